"""Whether a training has hung: nobody is dead, and nothing goes on. Pure; ages come from the nodes' monotonic clocks.

Each rank announces how long it may be silent in its phase, from the durations it has seen; the run file bounds that.
A rank that is silent for longer has hung, unless another one announces a long phase (an evaluation, a save) that it
may be waiting for, or the others go on. What is known of the whole attempt counts, too: a silence that ended by itself
is allowed twice its length from then on, and a process that works or reads is given more time than an idle one.

A training that tells no steps is judged by its progress file, or by its log and its CPU time, with wide limits.
Where nothing is known nothing is judged: a node without news is a matter of liveness, not of hanging.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trainer.contract import AttemptSpec, Progress
from trainer.launching.signs import SignsOfLife

FRESH_S = 3.0  # a node's news is news for so long
FROZEN_S = 1.0  # the launcher looks ten times a second: what is beyond was a stop of its own
SUSPICION = 0.7  # share of a limit from which on evidence is worth collecting
BUSY_FACTOR = 3.0  # times the floor: for a rank whose processes compute or read
GAP_FACTOR = 2.0  # times the longest silence that ended by itself
GAPS_KEPT = 64
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
    named_by: str = ""  # what speaks against these ranks: "process", "step", "flight", "stacks" or "cpu"
    evidence: tuple[str, ...] = ()  # sentences

    @property
    def cause(self) -> str:
        """One sentence for people."""
        missing = f"; waiting for rank {_join(self.ranks)}" if self.ranks else ""
        on = f" on {self.hint}" if self.ranks and self.hint else ""
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


# ---------------------------------------------------------------- pure


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
    limits = {view.rank: _find_limit_s(view, views, allowance, joint) for view in views}
    overdue = [view for view in views if _is_overdue(view, limits[view.rank])]
    overdue = [view for view in overdue if not _is_excused(view, views, limits, joint)]
    stuck = [view for view in overdue if not _do_others_go_on(view, views, limits[view.rank])]
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


def _find_limit_s(
    view: RankView, views: Sequence[RankView], allowance: Allowance, joint: frozenset[str]
) -> float | None:
    """A rank may be waiting for another one that is busy."""
    is_busy = any(other.is_busy and not _has_passed(other, view, joint) for other in views)
    return allowance.limit_s(view.phase, view.limit_s, is_busy=is_busy)


def _is_overdue(view: RankView, limit_s: float | None) -> bool:
    return limit_s is not None and view.age_s > limit_s


def find_joint_phases(views: Sequence[RankView]) -> frozenset[str]:
    """The long phases that all ranks enter together, as far as they have shown (twice at least).

    Most have entered it: one alone may do something that it doesn't always do alone.
    """
    names = {name for view in views for name in view.entered}
    counts = {name: [view.entered.get(name, 0) for view in views] for name in names}
    return frozenset(
        name
        for name, seen in counts.items()
        if min(seen) >= 2 and max(seen) - min(seen) <= 1 and 2 * seen.count(max(seen)) > len(seen)
    )


def _is_excused(
    view: RankView, views: Sequence[RankView], limits: Mapping[int, float | None], joint: frozenset[str]
) -> bool:
    """True when it may be waiting for one that announces something long, or that is under a debugger."""
    return any(
        other.state == "t"
        or (
            other.phase != "step" and not _is_overdue(other, limits[other.rank]) and not _has_passed(other, view, joint)
        )
        for other in views
    )


def _has_passed(view: RankView, other: RankView, joint: frozenset[str]) -> bool:
    """True when it has been where the other one is, and gone on: it doesn't hold that one up."""
    if view.step != other.step:
        return view.step > other.step
    return any(view.entered.get(name, 0) > other.entered.get(name, 0) for name in joint)


def _do_others_go_on(view: RankView, views: Sequence[RankView], limit_s: float | None) -> bool:
    if view.age_s > max(ALONE_MIN_S, ALONE_FACTOR * (limit_s or 0.0)):
        return False  # it never meets the others, maybe
    return any(other.age_s < 0.5 * (limit_s or 0.0) for other in views if other is not view)


def choose_suspects(views: Sequence[RankView], joint: frozenset[str]) -> tuple[tuple[int, ...], str, str]:
    """The ranks that the others wait for, by what, and why, as far as their steps and processes tell."""
    for letter, what in (("T", "its process is stopped (T)"), ("D", "its process waits in the kernel (D)")):
        found = tuple(view.rank for view in views if view.state == letter)
        if found and (len(found) < len(views) or len(views) == 1):
            return found, "process", f"rank {_join(found)}: {what}"
    ahead = [view for view in views if any(_has_passed(view, other, joint) for other in views)]
    behind = [view for view in views if view not in ahead]
    if not ahead:
        return (), "", ""
    ranks, most = tuple(view.rank for view in behind), max(view.step for view in views)
    if behind[0].step == most:
        return ranks, "step", f"rank {_join(ranks)} has not come to the {ahead[0].phase} that others are in"
    return ranks, "step", f"rank {_join(ranks)} is at step {behind[0].step}, others at {most}"


# ---------------------------------------------------------------- over time


