"""Whether ranks have hung: nobody is dead, and nothing goes on. Pure, of one moment.

Each rank announces how long it may be silent in its phase, from the durations it has seen; the run file bounds that.
A rank that is silent for longer has hung, unless another one announces a long phase (an evaluation, a save) that it
may be waiting for, or the others go on. A process that works or reads is given more time than an idle one.

Thousands of ranks are judged a few times a second: nothing here compares each with each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

BUSY_FACTOR = 3.0  # times the floor: for a rank whose processes compute or read
GAP_FACTOR = 2.0  # times the longest silence that ended by itself
ALONE_FACTOR, ALONE_MIN_S = 10.0, 300.0  # for a rank that is silent while the others go on
UNANNOUNCED_S = 1800.0  # where neither the rank nor the run file gives a limit

# (least, most) seconds of silence where the run file says nothing. A step's least is what makes a hang short.
DEFAULT_BOUNDS_S: Mapping[str, tuple[float, float]] = {
    "start": (60.0, 3600.0),
    "restore": (60.0, 3600.0),
    "compile": (60.0, 3600.0),
    "step": (7.0, 900.0),
    "save": (60.0, 1800.0),
    "eval": (60.0, 3600.0),
    "end": (300.0, 1800.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankView:
    """One rank as its node sees it."""

    rank: int
    node: str
    step: int
    phase: str
    age_s: float  # since its step or phase changed
    limit_s: float | None = None  # as it announces
    entered: Mapping[str, int] = field(default_factory=dict)  # how often it has entered each long phase
    is_busy: bool = False  # its processes compute or read
    state: str = ""  # letter of its process in /proc: T stopped, D waiting in the kernel, t traced


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """A training that has hung. `ranks`: those that the others wait for; empty: not known (yet)."""

    kind: str = "hang"
    step: int
    phase: str
    silent_s: float
    limit_s: float
    ranks: tuple[int, ...] = ()
    places: Mapping[int, str] = field(default_factory=dict)  # node of each rank
    nodes: tuple[str, ...] = ()  # to blame: it happened on this node before
    hint: str = ""  # the node of the missing ranks, if it is one
    named_by: str = ""  # what speaks against these ranks: "process", "kernel", "step", "flight", "stacks" or "cpu"
    evidence: tuple[str, ...] = ()  # sentences

    @property
    def cause(self) -> str:
        """One sentence for people."""
        missing = f"; waiting for rank {_join(self.ranks)}" if self.ranks else ""
        on = f" on {self.hint}" if self.ranks and self.hint else ""
        if self.step < -1:
            what = f"no steps are told, and nothing new in the logs for {self.silent_s:.0f} s"
            return f"{what} (limit {self.limit_s:.0f} s){missing}{on}"
        return (
            f"no progress for {self.silent_s:.1f} s in phase {self.phase} after step {self.step} "
            f"(limit {self.limit_s:.1f} s){missing}{on}"
        )

    def name(self, ranks: Sequence[int], by: str, why: str) -> Hang:
        """This hang with the ranks that the others wait for, and one sentence about it."""
        nodes = {self.places[rank] for rank in ranks if rank in self.places}
        hint = nodes.pop() if len(nodes) == 1 else ""
        return replace(self, ranks=tuple(ranks), hint=hint, named_by=by, evidence=(*self.evidence, why))


def _join(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """How long silence is allowed: the run file's bounds, and what this attempt has shown."""

    bounds_s: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    gaps_s: Mapping[str, float] = field(default_factory=dict)  # longest silence that ended by itself, by phase
    scale: float = 1.0

    def limit_s(self, phase: str, announced_s: float | None, *, is_busy: bool = False) -> float | None:
        """Seconds, or None where detection is off."""
        low, high = read_bounds(self.bounds_s, phase)
        if high <= 0:
            return None
        wanted = announced_s if announced_s is not None else min(high, UNANNOUNCED_S)
        limit = max(low, wanted, GAP_FACTOR * self.gaps_s.get(phase, 0.0), BUSY_FACTOR * low if is_busy else 0.0)
        return min(limit, high) * self.scale


def read_bounds(bounds_s: Mapping[str, tuple[float, ...]], phase: str) -> tuple[float, float]:
    """(least, most) of a phase; a most of 0 turns detection off."""
    given = bounds_s.get(phase)
    if given is None or len(given) < 2:
        return DEFAULT_BOUNDS_S.get(phase, DEFAULT_BOUNDS_S["start"])
    return given[0], given[1]


