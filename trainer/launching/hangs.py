"""Watches the ranks of a training for a hang; ages come from the nodes' monotonic clocks. Pure apart from its memory.

What is judged of one moment stands in trainer.launching.quiet. Over time there is more to know: a silence that ended
by itself is allowed twice its length from then on, and a node where a rank hangs for the second time is to blame.

A training that tells no steps is judged by its progress file, or by its log and its CPU time, with wide limits.
Where nothing is known nothing is judged: a node without news is a matter of liveness, not of hanging.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from trainer.contract import PHASES, AttemptSpec, Progress
from trainer.launching.quiet import GAP_FACTOR, Allowance, Hang, RankView, judge_ranks, parse_rank, read_bounds
from trainer.launching.signs import SignsOfLife

__all__ = ["Hang", "HangWatch"]

FRESH_S = 3.0  # a node's news is news for so long
FROZEN_S = 1.0  # the launcher looks ten times a second: what is beyond was a stop of its own
SUSPICION = 0.7  # share of a limit from which on evidence is worth collecting
LEARN_FROM_S = 2.0  # a shorter silence teaches nothing
GAPS_KEPT = 64
UNTOLD_STEP = -2  # of a program that tells no steps
WRONG_FACTOR = 2.0  # times a silence that was judged, perhaps wrongly; it is then allowed GAP_FACTOR times that

_Entry = Mapping[str, Any]  # of a beat's "ranks"


class HangWatch:
    """What the launcher knows of the ranks of the current start; remembers what earlier starts have shown."""

    def __init__(self, spec: AttemptSpec) -> None:
        self._bounds_s = spec.phase_bounds_s
        bounds = [read_bounds(self._bounds_s, phase) for phase in PHASES]
        self._least_s = min((min(low, high) for low, high in bounds if high > 0), default=0.0)  # no limit is below
        self._gaps: dict[str, deque[float]] = {}
        self._patience = 1.0  # with programs that only print
        self._hung_nodes: set[str] = set()  # where the missing rank of an earlier hang was
        self._launch = 0
        self._nodes: frozenset[str] = frozenset()
        self._entries: dict[str, Sequence[_Entry]] = {}  # looked at more closely only when one is old
        self._oldest_s: dict[str, float] = {}  # by node
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
        self._entries, self._oldest_s, self._fed_at = {}, {}, {}
        self._progress, self._progress_age_s, self._progress_fed_at = None, 0.0, self._clock
        self._signs = SignsOfLife()

    def feed(self, node: str, ranks: Sequence[Mapping[str, Any]], now: float) -> None:
        """The "ranks" of a node's beat; what is malformed is passed over."""
        self._tick(now)
        if node not in self._nodes:
            return
        self._fed_at[node] = self._clock
        oldest_s = _find_oldest_s(ranks)
        before_s = self._oldest_s.get(node, 0.0)
        if before_s > LEARN_FROM_S and oldest_s < before_s:
            self._learn(node, self._entries[node], ranks)
        self._entries[node], self._oldest_s[node] = ranks, oldest_s
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
        """Take a hang as it is acted upon: a node that hangs for the second time in the attempt is to blame.

        Where no process is seen to be stopped it may have been something long that nobody announced. To stop that again
        and again would end the run, so it is given more time from then on.
        """
        if hang.step == UNTOLD_STEP:
            self._patience *= WRONG_FACTOR
        elif hang.named_by != "process":
            longer_s = WRONG_FACTOR * hang.silent_s
            self._gaps.setdefault(hang.phase, deque(maxlen=GAPS_KEPT)).append(longer_s)
            said = f"if it was no hang: {GAP_FACTOR * longer_s:.0f} s are allowed in phase {hang.phase} from now on"
            hang = replace(hang, evidence=(*hang.evidence, said))
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
        if any("phase" in entry for entries in self._entries.values() for entry in entries[:1]):
            is_quiet = max(self._oldest_s.values()) > self._least_s * scale
            return judge_ranks(self._find_views(), allowance) if is_quiet else None
        if self._progress is not None:
            return self._judge_progress(self._progress, allowance)
        return self._judge_signs(scale)

    def _judge_progress(self, progress: Progress, allowance: Allowance) -> Hang | None:
        limit_s = allowance.limit_s(progress.phase, progress.limit_s)
        if limit_s is None or self._progress_age_s <= limit_s:
            return None
        return Hang(step=progress.step, phase=progress.phase, silent_s=self._progress_age_s, limit_s=limit_s)

    def _judge_signs(self, scale: float) -> Hang | None:
        _, most_s = read_bounds(self._bounds_s, "start")
        silence = self._signs.judge(self._clock, most_s=most_s, scale=scale, patience=self._patience)
        if silence is None:
            return None
        hang = Hang(
            step=UNTOLD_STEP, phase="step", silent_s=silence.silent_s, limit_s=silence.limit_s, places=silence.places
        )
        return hang.name(silence.ranks, "cpu", silence.why) if silence.ranks else hang

    def _find_views(self) -> list[RankView]:
        views = [parse_rank(node, entry) for node, entries in self._entries.items() for entry in entries]
        return [view for view in views if view is not None]

    def _learn(self, node: str, before: Sequence[_Entry], now: Sequence[_Entry]) -> None:
        """A silence that ended by itself is no hang the next time either."""
        earlier = {view.rank: view for entry in before if (view := parse_rank(node, entry)) is not None}
        for entry in now:
            view = parse_rank(node, entry)
            old = earlier.get(view.rank) if view is not None else None
            if view is None or old is None or (old.step, old.phase) == (view.step, view.phase):
                continue
            if old.age_s > read_bounds(self._bounds_s, old.phase)[0] / GAP_FACTOR:
                self._gaps.setdefault(old.phase, deque(maxlen=GAPS_KEPT)).append(old.age_s)


def _find_oldest_s(entries: Sequence[_Entry]) -> float:
    ages = (entry.get("age_s") for entry in entries)
    return max((age for age in ages if isinstance(age, int | float)), default=0.0)
