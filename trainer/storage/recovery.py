"""Steps that a crash cut short on their way from the nodes' disks to the run directory are finished there.

A node's own disk is written first. When the workers of an attempt are restarted in place, a checkpoint may be whole on
the nodes' disks and not in the run directory yet. If every file of it can be found, the nodes that hold them bring
them to the run directory, and it is published and read back there as any other: nothing is ever resumed from that the
run directory does not have.

All ranks call this together; what one of them can't do, all learn, and the step is let go.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.contract import (
    MANIFEST_NAME,
    Manifest,
    ManifestFile,
    RunPaths,
    fsync_dir,
    parse_checkpoint_name,
    write_bytes,
)
from trainer.storage.sources import Gather, SourcePlace
from trainer.storage.stored import (
    CheckpointRejected,
    Condition,
    check_file,
    find_checkpoints,
    parse_manifest,
    publish_verification,
    share_files,
)
from trainer.storage.tiers import LocalTier, copy_file

log = logging.getLogger("trainer.storage.recovery")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """A step that some nodes have and the run directory has not."""

    name: str
    data: bytes
    manifest: Manifest
    holders: dict[str, int]  # file: the node that brings it


def recover_own(place: SourcePlace, gather: Gather, *, wall: Callable[[], float] = time.time) -> Path | None:
    """The newest step of this very attempt that could be finished, now verified in the run directory; None: none.

    Call it before the checkpoint to resume from is chosen, on all ranks. Other attempts' steps are left alone: which
    of them counts is the service's to say.
    """
    for candidate in _find(place, gather):
        if _finish(candidate, place, gather, wall):
            return RunPaths(place.run_dir).checkpoints() / candidate.name
    return None


# ---------------------------------------------------------------- finding


def _find(place: SourcePlace, gather: Gather) -> list[_Candidate]:
    """Candidates that are whole on the disks of all nodes taken together, newest step first, the same on all ranks."""
    told = gather(_look(place))
    newest, begun = told[0].newest, told[0].begun
    seen: dict[tuple[str, bytes], dict[str, int]] = {}
    for rank, sight in enumerate(told):
        for name, (data, files) in sight.local.items():
            holders = seen.setdefault((name, data), {})
            holders.update({file: rank // place.node_size for file in files if file not in holders})
    checkpoints = RunPaths(place.run_dir).checkpoints()
    found = []
    for (name, data), holders in seen.items():
        with suppress(CheckpointRejected):
            manifest = parse_manifest(checkpoints / name, data)
            is_whole = {file.path for file in manifest.files} <= set(holders)
            if manifest.step > newest and name in begun and manifest.run == place.run and is_whole:
                found.append(_Candidate(name=name, data=data, manifest=manifest, holders=holders))
    return sorted(found, key=lambda c: (c.manifest.step, c.data), reverse=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sight:
    """What one rank sees: rank 0 the run directory, the first of each node its disk.

    `newest`: complete step of this attempt. `begun`: folders of saves that were not finished. A save makes its folder
    there first, so what has none is left over from another run of this name.
    """

    newest: int = -1
    begun: frozenset[str] = frozenset()
    local: dict[str, tuple[bytes, list[str]]]


def _look(place: SourcePlace) -> _Sight:
    there = find_checkpoints(RunPaths(place.run_dir).checkpoints()) if place.rank == 0 else []
    own = [found for found in there if found.attempt == place.attempt]
    local, here = place.local(), {}
    if local is not None and place.rank % place.node_size == 0:
        here = {name: found for name in local.names() if (found := _published(local, name, place.attempt))}
    return _Sight(
        newest=max((found.step for found in own if found.is_complete), default=-1),
        begun=frozenset(found.path.name for found in own if _has_no_manifest(found.path)),
        local=here,
    )


def _has_no_manifest(path: Path) -> bool:
    try:
        (path / MANIFEST_NAME).lstat()
    except FileNotFoundError:
        return True
    except OSError:  # one that can't be looked at now may be there
        return False
    return False


def _published(local: LocalTier, name: str, attempt: int) -> tuple[bytes, list[str]] | None:
    key, data = parse_checkpoint_name(name), local.manifest(name)
    if data is None or key is None or key[1] != attempt:
        return None
    try:
        manifest = parse_manifest(local.path(name), data)
    except CheckpointRejected:
        return None
    return data, [file.path for file in manifest.files if local.has(name, file)]


# ---------------------------------------------------------------- finishing


def _finish(candidate: _Candidate, place: SourcePlace, gather: Gather, wall: Callable[[], float]) -> bool:
    path = RunPaths(place.run_dir).checkpoints() / candidate.name
    steps: tuple[tuple[str, Callable[[], None]], ...] = (
        ("brought to the run directory", lambda: _bring(candidate, path, place)),
        ("published", lambda: write_bytes(path / MANIFEST_NAME, candidate.data) if place.rank == 0 else None),
        ("read back", lambda: _read_back(candidate, path, place)),
        ("verified", lambda: _vouch(path, wall()) if place.rank == 0 else None),
    )
    for what, work in steps:
        problems = [text for text in gather(_try(work)) if text]
        if problems:
            if place.rank == 0:
                log.warning("%s could not be %s: %s", candidate.name, what, "; ".join(problems[:3]))
            return False
    if place.rank == 0:
        log.info("%s was on the nodes' disks alone and is finished in the run directory", candidate.name)
    return True


def _try(work: Callable[[], None]) -> str:
    try:
        work()
    except (CheckpointRejected, OSError) as error:
        return str(error) or type(error).__name__
    return ""


def _bring(candidate: _Candidate, path: Path, place: SourcePlace) -> None:
    local = place.local()
    mine = [file for file in candidate.manifest.files if candidate.holders[file.path] == place.node]
    if local is None or not mine:
        return
    path.mkdir(parents=True, exist_ok=True)
    _refuse_bad(path, [copy_file(local.path(candidate.name), path, file) for file in _share(mine, place)])
    fsync_dir(path)
    fsync_dir(path.parent)


def _read_back(candidate: _Candidate, path: Path, place: SourcePlace) -> None:
    """Each rank reads what another brought, of the next node where there is one."""
    shares = share_files(candidate.manifest.files, place.world)
    nodes = -(-place.world // place.node_size)
    other = [f for f in candidate.manifest.files if (candidate.holders[f.path] + 1) % nodes == place.node]
    mine = _share(other, place) if nodes > 1 else shares[(place.rank + 1) % place.world]
    _refuse_bad(path, [check_file(path, file, from_storage=True) for file in mine])


def _share(files: Iterable[ManifestFile], place: SourcePlace) -> list[ManifestFile]:
    """This rank's part of what its node does."""
    first = place.node * place.node_size
    return share_files(files, min(place.node_size, place.world - first))[place.rank - first]


def _refuse_bad(path: Path, verdicts: list[Any]) -> None:
    bad = [v for v in verdicts if v.condition is not Condition.GOOD]
    if bad:
        raise CheckpointRejected(path, [f"{v.path} {v.reason}" for v in bad], files=[v.path for v in bad])


def _vouch(path: Path, now: float) -> None:
    publish_verification(path, ok=True, now=now)