def judge_ranks(views: Sequence[RankView], allowance: Allowance) -> Hang | None:
    """The hang that these ranks show, or None."""
    joint = find_joint_phases(views)
    busy = _Waits(joint, [view for view in views if view.is_busy])
    limits = {view.rank: allowance.limit_s(view.phase, view.limit_s, is_busy=busy.may_hold_up(view)) for view in views}
    overdue = [view for view in views if _is_overdue(view, limits[view.rank])]
    if not overdue or any(view.state == "t" for view in views):  # a debugger holds one
        return None
    excusing = _Waits(joint, [v for v in views if v.phase != "step" and not _is_overdue(v, limits[v.rank])])
    youngest_s = min(view.age_s for view in views)
    stuck = [
        view
        for view in overdue
        if not excusing.may_hold_up(view) and not _do_others_go_on(view, youngest_s, limits[view.rank])
    ]
    if not stuck:
        return None
    worst = max(stuck, key=lambda view: view.age_s - (limits[view.rank] or 0.0))
    hang = Hang(
        step=worst.step,
        phase=worst.phase,
        silent_s=worst.age_s,
        limit_s=limits[worst.rank] or 0.0,
        places={view.rank: view.node for view in views},
    )
    ranks, by, why = choose_suspects(views, joint)
    return hang.name(ranks, by, why) if ranks else hang


def _is_overdue(view: RankView, limit_s: float | None) -> bool:
    return limit_s is not None and view.age_s > limit_s


def find_joint_phases(views: Sequence[RankView]) -> tuple[str, ...]:
    """The long phases that all ranks enter together, as far as they have shown (twice at least).

    Most have entered it: one alone may do something that it doesn't always do alone.
    """
    names = {name for view in views for name in view.entered}
    counts = {name: [view.entered.get(name, 0) for view in views] for name in sorted(names)}
    return tuple(
        name
        for name, seen in counts.items()
        if min(seen) >= 2 and max(seen) - min(seen) <= 1 and 2 * seen.count(max(seen)) > len(seen)
    )


_Place = tuple[int, tuple[int, ...]]  # step, times that the joint phases were entered


def _find_place(view: RankView, joint: tuple[str, ...]) -> _Place:
    return view.step, tuple(view.entered.get(name, 0) for name in joint)


def _has_passed(place: _Place, other: _Place) -> bool:
    """True for one that has been where the other one is, and gone on: it doesn't hold that one up."""
    if place[0] != other[0]:
        return place[0] > other[0]
    return any(own > others for own, others in zip(place[1], other[1], strict=True))


class _Waits:
    """Whether a rank may be waiting for one of some others: for those that have not gone on from where it is."""

    def __init__(self, joint: tuple[str, ...], others: Sequence[RankView]) -> None:
        self._joint = joint
        places = {_find_place(view, joint) for view in others}
        self._first_step = min((step for step, _ in places), default=None)
        self._first = [place for place in places if place[0] == self._first_step]

    def may_hold_up(self, view: RankView) -> bool:
        if self._first_step is None or view.step != self._first_step:
            return self._first_step is not None and view.step > self._first_step
        own = _find_place(view, self._joint)
        return any(not _has_passed(place, own) for place in self._first)


def _do_others_go_on(view: RankView, youngest_s: float, limit_s: float | None) -> bool:
    if view.age_s > max(ALONE_MIN_S, ALONE_FACTOR * (limit_s or 0.0)):
        return False  # it never meets the others, maybe
    return youngest_s < 0.5 * (limit_s or 0.0)


def choose_suspects(views: Sequence[RankView], joint: tuple[str, ...]) -> tuple[tuple[int, ...], str, str]:
    """The ranks that the others wait for, by what, and why, as far as their steps and processes tell."""
    for letter, by, what in (
        ("T", "process", "its process is stopped (T)"),
        ("D", "kernel", "it waits in the kernel (D)"),
    ):
        found = tuple(sorted(view.rank for view in views if view.state == letter))
        if found and (len(found) < len(views) or len(views) == 1):
            return found, by, f"rank {_join(found)}: {what}"
    places = {view.rank: _find_place(view, joint) for view in views}
    first, last = min(places.values()), max(places.values())
    if first == last:
        return (), "", ""
    ranks = tuple(sorted(rank for rank, place in places.items() if place == first))
    if first[0] == last[0]:
        phase = next(view.phase for view in views if places[view.rank] == last)
        return ranks, "step", f"rank {_join(ranks)} has not come to the {phase} that others are in"
    return ranks, "step", f"rank {_join(ranks)} is at step {first[0]}, others at {last[0]}"


def parse_rank(node: str, entry: Mapping[str, Any]) -> RankView | None:
    """An item of a beat's "ranks" that tells a step; None for any other."""
    limit_s, entered = entry.get("limit_s"), entry.get("entered")
    try:
        return RankView(
            rank=int(entry["rank"]),
            node=node,
            step=int(entry["step"]),
            phase=str(entry["phase"]),
            age_s=float(entry["age_s"]),
            limit_s=float(limit_s) if limit_s is not None else None,
            entered={str(name): int(count) for name, count in entered.items()} if isinstance(entered, dict) else {},
            is_busy=bool(entry.get("busy", False)),
            state=str(entry.get("state") or ""),
        )
    except (KeyError, TypeError, ValueError):
        return None
