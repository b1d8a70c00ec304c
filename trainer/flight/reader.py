"""One Flight Recorder dump: bytes that a user's job wrote, to typed records.

PyTorch writes a pickle of plain values, and says the same in JSON where it is asked for that. Loading a pickle runs
what stands in it, so it is read by `trainer.format.pickled`, which calls nothing; size, number and depth are bounded.
What is missing or of another shape in a dump of an unknown version is left out and counted, not guessed.

Seen in torch 2.13 (format 2.10): `version` is a text, to be compared as numbers; `ranks` is a text; the JSON has texts
for the numbers of `pg_status` and 0 for a time that is not known. The gloo backend says "scheduled" of all it does,
ended or not (`retired` tells), and names its groups in the entries only: `pg_config` has one, without name and ranks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from typing import Any, TypeVar

from trainer.format.pickled import PickleRefused, read_pickle

MAX_BYTES = 32 * 1024 * 1024  # 20,000 entries with their stacks are 3 MB
MAX_ENTRIES = 100_000
MAX_OPCODES = 10_000_000  # 20,000 entries with their stacks are 1.6 million
MAX_RANKS = 200_000  # of one group
KNOWN_MAJOR = 2
DEFAULT_DESCRIPTION = "default_pg"  # of the group of all ranks

_T = TypeVar("_T")

_MAX_TEXT = 300
_MAX_TENSORS = 32  # told of one entry; the rest says no more
_MAX_DIMENSIONS = 16
_MAX_FRAMES = 32
_MAX_GROUPS = 20_000
_MAX_KEPT_TEXT = 100_000
_MAX_ALL_RANKS = 5_000_000  # of all groups of a dump
_MAX_INTEGER = 2**63


class FlightUnreadable(ValueError):
    """It is no Flight Recorder dump, or one that can't be read; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A process group, as one rank tells of it."""

    name: str
    description: str = ""
    ranks: tuple[int, ...] = ()  # global; empty: not told


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """How far one rank is with one group; None: not told, or nothing yet."""

    enqueued: int | None = None
    started: int | None = None
    completed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One operation that a rank has called."""

    record: int = 0  # number within this rank, growing; in the order of the calls
    group: str  # name of its process group
    seq: int  # number of the collective within the group, from 1; several entries of a coalesced call share one
    is_p2p: bool = False
    p2p_seq: int = 0
    op: str = ""  # "nccl:all_reduce", "gloo:broadcast", "nccl:send 0->1", …
    input_sizes: tuple[tuple[int, ...], ...] = ()
    output_sizes: tuple[tuple[int, ...], ...] = ()
    input_dtypes: tuple[str, ...] = ()
    output_dtypes: tuple[str, ...] = ()
    state: str = ""  # "scheduled", "started" (only with timing enabled), "completed"
    is_retired: bool = False  # nobody looks after it any more: it has ended, well or not
    created_ns: int | None = None  # wall clock of that rank's node
    started_ns: int | None = None
    completed_ns: int | None = None
    duration_ms: float | None = None  # only with timing enabled
    timeout_ms: int | None = None
    frames: tuple[str, ...] = ()  # "file.py:12 function", innermost first

    @property
    def is_over(self) -> bool:
        return self.is_retired or self.state == "completed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dump:
    """What one rank's recorder held."""

    version: tuple[int, ...] = ()  # (2, 10); empty: not told
    library: str = ""  # version of the communication library
    groups: Mapping[str, Group] = field(default_factory=dict)  # by name
    status: Mapping[str, Status] = field(default_factory=dict)  # by the group's name
    entries: tuple[Entry, ...] = ()  # oldest first
    skipped: int = 0  # entries of a shape that is not known

    @property
    def is_known_version(self) -> bool:
        return self.version[:1] == (KNOWN_MAJOR,)


def read_dump(data: bytes, *, max_entries: int | None = None) -> Dump:
    """The dump that these bytes are, a pickle or JSON; at most MAX_ENTRIES, unless told. Raises FlightUnreadable."""
    return _make_dump(load_dump(data), MAX_ENTRIES if max_entries is None else max_entries)


def load_dump(data: bytes) -> dict[Any, Any]:
    """The plain values of a dump, of any shape yet. Raises FlightUnreadable."""
    if len(data) > MAX_BYTES:
        raise FlightUnreadable(f"it has {len(data):,} bytes, more than {MAX_BYTES:,}")
    if not data:
        raise FlightUnreadable("it is empty")
    raw = _load_json(data) if data[:64].lstrip()[:1] == b"{" else _load_pickle(data)
    if not isinstance(raw, dict):
        raise FlightUnreadable("it is no table")
    if not {"version", "entries", "pg_status", "pg_config"} & set(raw):
        raise FlightUnreadable("it is no Flight Recorder dump: it has none of its fields")
    return raw


