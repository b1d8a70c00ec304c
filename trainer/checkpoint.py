"""Asynchronous sharded checkpoints on PyTorch DCP, published by a manifest and read back before they count.

One save, in order: copy to host memory (training waits for this only); then, in a thread and over a gloo group of
its own, every rank writes its shards, makes them durable and takes their checksums; rank 0 publishes MANIFEST.json
(the checkpoint is COMPLETE); ranks of other nodes read the shards back and compare; rank 0 publishes VERIFIED.json.

What DCP leaves open and this module closes: it fsyncs before its buffers are flushed and never syncs the directory
(each file is synced again here); it loads a flipped byte without a word (checksums are compared before it loads);
its errors derive from BaseException; shards of a larger old world survive an overwrite (every save has a fresh
folder, and only files of the manifest may be read).

Never two saves at once: a save asked for while one is in flight waits for it (`is_busy` tells beforehand).
A failed save (full disk, quota) is reported and its folder removed, training goes on and the next save is tried;
only `max_failures` in a row raise. An error of the group itself cannot be survived and is raised at the next save.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from trainer.contract import MANIFEST_NAME, Manifest, ManifestFile, RunPaths, fsync_dir, write_json
from trainer.state import Loaded, TrainState
from trainer.tiers import (
    CheckpointRejected,
    CheckpointUnreadable,
    Condition,
    FileVerdict,
    check_file,
    choose_prunable,
    describe_file,
    find_checkpoints,
    judge_files,
    parse_manifest,
    publish_verification,
    read_manifest_bytes,
    remove_checkpoint,
    share_files,
)

__all__ = [
    "CheckpointRejected",
    "CheckpointUnreadable",
    "Checkpointer",
    "SaveResult",
    "SaveSchedule",
    "SavesKeepFailing",
]

log = logging.getLogger("trainer.checkpoint")

METADATA_NAME = ".metadata"
VISIBLE_WITHIN_S = 10.0  # NFS clients cache "no such folder" for a few seconds
MAX_ERRORS_SHOWN = 3

T = TypeVar("T")


class SavesKeepFailing(RuntimeError):
    """So many saves in a row failed that going on would only lose more work."""


class _SaveFailed(Exception):
    """This save failed, and every rank knows it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveResult:
    """How one save ended. `blocking_s`: time that training waited; `total_s`: until it was read back."""

    step: int
    path: Path
    is_complete: bool
    is_verified: bool
    blocking_s: float
    total_s: float
    error: str = ""


