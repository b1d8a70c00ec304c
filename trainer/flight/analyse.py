"""Who keeps a training from going on, told by the Flight Recorder dumps of its ranks. Pure.

Ranks that wait in a collective are victims. To blame is who did not call it (its program is elsewhere, dead or
stopped), who called something else, or who left no dump while the others wait. Where several groups are stuck, most
wait because their ranks wait in another one: the chain is followed to a rank that waits for nobody.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.flight import words
from trainer.flight.calls import GroupCalls, gather_groups
from trainer.flight.files import Reading, find_dumps, read_dumps
from trainer.flight.groups import Ranks, Stuck, find_stuck, find_stuck_p2p
from trainer.flight.reader import Dump

HIGH, MEDIUM, LOW = "high", "medium", "low"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What the dumps of a training tell. Ranks are global."""

    kind: str  # one of KINDS
    sentence: str
    confidence: str = HIGH  # "high", "medium" or "low"
    culprits: tuple[int, ...] = ()  # ranks to look at; empty: none can be named
    is_program_fault: bool = False  # ranks call different things: a fault of the program, not of a node
    stuck: tuple[Stuck, ...] = ()  # what does not end, the likely origin first
    no_dump: tuple[int, ...] = ()  # ranks without a dump
    notes: tuple[str, ...] = ()  # what limits all this


KINDS = (
    "none",  # nothing is stuck
    "absent",  # ranks have not called what the others wait for
    "mismatch",  # ranks have called something else: operation, size or type
    "order",  # ranks use their groups in different orders
    "circle",  # ranks wait for each other, each in another group
    "blocked",  # a GPU has not begun what those of others have
    "unfinished",  # all have called it, and it has ended for some
    "stuck_together",  # all have called it, and it has ended for none
)


def analyse(dumps: Mapping[int, Dump], world_size: int = 0, *, unread: frozenset[int] = frozenset()) -> Finding:
    """What the dumps tell, by global rank. `world_size` 0: as many as the dumps tell of.

    `unread`: ranks that have a dump which was not looked at; they are no suspects for having none.
    """
    world = world_size or _guess_world(dumps)
    no_dump = tuple(rank for rank in range(world) if rank not in dumps and rank not in unread)
    notes = _limits(dumps, world_size)
    groups = gather_groups(dumps, world)
    busy = _busy_ranks(groups)
    ranks = Ranks(idle=tuple(rank for rank in sorted(dumps) if rank not in busy), no_dump=no_dump)
    stuck = [found for group in groups if (found := find_stuck(group, ranks)) is not None]
    stuck += [found for group in groups for found in find_stuck_p2p(group, ranks)]
    pending = sorted((s for s in stuck if s.is_pending), key=lambda s: _priority(s, busy))
    if pending:
        return _judge(pending, busy, no_dump, dumps, notes)
    if stuck:
        return _judge_uneven(sorted(stuck, key=lambda s: _priority(s, busy)), no_dump, dumps, notes)
    return Finding(
        kind="none", sentence=words.nothing_stuck(len(dumps), no_dump), no_dump=no_dump, notes=notes, confidence=MEDIUM
    )


def analyse_folder(folder: Path, world_size: int = 0, *, limit_s: float = 5.0) -> Finding | None:
    """What the dumps in a folder tell; None when none of them can be read. Raises OSError without the folder."""
    reading = read_dumps(find_dumps(folder), limit_s=limit_s, prefers_short=True)
    return analyse_reading(reading, world_size) if reading.dumps else None


def analyse_reading(reading: Reading, world_size: int = 0) -> Finding:
    """The same of dumps that were read, and with what could not be read."""
    found = analyse(reading.dumps, world_size, unread=reading.unread)
    notes = list(found.notes)
    if reading.unreadable:
        notes.append(words.unreadable(reading.unreadable))
    if reading.unread:
        notes.append(words.not_come_to(reading.unread))
    is_part = reading.unreadable or reading.unread
    return Finding(
        kind=found.kind,
        sentence=found.sentence,
        confidence=LOW if is_part and found.kind == "absent" and _blames_silence(found) else found.confidence,
        culprits=found.culprits,
        is_program_fault=found.is_program_fault,
        stuck=found.stuck,
        no_dump=found.no_dump,
        notes=tuple(notes),
    )


def _blames_silence(found: Finding) -> bool:
    return bool(set(found.culprits) & set(found.no_dump))


def _guess_world(dumps: Mapping[int, Dump]) -> int:
    ranks = [rank for dump in dumps.values() for group in dump.groups.values() for rank in group.ranks]
    return max((*dumps, *ranks), default=-1) + 1


def _limits(dumps: Mapping[int, Dump], world_size: int) -> tuple[str, ...]:
    notes = []
    if not world_size and not any(group.ranks for dump in dumps.values() for group in dump.groups.values()):
        notes.append("nobody tells how many ranks there are: one above those with a dump is not missed")
    unknown = sorted({".".join(map(str, d.version)) or "none" for d in dumps.values() if not d.is_known_version})
    if unknown:
        notes.append(f"dumps of a version that is not known ({', '.join(unknown[:3])}) are read as far as they go")
    skipped = sum(dump.skipped for dump in dumps.values())
    if skipped:
        notes.append(f"{skipped} entries have a shape that is not known and are left out")
    return tuple(notes)


