"""What each rank has called in each process group, and how far it is: Flight Recorder entries put in order.

A group is told by its name, its backend and its ranks: split groups may share a name, and a group that has one backend
for the GPU and one for the CPU counts the calls of each by themselves. The numbers of `pg_status` are used only for
a rank of which no entry is left: gloo counts sends among them. Several entries of one coalesced call are one call, and
it is its end marker that says whether it is over.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from trainer.flight.reader import DEFAULT_DESCRIPTION, Dump, Entry, Group

DEFAULT_NAME = "0"

_MARKER = "coalesced"
_PEER = re.compile(r"^(?:\w+:)?(?P<verb>send|recv) (?P<own>\d{1,9})(?P<way>->|<-)(?P<peer>\d{1,9})")

GroupKey = tuple[str, str, tuple[int, ...]]  # name, backend and ranks; no ranks: they are not told


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One collective, or one send or receive, that a rank has called."""

    seq: int
    is_p2p: bool
    entries: tuple[Entry, ...]  # several of a coalesced call
    is_over: bool
    state: str

    @property
    def first(self) -> Entry:
        return self.entries[0]

    @property
    def op(self) -> str:
        """Without the backend's name: "all_reduce"; "all_gather+all_gather" of a coalesced call."""
        return "+".join(dict.fromkeys(plain_op(entry.op) for entry in self.entries)) or "a collective"


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """How far one rank is in one group."""

    collectives: Mapping[int, Call] = field(default_factory=dict)  # by number; what the recorder still held
    p2p: tuple[Call, ...] = ()
    enqueued: int = 0  # newest collective that was called
    completed: int = 0  # all up to this one are over

    @property
    def pending(self) -> tuple[Call, ...]:
        return tuple(call for call in (*self.collectives.values(), *self.p2p) if not call.is_over)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCalls:
    """A process group over all dumps."""

    key: GroupKey
    label: str  # for people
    members: tuple[int, ...] | None  # global ranks; None: nobody tells
    positions: Mapping[int, Position]  # of the members with a dump

    def globally(self, local: int) -> int:
        """The global rank of the n-th member."""
        return self.members[local] if self.members is not None and local < len(self.members) else local


def plain_op(name: str) -> str:
    """`all_reduce` of `nccl:all_reduce`, `send` of `nccl:send 0->1`."""
    return name.partition(":")[2].partition(" ")[0] if ":" in name else name.partition(" ")[0]


def gather_groups(dumps: Mapping[int, Dump], world_size: int) -> tuple[GroupCalls, ...]:
    """All groups in which the dumps tell of a call, each with how far its members are."""
    ranks_of = _find_ranks(dumps, world_size)
    found: dict[GroupKey, dict[int, Position]] = {}
    for rank, dump in dumps.items():
        for (name, backend), calls in _gather_calls(dump).items():
            ranks = ranks_of[rank, name]
            if not ranks or rank in ranks:
                found.setdefault((name, backend, ranks), {})[rank] = _make_position(calls)
    _add_callless(found, dumps, ranks_of)
    descriptions = {
        (name, ranks_of[rank, name]): group.description
        for rank, dump in dumps.items()
        for name, group in dump.groups.items()
        if group.description not in ("", "undefined")
    }
    return tuple(
        GroupCalls(
            key=key,
            label=_label(key[0], descriptions.get((key[0], key[2]), "")),
            members=key[2] or None,
            positions=positions,
        )
        for key, positions in found.items()
    )


def _add_callless(
    found: dict[GroupKey, dict[int, Position]],
    dumps: Mapping[int, Dump],
    ranks_of: Mapping[tuple[int, str], tuple[int, ...]],
) -> None:
    """Members with a dump and without a call in it: they have called nothing, or it has fallen out of the recorder."""
    backends: dict[str, set[str]] = {}
    for name, backend, _ in found:
        backends.setdefault(name, set()).add(backend)
    for (name, _, ranks), positions in found.items():
        for rank, dump in dumps.items():
            if rank in positions or not (rank in ranks or (not ranks and ranks_of.get((rank, name)) == ())):
                continue
            status = dump.status.get(name) if len(backends[name]) == 1 else None
            positions[rank] = Position(
                enqueued=(status.enqueued or 0) if status is not None else 0,
                completed=(status.completed or 0) if status is not None else 0,
            )


def _find_ranks(dumps: Mapping[int, Dump], world_size: int) -> dict[tuple[int, str], tuple[int, ...]]:
    """The ranks of the group that each rank means by each name."""
    found: dict[tuple[int, str], tuple[int, ...]] = {}
    told: dict[str, set[tuple[int, ...]]] = {}
    for rank, dump in dumps.items():
        for group in dump.groups.values():
            found[rank, group.name] = ranks = _members(group, world_size)
            if ranks:
                told.setdefault(group.name, set()).add(ranks)
    for place, ranks in found.items():
        others = told.get(place[1], set())
        if not ranks and len(others) == 1:
            found[place] = next(iter(others))
    return found


