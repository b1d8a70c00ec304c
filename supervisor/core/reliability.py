"""How often a run fails, what that costs, and how often to save. Pure; formulas and their limits are in the docstrings.

PlanError    an argument makes no sense; the message names it
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise

from supervisor.model import UNREPORTED, Attempt, Interruption

# Llama 3: 419 unexpected interruptions in 54 days on 16,384 GPUs (Grattafiori et al. 2024, arXiv 2407.21783).
LLAMA3_INTERRUPTIONS = 419
LLAMA3_GPU_HOURS = 54 * 24 * 16_384
GPU_MTBF_H = LLAMA3_GPU_HOURS / LLAMA3_INTERRUPTIONS

CONFIDENCE = 0.9  # two-sided; without any interruption the bound is one-sided at 95 %


class PlanError(ValueError):
    """An argument makes no sense. The message is one line for people."""


# ---------------------------------------------------------------- mean time between failures


@dataclass(frozen=True, slots=True, kw_only=True)
class Mtbf:
    """Mean time between unplanned interruptions, hours, with its interval and what it rests on."""

    mtbf_h: float | None  # None: no interruption yet, only the lower bound is known
    low_h: float
    high_h: float | None  # None: without an interruption there is no upper bound
    interruptions: int
    observed_h: float

    @property
    def is_bound(self) -> bool:
        """True when only the lower bound is known."""
        return self.mtbf_h is None


def estimate_mtbf(observed_s: float, interruptions: int, *, confidence: float = CONFIDENCE) -> Mtbf:
    """MTBF from `observed_s` of running time with `interruptions` unplanned ends.

    The interval is exact for a Poisson process that is watched for a given time: 2T/chi2(1-a/2; 2k+2) to
    2T/chi2(a/2; 2k). With none, the lower bound T/-ln(a/2): about T/3.
    """
    if not math.isfinite(observed_s) or observed_s < 0:
        raise PlanError(f"observed time must be 0 or more seconds, not {observed_s}")
    if interruptions < 0:
        raise PlanError(f"the number of interruptions must be 0 or more, not {interruptions}")
    tail = (1 - confidence) / 2
    hours = observed_s / 3600
    low = hours / _poisson_mean(interruptions, tail)
    if interruptions == 0:
        return Mtbf(mtbf_h=None, low_h=low, high_h=None, interruptions=0, observed_h=hours)
    high = hours / _poisson_mean(interruptions - 1, 1 - tail)
    return Mtbf(mtbf_h=hours / interruptions, low_h=low, high_h=high, interruptions=interruptions, observed_h=hours)


def _poisson_mean(count: int, probability: float) -> float:
    """The mean of a Poisson variable that is at most `count` with `probability`: half a chi-square quantile."""
    return _bisect(lambda mean: poisson_cdf(count, mean) - probability, 0.0, 10.0 + count + 6 * math.sqrt(count + 1))


def poisson_cdf(count: int, mean: float) -> float:
    """Probability that a Poisson variable with this mean is at most `count`."""
    if mean <= 0:
        return 1.0
    log_mean = math.log(mean)
    logs = [k * log_mean - mean - math.lgamma(k + 1) for k in range(count + 1)]
    top = max(logs)
    return min(1.0, math.exp(top) * math.fsum(math.exp(log - top) for log in logs))


def _bisect(falls: Callable[[float], float], low: float, high: float) -> float:
    """Where a falling function crosses 0; `high` is pushed up until it lies beyond."""
    while falls(high) > 0:
        low, high = high, 2 * high
    while high - low > 1e-10 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if falls(middle) > 0 else (low, middle)
    return (low + high) / 2


# ---------------------------------------------------------------- what a run has got out of its time


def running_s(attempts: Sequence[Attempt], now: datetime, *, since: datetime | None = None) -> float:
    """Seconds that the jobs of these attempts have run (since an instant), over all attempts."""
    return math.fsum(_ran_s(attempt, now, since) for attempt in attempts)


def run_mtbf(attempts: Sequence[Attempt], interruptions: Sequence[Interruption], now: datetime) -> Mtbf | None:
    """The run's MTBF; None before anything has run. Planned ends (stop, time limit, saved) do not count."""
    observed_s = running_s(attempts, now)
    unplanned = sum(1 for interruption in interruptions if not interruption.is_planned)
    return estimate_mtbf(observed_s, unplanned) if observed_s > 0 else None