# ---------------------------------------------------------------- which one is the origin


def _busy_ranks(groups: Sequence[GroupCalls]) -> frozenset[int]:
    """Ranks that wait for something themselves."""
    return frozenset(rank for group in groups for rank, position in group.positions.items() if position.pending)


def _priority(stuck: Stuck, busy: frozenset[int]) -> tuple[int, float]:
    """Small for the origin. Between equals: what was called first, by the clocks of the nodes."""
    if stuck.differing:
        order = 0
    elif any(rank not in busy for rank in stuck.absent):
        order = 1
    elif stuck.no_dump:
        order = 2
    elif stuck.blocked:
        order = 3
    else:
        order = 4 if not stuck.absent else 5
    return order, stuck.first_ns if stuck.first_ns is not None else float("inf")


def _judge(
    stuck: list[Stuck],
    busy: frozenset[int],
    no_dump: tuple[int, ...],
    dumps: Mapping[int, Dump],
    notes: tuple[str, ...],
) -> Finding:
    first = stuck[0]
    kind, culprits, confidence = _blame(first, stuck, busy)
    if kind in ("circle", "stuck_together", "unfinished") and len(stuck) > 1:
        crossed = _find_crossed(stuck)
        if crossed is not None:
            kind, culprits, first = "order", crossed[1], crossed[0]
            confidence = HIGH if first.has_members else MEDIUM
            stuck = [first, *(other for other in stuck if other is not first)]
    return Finding(
        kind=kind,
        sentence=words.tell(kind, culprits, stuck, no_dump, dumps),
        confidence=confidence,
        culprits=culprits,
        is_program_fault=kind in ("mismatch", "order"),
        stuck=tuple(stuck),
        no_dump=no_dump,
        notes=notes if first.has_members else (*notes, f"nobody tells which ranks belong to {first.group}"),
    )


def _blame(first: Stuck, stuck: Sequence[Stuck], busy: frozenset[int]) -> tuple[str, tuple[int, ...], str]:
    """(kind, ranks, confidence) of the origin."""
    if first.differing:
        has_majority = len(first.differing) < len(first.different)
        return "mismatch", first.differing, HIGH if has_majority else MEDIUM
    idle = tuple(rank for rank in first.absent if rank not in busy)
    if idle:
        return "absent", idle, HIGH if first.has_members and not first.no_dump else MEDIUM
    if first.no_dump:
        is_few = len(first.no_dump) <= max(1, len(first.reached) // 2)
        return "absent", first.no_dump, MEDIUM if is_few else LOW
    if first.absent:
        return "circle", tuple(sorted({rank for one in stuck for rank in one.absent})), MEDIUM
    if first.blocked:
        return "blocked", first.blocked, MEDIUM
    if first.done:
        return "unfinished", first.waiting, LOW
    return "stuck_together", (), LOW


def _find_crossed(stuck: Sequence[Stuck]) -> tuple[Stuck, tuple[int, ...]] | None:
    """Two stuck collectives that ranks of both have called, or would call, in different orders.

    Where nobody tells who belongs to the groups, that of two of them is assumed which all wait in.
    """
    for place, one in enumerate(stuck):
        for other in stuck[place + 1 :]:
            if one.is_p2p or other.is_p2p or not (_are_shared(one, other) or _are_shared(other, one)):
                continue
            before = {rank for rank in one.waiting if _is_before(one, other, rank)}
            after = {rank for rank in other.waiting if _is_before(other, one, rank)}
            if before and after:
                fewer = before if len(before) < len(after) else after
                return one, tuple(sorted(before | after if len(before) == len(after) else fewer))
    return None


def _are_shared(one: Stuck, other: Stuck) -> bool:
    both = {*one.reached} & {*other.reached}
    return len(both) > 1 or not (one.has_members or other.has_members)


def _is_before(one: Stuck, other: Stuck, rank: int) -> bool:
    """Whether the rank called the one before the other; a call that it has not come to yet comes after."""
    mine, its = one.calls.get(rank), other.calls.get(rank)
    if mine is None:
        return False
    if its is None:
        return other.reached.get(rank, 0) < other.seq and (rank in other.reached or not other.has_members)
    return (mine.first.created_ns or 0, mine.first.record) < (its.first.created_ns or 0, its.first.record)


def _judge_uneven(
    stuck: list[Stuck], no_dump: tuple[int, ...], dumps: Mapping[int, Dump], notes: tuple[str, ...]
) -> Finding:
    """Nobody waits (any more), and some have called more than others: the waiting has failed, or all goes on."""
    first = stuck[0]
    kind = "mismatch" if first.differing else "absent"
    culprits = first.differing or first.absent
    return Finding(
        kind=kind,
        sentence=words.tell(kind, culprits, stuck, no_dump, dumps),
        confidence=MEDIUM if first.differing else LOW,
        culprits=culprits,
        is_program_fault=kind == "mismatch",
        stuck=tuple(stuck),
        no_dump=no_dump,
        notes=(*notes, "nothing is pending: the ranks may have gone on, or have given up"),
    )
