"""Which rank is slower than the others, from the step times that they tell. Pure; standard library only.

Each rank tells totals: ordinary steps, their seconds, and its own seconds among them (trainer.steptime). Over the
newest `straggler_window` steps each rank's own time per step is compared with the median of all ranks. A rank is a
straggler when, over the whole window, it is slower by `straggler_ratio` and the training is slower for it, and when it
was so in nearly every part of the window: one long pause is none. It stays one until it is clearly better.

Nobody is named because of somebody else. The own time leaves out the waits for others; where a rank waits in a way
that is not seen, all of them look slow, and then nobody is: slow ranks are a minority, or it is not them. Where half
are slow (one of two ranks, one of two nodes) the evidence must be clear: slower by far, while all others wait.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from trainer.contract import AttemptSpec, Straggler

PARTS = 5  # of a window
_PARTS_SLOW = 4  # of them
_STEP_SHARE = 0.1  # of the step time that the slow rank costs, at least
_JUDGE_EVERY_S = 1.0
_STALE_S = 15.0  # a rank that has told nothing for so long is judged by others (hangs, liveness)
_ENDS_AT = 0.5  # a straggler is one until its excess is below this share of the limit's


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimes:
    """One rank over a window: mean own time per step in each part, and over all of it. Seconds."""

    rank: int
    node: str
    parts_own_s: tuple[float, ...]
    own_s: float
    step_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerPolicy:
    """When a rank is a straggler: slower than the median by `ratio` over `window` steps. `ratio` 0: never."""

    ratio: float
    window: int = 50

    @property
    def excess(self) -> float:
        """How far above the median the limit is, in medians."""
        return self.ratio - 1


def judge_stragglers(
    times: Sequence[RankTimes], policy: StragglerPolicy, known: frozenset[int] = frozenset()
) -> tuple[Straggler, ...]:
    """The stragglers among all ranks of a training, the slowest first. `known`: those of the judgement before."""
    if policy.ratio <= 1 or len(times) < 2:
        return ()
    median_s = _lower_median([t.own_s for t in times])
    parts_s = [_lower_median(part) for part in zip(*(t.parts_own_s for t in times), strict=True)]
    step_s = _lower_median([t.step_s for t in times])
    slow = [t for t in times if _is_slow(t, median_s, parts_s, step_s, policy, is_known=t.rank in known)]
    others = [t for t in times if t not in slow]
    if 2 * len(slow) > len(times) or (2 * len(slow) == len(times) and not _is_clear(slow, others, step_s, policy)):
        return ()
    ranks_of: dict[str, list[int]] = {}
    for t in times:
        ranks_of.setdefault(t.node, []).append(t.rank)
    slow_ranks = {t.rank for t in slow}
    return tuple(
        Straggler(
            node=t.node,
            rank=t.rank,
            ratio=round(t.own_s / max(median_s, 1e-9), 2),
            detail=_say(t, median_s, step_s, policy, is_whole=slow_ranks.issuperset(ranks_of[t.node]), of=ranks_of),
        )
        for t in sorted(slow, key=lambda t: -t.own_s)
    )


def _is_slow(
    t: RankTimes, median_s: float, parts_s: Sequence[float], step_s: float, policy: StragglerPolicy, *, is_known: bool
) -> bool:
    share = _ENDS_AT if is_known else 1.0
    costs = t.own_s - median_s >= share * _STEP_SHARE * step_s
    over = t.own_s >= (1 + share * policy.excess) * median_s
    part_limit = 1 + _ENDS_AT * share * policy.excess  # a part has few steps: less is asked of it
    parts = sum(own >= part_limit * max(m, 1e-9) for own, m in zip(t.parts_own_s, parts_s, strict=True))
    return costs and over and parts >= (_PARTS_SLOW if not is_known else PARTS // 2)


def _is_clear(slow: Sequence[RankTimes], others: Sequence[RankTimes], step_s: float, policy: StragglerPolicy) -> bool:
    """Where half of the ranks are slow: all on one node, slower by twice the limit, and all others wait for them."""
    if len({t.node for t in slow}) > 1 or {t.node for t in slow} & {t.node for t in others}:
        return False
    fastest_slow, slowest_other = min(t.own_s for t in slow), max(t.own_s for t in others)
    return fastest_slow >= (1 + 2 * policy.excess) * slowest_other and slowest_other <= 0.6 * step_s


def _say(
    t: RankTimes,
    median_s: float,
    step_s: float,
    policy: StragglerPolicy,
    *,
    is_whole: bool,
    of: Mapping[str, Sequence[int]],
) -> str:
    whole = f"; all {len(of[t.node])} ranks of {t.node} are slow" if is_whole and len(of[t.node]) > 1 else ""
    return (
        f"rank {t.rank} on {t.node}: {_ms(t.own_s)} of own time per step over {policy.window} steps, median of all "
        f"{sum(len(ranks) for ranks in of.values())} ranks {_ms(median_s)}, step time {_ms(step_s)}{whole}"
    )


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds >= 0.1 else f"{1000 * seconds:.3g} ms"


def _lower_median(values: Sequence[float]) -> float:
    return sorted(values)[(len(values) - 1) // 2]


# ---------------------------------------------------------------- what ranks have told


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """Totals of one rank when it had done `step`."""

    step: int
    timed: float
    step_s: float
    own_s: float


@dataclass(slots=True)
class Track:
    """One rank's totals over time, newest last; at most two windows of them."""

    node: str
    told: list[Told] = field(default_factory=list)
    heard_at: float = -math.inf

    def add(self, told: Told, window: int, now: float) -> None:
        """Keep what was told; a rank that has begun anew is forgotten first."""
        if self.told and (told.step < self.told[-1].step or told.timed < self.told[-1].timed):
            self.told.clear()
        self.heard_at = now
        if self.told and told.step == self.told[-1].step:
            self.told[-1] = told
            return
        self.told.append(told)
        oldest = bisect_right(self.told, told.step - 2 * window, key=lambda t: t.step) - 1
        if oldest > 0:
            del self.told[:oldest]

    def at(self, step: float) -> Told | None:
        """Totals at a step between two that were told, as if told then; None outside of them."""
        after = bisect_left(self.told, step, key=lambda t: t.step)
        if after == len(self.told):
            return None
        right = self.told[after]
        if right.step == step:
            return right
        if after == 0:
            return None
        left = self.told[after - 1]
        share = (step - left.step) / (right.step - left.step)
        return Told(
            step=int(step),
            timed=left.timed + share * (right.timed - left.timed),
            step_s=left.step_s + share * (right.step_s - left.step_s),
            own_s=left.own_s + share * (right.own_s - left.own_s),
        )


