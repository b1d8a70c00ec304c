"""How often to save: the cost of a save, of a failure and of a restart against each other. Pure.

Formulas: Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation
Computer Systems 22 (2006); the exact efficiency of a process with exponential failures that may strike at any time.
The restart time does not move the optimum, it only counts in the loss.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise

from supervisor.core.reliability import GPU_MTBF_H
from supervisor.model import PLANNED_ENDS, Attempt, AttemptEnd, CheckpointSpec, Interruption, RunSpec

GPUS_PER_PRIOR_NODE = 8  # of the training that the prior comes from
PRIOR_WEIGHT = 1.0  # failures that the prior counts for: a run's own outweigh it from the second on
LEAST_BETWEEN_S = 60.0  # node seconds between two failures of its own: of starts that fail at once, nothing is learnt
COSTS_KEPT = 5  # saves whose blocking time is remembered
COSTS_NEEDED = 2  # before anything is concluded: the first save of a process is often the slowest
CHANGE_TOLD = 0.2  # smaller changes are not worth telling: the loss is flat around its minimum
DEFAULT_RESTART_S = 300.0  # until a start of this run was seen
_NO_FAILURE = frozenset({AttemptEnd.REFUSED, AttemptEnd.LOST, AttemptEnd.NOT_NEEDED})


# ---------------------------------------------------------------- formulas


def daly_s(save_s: float, mtbf_s: float) -> float:
    """Seconds of work between saves that lose least time: Daly's higher-order estimate; the MTBF from save = 2 MTBF on.

    Within a fraction of a percent of the optimum's loss for every save that is shorter than the MTBF, where Young's
    formula is too long by about two thirds of a save.
    """
    if save_s <= 0:
        return 0.0
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    share = save_s / (2 * mtbf_s)
    return math.sqrt(2 * save_s * mtbf_s) * (1 + math.sqrt(share) / 3 + share / 9) - save_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Shares of all time, 0 to 1, that go to saving, to work done again and to restarts."""

    saving: float
    repeated: float
    restarts: float

    @property
    def total(self) -> float:
        return self.saving + self.repeated + self.restarts


def expected_loss(
    every_s: float, *, save_s: float, mtbf_s: float, restart_s: float = 0.0, durable_s: float = 0.0
) -> Loss:
    """What saving after every `every_s` of work costs, for failures that strike at random at any time.

    `save_s` blocks the training; `durable_s` passes until a save counts, while the training goes on: a failure
    meanwhile goes back to the save before. Exact for durable_s = 0.
    """
    segment_s = every_s + save_s
    # Time that one segment takes on average, failures and their restarts included.
    taken_s = mtbf_s * _grown(restart_s / mtbf_s) * math.expm1(min(segment_s / mtbf_s, _MAX_EXPONENT))
    failures = math.expm1(min(segment_s / mtbf_s, _MAX_EXPONENT))  # per segment, those during a restart aside
    late_s = failures * max(0.0, durable_s - save_s)
    whole_s = taken_s + late_s
    restarts_s = mtbf_s * (_grown(restart_s / mtbf_s) - 1) * failures
    saving_s = save_s
    repeated_s = whole_s - every_s - saving_s - restarts_s
    return Loss(saving=saving_s / whole_s, repeated=repeated_s / whole_s, restarts=restarts_s / whole_s)


_MAX_EXPONENT = 300.0  # beyond it nothing ever gets done, and floats end


def _grown(ratio: float) -> float:
    return math.exp(min(ratio, _MAX_EXPONENT / 2))


# ---------------------------------------------------------------- mean time between failures


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """The mean time between failures of a job of `nodes` nodes, and what it rests on."""

    mtbf_s: float
    failures: int  # of this run's own
    observed_node_s: float  # time that its nodes ran
    prior_share: float  # the prior's weight in it, 1: nothing else, towards 0 with the run's own failures

    @property
    def basis(self) -> str:
        """For people: what it rests on."""
        days = self.observed_node_s / 86400
        own = f"{self.failures} failures in {days:.2g} node-days"
        return f"{own}, and the prior (weight {self.prior_share:.0%})"