def ettr(
    attempts: Sequence[Attempt],
    now: datetime,
    *,
    is_script: bool = False,
    interruptions: Sequence[Interruption] = (),
) -> float | None:
    """Effective training time ratio so far, 0 to 1; None before the first step was seen, or where none is told.

    Productive time over (wall-clock time - queueing). Productive is the time from an attempt's first step to its last
    sign of progress, times the share of its steps that no later attempt had to do again. What a job waits in the queue
    is left out; noticing, restarting, loading and checking count as loss. Blocking saves are in the stepping time. Of
    `interruptions` those that a job survived are needed: their down time and the steps done again are no progress.

    A person's own script (`is_script`) may resume by itself: until its steps tell where it went on, nothing counts as
    done again.
    """
    ran = sorted((a for a in attempts if a.started_at is not None), key=lambda a: a.number)
    if not any(attempt.stepped_at and attempt.last_step is not None for attempt in ran):
        return None
    resumed_from = {a.number: _resumed_from(a, attempts, is_script=is_script) for a in ran}
    inside = [i for i in interruptions if i.is_in_job]
    productive_s = math.fsum(
        _productive_s(a, resumed_from[a.number], now, [i for i in inside if i.attempt == a.number]) for a in ran
    )
    wall_s = _wall_s(ran, now)
    return max(0.0, min(1.0, productive_s / wall_s)) if wall_s > 0 else None


def _resumed_from(attempt: Attempt, attempts: Sequence[Attempt], *, is_script: bool) -> int | None:
    """The earliest step that training went on from after this attempt: what lies beyond it was done again."""
    later = [other for other in attempts if other.number > attempt.number]
    newest = max((other.number for other in later), default=0)
    begun = (o for o in later if o.stepped_at is not None or o.number == newest)
    steps = (find_resume_step(o) if is_script else _resume_step(o) for o in begun)
    return min((step for step in steps if step is not None), default=None)


def find_resume_step(attempt: Attempt) -> int | None:
    """The step that an attempt went on from: as it was told, or as its own first step shows; None: nobody knows."""
    if attempt.resume_path or attempt.first_step is not None:
        return _resume_step(attempt)
    return attempt.resume_step if attempt.last_step is not None else None


def _resume_step(attempt: Attempt) -> int:
    if attempt.resume_path or attempt.first_step is None:
        return attempt.resume_step
    return max(attempt.resume_step, attempt.first_step - 1)


def _ran_s(attempt: Attempt, now: datetime, since: datetime | None) -> float:
    if attempt.started_at is None:
        return 0.0
    start = attempt.started_at if since is None else max(since, attempt.started_at)
    return max(0.0, ((attempt.over_at or now) - start).total_seconds())


def _productive_s(
    attempt: Attempt, resumed_from: int | None, now: datetime, inside: Sequence[Interruption] = ()
) -> float:
    resume_step = _resume_step(attempt)
    steps = (attempt.last_step or 0) - resume_step
    made = steps + sum(i.lost_steps or 0 for i in inside)
    if attempt.stepped_at is None or steps <= 0:
        return 0.0
    end = attempt.over_at or now
    if attempt.progress_at is not None:
        end = min(end, attempt.progress_at)  # what came after the last sign of progress was waiting for us to notice
    down_s = math.fsum(_down_s(i, end) for i in inside)
    stepped_s = max(0.0, (end - attempt.stepped_at).total_seconds() - down_s)
    kept = steps if resumed_from is None else min(steps, max(0, resumed_from - resume_step))
    return stepped_s * kept / made


def _down_s(interruption: Interruption, end: datetime) -> float:
    """From the last sign of life to the first new step, inside a job."""
    until = min(interruption.resumed_at or end, end)
    return max(0.0, (until - interruption.detected_at).total_seconds()) + (interruption.detection_s or 0.0)


def _wall_s(ran: Sequence[Attempt], now: datetime) -> float:
    """From the first start to the newest end, without the time between an attempt's submission and its start."""
    first = min(a.started_at for a in ran if a.started_at is not None)
    last = max(a.over_at or now for a in ran)
    queued_s = math.fsum(_queued_s(before, a) for before, a in pairwise(ran))
    return (last - first).total_seconds() - queued_s


