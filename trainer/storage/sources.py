"""Where each file of a checkpoint is read from: the nearest tier that has it whole, file by file.

A node that stayed has its own files on its disk; one that came anew reads them from the shared file system; a file that
is bad there comes back from object storage, where there is one. Which checkpoint is read is not decided here: the path
that is given stands, whatever else a tier may hold.

All ranks of the group call the same things in the same order; what one of them finds, all learn.
"""

from __future__ import annotations

import errno
import logging
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from trainer.contract import ENV_RESUME_FROM, ENV_RUN, Manifest, ManifestFile, RunPaths
from trainer.storage.leases import hold_lease
from trainer.storage.objects import ObjectStorageFailed, ObjectTier
from trainer.storage.stored import (
    CheckpointRejected,
    CheckpointUnreadable,
    parse_manifest,
    read_manifest_bytes,
    share_files,
)
from trainer.storage.tiers import LocalTier

log = logging.getLogger("trainer.storage.sources")

T = TypeVar("T")
Locate = Callable[[ManifestFile], Path]
Gather = Callable[[Any], list[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcePlace:
    """Who reads: this rank among those of its attempt, and the tiers there are beside the run directory."""

    run_dir: Path
    run: str
    attempt: int
    rank: int
    world: int
    node_size: int  # ranks of one node
    local_dir: str = ""
    object_url: str = ""

    @property
    def node(self) -> int:
        return self.rank // self.node_size

    def local(self) -> LocalTier | None:
        return LocalTier(Path(self.local_dir) / self.run) if self.local_dir else None

    def objects(self) -> ObjectTier | None:
        return ObjectTier(f"{self.object_url.rstrip('/')}/{self.run}") if self.object_url else None


def read_checkpoint(path: Path, load: Callable[[Manifest, Locate], T], *, place: SourcePlace, gather: Gather) -> T:
    """What `load` returns for the checkpoint at `path`, its files taken from the nearest tier that has them whole.

    `load` (trainer.saving.reading.load_state) reads each file where the function that it is given says, compares it
    with the manifest, takes the run directory's where that copy is bad, and raises `CheckpointRejected` with the
    `files` that are bad there, too, alike on all ranks: then it is called once more, with these from object storage.
    Nothing prunes the checkpoint meanwhile. Raises `CheckpointRejected` when no tier has a file whole,
    `CheckpointUnreadable` when the run directory can't be read now.
    """
    with _lease(path, place):
        data = _share_manifest(path, place, gather)
        sources = _Sources(path, parse_manifest(path, data), place, gather)
        sources.look_at_local(data)
        try:
            loaded = sources.load(load)
            gather(None)  # the lease and what was fetched stay until the last rank has read
        finally:
            sources.tidy_up()
    return loaded


@contextmanager
def _lease(path: Path, place: SourcePlace) -> Iterator[None]:
    if place.rank != 0:
        yield
        return
    lease = RunPaths(place.run_dir).read_lease(place.attempt)
    with hold_lease(lease, attempt=place.attempt, names=[path.name]):
        yield


# ---------------------------------------------------------------- the manifest


def _share_manifest(path: Path, place: SourcePlace, gather: Gather) -> bytes:
    """The manifest's bytes, read once and handed to all: two clients of a network file system may see two versions."""
    found = _find_manifest(path, place) if place.rank == 0 else None
    kind, value = gather(found)[0]
    if kind == "rejected":
        raise CheckpointRejected(path, value)
    if kind == "unreadable":
        raise CheckpointUnreadable(*value)
    return bytes(value)


def _find_manifest(path: Path, place: SourcePlace) -> tuple[str, Any]:
    try:
        data = read_manifest_bytes(path)
        refuse_another_run(path, parse_manifest(path, data), place)
    except CheckpointRejected as error:
        other = _manifest_of_other_tier(path, place) if _is_own(path, place) else None
        if other is None:
            return "rejected", error.problems
        log.warning("%s; its manifest is taken from another tier", error)
        return "manifest", other
    except OSError as error:
        return "unreadable", (error.errno or errno.EIO, error.strerror or str(error), str(path))
    return "manifest", data


def refuse_another_run(path: Path, manifest: Manifest, place: SourcePlace) -> None:
    """Raise `CheckpointRejected` for another run's checkpoint among those of this one.

    It is whole, so no checksum tells. One that is named from elsewhere is meant.
    """
    if manifest.run != place.run and _is_own(path, place):
        way = (
            f"name it from where it was made, by {ENV_RESUME_FROM}, to begin from it; {ENV_RUN}={manifest.run}, if all "
            "of this run directory is that run's"
        )
        raise CheckpointRejected(path, [f"is of run {manifest.run}, not of {place.run} ({way})"])


def _is_own(path: Path, place: SourcePlace) -> bool:
    return path.parent == RunPaths(place.run_dir).checkpoints()


def _manifest_of_other_tier(path: Path, place: SourcePlace) -> bytes | None:
    local = place.local()
    found = local.manifest(path.name) if local is not None else None
    try:
        objects = place.objects() if found is None else None
        found = objects.manifest(path.name) if objects is not None else found
        if found is not None:
            parse_manifest(path, found)
    except (ObjectStorageFailed, CheckpointRejected) as error:
        log.warning("%s", error)
        return None
    return found


# ---------------------------------------------------------------- files


class _Sources:
    """Which copy of each file this rank reads. Changes in step on all ranks."""

    def __init__(self, path: Path, manifest: Manifest, place: SourcePlace, gather: Gather) -> None:
        self._path, self._manifest, self._place, self._gather = path, manifest, place, gather
        self._local: frozenset[str] = frozenset()  # on this node's disk
        self._fetched: set[str] = set()
        self._fetched_dir = RunPaths(place.run_dir).fetched(place.attempt) / path.name

    def locate(self, file: ManifestFile) -> Path:
        if file.path in self._fetched:
            return self._fetched_dir / file.path
        local = self._place.local()
        if local is not None and file.path in self._local:
            return local.path(self._path.name) / file.path
        return self._path / file.path

    def load(self, load: Callable[[Manifest, Locate], T]) -> T:
        while True:
            try:
                return load(self._manifest, self.locate)
            except CheckpointRejected as error:
                if not self._replace(error):
                    raise

    def look_at_local(self, manifest: bytes) -> None:
        """Find out which files this node has: of this very checkpoint, with their recorded sizes."""
        local, name = self._place.local(), self._path.name
        if local is None or local.manifest(name) != manifest:  # another run's, or of another try at the same step
            return
        self._local = frozenset(file.path for file in self._manifest.files if local.has(name, file))

    def _replace(self, error: CheckpointRejected) -> bool:
        """Take bad files from object storage; False when it can't have or hasn't them, the same on all ranks."""
        bad = [file for file in self._manifest.files if file.path in set(error.files) - self._fetched]
        if not bad or len(bad) != len(set(error.files)) or not self._place.object_url:
            return False
        if self._place.rank == 0:
            log.warning("%s; fetching %s from object storage", error, ", ".join(file.path for file in bad))
        return self._fetch(bad)

    def _fetch(self, files: Sequence[ManifestFile]) -> bool:
        """Bring files back from object storage into the run directory, where all ranks see them."""
        mine = share_files(files, self._place.world)[self._place.rank]
        problems = [text for text in self._gather(self._fetch_share(mine)) if text]
        if problems and self._place.rank == 0:
            log.warning("object storage does not help: %s", "; ".join(problems[:3]))
        if not problems:
            self._fetched |= {file.path for file in files}
        return not problems

    def _fetch_share(self, files: Iterable[ManifestFile]) -> str:
        try:
            objects = self._place.objects()
            assert objects is not None
            for file in files:
                objects.get_file(self._path.name, file, self._fetched_dir / file.path)
        except (ObjectStorageFailed, CheckpointRejected, OSError) as error:
            return str(error) or type(error).__name__
        return ""

    def tidy_up(self) -> None:
        """Remove what was fetched: it was for this restart."""
        if self._place.rank == 0 and self._fetched:
            shutil.rmtree(self._fetched_dir, ignore_errors=True)