def prior_node_mtbf_s(gpus_per_node: int | None) -> float:
    """Mean time between failures of one node before anything is known of it, seconds.

    From the failures of Llama 3's training (supervisor.core.reliability): by its GPUs, or a node of eight where the
    run file names none.
    """
    return GPU_MTBF_H * 3600 / (gpus_per_node or GPUS_PER_PRIOR_NODE)


def blend_rate(*, failures: int, observed_node_s: float, prior_node_s: float, nodes: int) -> Rate:
    """The mean of the run's own time between failures and the prior's, which weighs as PRIOR_WEIGHT failures.

    A run that fails more rarely than the prior gets the arithmetic mean (Gamma-Poisson: without a failure, its time is
    added to the prior's). One that fails more often gets the geometric mean: the prior may be wrong by orders of
    magnitude, and in an arithmetic mean its long exposure would hide dozens of failures. The two meet where both times
    are the same. Failures and time are the nodes', so that what was seen at another size counts too.
    """
    share = PRIOR_WEIGHT / (PRIOR_WEIGHT + failures)
    own_s = max(observed_node_s / failures, LEAST_BETWEEN_S) if failures else math.inf
    if own_s < prior_node_s:
        node_s = own_s ** (1 - share) * prior_node_s**share
    else:
        node_s = prior_node_s * share + observed_node_s * share / PRIOR_WEIGHT
    if not failures:
        share = prior_node_s / (prior_node_s + observed_node_s)
    return Rate(
        mtbf_s=node_s / max(1, nodes),
        failures=failures,
        observed_node_s=observed_node_s,
        prior_share=share,
    )


def measure_rate(spec: RunSpec, attempts: Sequence[Attempt], now: datetime) -> Rate:
    """The rate of the run at the size of its newest attempt. Planned ends are no failures."""
    # What a job survived is a failure, too, unless it was made on purpose.
    failures = sum(max(0, a.launch + (1 if is_failure(a) else 0) - a.planned) for a in attempts)
    observed = math.fsum(_size(a) * _ran_s(a, now) for a in attempts)
    newest = max(attempts, key=lambda a: a.number, default=None)
    nodes = _size(newest) if newest is not None else spec.nodes.max
    prior = prior_node_mtbf_s(spec.slurm.gpus_per_node)
    return blend_rate(failures=failures, observed_node_s=observed, prior_node_s=prior, nodes=nodes)


def is_failure(attempt: Attempt) -> bool:
    """True for an end that nobody planned."""
    return attempt.end is not None and attempt.end not in PLANNED_ENDS and attempt.end not in _NO_FAILURE


def _size(attempt: Attempt) -> int:
    return len(attempt.nodes) or attempt.nodes_wanted


def _ran_s(attempt: Attempt, now: datetime) -> float:
    if attempt.started_at is None:
        return 0.0
    return max(0.0, ((attempt.over_at or now) - attempt.started_at).total_seconds())


def measure_restart_s(attempts: Sequence[Attempt], interruptions: Sequence[Interruption] = ()) -> float:
    """Seconds that a failure keeps the training from new steps, from the last sign of progress to the first new step.

    The median over this run's failures, those that its jobs survived and drills too; before the first one, the time
    that its newest start took; before that, DEFAULT_RESTART_S. What a job waited in the queue counts: nothing is
    computed meanwhile.
    """
    ordered = sorted(attempts, key=lambda a: a.number)
    gaps = [gap for before, after in pairwise(ordered) if (gap := _gap_s(before, after)) is not None]
    gaps += [(i.detection_s or 0.0) + i.recovery_s for i in interruptions if i.is_in_job and i.recovery_s is not None]
    if gaps:
        return statistics.median(gaps)
    starts = [_start_s(a) for a in ordered]
    known = [s for s in starts if s is not None]
    return known[-1] if known else DEFAULT_RESTART_S


def _gap_s(before: Attempt, after: Attempt) -> float | None:
    since = before.progress_at or before.over_at
    if not is_failure(before) or since is None or after.stepped_at is None:
        return None
    return max(0.0, (after.stepped_at - since).total_seconds())


def _start_s(attempt: Attempt) -> float | None:
    if attempt.stepped_at is None or attempt.started_at is None:
        return None
    return max(0.0, (attempt.stepped_at - attempt.started_at).total_seconds())


