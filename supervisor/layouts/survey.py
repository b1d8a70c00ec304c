"""Looks at a folder of checkpoints again and again: what changed is inspected, what did not costs one stat."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

import xxhash

from supervisor.jobfiles import NotAFile, open_folder
from supervisor.layouts.deepspeed import LATEST_NAME
from supervisor.layouts.found import Candidate, Found
from supervisor.layouts.megatron import TRACKER_NAME
from supervisor.layouts.registry import AUTO, LAYOUTS, Layout, choose
from supervisor.layouts.tree import Broken, Entry, OutOfTime, Tree, Unfinished, to_entry
from supervisor.model import MARK_PREFIX, UNFINISHED_MARKERS, CheckpointView

MAX_NAMES = 20_000
MAX_SIZES = 256  # files of one that is being written whose sizes are looked at
MAX_CANDIDATES = 64  # the newest; a training that keeps more is walked back no further
RECHECK_S = 60.0  # between two looks into a whole one whose folder has not changed
RECHECK_OLD_S = 900.0  # the same for those that are not among the newest
NEWEST = 4
RECHECK_BROKEN_S = 2.0  # it may be one that is being written
SETTLE_S = 5.0  # one without an end mark must not change for this long, between looks: clocks of file servers differ
TRACKERS = (TRACKER_NAME, LATEST_NAME)  # with another content, what they name is another
NEWER_S = 30.0  # by so much a file may be newer than the mark that was written after it


class NoFolder(Exception):
    """There is no folder of checkpoints: the training has not made it, or its file system is not there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """What one look gives. `unknown`: paths that are there and could not be looked at. `digest` changes with growth.

    `unsettled`: whole, as far as can be told, and without a mark that says so: one more look in a few seconds tells.
    """

    views: tuple[CheckpointView, ...] = ()
    unknown: tuple[str, ...] = ()
    unsettled: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    digest: str = ""
    layout: str = ""
    entries: int = 0  # names in the folder, whatever they are
    marks: tuple[str, ...] = ()  # "<attempt>-<node>": that nodes left there


@dataclass(slots=True, kw_only=True)
class _Known:
    entry: Entry
    view: CheckpointView
    looked_at: float
    since: float  # when it was first seen like this
    trackers: tuple[Entry | None, ...]
    files: tuple[str, ...]  # of a whole one: while they are as they were, nothing is opened again
    is_settled: bool


@dataclass(slots=True)
class _Memory:
    known: dict[str, _Known] = field(default_factory=dict)
    partial: dict[str, Tree] = field(default_factory=dict)