def _members(group: Group, world_size: int) -> tuple[int, ...]:
    if group.ranks:
        return group.ranks
    is_default = group.description == DEFAULT_DESCRIPTION or (not group.description and group.name == DEFAULT_NAME)
    return tuple(range(world_size)) if is_default else ()


def _label(name: str, description: str) -> str:
    return f"group {name} ({description})" if description and description != name else f"group {name}"


# ---------------------------------------------------------------- entries to calls


def _gather_calls(dump: Dump) -> dict[tuple[str, str], list[Call]]:
    """By the group's name and the backend."""
    by_group: dict[tuple[str, str], list[Entry]] = {}
    for entry in dump.entries:
        by_group.setdefault((entry.group, entry.op.partition(":")[0] if ":" in entry.op else ""), []).append(entry)
    return {place: list(_join_coalesced(entries)) for place, entries in by_group.items()}


def _join_coalesced(entries: Sequence[Entry]) -> Iterator[Call]:
    """One call for each entry, and one for all entries that an end marker closes."""
    run: list[Entry] = []
    for entry in entries:
        if plain_op(entry.op) == _MARKER:
            if run:
                yield _make_call(run, entry)
            run = []
            continue
        if run and not _is_same(run[-1], entry):
            yield from (_make_call([one], one) for one in run)
            run = []
        run.append(entry)
    yield from (_make_call([one], one) for one in run)


def _is_same(one: Entry, other: Entry) -> bool:
    return (one.seq, one.p2p_seq, one.is_p2p) == (other.seq, other.p2p_seq, other.is_p2p)


def _make_call(entries: Sequence[Entry], end: Entry) -> Call:
    first = entries[0]
    return Call(
        seq=first.p2p_seq if first.is_p2p else first.seq,
        is_p2p=first.is_p2p,
        entries=tuple(entries),
        is_over=end.is_over,
        state=end.state,
    )


def _make_position(calls: Sequence[Call]) -> Position:
    collectives: dict[int, Call] = {}
    for call in calls:
        if not call.is_p2p:
            known = collectives.get(call.seq)
            collectives[call.seq] = call if known is None else _merge(known, call)
    pending = [seq for seq, call in collectives.items() if not call.is_over]
    enqueued = max(collectives, default=0)
    return Position(
        collectives=collectives,
        p2p=tuple(call for call in calls if call.is_p2p),
        enqueued=enqueued,
        completed=min(pending) - 1 if pending else enqueued,
    )


def _merge(one: Call, other: Call) -> Call:
    return Call(
        seq=one.seq,
        is_p2p=one.is_p2p,
        entries=(*one.entries, *other.entries)[:64],
        is_over=one.is_over and other.is_over,
        state=one.state if not one.is_over else other.state,
    )


# ---------------------------------------------------------------- what ranks must agree on

_UNEVEN = frozenset({"all_to_all", "alltoall", "alltoall_base", "all_to_all_single"})  # each rank has sizes of its own
_AT_ROOT = {"gather": "output", "scatter": "input"}  # only the root has these tensors


def signature(call: Call) -> tuple[tuple[object, ...], ...]:
    """What all ranks have to call alike: the operation, the sizes and the types, of each part of the call."""
    return tuple(sorted(_sign(entry) for entry in call.entries))


def _sign(entry: Entry) -> tuple[object, ...]:
    op = plain_op(entry.op)
    spared = _AT_ROOT.get(op)
    has_sizes = op not in _UNEVEN
    inputs = () if spared == "input" or not has_sizes else _counts(entry.input_sizes)
    outputs = () if spared == "output" or not has_sizes else _counts(entry.output_sizes)
    kinds = entry.output_dtypes if spared == "input" else entry.input_dtypes
    return (op, inputs, outputs, tuple(sorted(set(kinds))))


def _counts(sizes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Numbers of elements: the shape may differ."""
    return tuple(math.prod(size) for size in sizes)


def describe(call: Call) -> str:
    """`all_reduce of 8x16 Float`, for people."""
    first = call.first
    sizes = first.input_sizes or first.output_sizes
    kinds = first.input_dtypes or first.output_dtypes
    shape = ",".join("x".join(map(str, size)) or "1" for size in sizes[:3]) + (",…" if len(sizes) > 3 else "")
    what = f"{shape} {kinds[0] if kinds else ''}".strip()
    return f"{call.op} of {what}" if what else call.op


# ---------------------------------------------------------------- sends and receives


def peer_of(entry: Entry) -> tuple[str, int] | None:
    """("send" or "recv", the other's number within the group) of an entry; None: its name does not tell."""
    found = _PEER.match(entry.op)
    return (found["verb"], int(found["peer"])) if found else None