def fold_window(tracks: Mapping[int, Track], window: int) -> tuple[RankTimes, ...]:
    """All ranks over the newest window that every one of them has told of; empty while there is none."""
    if not tracks or any(not track.told for track in tracks.values()):
        return ()
    end = min(track.told[-1].step for track in tracks.values())
    edges = [end - window + window * part / PARTS for part in range(PARTS + 1)]
    folded = [_fold_rank(rank, track, edges) for rank, track in sorted(tracks.items())]
    return tuple(times for times in folded if times is not None) if None not in folded else ()


def _fold_rank(rank: int, track: Track, edges: Sequence[float]) -> RankTimes | None:
    marks = [track.at(edge) for edge in edges]
    known = [mark for mark in marks if mark is not None]
    if len(known) != len(marks):
        return None
    first, last = known[0], known[-1]
    timed = last.timed - first.timed
    if timed < (edges[-1] - edges[0]) / 2:  # most of the window went by saving and the like
        return None
    whole = (last.own_s - first.own_s) / timed
    parts = tuple(
        (b.own_s - a.own_s) / (b.timed - a.timed) if b.timed - a.timed >= 0.5 else whole for a, b in pairwise(known)
    )
    return RankTimes(
        rank=rank, node=track.node, parts_own_s=parts, own_s=whole, step_s=(last.step_s - first.step_s) / timed
    )


# ---------------------------------------------------------------- over time


class StragglerWatch:
    """What the launcher asks: fed with the ranks of the beats, it says who is slow now, and whom to replace."""

    def __init__(self, spec: AttemptSpec) -> None:
        self._policy = StragglerPolicy(ratio=spec.straggler_ratio, window=max(PARTS, spec.straggler_window))
        self._replaces = spec.straggler_action == "replace"
        self._tracks: dict[int, Track] = {}
        self._found: tuple[Straggler, ...] = ()
        self._since: dict[str, int] = {}  # node to the step at which it was found
        self._judged_step = -1
        self._looked_at = -math.inf

    def begin(self, now: float, nodes: Mapping[int, str]) -> None:  # noqa: ARG002 - the launcher's watches are called alike
        """A start of the training with these ranks on these nodes; what was told before is forgotten."""
        self._tracks = {rank: Track(node=node) for rank, node in nodes.items()}
        self._found, self._since, self._judged_step = (), {}, -1

    def feed(self, now: float, node: str, ranks: Sequence[Mapping[str, Any]]) -> None:
        """A node's beat. What has no times or no known rank is passed over: a beat is what a node says."""
        if self._policy.ratio <= 1:
            return
        for item in ranks:
            told = _parse(item)
            track = self._tracks.get(_whole(item.get("rank"), -1))
            if told is not None and track is not None and track.node == node:
                track.add(told, self._policy.window, now)

    def judge(self, now: float) -> tuple[Straggler, ...]:
        """Who is slow now. The same as before while there is nothing newer, or a rank has gone silent."""
        if self._policy.ratio <= 1 or not self._tracks:
            return ()
        if now - self._looked_at < _JUDGE_EVERY_S:
            return self._found
        self._looked_at = now
        if any(now - track.heard_at > _STALE_S for track in self._tracks.values()):
            return self._found
        end = min(track.told[-1].step for track in self._tracks.values())
        # Again after a part of a window: else the same steps are judged again and again.
        if end < self._judged_step + max(1, self._policy.window // PARTS):
            return self._found
        times = fold_window(self._tracks, self._policy.window)
        if times:
            self._judged_step = end
            self._found = judge_stragglers(times, self._policy, frozenset(s.rank for s in self._found))
            self._since = {s.node: self._since.get(s.node, end) for s in self._found}
        return self._found

    def replacement(self, saved_step: int | None, *, has_spare: bool) -> Straggler | None:
        """The straggler whose node is to be replaced now; None while that would lose work, or can't be.

        `saved_step`: newest verified checkpoint of the training.
        """
        if not self._replaces or not has_spare or saved_step is None:
            return None
        return next((s for s in self._found if saved_step >= self._since.get(s.node, saved_step + 1)), None)


def _parse(item: Mapping[str, Any]) -> Told | None:
    values = [item.get(name) for name in ("timed_step", "timed", "step_s", "own_s")]
    if any(isinstance(value, bool) or not isinstance(value, int | float) for value in values):
        return None
    step, timed, step_s, own_s = (float(value) for value in values if value is not None)
    if not all(0 <= value < 1e12 for value in (step, timed, step_s, own_s)):
        return None
    return Told(step=int(step), timed=timed, step_s=step_s, own_s=own_s)


def _whole(value: object, otherwise: int) -> int:
    return value if isinstance(value, int) else otherwise
