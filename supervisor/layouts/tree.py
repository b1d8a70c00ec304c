"""Read access to a folder of checkpoints: bounded, no link followed, nothing but regular files opened.

Broken       what lies there is no whole checkpoint; the message says what is wrong
Unfinished   and it never was one: its save did not end
OutOfTime    the look was cut short: nothing is known, and what was learnt so far shortens the next look
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, TypeVar

from supervisor.jobfiles import NotAFile, open_folder, open_parent, open_regular

T = TypeVar("T")

MAX_NAMES = 200_000  # in one folder of one checkpoint: one file per rank, and more


class Broken(Exception):
    """What lies there is no whole checkpoint."""


class Unfinished(Broken):
    """A save that did not end: what lies there never was a checkpoint."""


class OutOfTime(Exception):
    """The look was cut short by its budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What a name leads to, without following links."""

    kind: str  # "file", "folder", "link" or "other"
    size: int
    mtime_ns: int
    inode: int


class Tree:
    """Files below one open folder, by paths relative to it. What was seen is remembered for as long as the tree lives.

    A path comes from a job's files: one that leads out of the folder is Broken.
    """

    def __init__(self, folder: int, *, until: float = float("inf")) -> None:
        self._folder = folder
        self._until = until
        self._entries: dict[str, Entry | None] = {}
        self._names: dict[str, tuple[str, ...]] = {}
        self._learnt: dict[tuple[str, str], Any] = {}

    def renew(self, folder: int, until: float) -> None:
        """Go on with another look, after one that ran out of time."""
        self._folder, self._until = folder, until

    def entry(self, path: str) -> Entry | None:
        """What lies under a path; None: nothing. Raises OSError when that can't be told."""
        if path not in self._entries:
            self._spend()
            self._entries[path] = self._look(path)
        return self._entries[path]

    def file(self, path: str) -> Entry:
        """A regular file that must be there."""
        entry = self.entry(path)
        if entry is None:
            raise Broken(f"{path} is missing")
        if entry.kind != "file":
            raise Broken(f"{path} is not a regular file")
        return entry

    def is_file(self, path: str) -> bool:
        entry = self.entry(path)
        return entry is not None and entry.kind == "file"

    def is_folder(self, path: str) -> bool:
        entry = self.entry(path)
        return entry is not None and entry.kind == "folder"

    def names(self, path: str) -> tuple[str, ...]:
        """Names in a folder ("": the tree's own), sorted; raises Broken when it is none, or has too many."""
        if path not in self._names:
            self._spend()
            self._names[path] = self._list(path)
        return self._names[path]

    def read(self, path: str, max_bytes: int) -> bytes:
        """The content of a small file."""
        with self.open(path) as fd:
            size = os.fstat(fd).st_size
            if size > max_bytes:
                raise Broken(f"{path} has {size} bytes, more than {max_bytes}")
            return read_at(fd, 0, size)

    def once(self, what: str, path: str, learn: Callable[[], T]) -> T:
        """What `learn` makes of a file; a look that goes on after one that ran out of time has it already."""
        key = (what, path)
        if key not in self._learnt:
            self._learnt[key] = learn()
        found: T = self._learnt[key]
        return found

    def read_hint(self, path: str) -> bytes:
        """The content of a small file that is only believed when it makes sense; empty for a link, a FIFO or more."""
        try:
            return self.read(path, 4096).strip()
        except Broken:
            return b""

    @contextmanager
    def open(self, path: str) -> Iterator[int]:
        """A descriptor of a regular file."""
        self._spend()
        try:
            with open_parent(self._folder, _checked(path)) as (parent, name), open_regular(name, dir_fd=parent) as fd:
                yield fd
        except FileNotFoundError:
            raise Broken(f"{path} is missing") from None
        except NotAFile as error:
            raise Broken(f"{path}: {error}") from None

    def _spend(self) -> None:
        if time.monotonic() > self._until:
            raise OutOfTime

    def _look(self, path: str) -> Entry | None:
        try:
            with open_parent(self._folder, _checked(path)) as (parent, name):
                found = os.stat(name, dir_fd=parent, follow_symlinks=False)
        except FileNotFoundError:
            return None
        except NotAFile as error:
            raise Broken(f"{path}: {error}") from None
        return to_entry(found)

    def _list(self, path: str) -> tuple[str, ...]:
        names: list[str] = []
        try:
            if not path:
                with os.scandir(self._folder) as entries:
                    return tuple(sorted(entry.name for entry in entries))
            with (
                open_parent(self._folder, _checked(path)) as (parent, name),
                open_folder(name, dir_fd=parent) as folder,
                os.scandir(folder) as entries,
            ):
                for entry in entries:
                    names.append(entry.name)
                    if len(names) > MAX_NAMES:
                        raise Broken(f"{path} holds more than {MAX_NAMES} names")
        except FileNotFoundError:
            raise Broken(f"{path} is missing") from None
        except NotAFile as error:
            raise Broken(f"{path}: {error}") from None
        return tuple(sorted(names))


def to_entry(found: os.stat_result) -> Entry:
    """The part of a stat that matters here."""
    kinds = ((stat.S_ISREG, "file"), (stat.S_ISDIR, "folder"), (stat.S_ISLNK, "link"))
    kind = next((word for test, word in kinds if test(found.st_mode)), "other")
    return Entry(kind=kind, size=found.st_size, mtime_ns=found.st_mtime_ns, inode=found.st_ino)


def read_at(fd: int, offset: int, length: int) -> bytes:
    """`length` bytes from `offset`; fewer when the file ends before."""
    parts = bytearray()
    while len(parts) < length:
        data = os.pread(fd, min(1 << 20, length - len(parts)), offset + len(parts))
        if not data:
            break
        parts += data
    return bytes(parts)


def _checked(path: str) -> str:
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or "\0" in path or len(path) > 4096:
        raise Broken(f"{path[:200]!r} leads out of the folder")
    return path
