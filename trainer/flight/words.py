"""The findings about Flight Recorder dumps in sentences for people. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime

from trainer.flight.calls import Call, describe
from trainer.flight.groups import Stuck
from trainer.flight.reader import Dump

_MAX_RANGES = 12
_LIBRARY_PARTS = ("/torch/", "/site-packages/", "/dist-packages/", "/lib/python")


def tell(
    kind: str, culprits: tuple[int, ...], stuck: Sequence[Stuck], no_dump: tuple[int, ...], dumps: Mapping[int, Dump]
) -> str:
    """One sentence of who and what, and one of each further thing to know."""
    first = stuck[0]
    sentences = [_main(kind, culprits, first, stuck, no_dump, dumps)]
    if len(stuck) > 1:
        others = ", ".join(dict.fromkeys(other.group for other in stuck[1:4])) + (", …" if len(stuck) > 4 else "")
        sentences.append(f"further stuck: {others}")
    if no_dump and not (kind == "absent" and set(culprits) <= set(no_dump)):
        sentences.append(f"no dump of {name_ranks(no_dump)}")
    return "; ".join(sentences)


def _main(
    kind: str,
    culprits: tuple[int, ...],
    first: Stuck,
    stuck: Sequence[Stuck],
    no_dump: tuple[int, ...],
    dumps: Mapping[int, Dump],
) -> str:
    ranks, what = name_ranks(culprits), name_call(first)
    if kind == "mismatch":
        return _tell_mismatch(first)
    if kind == "order":
        return (
            f"the ranks use their groups in different orders: {name_ranks(stuck[0].waiting)} first "
            f"{name_call(stuck[0])}, {name_ranks(stuck[1].waiting)} first {name_call(stuck[1])}"
        )
    if kind == "circle":
        waits = "; ".join(f"{name_ranks(s.waiting)} in {name_call(s)} for {name_ranks(s.absent)}" for s in stuck[:4])
        return f"ranks wait for each other in a circle: {waits}"
    if kind == "blocked":
        return f"the GPU of {ranks} has not begun {what}, which that of others has: earlier work holds it up"
    if kind == "unfinished":
        return f"{what} has ended on {name_ranks(first.done)} and not on {ranks}: a link or a GPU there"
    if kind == "stuck_together" and first.is_p2p:
        return f"{name_ranks(first.waiting)} have called both halves of {what} and it does not end: the link, or a GPU"
    if kind == "stuck_together":
        return f"all ranks whose dump was read have called {what} and it ends for none: the network, or a GPU"
    if set(culprits) <= set(no_dump):
        return f"{_waiters(first)} {what}{_since(first)}; no dump of {ranks}: dead, stopped, or not asked"
    verb = "sends or receives" if first.is_p2p else "did not join"
    if first.is_p2p:
        return f"{_waiters(first)} {what}{_since(first)}, and {ranks} has not called the other half" + _last(
            culprits, dumps
        )
    return f"{ranks} {verb} {what}; {_waiters(first)} it{_since(first)}{_last(culprits, dumps)}"


def _waiters(stuck: Stuck) -> str:
    if not stuck.waiting:
        called = sorted(rank for rank, seq in stuck.reached.items() if seq >= stuck.seq)
        return f"{name_ranks(called)} called"
    return f"{name_ranks(stuck.waiting)} {'waits' if len(stuck.waiting) == 1 else 'wait'} for"


def _tell_mismatch(stuck: Stuck) -> str:
    at = stuck.differing_at if stuck.differing_at is not None else stuck.seq
    by_what: dict[str, list[int]] = {}
    for rank, call in sorted(stuck.different.items()):
        place = call_place(call)
        by_what.setdefault(describe(call) + (f" ({place})" if place else ""), []).append(rank)
    told = "; ".join(f"{name_ranks(ranks)} {what}" for what, ranks in list(by_what.items())[:6])
    return f"the ranks disagree on collective #{at} of {stuck.group}: {told}"


def name_call(stuck: Stuck) -> str:
    """`all_reduce #4 of group 0 (default_pg)`."""
    call = stuck.most
    what = call.op if call is not None else "collective"
    return f"{what} #{stuck.seq} of {stuck.group}"


def _since(stuck: Stuck) -> str:
    if stuck.first_ns is None or stuck.first is None:
        return ""
    at = datetime.fromtimestamp(stuck.first_ns / 1e9, UTC) if stuck.first_ns < 2**62 else None
    place = call_place(stuck.calls[stuck.first]) if stuck.first in stuck.calls else ""
    where = f" at {place}" if place else ""
    return f" since {at:%H:%M:%S} UTC (rank {stuck.first} first{where})" if at is not None else ""


def _last(culprits: tuple[int, ...], dumps: Mapping[int, Dump]) -> str:
    """What the first of the culprits called last."""
    entries = [entry for rank in culprits[:1] if rank in dumps for entry in dumps[rank].entries]
    if not entries:
        return ""
    last = max(entries, key=lambda e: (e.created_ns or 0, e.record))
    call = Call(seq=last.seq, is_p2p=last.is_p2p, entries=(last,), is_over=last.is_over, state=last.state)
    place = call_place(call)
    return f"; rank {culprits[0]} last called {call.op} #{last.seq} of group {last.group}" + (
        f" at {place}" if place else ""
    )


def call_place(call: Call) -> str:
    """Where the user's program called it: the innermost frame that is no library's."""
    for frame in call.first.frames:
        path = frame.rpartition(" ")[0]
        if path and not any(part in path for part in _LIBRARY_PARTS):
            return path.rpartition("/")[2]
    return ""


def nothing_stuck(count: int, no_dump: tuple[int, ...]) -> str:
    """For dumps in which no rank waits."""
    if not count:
        return "no dump"
    missing = f"; no dump of {name_ranks(no_dump)}" if no_dump else ""
    return f"no rank waits for a collective in the dumps of {count} ranks{missing}"


def unreadable(lines: Sequence[str]) -> str:
    """Files that are no dumps, or damaged."""
    more = f" and {len(lines) - 3} more" if len(lines) > 3 else ""
    return f"not read: {'; '.join(lines[:3])}{more}"


def not_come_to(ranks: Iterable[int]) -> str:
    """Dumps that were left out."""
    return f"the dumps of {name_ranks(ranks)} were not read: there was no time, or they are too large together"


def name_ranks(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0-2, 5`."""
    ordered = sorted(set(ranks))
    if not ordered:
        return "nobody"
    ranges: list[list[int]] = []
    for rank in ordered:
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    shown = [str(a) if a == b else f"{a}-{b}" for a, b in ranges[:_MAX_RANGES]]
    more = ", …" if len(ranges) > _MAX_RANGES else ""
    return f"rank{'' if len(ordered) == 1 else 's'} {', '.join(shown)}{more}"