# ---------------------------------------------------------------- the interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What saves and restarts of a run take, seconds."""

    save_s: float  # a save blocks the training
    durable_s: float  # until a save is durable and verified
    restart_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """How often to save, what it costs, and why."""

    every_s: float
    best_s: float  # by the formula alone, without bounds
    bound: str  # what holds it off that: empty, or a sentence's part
    loss: Loss
    costs: Costs
    rate: Rate

    @property
    def why(self) -> str:
        """One line for people."""
        costs = f"a save blocks {self.costs.save_s:.3g} s, a failure every {self.rate.mtbf_s / 3600:.3g} h"
        held = f"; {self.bound}" if self.bound else ""
        return f"{costs} ({self.rate.basis}){held}; expected loss {self.loss.total:.2%}"


def first_every_s(spec: CheckpointSpec) -> float:
    """The interval before anything was measured."""
    if spec.interval == "fixed":
        return spec.every_s
    return min(max(spec.every_s, spec.every_min_s), spec.every_max_s)


def carried_every_s(spec: CheckpointSpec, attempts: Sequence[Attempt]) -> float:
    """The interval that a new attempt begins with: what the one before was told last."""
    newest = max(attempts, key=lambda a: a.number, default=None)
    told_s = newest.checkpoint_every_s if newest is not None else 0.0
    return told_s if told_s > 0 and spec.interval == "auto" else first_every_s(spec)


def measure_costs(attempts: Sequence[Attempt], interruptions: Sequence[Interruption] = ()) -> Costs | None:
    """What saves cost in the newest attempt that has made some; None before anybody has measured one."""
    measured = [a for a in attempts if a.save_costs_s]
    newest = max(measured, key=lambda a: a.number, default=None)
    if newest is None or (len(newest.save_costs_s) < COSTS_NEEDED and len(measured) == 1):
        return None
    save_s = statistics.median_low(newest.save_costs_s)
    durable = newest.save_total_s if newest.save_total_s is not None else save_s
    return Costs(save_s=save_s, durable_s=max(durable, save_s), restart_s=measure_restart_s(attempts, interruptions))


def choose_interval(spec: CheckpointSpec, costs: Costs, rate: Rate) -> Interval:
    """The interval with the least loss, within the bounds of the run file.

    Never shorter than a save takes until it is durable: one save is in flight at a time.
    """
    best_s = daly_s(costs.save_s, rate.mtbf_s)
    every_s, bound = best_s, ""
    if spec.interval == "fixed":
        every_s, bound = spec.every_s, "fixed by the run file"
    elif best_s > spec.every_max_s:
        every_s, bound = spec.every_max_s, "bounded by every_max_s"
    elif best_s < spec.every_min_s:
        every_s, bound = spec.every_min_s, "bounded by every_min_s"
    if spec.interval != "fixed" and every_s < costs.durable_s:
        every_s, bound = costs.durable_s, "a save takes that long until it is durable"
    loss = expected_loss(
        every_s,
        save_s=costs.save_s,
        mtbf_s=rate.mtbf_s,
        restart_s=costs.restart_s,
        durable_s=costs.durable_s,
    )
    return Interval(every_s=every_s, best_s=best_s, bound=bound, loss=loss, costs=costs, rate=rate)


def judge_interval(
    spec: RunSpec, attempts: Sequence[Attempt], now: datetime, interruptions: Sequence[Interruption] = ()
) -> Interval | None:
    """The interval of a run now; None until saves were measured."""
    costs = measure_costs(attempts, interruptions)
    return None if costs is None else choose_interval(spec.checkpoint, costs, measure_rate(spec, attempts, now))


def is_worth_telling(told_s: float, every_s: float) -> bool:
    """False for changes that would change next to nothing of the loss."""
    return abs(every_s - told_s) > CHANGE_TOLD * told_s


def fold_cost(known: tuple[float, ...], save_s: float | None) -> tuple[float, ...]:
    """The blocking times of the last saves with the newest one, if it is another."""
    if save_s is None or not math.isfinite(save_s) or save_s < 0 or (known and known[-1] == save_s):
        return known
    return (*known, save_s)[-COSTS_KEPT:]
