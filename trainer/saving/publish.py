"""What rank 0's writer does to the folders of checkpoints: make one, publish it, vouch for it, remove a failed one.

In this order, so that a power cut at any moment leaves either nothing of a save or a part that nobody takes for whole:
files durable, names durable, manifest, record of the reading back, hint, pruning. A newer start of the attempt may have
taken over at any moment, and saves the same steps under the same names. Nothing of it is touched: before each change
the claim is looked at (trainer.session.claims), and whether the folder is the very one that was made here.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainer.contract import MANIFEST_NAME, Manifest, ManifestFile, checkpoint_name, fsync_dir, write_bytes
from trainer.format.manifest import seal_manifest
from trainer.session.claims import Claim, ClaimLost, check_claim
from trainer.storage.stored import (
    CheckpointRejected,
    find_checkpoints,
    publish_verification,
    read_manifest,
    read_manifest_bytes,
    remove_checkpoint,
)
from trainer.storage.tiers import prune

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


class Folder:
    """The folder of one save, made here and known by more than its name; `manifest`: what was published in it."""

    def __init__(self, path: Path) -> None:
        path.mkdir(parents=True)
        fsync_dir(path.parent)
        self.path = path
        self.manifest = b""
        self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)  # held: its inode is not used again

    def close(self) -> None:
        """It is not needed any more; harmless when called again."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def is_in_place(self) -> bool:
        """False when another one has its name, or none. Raises OSError when that can't be seen."""
        try:
            return os.path.samestat(os.fstat(self._fd), self.path.lstat())
        except FileNotFoundError:
            return False
        except OSError as error:
            if error.errno == errno.ESTALE:  # removed by another host
                return False
            raise

    def check(self) -> None:
        """Raise `ClaimLost` when another one has its name, or none, OSError when that can't be seen."""
        if not self.is_in_place():
            raise ClaimLost(f"{self.path.name} was removed or made anew by somebody else in the middle of the save")


def open_folder(destination: Destination, step: int) -> Folder | list[dict[str, Any]]:
    """Make the folder of a step, empty; where a verified checkpoint of it is, that stays: its manifest's files.

    Raises OSError and `ClaimLost`.
    """
    destination.check()
    path = destination.path(step)
    if _is_verified(path):
        with suppress(CheckpointRejected):  # it says nothing any more: it makes room
            return [asdict(file) for file in read_manifest(path).files]
    remove_checkpoint(path)
    return Folder(path)


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


def publish(destination: Destination, folder: Folder, manifest: bytes) -> None:
    """Write the manifest of a step whose files are all durable. Raises OSError and `ClaimLost`."""
    fsync_dir(folder.path)
    destination.check()
    folder.check()
    write_bytes(folder.path / MANIFEST_NAME, manifest)
    folder.manifest = manifest


def vouch(destination: Destination, folder: Folder, request: Mapping[str, Any], bad_files: Iterable[str]) -> None:
    """Record what reading back found; when all was good, point the hint here and prune.

    Raises OSError and `ClaimLost`.
    """
    destination.check()
    folder.check()
    path = folder.path
    if read_manifest_bytes(path) != folder.manifest:
        raise ClaimLost(f"the manifest of {path.name} is not the one that was published")
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


def discard(folder: Folder) -> None:
    """Remove the folder of a failed save: its space is what the next one needs. Never raises OSError.

    One that has a manifest stays: whoever published it, it may be whole.
    """
    path = folder.path
    for _ in range(_DISCARD_TRIES):
        with suppress(OSError):
            if not folder.is_in_place() or os.path.lexists(path / MANIFEST_NAME):
                return
            remove_checkpoint(path)
        if not os.path.lexists(path):
            return
        time.sleep(_DISCARD_WAIT_S)  # a rank that has not heard yet made its file just now
    log.warning("the folder of a failed save is not removed: %s", path)
