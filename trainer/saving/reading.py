"""A verified restore, into any number of ranks: nothing counts as loaded before every file is found as recorded.

Each rank reads what it needs straight into its tensors. Meanwhile the checksum of each file, and of each copy of one
that somebody reads, is taken by one rank, if possible one that reads most of it anyway. Then all ranks hear what all
found, and return or raise alike. Where another copy than the checkpoint's own failed, the own one is read instead.
"""

from __future__ import annotations

import errno
import os
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from trainer.contract import Manifest
from trainer.format.coverage import NotCovered, check_coverage
from trainer.format.metadata import METADATA_NAME, Entry, Metadata
from trainer.saving.copies import OWN, Failure, Sight, assign
from trainer.saving.filereads import Scratch
from trainer.saving.located import CopyFailed, Locate, Located
from trainer.saving.quiet import no_collections
from trainer.saving.targets import Boxes, Mismatch, find_boxes
from trainer.storage.stored import CheckpointRejected, CheckpointUnreadable

State = Mapping[str, Any]
Template = State | Callable[[dict[str, bytes]], State]

MAX_PROBLEMS_SHOWN = 8
_THREADS = max(2, min(8, len(os.sched_getaffinity(0)) // 4))  # files that a rank reads at the same time

T = TypeVar("T")


def load_state(
    path: Path,
    template: Template,
    *,
    group: dist.ProcessGroup | None = None,
    manifest: Manifest,
    locate: Locate | None = None,
    wanted: Callable[[str], bool] = lambda _key: True,
    on_bytes: Callable[[int], None] = lambda _count: None,
) -> dict[str, bytes]:
    """Load the checkpoint `path` into the tensors of `template`; every rank of `group` calls it.

    Returns the byte items whose key is `wanted`, by key. `template` is a state, or makes one from those items; these
    are known to be undamaged then, but not yet to be the manifest's: it must do no more than make the tensors.
    `locate` names another copy of a file, nearer by. `on_bytes` hears of bytes read, from any thread.

    Raises, on every rank alike, `CheckpointRejected` when any file is not as recorded (`files` names it) or the
    checkpoint does not fit, and `CheckpointUnreadable` when a file can't be read now. The tensors may hold anything
    then. What `template` raises on all ranks comes out as it is.
    """
    restore = _Restore(path, _Ranks(group), Located(path, manifest.files, locate, on_bytes))
    with no_collections():
        boxes, items = restore.prepare(template, wanted)
    restore.read(boxes)
    return items


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """What one rank found. `is_foreign`: its problem is an error of the caller's, not of the checkpoint."""

    failures: tuple[Failure, ...] = ()
    problems: tuple[str, ...] = ()
    is_foreign: bool = False


class _Restore:
    """The steps of one restore, which all ranks take together."""

    def __init__(self, path: Path, ranks: _Ranks, located: Located) -> None:
        self._path = path
        self._ranks = ranks
        self._located = located
        self._sizes = {name: file.size_bytes for name, file in located.files.items()}

    def prepare(self, template: Template, wanted: Callable[[str], bool]) -> tuple[Boxes, dict[str, bytes]]:
        """(what this rank has to read, the byte items)."""
        metadata, outcome, error = self._hear_metadata()
        found: tuple[Boxes, dict[str, bytes]] | None = None
        if metadata is not None:
            found, outcome, error = _attempt(lambda: self._prepare(metadata, template, wanted))
        outcomes = self._ranks.gather(outcome)
        if error is not None and all(other.is_foreign for other in outcomes):
            raise error
        self._judge(outcomes)
        assert found is not None
        return found

    def _hear_metadata(self) -> tuple[Metadata | None, _Outcome, Exception | None]:
        """What rank 0 reads, and has checked: thousands of ranks need not read and parse hundreds of MB each."""
        if self._ranks.world == 1:
            return _attempt(self._read_metadata)
        read, outcome, error = _attempt(self._pack_metadata) if self._ranks.rank == 0 else (None, _Outcome(), None)
        packed = self._ranks.from_first(None if read is None else read[1])
        if read is not None or packed is None:
            return None if read is None else read[0], outcome, error
        return pickle.loads(packed), outcome, error  # noqa: S301 - rank 0 made it, of what it read without unpickling

    def _pack_metadata(self) -> tuple[Metadata, bytes]:
        metadata = self._read_metadata()
        return metadata, pickle.dumps(metadata)

    def _prepare(
        self, metadata: Metadata, template: Template, wanted: Callable[[str], bool]
    ) -> tuple[Boxes, dict[str, bytes]]:
        items = {entry.key: self._located.read_item(entry) for entry in _byte_entries(metadata, wanted)}
        state = template(dict(items)) if callable(template) else template
        return find_boxes(metadata, state), items

    def _read_metadata(self) -> Metadata:
        if METADATA_NAME not in self._sizes:
            raise Mismatch([f"its manifest does not cover {METADATA_NAME}"])
        metadata = self._located.read_metadata()
        uncovered = sorted(set(metadata.entries.paths) - set(self._sizes))
        if uncovered:
            raise Mismatch([f"its manifest does not cover {name}" for name in uncovered])
        try:
            check_coverage(metadata, self._sizes)
        except NotCovered as error:
            raise Mismatch([str(error)]) from None
        return metadata

    def read(self, boxes: Boxes) -> None:
        """Read the boxes, and have every file checked."""
        pending = set(self._sizes) - {METADATA_NAME}  # which rank 0 has checked before it believed it
        while True:
            outcomes = self._ranks.gather(_Outcome(failures=self._read_once(boxes, pending)))
            failed = {failure.copy for outcome in outcomes for failure in outcome.failures}
            if not failed:
                return
            if any(copy.place == OWN for copy in failed):
                self._judge(outcomes)
            pending = self._located.forsake(failed)

    def _read_once(self, boxes: Boxes, pending: set[str]) -> tuple[Failure, ...]:
        """Read and check what falls to this rank; `pending`: the files to read, where it needs any of them."""
        duties = assign(self._ranks.gather(self._sights(boxes, pending)), self._sizes)[self._ranks.rank]
        names = {name for name in pending if boxes.get(name)} | {copy.file for copy in duties}

        def read_one(name: str) -> Failure | None:
            is_checked = self._located.copy_of(name) in duties
            try:
                self._located.read(
                    name, lambda file: file.read_boxes(boxes.get(name, ()), Scratch(), is_checked=is_checked)
                )
            except CopyFailed as error:
                return error.failure
            except Exception as error:  # noqa: BLE001 - as above
                reason = f"could not be loaded: {type(error).__name__}: {error}"
                return Failure(copy=self._located.copy_of(name), reason=reason, errno=errno.EIO)
            return None

        with ThreadPoolExecutor(_THREADS, thread_name_prefix="restore") as pool:
            found = list(pool.map(read_one, sorted(names)))
        return tuple(failure for failure in found if failure is not None)

    def _sights(self, boxes: Boxes, pending: set[str]) -> list[Sight]:
        # Files that nobody needs are checked, too: each is offered by one rank.
        offered = sorted(self._sizes)[self._ranks.rank :: self._ranks.world]
        sights = []
        for name in sorted(pending):
            needed = sum(box.into.numel() * box.into.itemsize for box in boxes.get(name, ()))
            if needed or name in offered:
                sights.append(Sight(self._located.copy_of(name), needed))
        return sights

    def _judge(self, outcomes: Sequence[_Outcome]) -> None:
        failures = [failure for outcome in outcomes for failure in outcome.failures]
        bad = [failure for failure in failures if not failure.errno]
        problems = _distinct([*map(str, bad), *(text for outcome in outcomes for text in outcome.problems)])
        if problems:
            shown = [*problems[:MAX_PROBLEMS_SHOWN], *_count_rest(problems)]
            raise CheckpointRejected(self._path, shown, files=_distinct(failure.copy.file for failure in bad))
        unread = _distinct(map(str, failures))
        if unread:
            raise CheckpointUnreadable(failures[0].errno, "; ".join(unread[:MAX_PROBLEMS_SHOWN]), str(self._path))


def _attempt(work: Callable[[], T]) -> tuple[T | None, _Outcome, Exception | None]:
    """(what `work` gives, what to tell the other ranks, what it raised that is not the checkpoint's fault)."""
    try:
        return work(), _Outcome(), None
    except CopyFailed as failed:
        return None, _Outcome(failures=(failed.failure,)), None
    except Mismatch as mismatch:
        return None, _Outcome(problems=mismatch.problems), None
    except Exception as raised:  # noqa: BLE001 - whatever it is, the other ranks must not wait for this one
        return None, _Outcome(problems=(f"{type(raised).__name__}: {raised}",), is_foreign=True), raised


def _byte_entries(metadata: Metadata, wanted: Callable[[str], bool]) -> list[Entry]:
    entries = metadata.entries
    keys = (key for key in metadata.byte_keys if wanted(key))
    return [entries[number] for key in keys for number in entries.numbers_of(key)]


def _distinct(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(texts))


def _count_rest(problems: Sequence[str]) -> list[str]:
    rest = len(problems) - MAX_PROBLEMS_SHOWN
    return [f"and {rest} more"] if rest > 0 else []


class _Ranks:
    """Gathers from all ranks of a group to all; without torch.distributed there is one rank."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._is_alone = not dist.is_initialized()
        self.rank = 0 if self._is_alone else dist.get_rank(group)
        self.world = 1 if self._is_alone else dist.get_world_size(group)

    def gather(self, value: T) -> list[T]:
        if self._is_alone:
            return [value]
        gathered: list[Any] = [None] * self.world
        dist.all_gather_object(gathered, value, group=self._group)
        return gathered

    def from_first(self, value: T) -> T:
        """What rank 0 gives."""
        shared: list[Any] = [value if self.rank == 0 else None]
        dist.broadcast_object_list(shared, group=self._group, group_src=0)
        return shared[0]  # type: ignore[no-any-return]
