"""Whether a loss went wrong, and since which step. Pure: losses in, a finding out.

Not a number, or infinite, is wrong at once. A spike is a loss far above the recent ones by a robust measure: its
distance from their median, in units of 1.4826 times their median absolute deviation (a standard deviation for normal
noise, and blind to single outliers). Judging spikes is off unless a threshold is given: what is a spike depends on
the data, and a false alarm costs more than a late one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

_TO_DEVIATION = 1.4826  # of a normal distribution, from its median absolute deviation
_LEAST_SHARE = 1e-3  # of the median: losses that hardly move must not make a spike of rounding


@dataclass(frozen=True, slots=True, kw_only=True)
class LossPolicy:
    """What counts as wrong.

    `nan_steps`: so many steps in a row without a finite loss (0: never judged). `spike_score`: robust z-score above
    which a loss is a spike (0: never judged; 10 is a careful beginning), `spike_steps`: so many in a row.
    `window`: recent losses that are compared with, `least`: fewer than so many are no ground for a judgement.
    """

    nan_steps: int = 1
    spike_score: float = 0.0
    spike_steps: int = 3
    window: int = 128
    least: int = 32

    def __post_init__(self) -> None:
        if self.nan_steps < 0 or self.spike_score < 0 or self.spike_steps < 1:
            raise ValueError("nan_steps and spike_score can't be negative, and spike_steps is at least 1")
        if not 2 <= self.least <= self.window:
            raise ValueError("a judgement needs 2 <= least <= window")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A loss that went wrong. `onset_step`: the first wrong step; `score` of a spike: robust z-score of the last."""

    kind: str  # "nan" or "spike"
    onset_step: int
    step: int
    loss: float
    score: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LossWatch:
    """What has been seen so far; `observe` returns the next value. Wrong losses never enter `recent`."""

    policy: LossPolicy = field(default_factory=LossPolicy)
    recent: tuple[float, ...] = ()
    wrong_since: int | None = None
    wrong_kind: str = ""
    wrong_steps: int = 0

    def observe(self, step: int, loss: float) -> tuple[LossWatch, Finding | None]:
        """This watch after one more step, and what is wrong, if so many steps in a row were."""
        kind, score, needed = self._judge(loss)
        if not kind:
            return self._accept(loss), None
        continues = kind == self.wrong_kind
        since = self.wrong_since if continues and self.wrong_since is not None else step
        count = self.wrong_steps + 1 if continues else 1
        seen = replace(self, wrong_since=since, wrong_kind=kind, wrong_steps=count)
        if count < needed:
            return seen, None
        return seen, Finding(kind=kind, onset_step=since, step=step, loss=loss, score=score)

    def _judge(self, loss: float) -> tuple[str, float | None, int]:
        policy = self.policy
        if not math.isfinite(loss):
            return ("nan", None, policy.nan_steps) if policy.nan_steps else ("", None, 0)
        if policy.spike_score and len(self.recent) >= policy.least:
            score = robust_score(loss, self.recent)
            if score > policy.spike_score:
                return "spike", score, policy.spike_steps
        return "", None, 0

    def _accept(self, loss: float) -> LossWatch:
        keeps = self.policy.spike_score and math.isfinite(loss)
        recent = (*self.recent, loss)[-self.policy.window :] if keeps else self.recent
        if recent is self.recent and not self.wrong_steps:
            return self
        return replace(self, recent=recent, wrong_since=None, wrong_kind="", wrong_steps=0)


def robust_score(value: float, recent: Sequence[float]) -> float:
    """How far `value` lies above the median of `recent`, in robust standard deviations."""
    middle = statistics.median(recent)
    spread = _TO_DEVIATION * statistics.median(abs(x - middle) for x in recent)
    return (value - middle) / max(spread, _LEAST_SHARE * abs(middle), 1e-12)