class HangWatch:
    """What the launcher knows of the ranks of the current start; remembers what earlier starts have shown."""

    def __init__(self, spec: AttemptSpec) -> None:
        self._bounds_s = spec.phase_bounds_s
        self._gaps: dict[str, deque[float]] = {}
        self._hung_nodes: set[str] = set()  # where the missing rank of an earlier hang was
        self._launch = 0
        self._nodes: frozenset[str] = frozenset()
        self._views: dict[str, tuple[RankView, ...]] = {}
        self._fed_at: dict[str, float] = {}
        self._clock = 0.0  # stands still while the launcher does
        self._looked_at: float | None = None
        self._progress: Progress | None = None
        self._progress_age_s = 0.0
        self._progress_fed_at = 0.0
        self._signs = SignsOfLife()

    def begin(self, launch: int, nodes: Sequence[str], now: float) -> None:
        """Another start of the training, on these nodes."""
        self._tick(now)
        self._launch, self._nodes = launch, frozenset(nodes)
        self._views, self._fed_at = {}, {}
        self._progress, self._progress_age_s, self._progress_fed_at = None, 0.0, self._clock
        self._signs = SignsOfLife()

    def feed(self, node: str, ranks: Sequence[Mapping[str, Any]], now: float) -> None:
        """The "ranks" of a node's beat; what is malformed is passed over."""
        self._tick(now)
        if node not in self._nodes:
            return
        self._fed_at[node] = self._clock
        before = {view.rank: view for view in self._views.get(node, ())}
        views = tuple(view for entry in ranks if (view := parse_rank(node, entry)) is not None)
        for view in views:
            self._learn(before.get(view.rank), view)
        self._views[node] = views
        self._signs.feed(node, ranks, self._clock)

    def feed_progress(self, progress: Progress | None, now: float) -> None:
        """The progress file as it was read just now; None: it could not be read, and proves nothing."""
        self._tick(now)
        passed_s, self._progress_fed_at = self._clock - self._progress_fed_at, self._clock
        if progress is None or progress.launch not in (None, self._launch):
            return
        before, self._progress = self._progress, progress
        is_same = before is not None and (before.seq, before.step, before.phase) == (
            progress.seq,
            progress.step,
            progress.phase,
        )
        self._progress_age_s = self._progress_age_s + min(passed_s, FRESH_S) if is_same else 0.0

    def suspects(self, now: float) -> bool:
        """True when most of a limit has passed: time to collect evidence, in case."""
        return self._judge(now, SUSPICION) is not None

    def judge(self, now: float) -> Hang | None:
        """The hang as it stands, as long as it lasts."""
        return self._judge(now, 1.0)

    def settle(self, hang: Hang) -> Hang:
        """Take a hang as it is acted upon: a node that hangs for the second time in the attempt is to blame."""
        if not hang.hint:
            return hang
        if hang.hint in self._hung_nodes:
            again = f"a rank on {hang.hint} hung before in this attempt"
            return replace(hang, nodes=(hang.hint,), evidence=(*hang.evidence, again))
        self._hung_nodes.add(hang.hint)
        return hang

    # ----

    def _tick(self, now: float) -> None:
        if self._looked_at is not None:
            self._clock += min(max(0.0, now - self._looked_at), FROZEN_S)
        self._looked_at = now

    def _judge(self, now: float, scale: float) -> Hang | None:
        self._tick(now)
        if any(self._clock - self._fed_at.get(node, -FRESH_S) >= FRESH_S for node in self._nodes):
            return None
        gaps = {phase: max(seen) for phase, seen in self._gaps.items()}
        allowance = Allowance(bounds_s=self._bounds_s, gaps_s=gaps, scale=scale)
        views = [view for seen in self._views.values() for view in seen]
        if views:
            return judge_ranks(views, allowance)
        if self._progress is not None:
            return self._judge_progress(self._progress, allowance)
        return self._judge_signs(scale)

    def _judge_progress(self, progress: Progress, allowance: Allowance) -> Hang | None:
        limit_s = allowance.limit_s(progress.phase, progress.limit_s)
        if limit_s is None or self._progress_age_s <= limit_s:
            return None
        return Hang(step=progress.step, phase=progress.phase, silent_s=self._progress_age_s, limit_s=limit_s)

    def _judge_signs(self, scale: float) -> Hang | None:
        if read_bounds(self._bounds_s, "step")[1] <= 0:
            return None
        silence = self._signs.judge(self._clock, scale)
        if silence is None:
            return None
        hang = Hang(step=-1, phase="step", silent_s=silence.silent_s, limit_s=silence.limit_s, places=silence.places)
        return hang.name(silence.ranks, "cpu", silence.why) if silence.ranks else hang

    def _learn(self, before: RankView | None, view: RankView) -> None:
        """A silence that ended by itself is no hang the next time either."""
        if before is None or (before.step, before.phase) == (view.step, view.phase):
            return
        low, _ = read_bounds(self._bounds_s, before.phase)
        if before.age_s > low / GAP_FACTOR:
            self._gaps.setdefault(before.phase, deque(maxlen=GAPS_KEPT)).append(before.age_s)


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