def merge_dumps(one: Dump, other: Dump) -> Dump:
    """What two recorders of one rank tell: NCCL has one of its own, apart from that of the other backends."""
    groups = {**other.groups, **one.groups}
    groups.update({name: group for name, group in other.groups.items() if group.ranks and not groups[name].ranks})
    return Dump(
        version=one.version or other.version,
        library=one.library or other.library,
        groups=groups,
        status={**one.status, **other.status},
        entries=(*one.entries, *other.entries),
        skipped=one.skipped + other.skipped,
    )


def _load_pickle(data: bytes) -> Any:
    try:
        return read_pickle(data, {}, max_opcodes=MAX_OPCODES)
    except PickleRefused as error:
        raise FlightUnreadable(f"a pickle that is not read: {error}") from None


def _load_json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FlightUnreadable(f"JSON that can't be read: {str(error)[:100]}") from None


# ---------------------------------------------------------------- plain values to records


def _make_dump(raw: dict[Any, Any], max_entries: int) -> Dump:
    items = raw.get("entries")
    items = items if isinstance(items, list) else []
    known: _Known = {}
    if len(items) > max_entries:
        raise FlightUnreadable(f"it has {len(items):,} entries, more than {max_entries:,}")
    entries: list[Entry] = []
    names: dict[str, str] = {}  # a group's number within the rank: its name
    for item in items:
        entry = _make_entry(item, known)
        if entry is not None:
            entries.append(entry)
            names.setdefault(_key(item.get("pg_id")), entry.group)
    groups = dict(_groups(raw.get("pg_config")))
    descriptions = {e.group: _group_text(i, 1) for i, e in zip(reversed(items), reversed(entries), strict=False)}
    return Dump(
        version=_version(raw.get("version")),
        library=_text(raw.get("comm_lib_version", raw.get("nccl_version"))),
        groups=_fill_groups(groups, entries, descriptions),
        status=dict(_statuses(raw.get("pg_status"), names, groups)),
        entries=tuple(entries),
        skipped=len(items) - len(entries),
    )


def _fill_groups(told: Mapping[str, Group], entries: list[Entry], descriptions: Mapping[str, str]) -> dict[str, Group]:
    """Groups that only the entries name are added, and the nameless one of gloo is left out.

    It may have ranks: those of the group that was made last. Are they the first n, they are all there are.
    """
    named = {name: group for name, group in told.items() if name}
    nameless = told[""].ranks if "" in told else ()
    whole = nameless if nameless == tuple(range(len(nameless))) else ()
    for entry in entries:
        if entry.group not in named:
            description = descriptions.get(entry.group, "")
            ranks = whole if description == DEFAULT_DESCRIPTION else ()
            named[entry.group] = Group(name=entry.group, description=description, ranks=ranks)
    return named


def _make_entry(raw: Any, known: _Known) -> Entry | None:
    if not isinstance(raw, dict):
        return None
    seq, group = _integer(raw.get("collective_seq_id")), _group_text(raw, 0)
    if seq is None or not group:
        return None
    return Entry(
        record=_integer(raw.get("record_id")) or 0,
        group=group,
        seq=seq,
        is_p2p=raw.get("is_p2p") is True,
        p2p_seq=_integer(raw.get("p2p_seq_id")) or 0,
        op=_text(raw.get("profiling_name")),
        input_sizes=_once(raw.get("input_sizes"), _sizes, known),
        output_sizes=_once(raw.get("output_sizes"), _sizes, known),
        input_dtypes=_once(raw.get("input_dtypes"), _texts, known),
        output_dtypes=_once(raw.get("output_dtypes"), _texts, known),
        state=_text(raw.get("state")),
        is_retired=raw.get("retired") is True,
        created_ns=_instant(raw.get("time_created_ns")),
        started_ns=_instant(raw.get("time_discovered_started_ns")),
        completed_ns=_instant(raw.get("time_discovered_completed_ns")),
        duration_ms=_number(raw.get("duration_ms")),
        timeout_ms=_integer(raw.get("timeout_ms")),
        frames=_once(raw.get("frames"), _frames, known),
    )


_Known = dict[tuple[int, Callable[[Any], Any]], Any]


def _once(raw: Any, make: Callable[[Any], _T], known: _Known) -> _T:
    """What `make` gives, made once for a value: a pickle can name one value a million times in two bytes each."""
    place = (id(raw), make)
    if place not in known:
        known[place] = make(raw)
    found: _T = known[place]
    return found