def _queued_s(before: Attempt, attempt: Attempt) -> float:
    """A job that was queued ahead waited for nothing while the attempt before it ran."""
    if attempt.started_at is None or attempt.submitted_at is None:
        return 0.0
    since = max(attempt.submitted_at, before.over_at) if before.over_at is not None else attempt.submitted_at
    return max(0.0, (attempt.started_at - since).total_seconds())


# ---------------------------------------------------------------- what one interruption has cost


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """The time that one interruption has cost, in parts that follow each other: their sum is all of it."""

    detection_s: float  # from the last sign of progress to the notice
    restart_s: float  # from there to the first new step: the down time
    recompute_s: float  # from there until the step that had been reached is reached again
    is_open: bool = False  # it is not over: counted up to now
    has_clock_step: bool = False  # an instant lay before the one that it follows, and counts as 0

    @property
    def total_s(self) -> float:
        return self.detection_s + self.restart_s + self.recompute_s


def split_gap(interruption: Interruption, ended: Attempt | None, now: datetime) -> Gap:
    """Where the time of an interruption went; `ended`: the attempt that it ended, where it is known.

    Work is lost from the last step that was seen (the record of progress is a few seconds old at most). Instants come
    from one clock per run of the daemon: a step of the host's clock between two of them shows as a negative part.
    Inside a job the launcher says how long it took to notice.
    """
    seen_at = ended.progress_at if ended is not None and ended.phase != UNREPORTED else None
    if interruption.is_in_job:
        seen_at = interruption.detected_at - timedelta(seconds=min(interruption.detection_s or 0.0, _DETECTION_MAX_S))
    known = [seen_at or interruption.detected_at, interruption.detected_at]
    is_open = interruption.caught_up_at is None
    known += [at for at in (interruption.resumed_at, interruption.caught_up_at) if at is not None]
    if is_open:
        known.append(now)
    reached = [max(known[: n + 1]) for n in range(len(known))]
    parts = [(later - earlier).total_seconds() for earlier, later in itertools.pairwise(reached)]
    detection_s, restart_s, recompute_s = (*parts, 0.0)[:3]
    return Gap(
        detection_s=detection_s,
        restart_s=restart_s,
        recompute_s=recompute_s,
        is_open=is_open,
        has_clock_step=known != reached,
    )


_DETECTION_MAX_S = 86_400.0


# ---------------------------------------------------------------- how often to save


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePlan:
    """The answer of `supervisor plan`."""

    gpus: int
    save_s: float  # time that a save blocks training
    restart_s: float  # notice, requeue, load, first new step
    mtbf_h: float
    interval_min: float  # work between saves
    lost_percent: float  # of all time: saving, work done again, restarts
    is_rough: bool  # the save is long against the MTBF: Young's formula is off by more than a little


def young_s(save_s: float, mtbf_s: float) -> float:
    """Young's interval between saves, seconds of work: sqrt(2 * save * MTBF).

    Restart time does not move it. Up to a save of about MTBF/10 its loss is within a fraction of a percent of the
    exact optimum.
    """
    return math.sqrt(2 * save_s * mtbf_s)


def waste(interval_s: float, save_s: float, restart_s: float, mtbf_s: float) -> float:
    """Share of all time that is lost, to first order: save/interval + (interval/2 + restart)/MTBF; at most 1."""
    return min(1.0, save_s / interval_s + (interval_s / 2 + restart_s) / mtbf_s)


def plan_saves(gpus: int, save_s: float, restart_s: float, *, gpu_mtbf_h: float = GPU_MTBF_H) -> SavePlan:
    """How often to save on `gpus` GPUs that fail as often as Llama 3's did. Raises PlanError."""
    for name, value, low in (("--gpus", gpus, 1), ("--save-s", save_s, 0), ("--restart-s", restart_s, 0)):
        if not math.isfinite(value) or value < low or (name == "--save-s" and value == 0):
            wanted = "above 0" if name == "--save-s" else f"at least {low}"
            raise PlanError(f"{name} must be {wanted}, not {value:g}")
    mtbf_s = gpu_mtbf_h * 3600 / gpus
    interval_s = young_s(save_s, mtbf_s)
    return SavePlan(
        gpus=gpus,
        save_s=save_s,
        restart_s=restart_s,
        mtbf_h=mtbf_s / 3600,
        interval_min=interval_s / 60,
        lost_percent=100 * waste(interval_s, save_s, restart_s, mtbf_s),
        is_rough=save_s > mtbf_s / 10 or restart_s > mtbf_s,
    )