class Survey:
    """Remembers folders between looks. One of it in each reading process."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._folders: dict[tuple[str, str], _Memory] = {}

    def look(
        self,
        directory: Path,
        layout_name: str,
        until: float,
        *,
        is_final: bool = False,
        marks: Sequence[str] = UNFINISHED_MARKERS,
    ) -> Sight:
        """Views of the newest checkpoints, oldest first; raises NoFolder, and OSError when the list can't be read.

        `is_final`: the job has ended, so what lies there is all that comes. `marks`: ends of the names of files that
        stand beside a checkpoint (or names of files in it) that is not finished; they are never removed here.
        """
        memory = self._folders.setdefault((str(directory), layout_name), _Memory())
        try:
            folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise NoFolder(f"{directory} does not exist") from None
        try:
            names, odd = _list(folder, directory)
            left = tuple(sorted(name.removeprefix(MARK_PREFIX) for name in names if name.startswith(MARK_PREFIX)))
            names = [name for name in names if not name.startswith(MARK_PREFIX)]
            layout, note = choose(names) if layout_name == AUTO else (LAYOUTS[layout_name], "")
            look = _Look(self, folder, directory, layout, memory, until, is_final=is_final, marks=tuple(marks))
            return replace(look.run(names, tuple(line for line in (note, odd) if line)), marks=left)
        finally:
            os.close(folder)


class _Look:
    """One look at one folder."""

    def __init__(
        self,
        survey: Survey,
        folder: int,
        directory: Path,
        layout: Layout,
        memory: _Memory,
        until: float,
        *,
        is_final: bool,
        marks: tuple[str, ...],
    ) -> None:
        self._now = survey._clock()  # noqa: SLF001 - a part of it
        self._folder, self._directory, self._layout = folder, directory, layout
        self._memory, self._until, self._is_final = memory, until, is_final
        self._marks = marks
        self._names: frozenset[str] = frozenset()
        self._trackers: tuple[Entry | None, ...] = ()
        self._unknown: list[str] = []
        self._unsettled: list[str] = []
        self._notes: list[str] = []
        self._digest = xxhash.xxh3_64()

    def run(self, names: list[str], notes: tuple[str, ...]) -> Sight:
        self._names = frozenset(names)
        tree = Tree(self._folder)
        self._trackers = tuple(tree.entry(name) if name in self._names else None for name in TRACKERS)
        # names without a step come first: there are few of them, and any may be the newest
        found = sorted(self._layout.find(names), key=lambda c: (c.step is None, c.step or 0, c.name), reverse=True)
        views = [
            view
            for place, candidate in enumerate(found[:MAX_CANDIDATES])
            if (view := self._look_at(candidate, RECHECK_S if place < NEWEST else RECHECK_OLD_S)) is not None
        ]
        wanted = {c.name for c in found[:MAX_CANDIDATES]}
        for old in [name for name in self._memory.known if name not in wanted]:
            del self._memory.known[old]
        for old in [name for name in self._memory.partial if name not in wanted]:
            del self._memory.partial[old]
        return Sight(
            views=tuple(sorted(views, key=lambda v: (v.step, v.path.endswith("/last.ckpt"), v.path))),
            unknown=tuple(self._unknown),
            unsettled=tuple(self._unsettled),
            notes=notes + tuple(self._notes),
            digest=self._digest.hexdigest(),
            layout=self._layout.name,
            entries=len(names),
        )

    def _look_at(self, candidate: Candidate, recheck_s: float) -> CheckpointView | None:
        """The view; None when it is gone again, or can't be told (then it is in `unknown`)."""
        path = str(self._directory / candidate.name)
        known = self._memory.known.get(candidate.name)
        try:
            entry = to_entry(os.stat(candidate.name, dir_fd=self._folder, follow_symlinks=False))
            self._digest.update(f"{candidate.name}:{entry}".encode("utf-8", "replace"))
            if known is not None:
                self._digest.update(known.view.stamp.encode())
            if entry.kind == "folder" and (known is None or not known.view.is_complete):
                self._digest.update(_sizes(self._folder, candidate.name))
            if known is not None and known.entry == entry and not self._is_due(known, recheck_s):
                return self._offer(known)
            if known is not None and self._is_as_it_was(known, entry):
                return self._offer(known)
            view, files, has_mark = self._inspect(candidate, path)
        except FileNotFoundError:
            return None
        except OutOfTime:
            return self._fall_back(path, known)
        except OSError as error:
            self._notes.append(f"{path}: {error.strerror}"[:500])
            return self._fall_back(path, known)
        since = known.since if known is not None and known.view == view else self._now
        is_settled = has_mark or self._is_final or self._now - since >= SETTLE_S
        self._memory.known[candidate.name] = _Known(
            entry=entry,
            view=view,
            looked_at=self._now,
            since=since,
            trackers=self._trackers,
            files=files,
            is_settled=is_settled,
        )
        return self._offer(self._memory.known[candidate.name])

    def _offer(self, known: _Known) -> CheckpointView | None:
        """The view of what is known; None for one that may still be written."""
        if known.is_settled or not known.view.is_complete:
            return known.view
        self._unsettled.append(known.view.path)
        return None

    def _is_as_it_was(self, known: _Known, entry: Entry) -> bool:
        """True when every file of a whole one has the size and the time that it had."""
        if not known.files or not known.is_settled or known.trackers != self._trackers:
            return False
        tree = Tree(self._folder, until=self._until)
        try:
            _refuse_marked(tree, self._names, known.view.path.rpartition("/")[2], self._marks)
            is_same = stamp_of({name: tree.file(name) for name in known.files}) == known.view.stamp
        except Broken:
            return False
        if is_same:
            known.entry, known.looked_at = entry, self._now
        return is_same

    def _fall_back(self, path: str, known: _Known | None) -> CheckpointView | None:
        """Could not look is neither "gone" nor "broken"."""
        if known is not None and known.view.is_complete and known.is_settled:
            return known.view
        self._unknown.append(path)
        return None

    def _is_due(self, known: _Known, recheck_s: float) -> bool:
        age = self._now - known.looked_at
        if known.view.is_complete and known.is_settled:
            return age >= recheck_s and self._now < self._until
        return self._is_final or age >= RECHECK_BROKEN_S

    def _inspect(self, candidate: Candidate, path: str) -> tuple[CheckpointView, tuple[str, ...], bool]:
        """(view, its files when it is whole, whether a mark says that its save has ended)."""
        view = CheckpointView(step=candidate.step or 0, attempt=0, path=path, stamp="-")
        # what a look that ran out of time has seen already makes the next one shorter
        tree = self._memory.partial.setdefault(candidate.name, Tree(self._folder))
        tree.renew(self._folder, self._until)
        try:
            found, entries = inspect_candidate(tree, self._layout, candidate, self._names, self._marks)
        except Broken as error:
            del self._memory.partial[candidate.name]
            detail = _printable(str(error))[:500]
            return replace(view, detail=detail, is_unfinished=isinstance(error, Unfinished)), (), False
        del self._memory.partial[candidate.name]
        view = describe(found, entries, path)
        return view, found.files, found.has_end_mark