class SaveSchedule:
    """When the next save is due: every so many steps, or every so many seconds.

    By time, the first save after a start comes after half the interval: failures gather just after a restart, and
    a run that dies before its first save makes no progress at all.
    """

    def __init__(
        self,
        *,
        every_s: float = 0.0,
        every_steps: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._every_s = every_s
        self._every_steps = every_steps
        self._clock = clock
        self._next_at = clock() + every_s / 2

    def is_due(self, step: int) -> bool:
        """True if a save should follow step `step` (counted from 1). 0 for both intervals: never."""
        if self._every_steps and step % self._every_steps == 0:
            return True
        return self._every_s > 0 and self._clock() >= self._next_at

    def saved(self) -> None:
        """Say that a save was begun now."""
        self._next_at = self._clock() + self._every_s


class Checkpointer:
    """Saves and loads the checkpoints of one attempt; every rank has one and makes the same calls in the same order.

    `process_group`: a gloo group that nothing else uses while a save is in flight; made here when not given.
    `keep_last`: prune older checkpoints here (never the last two verified); leave it out when a service prunes.
    `node_size`: ranks on a node, so that shards are read back by another node where there is one.
    """

    def __init__(
        self,
        run_dir: Path,
        run: str,
        attempt: int,
        *,
        process_group: dist.ProcessGroup | None = None,
        keep_last: int | None = None,
        max_failures: int = 3,
        node_size: int = 1,
        group_timeout: timedelta = timedelta(hours=1),
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._paths = RunPaths(run_dir)
        self._run = run
        self._attempt = attempt
        self._group = process_group or dist.new_group(backend="gloo", timeout=group_timeout)
        self._rank = dist.get_rank(self._group)
        self._world = dist.get_world_size(self._group)
        self._keep_last = keep_last
        self._max_failures = max_failures
        self._node_size = node_size
        self._wall = wall
        # Pinned buffers are worth keeping between saves; without CUDA there is nothing to pin.
        self._stager = BlockingAsyncStager(cache_staged_state_dict=torch.cuda.is_available())
        self._thread: threading.Thread | None = None
        self._result: SaveResult | None = None
        self._fatal: BaseException | None = None
        self._failures = 0
        self._last_error = ""
        self._resumed_from: Path | None = None

    # ------------------------------------------------------------ saving

    @property
    def is_busy(self) -> bool:
        """True while a save is in flight on this rank."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def failures(self) -> int:
        """Failed saves in a row, as far as they have been collected."""
        return self._failures

    def save(self, state: TrainState) -> float:
        """Begin a save of `state` as it is now; returns the seconds that the caller was blocked.

        Waits for a save in flight. Raises `SavesKeepFailing` when the last `max_failures` saves failed, and the
        group's own error if its collectives broke.
        """
        began = time.monotonic()
        self.wait()
        if self._failures >= self._max_failures:
            raise SavesKeepFailing(f"the last {self._failures} saves failed, the newest with: {self._last_error}")
        staged = self._stage(state)
        blocking_s = time.monotonic() - began
        self._thread = threading.Thread(
            target=self._save_in_background,
            args=(staged, state.step, state.samples, blocking_s),
            name=f"save-{state.step}",
            daemon=True,  # a save that waits for a dead peer must not keep a failing process alive
        )
        self._thread.start()
        return blocking_s

    def _stage(self, state: TrainState) -> dict[str, Any] | Exception:
        # An error here (no host memory left) is this rank's alone: it goes to the agreement that begins the save.
        try:
            staged: dict[str, Any] = self._stager.stage(state.collect())
        except Exception as error:  # noqa: BLE001
            return error
        return staged

    def poll(self) -> SaveResult | None:
        """The result of the save that has ended since the last call, else None; never blocks."""
        return None if self.is_busy else self._collect()

    def wait(self) -> SaveResult | None:
        """Wait for the save in flight and return its result, None if there is nothing new.

        Raises the group's own error if its collectives broke.
        """
        if self._thread is not None:
            self._thread.join()
        result = self._collect()
        if self._fatal is not None:
            raise self._fatal
        return result

    def _collect(self) -> SaveResult | None:
        self._thread = None
        result, self._result = self._result, None
        if result is not None:
            self._failures = 0 if result.is_verified else self._failures + 1
            self._last_error = result.error
        return result

    def _save_in_background(
        self, staged: dict[str, Any] | Exception, step: int, samples: int, blocking_s: float
    ) -> None:
        began = time.monotonic()
        result = SaveResult(
            step=step,
            path=self._paths.checkpoint(step, self._attempt),
            is_complete=False,
            is_verified=False,
            blocking_s=blocking_s,
            total_s=0.0,
        )
        try:
            result = self._save(result, staged, samples)
        except BaseException as error:  # noqa: BLE001 - a thread has nobody to raise to: kept for the next save
            self._fatal = error
            result = replace(result, error=f"{type(error).__name__}: {error}")
        self._result = replace(result, total_s=blocking_s + time.monotonic() - began)

    def _save(self, result: SaveResult, staged: dict[str, Any] | Exception, samples: int) -> SaveResult:
        path = result.path
        try:
            self._agree(lambda: _raise_if_error(staged))
            if self._on_rank_0(lambda: self._prepare(path)):
                return replace(result, is_complete=True, is_verified=True)
        except _SaveFailed as error:
            return replace(result, error=str(error))
        assert not isinstance(staged, Exception)  # agreed above
        try:
            self._agree(lambda: await_visible(path))
            self._write_shards(staged, path)
            files = [file for part in self._agree(lambda: _seal(path, self._rank)) for file in part]
            self._on_rank_0(lambda: write_json(path / MANIFEST_NAME, self._manifest(result.step, samples, files)))
        except _SaveFailed as error:
            free = _describe_space(path.parent)  # torch calls a full disk "unexpected pos"
            self._give_up(path)
            return replace(result, error=f"{error} ({free})")
        return self._verify(replace(result, is_complete=True), files)

    def _prepare(self, path: Path) -> bool:
        # True: this attempt has published and read back this step already (its workers were restarted in place).
        known = {found.path: found for found in find_checkpoints(self._paths.checkpoints())}.get(path)
        if known is not None and known.is_verified:
            return True
        remove_checkpoint(path)
        path.mkdir(parents=True)
        fsync_dir(path.parent)
        return False

    def _write_shards(self, staged: dict[str, Any], path: Path) -> None:
        try:
            dcp_save(
                staged,
                storage_writer=FileSystemWriter(path, sync_files=False),  # _seal syncs, and does it right
                process_group=self._group,
            )
        except CheckpointException as error:  # raised on every rank alike
            raise _SaveFailed(_describe(error)) from None

    def _manifest(self, step: int, samples: int, files: list[ManifestFile]) -> Manifest:
        return Manifest(
            run=self._run,
            attempt=self._attempt,
            step=step,
            samples=samples,
            world_size=self._world,
            time=self._wall(),
            files=tuple(sorted(files, key=lambda file: file.path)),
        )

    def _verify(self, result: SaveResult, files: list[ManifestFile]) -> SaveResult:
        try:
            mine = [file for file in files if self._reads_back(file)]
            parts = self._agree(lambda: [check_file(result.path, f, from_storage=True) for f in mine])
            verdicts = [verdict for part in parts for verdict in part]
            unknown = [v for v in verdicts if v.condition is Condition.UNKNOWN]
            bad = [v for v in verdicts if v.condition is Condition.BAD]
            if unknown and not bad:
                return replace(result, error=_list(unknown))
            self._on_rank_0(
                lambda: publish_verification(result.path, ok=not bad, bad_files=[v.path for v in bad], now=self._wall())
            )
        except _SaveFailed as error:
            return replace(result, error=str(error))
        if bad:
            return replace(result, error=_list(bad))
        self._prune(result.path)
        return replace(result, is_verified=True)

    def _reads_back(self, file: ManifestFile) -> bool:
        distance = self._node_size if self._node_size < self._world else 1
        return (_writer(file.path) + distance) % self._world == self._rank

    def _prune(self, newest: Path) -> None:
        if self._keep_last is None or self._rank != 0:
            return
        found = find_checkpoints(self._paths.checkpoints())
        in_use = frozenset({newest} | ({self._resumed_from} if self._resumed_from else set()))
        for old in choose_prunable(found, keep_last=self._keep_last, attempt=self._attempt, in_use=in_use):
            try:
                remove_checkpoint(old.path)
            except OSError as error:
                log.warning("old checkpoint %s is not removed: %s", old.path, error)

    def _give_up(self, path: Path) -> None:
        # Frees the space of the failed try, which is what the next one needs after ENOSPC.
        if self._rank == 0:
            with suppress(OSError):
                remove_checkpoint(path)

    # ------------------------------------------------------------ loading

    def load(self, path: Path, state: TrainState) -> Loaded:
        """Verify every byte of a checkpoint, then load it into `state`; the same result on every rank.

        Raises `CheckpointRejected` (also when it is whole but does not fit this model) and `CheckpointUnreadable`
        when the file system does not let it be read now. After a rejection the state's tensors may hold a mixture:
        load another checkpoint or end.
        """
        self.wait()
        manifest = self._verify_before_load(path)
        template = state.template(manifest.world_size)
        try:
            dcp_load(
                template,
                storage_reader=FileSystemReader(path),
                process_group=self._group,
            )
        except CheckpointException as error:
            raise CheckpointRejected(path, [f"does not load: {_describe(error)}"]) from None
        loaded = state.apply(template)
        self._resumed_from = path
        return loaded

    def _verify_before_load(self, path: Path) -> Manifest:
        manifest = parse_manifest(path, self._shared_manifest(path))
        mine = share_files(manifest.files, self._world)[self._rank]
        parts: list[list[FileVerdict]] = self._gather([check_file(path, file) for file in mine])
        judge_files(path, [verdict for part in parts for verdict in part])
        _check_coverage(path, manifest)
        return manifest

    def _shared_manifest(self, path: Path) -> bytes:
        # Read once and handed to all: two clients of a network file system may see two versions for a while.
        found: bytes | CheckpointRejected | OSError | None = None
        if self._rank == 0:
            try:
                found = read_manifest_bytes(path)
            except CheckpointRejected as error:
                found = error
            except OSError as error:
                found = error
        first = self._gather(_portable(found))[0]
        if isinstance(first, bytes):
            return first
        kind, problems = first
        if kind == "rejected":
            raise CheckpointRejected(path, problems)
        raise CheckpointUnreadable(*problems)

    # ------------------------------------------------------------ agreement

    def _gather(self, value: T) -> list[T]:
        gathered: list[Any] = [None] * self._world
        dist.all_gather_object(gathered, value, group=self._group)
        return gathered

    def _agree(self, work: Callable[[], T]) -> list[T]:
        """Do local work; every rank gets all results, or `_SaveFailed` on every rank if one failed."""
        value: T | None = None
        error = ""
        try:
            value = work()
        except Exception as failure:  # noqa: BLE001 - whatever went wrong here, the others must not wait for it
            error = f"rank {self._rank}: {type(failure).__name__}: {failure}"
        parts = self._gather((value, error))
        errors = [text for _, text in parts if text]
        if errors:
            raise _SaveFailed("; ".join(errors[:MAX_ERRORS_SHOWN]))
        return [part for part, _ in parts]  # type: ignore[misc]

    def _on_rank_0(self, work: Callable[[], T]) -> T:
        return self._agree(lambda: work() if self._rank == 0 else None)[0]  # type: ignore[return-value]


def _raise_if_error(staged: dict[str, Any] | Exception) -> None:
    if isinstance(staged, Exception):
        raise staged


def _portable(found: bytes | CheckpointRejected | OSError | None) -> Any:
    if isinstance(found, CheckpointRejected):
        return "rejected", found.problems
    if isinstance(found, OSError):
        return "unreadable", (found.errno, found.strerror, found.filename)
    return found


def await_visible(path: Path, *, within_s: float = VISIBLE_WITHIN_S) -> None:
    """Return as soon as this node sees a folder that rank 0 made; raises FileNotFoundError saying what is needed."""
    deadline = time.monotonic() + within_s
    while True:
        try:
            with os.scandir(path):  # asks the server; a cached "no such folder" may answer a stat
                return
        except FileNotFoundError:
            if time.monotonic() >= deadline:
                raise FileNotFoundError(
                    f"{path} was made by rank 0 and is not seen here: checkpoints need a file system that all "
                    "nodes share"
                ) from None
            time.sleep(0.1)


def _seal(path: Path, rank: int) -> list[ManifestFile]:
    """Make this rank's files durable and describe them; rank 0 also owns the metadata."""
    names = sorted(entry.name for entry in os.scandir(path) if _owns(rank, entry.name))
    for name in names:
        fd = os.open(path / name, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    fsync_dir(path)
    return [describe_file(path, name) for name in names]


def _owns(rank: int, name: str) -> bool:
    return name.startswith(f"__{rank}_") or (rank == 0 and name == METADATA_NAME)


def _writer(name: str) -> int:
    """Rank that wrote a file of the checkpoint."""
    return 0 if name == METADATA_NAME else int(name.removeprefix("__").partition("_")[0])


def _check_coverage(path: Path, manifest: Manifest) -> None:
    """Refuse a checkpoint that would read a file whose checksum nobody recorded."""
    covered = {file.path for file in manifest.files}
    if METADATA_NAME not in covered:
        raise CheckpointRejected(path, [f"its manifest does not cover {METADATA_NAME}"])
    metadata = FileSystemReader(path).read_metadata()
    used = {info.relative_path for info in (metadata.storage_data or {}).values()}
    if not used <= covered:
        raise CheckpointRejected(path, [f"its manifest does not cover {', '.join(sorted(used - covered))}"])


def _describe(error: CheckpointException) -> str:
    shown = [f"rank {rank}: {failure}" for rank, (failure, _) in sorted(error.failures.items())]
    return "; ".join(shown[:MAX_ERRORS_SHOWN])


def _describe_space(folder: Path) -> str:
    try:
        usage = shutil.disk_usage(folder)
    except OSError as error:
        return f"{folder}: {error.strerror}"
    return f"{usage.free / 1e6:.1f} MB free of {usage.total / 1e6:.1f} MB at {folder}"


def _list(verdicts: list[FileVerdict]) -> str:
    return "; ".join(f"{v.path} {v.reason}" for v in verdicts[:MAX_ERRORS_SHOWN])
