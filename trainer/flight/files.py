"""Which files of a folder are Flight Recorder dumps, and of which rank: only the name tells.

`fr_trace_rank_7` is what we have them named, `nccl_trace_rank_7` and `comm_lib_trace_rank_7` what PyTorch does by
itself; some sites put the host in front of the rank (`nccl_trace_rank_node02_5`); `rank7.flight` and
`rank7.nccl.flight` (NCCL has a recorder of its own) are what a rank writes when its node's `trainer.node` asks for it.
With `.short` behind it, it is the part that tells where the rank is (trainer.flight.digest).
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainer.flight.reader import MAX_BYTES, MAX_ENTRIES, Dump, FlightUnreadable, merge_dumps, read_dump

MAX_NAMES = 100_000
MAX_DUMPS = 20_000
MAX_TOTAL_BYTES = 8 * 1024**3
SHORT = ".short"

_ASKED = re.compile(r"^rank(?P<rank>\d{1,9})(?P<library>\.nccl)?\.flight(?:\.json)?\Z")
_OWN_ACCORD = re.compile(
    r"^.*trace.*rank_(?:(?P<host>[A-Za-z0-9][\w.-]*?)_)?(?P<rank>\d{1,9})(?:\.json|\.pkl|\.pickle)?\Z"
)
_ANY = re.compile(r"^.*?(?P<rank>\d{1,9})(?:\.json|\.pkl|\.pickle)?\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpFile:
    """A file that is a dump by its name."""

    path: Path
    rank: int
    host: str = ""  # as the name tells it; empty: it does not
    is_nccl_only: bool = False  # of a rank that has another dump, with what its other backends did
    is_short: bool = False


@dataclass(slots=True, kw_only=True)
class Reading:
    """The dumps that could be read, and what of the others is to be said."""

    dumps: dict[int, Dump] = field(default_factory=dict)  # by global rank
    files: dict[int, DumpFile] = field(default_factory=dict)  # that each was read from
    unreadable: list[str] = field(default_factory=list)  # one sentence a file
    unread: frozenset[int] = frozenset()  # ranks whose dumps were not come to: time or bytes ran out


def parse_name(path: Path) -> DumpFile | None:
    """The dump that a file is by its name; None for another file, and for one that is being written."""
    if path.name.endswith(".tmp") or path.name.startswith("."):
        return None
    name = path.name.removesuffix(SHORT)
    found = _ASKED.match(name) or _OWN_ACCORD.match(name)
    if found is None:
        return None
    told = found.groupdict()
    return DumpFile(
        path=path,
        rank=int(found["rank"]),
        host=told.get("host") or "",
        is_nccl_only=bool(told.get("library")),
        is_short=name != path.name,
    )


def find_dumps(folder: Path) -> tuple[DumpFile, ...]:
    """The dumps that lie in a folder, by rank. Raises OSError when it can't be listed."""
    found: list[DumpFile] = []
    with os.scandir(folder) as entries:
        for count, entry in enumerate(entries):
            if count >= MAX_NAMES or len(found) >= MAX_DUMPS:
                break
            file = parse_name(folder / entry.name)
            if file is not None and entry.is_file(follow_symlinks=False):
                found.append(file)
    return tuple(sorted(found, key=lambda file: (file.rank, file.path.name)))


def name_file(path: Path) -> DumpFile | None:
    """A file that somebody says is a dump: its rank is the last number of its name; None without one."""
    known = parse_name(path)
    if known is not None:
        return known
    found = _ANY.match(path.name)
    return DumpFile(path=path, rank=int(found["rank"])) if found else None


def read_dumps(
    files: Iterable[DumpFile],
    *,
    limit_s: float = 60.0,
    max_total_bytes: int = MAX_TOTAL_BYTES,
    max_entries: int = MAX_ENTRIES,
    prefers_short: bool = False,
    read: Callable[[Path, int], bytes] | None = None,
) -> Reading:
    """Read them all, the newest of each rank, until time or bytes run out.

    `prefers_short`: the short one where there is one, else the whole one where there is one.
    `read`: (path, most bytes) to a file's content, raising OSError; by default a plain file that is no link.
    """
    reading, until, left = Reading(), time.monotonic() + limit_s, max_total_bytes
    chosen = sorted(_choose(files, prefers_short=prefers_short), key=lambda f: (f.rank, f.is_nccl_only))
    for place, file in enumerate(chosen):
        if time.monotonic() > until or left <= 0:
            reading.unread = frozenset(other.rank for other in chosen[place:])
            break
        try:
            data = (read or read_plain)(file.path, MAX_BYTES)
            left -= len(data)
            dump = read_dump(data, max_entries=max_entries)
            known = reading.dumps.get(file.rank)
            reading.dumps[file.rank] = dump if known is None else merge_dumps(known, dump)
            reading.files.setdefault(file.rank, file)
        except OSError as error:
            reading.unreadable.append(f"{file.path.name}: {error.strerror or error}")
        except FlightUnreadable as error:
            reading.unreadable.append(f"{file.path.name}: {error}")
    return reading


def read_plain(path: Path, max_bytes: int) -> bytes:
    """A file's bytes; raises OSError for a link, a pipe, and what is larger."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(handle, "rb") as file:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(f"{path.name} is no file")
        if found.st_size > max_bytes:
            raise OSError(f"it has {found.st_size:,} bytes, more than {max_bytes:,}")
        return file.read(max_bytes + 1)


def _choose(files: Iterable[DumpFile], *, prefers_short: bool) -> Sequence[DumpFile]:
    """One file of each recorder of a rank, the newest: it may have dumped by itself and been asked too."""
    kept: dict[tuple[int, bool], tuple[bool, float, DumpFile]] = {}
    for file in files:
        try:
            changed = file.path.lstat().st_mtime
        except OSError:
            changed = 0.0
        rated = (file.is_short is prefers_short, changed, file)
        place = (file.rank, file.is_nccl_only)
        if place not in kept or rated[:2] > kept[place][:2]:
            kept[place] = rated
    return [file for _, _, file in kept.values()]