def inspect_candidate(
    tree: Tree,
    layout: Layout,
    candidate: Candidate,
    names: Collection[str],
    marks: Sequence[str] = UNFINISHED_MARKERS,
) -> tuple[Found, Mapping[str, Entry]]:
    """What a layout makes of one name, with its files; `names`: all of the folder. Raises Broken, OSError."""
    _refuse_marked(tree, names, candidate.name, marks)
    found = layout.inspect(tree, candidate)
    entries = {name: tree.file(name) for name in found.files}
    _refuse_older_mark(found, entries)
    return found, entries


def _refuse_marked(tree: Tree, names: Collection[str], name: str, marks: Sequence[str]) -> None:
    """A framework may put a file beside one that it writes or removes, or into it."""
    marked = [f"{base}{mark}" for base in (name, name.removesuffix(".ckpt")) for mark in marks]
    found = next((mark for mark in marked if mark in names), None)
    if found is None and tree.is_folder(name):
        found = next((inner for mark in marks if tree.entry(inner := f"{name}/{mark}") is not None), None)
    if found is not None:
        raise Unfinished(f"{found} says that it is not finished")


def _refuse_older_mark(found: Found, entries: Mapping[str, Entry]) -> None:
    """A step that is saved again lies under its old mark until the new one is written: two saves, mixed."""
    if not found.end_mark:
        return
    mark = entries[found.end_mark].mtime_ns
    newest = max(entries, key=lambda name: entries[name].mtime_ns)
    if entries[newest].mtime_ns - mark > NEWER_S * 1e9:
        raise Broken(f"{newest} is newer than {found.end_mark}: saved again and not finished, or copied without times")


def describe(found: Found, entries: Mapping[str, Entry], path: str) -> CheckpointView:
    """The view of a whole checkpoint; its stamp changes when any of its files is written again."""
    return CheckpointView(
        step=found.step,
        attempt=0,
        path=path,
        size_bytes=sum(entry.size for entry in entries.values()),
        files=len(entries),
        is_complete=True,
        world_size=found.world_size,
        is_elastic=found.is_elastic,
        detail=_printable(found.note),
        stamp=stamp_of(entries),
    )


def stamp_of(entries: Mapping[str, Entry]) -> str:
    """What changes when any of these files is written again."""
    text = "\n".join(f"{name}:{e.size}:{e.mtime_ns}" for name, e in sorted(entries.items()))
    return xxhash.xxh3_64_hexdigest(text.encode("utf-8", "replace"))


def _sizes(folder: int, name: str) -> bytes:
    """Sizes of some of the files of one that is being written: they tell that the writer lives."""
    found: list[str] = []
    try:
        with open_folder(name, dir_fd=folder) as inner, os.scandir(inner) as entries:
            some = islice(entries, MAX_SIZES)
            found.extend(f"{entry.name}:{entry.stat(follow_symlinks=False).st_size}" for entry in some)
    except (OSError, NotAFile):
        return b"?"
    return "\n".join(sorted(found)).encode("utf-8", "replace")


def _list(folder: int, directory: Path) -> tuple[list[str], str]:
    """Names that can be told to others, and a note on those that can't: they are not UTF-8, so no step's either."""
    names: list[str] = []
    odd: list[str] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            (names if _is_text(entry.name) else odd).append(entry.name)
            if len(names) + len(odd) > MAX_NAMES:
                raise OSError(errno.E2BIG, f"more than {MAX_NAMES:,} names", str(directory))
    if not odd:
        return names, ""
    return names, f"{directory}: {len(odd)} names that are not UTF-8 are left out, {ascii(min(odd))[:200]} among them"


def _is_text(name: str) -> bool:
    return not any("\ud800" <= char <= "\udfff" for char in name)


def _printable(text: str) -> str:
    """With "?" for what is not UTF-8: a name inside a checkpoint."""
    return text.encode("utf-8", "replace").decode()