def _group_text(raw: Any, place: int) -> str:
    """Name (0) or description (1) of an entry's group; an older dump has its number only."""
    pair = raw.get("process_group") if isinstance(raw, dict) else None
    if isinstance(pair, tuple | list) and len(pair) > place:
        return _text(pair[place])
    return _key(raw.get("pg_id")) if isinstance(raw, dict) and place == 0 else ""


def _groups(raw: Any) -> Iterator[tuple[str, Group]]:
    if not isinstance(raw, dict):
        return
    left = _MAX_ALL_RANKS
    for key, value in list(raw.items())[:_MAX_GROUPS]:
        if isinstance(value, dict):
            name = _text(value.get("name")) or _key(key)
            ranks = _ranks(value.get("ranks"), min(left, MAX_RANKS))
            left -= len(ranks)
            yield name, Group(name=name, description=_text(value.get("desc")), ranks=ranks)


def _statuses(raw: Any, names: Mapping[str, str], groups: Mapping[str, Group]) -> Iterator[tuple[str, Status]]:
    """By name: `pg_status` has each group's number within the rank, which is another number on another rank."""
    if not isinstance(raw, dict):
        return
    for key, value in list(raw.items())[:_MAX_GROUPS]:
        number = _key(key)
        name = names.get(number) or (number if number in groups else "")
        if isinstance(value, dict) and name:
            yield (
                name,
                Status(
                    enqueued=_reached(value.get("last_enqueued_collective")),
                    started=_reached(value.get("last_started_collective")),
                    completed=_reached(value.get("last_completed_collective")),
                ),
            )


def _version(raw: Any) -> tuple[int, ...]:
    found = re.fullmatch(r"(\d{1,6})((?:\.\d{1,6}){0,5})", raw.strip()) if isinstance(raw, str) else None
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def _ranks(raw: Any, most: int) -> tuple[int, ...]:
    """Of a list, or of a text such as "[0, 1, 2]"."""
    if isinstance(raw, str):
        return _known_ranks(raw, most) if len(raw) <= _MAX_KEPT_TEXT else _read_ranks(raw, most)
    ranks = [_integer(part) for part in raw[:most]] if isinstance(raw, list) else []
    return tuple(rank for rank in ranks if rank is not None and rank >= 0)


def _read_ranks(text: str, most: int) -> tuple[int, ...]:
    return tuple(int(found[0]) for found in islice(re.finditer(r"[0-9]{1,9}", text[: 12 * most]), most))


_known_ranks = lru_cache(maxsize=64)(_read_ranks)  # all ranks of a training tell the same


def _sizes(raw: Any) -> tuple[tuple[int, ...], ...]:
    items = raw[:_MAX_TENSORS] if isinstance(raw, list | tuple) else ()
    return tuple(
        tuple(n for n in (_integer(part) for part in item[:_MAX_DIMENSIONS]) if n is not None)
        for item in items
        if isinstance(item, list | tuple)
    )


def _texts(raw: Any) -> tuple[str, ...]:
    return tuple(_text(item) for item in raw[:_MAX_TENSORS]) if isinstance(raw, list | tuple) else ()


def _frames(raw: Any) -> tuple[str, ...]:
    items = raw[:_MAX_FRAMES] if isinstance(raw, list | tuple) else ()
    return tuple(
        f"{_text(item.get('filename'))}:{_integer(item.get('line')) or 0} {_text(item.get('name'))}"
        for item in items
        if isinstance(item, dict)
    )


def _text(raw: Any) -> str:
    """Printable, cut; empty for what is no text."""
    if not isinstance(raw, str):
        return ""
    text = raw[:_MAX_TEXT]
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def _key(raw: Any) -> str:
    return raw[:_MAX_TEXT] if isinstance(raw, str) else str(raw) if type(raw) is int else ""


def _integer(raw: Any) -> int | None:
    if type(raw) is int:
        return raw if -_MAX_INTEGER <= raw < _MAX_INTEGER else None
    return int(raw) if isinstance(raw, str) and re.fullmatch(r"-?[0-9]{1,18}", raw) else None


def _number(raw: Any) -> float | None:
    return float(raw) if type(raw) in (int, float) and abs(raw) < _MAX_INTEGER else None


def _instant(raw: Any) -> int | None:
    return _integer(raw) or None  # 0: not known


def _reached(raw: Any) -> int | None:
    found = _integer(raw)
    return None if found is None or found < 0 else found
