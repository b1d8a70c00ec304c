"""What rank 0's writer does to the folders of checkpoints: make one, publish it, vouch for it, remove a failed one.

In this order, so that a power cut at any moment leaves either nothing of a save or a part that nobody takes for whole:
files durable, names durable, manifest, record of the reading back, hint, pruning. Before each of these the claim is
looked at (trainer.claims): a newer start of the attempt may have taken over, and nothing of it is touched.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainer.claims import Claim, check_claim
from trainer.contract import MANIFEST_NAME, Manifest, ManifestFile, checkpoint_name, fsync_dir, write_bytes
from trainer.manifest import seal_manifest
from trainer.stored import CheckpointRejected, find_checkpoints, publish_verification, read_manifest, remove_checkpoint
from trainer.tiers import prune

log = logging.getLogger("trainer.saving.publish")

LATEST_NAME = "latest"
_DISCARD_TRIES = 20
_DISCARD_WAIT_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """Where one attempt publishes its checkpoints. `keep_last`: None where someone else prunes.

    `claim`: what entitles to it; None where nobody else can be there.
    """

    checkpoints: Path
    run: str
    attempt: int
    world: int
    keep_last: int | None = None
    claim: Claim | None = None

    def path(self, step: int) -> Path:
        """The folder of one step."""
        return self.checkpoints / checkpoint_name(step, self.attempt)

    def check(self) -> None:
        """Raise `ClaimLost` when a newer start of the attempt has taken over, OSError when that can't be seen."""
        if self.claim is not None:
            check_claim(self.checkpoints.parent, self.claim)


def open_folder(destination: Destination, step: int) -> list[dict[str, Any]] | None:
    """Make the folder of a step, empty; where a verified checkpoint of it is, that stays: its manifest's files.

    Raises OSError and `ClaimLost`.
    """
    destination.check()
    path = destination.path(step)
    if _is_verified(path):
        with suppress(CheckpointRejected):  # it says nothing any more: it makes room
            return [asdict(file) for file in read_manifest(path).files]
    remove_checkpoint(path)
    path.mkdir(parents=True)
    fsync_dir(path.parent)
    return None


def _is_verified(path: Path) -> bool:
    known = {found.path: found for found in find_checkpoints(path.parent)}.get(path)
    return known is not None and known.is_verified


def describe(destination: Destination, request: Mapping[str, Any], files: Iterable[Mapping[str, Any]]) -> bytes:
    """The bytes of the manifest of a step."""
    return seal_manifest(
        Manifest(
            run=destination.run,
            attempt=destination.attempt,
            step=int(request["step"]),
            samples=int(request["samples"]),
            tokens=request["tokens"],
            is_elastic=bool(request["is_elastic"]),
            libraries=dict(request["libraries"]),
            world_size=destination.world,
            time=time.time(),
            files=tuple(sorted((ManifestFile(**file) for file in files), key=lambda file: file.path)),
        )
    )


def publish(destination: Destination, request: Mapping[str, Any], manifest: bytes) -> None:
    """Write the manifest of a step whose files are all durable. Raises OSError and `ClaimLost`."""
    path = destination.path(int(request["step"]))
    fsync_dir(path)
    destination.check()
    write_bytes(path / MANIFEST_NAME, manifest)


def vouch(destination: Destination, request: Mapping[str, Any], bad_files: Iterable[str]) -> None:
    """Record what reading back found; when all was good, point the hint here and prune.

    Raises OSError and `ClaimLost`.
    """
    destination.check()
    path = destination.path(int(request["step"]))
    bad = sorted(bad_files)
    publish_verification(path, ok=not bad, bad_files=bad, now=time.time())
    if not bad:
        point_latest(path)
        if destination.keep_last is not None:
            in_use = {path, *(Path(name) for name in request.get("in_use", ()))}
            prune(destination.checkpoints, keep_last=destination.keep_last, attempt=destination.attempt, in_use=in_use)


def point_latest(path: Path) -> None:
    """Let the link `latest` beside a verified checkpoint point to it. A hint: nobody of ours follows it."""
    temporary = path.parent / f".{LATEST_NAME}.{os.getpid()}.tmp"
    try:
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(path.name)
        temporary.replace(path.parent / LATEST_NAME)
    except OSError as error:
        log.warning("the link %s is not renewed: %s", LATEST_NAME, error)


def discard(destination: Destination, step: int) -> None:
    """Remove the folder of a failed save: its space is what the next one needs. Never raises OSError.

    One that is verified is none of a failed save. Raises `ClaimLost`: a newer start may be writing there.
    """
    path = destination.path(step)
    for _ in range(_DISCARD_TRIES):
        with suppress(OSError):
            destination.check()
            if _is_verified(path):
                return
            remove_checkpoint(path)
        if not path.exists():
            return
        time.sleep(_DISCARD_WAIT_S)  # a rank that has not heard yet made its file just now
    log.warning("the folder of a failed save is not removed: %s", path)
