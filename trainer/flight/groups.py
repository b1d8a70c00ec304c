"""What keeps one process group: the collective that does not end, and what each rank has to do with it. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from trainer.flight.calls import Call, GroupCalls, peer_of, signature

_LOOK_BACK = 8  # collectives before the stuck one: a disagreement may have been there before it stopped anything


@dataclass(frozen=True, slots=True, kw_only=True)
class Stuck:
    """A collective (or a send or receive) that does not end. Ranks are global."""

    group: str  # for people
    seq: int
    is_p2p: bool = False
    calls: Mapping[int, Call] = field(default_factory=dict)  # what each rank called there, where that is still known
    waiting: tuple[int, ...] = ()  # have called it, and it has not ended there
    absent: tuple[int, ...] = ()  # with a dump, and have not called it
    no_dump: tuple[int, ...] = ()  # members without a dump
    differing: tuple[int, ...] = ()  # called something else there than most; all of them where there is no majority
    differing_at: int | None = None  # the collective at which they differ: `seq`, or one near it
    different: Mapping[int, Call] = field(default_factory=dict)  # what each rank called there
    blocked: tuple[int, ...] = ()  # called it, and their GPU has not begun it, while others' has
    done: tuple[int, ...] = ()  # for whom it has ended
    reached: Mapping[int, int] = field(default_factory=dict)  # newest collective that each rank has called
    first: int | None = None  # rank that called it first, by the clocks of the nodes
    first_ns: int | None = None
    is_pending: bool = True  # False: nobody waits (any more); the ranks have only called more, or other things
    has_members: bool = (
        True  # False: nobody tells who belongs to the group; `absent` are all ranks that wait for nothing
    )

    @property
    def most(self) -> Call | None:
        """What most ranks have called there."""
        common = Counter(signature(call) for call in self.calls.values()).most_common(1)
        return next((c for c in self.calls.values() if signature(c) == common[0][0]), None) if common else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """What the ranks of a training are, before any group is looked at."""

    idle: tuple[int, ...]  # with a dump, and wait for nothing
    no_dump: tuple[int, ...]


def find_stuck(group: GroupCalls, ranks: Ranks) -> Stuck | None:
    """The first collective of the group that some ranks wait for, or at which they part; None: all is even."""
    positions = group.positions
    waiting = {rank for rank, p in positions.items() if any(not c.is_over for c in p.collectives.values())}
    waiting |= {rank for rank, p in positions.items() if not p.collectives and p.enqueued > p.completed}
    reached = {rank: p.enqueued for rank, p in positions.items()}
    seq = min(p.completed for p in positions.values()) + 1
    differing, differing_at, different = _find_differing(group, seq)
    if not waiting and len(set(reached.values())) == 1 and not differing:
        return None
    if differing_at is not None and not waiting:
        seq = differing_at
    calls = {rank: p.collectives[seq] for rank, p in positions.items() if seq in p.collectives}
    absent = {rank for rank in positions if reached[rank] < seq}
    if group.members is None and waiting:
        absent |= {rank for rank in ranks.idle if rank not in positions}
    created = [(c.first.created_ns, rank) for rank, c in calls.items() if c.first.created_ns is not None]
    first_ns, first = min(created, default=(None, None))
    return Stuck(
        group=group.label,
        seq=seq,
        calls=calls,
        waiting=tuple(sorted(r for r in waiting if positions[r].completed < seq <= reached[r])),
        absent=tuple(sorted(absent)),
        no_dump=tuple(r for r in ranks.no_dump if group.members is None or r in group.members),
        differing=differing,
        differing_at=differing_at,
        different=different,
        blocked=_find_blocked(calls),
        done=tuple(sorted(r for r, p in positions.items() if p.completed >= seq)),
        reached=reached,
        first=first,
        first_ns=first_ns,
        is_pending=bool(waiting),
        has_members=group.members is not None,
    )


def _find_differing(group: GroupCalls, seq: int) -> tuple[tuple[int, ...], int | None, dict[int, Call]]:
    """The ranks that disagree at the earliest collective at which any do, which one that is, and what they called.

    Up to the stuck one; where it has ended for some, those that all have called after it too.
    """
    has_ended = any(p.completed >= seq for p in group.positions.values())
    last = max(seq, min(p.enqueued for p in group.positions.values()) if has_ended else 0)
    for at in range(max(1, seq - _LOOK_BACK), min(last, seq + _LOOK_BACK) + 1):
        calls = {rank: p.collectives[at] for rank, p in group.positions.items() if at in p.collectives}
        differing = choose_differing(calls)
        if differing:
            return differing, at, calls
    return (), None, {}


def choose_differing(calls: Mapping[int, Call]) -> tuple[int, ...]:
    """The ranks that call something else than the majority; all of them without one; none when all agree."""
    signs = {rank: signature(call) for rank, call in calls.items()}
    counts = Counter(signs.values())
    if len(counts) < 2:
        return ()
    (most, count), *_ = counts.most_common(1)
    if 2 * count <= len(signs):
        return tuple(sorted(signs))
    return tuple(sorted(rank for rank, sign in signs.items() if sign != most))


def _find_blocked(calls: Mapping[int, Call]) -> tuple[int, ...]:
    """Ranks whose GPU has not begun what that of others has: something before it holds their stream up."""
    states = {rank: call.state for rank, call in calls.items() if not call.is_over}
    if "started" not in states.values():
        return ()
    return tuple(sorted(rank for rank, state in states.items() if state == "scheduled"))


# ---------------------------------------------------------------- sends and receives


def find_stuck_p2p(group: GroupCalls, ranks: Ranks) -> tuple[Stuck, ...]:
    """Sends and receives that do not end: most wait for a rank which has not called the other half."""
    pending: dict[tuple[int, int], Call] = {}
    for rank, position in group.positions.items():
        for call in position.p2p:
            for entry in call.entries if not call.is_over else ():
                told = peer_of(entry)
                if told is not None:
                    pending.setdefault((rank, group.globally(told[1])), call)
    return tuple(
        _both(group, pair, pending) if pair[::-1] in pending else _half(group, pair, call, ranks)
        for pair, call in sorted(pending.items())
        if pair[::-1] not in pending or pair[0] < pair[1]
    )


def _half(group: GroupCalls, pair: tuple[int, int], call: Call, ranks: Ranks) -> Stuck:
    rank, peer = pair
    return Stuck(
        group=group.label,
        seq=call.seq,
        is_p2p=True,
        calls={rank: call},
        waiting=(rank,),
        absent=() if peer in ranks.no_dump else (peer,),
        no_dump=(peer,) if peer in ranks.no_dump else (),
        first=rank,
        first_ns=call.first.created_ns,
    )


def _both(group: GroupCalls, pair: tuple[int, int], pending: Mapping[tuple[int, int], Call]) -> Stuck:
    calls = {pair[0]: pending[pair], pair[1]: pending[pair[::-1]]}
    return Stuck(group=group.label, seq=calls[pair[0]].seq, is_p2p=True, calls=calls, waiting=pair)
