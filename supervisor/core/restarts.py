"""Whether, when, how large and from where a run starts again, and when it is held for a person. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from slurm.types import NodeBase, NodeRecord
from supervisor.core.nodes import is_fit
from supervisor.model import (
    Attempt,
    AttemptEnd,
    Checkpoint,
    CheckpointState,
    NodeMemory,
    NodesSpec,
    RestartSpec,
    Run,
    RunSpec,
    RunState,
    Verdict,
)

# Ends that cost no part of the budget: nobody's fault, and each is bounded by something else.
_FREE_ENDS = frozenset(
    {
        AttemptEnd.RESIZED,
        AttemptEnd.TIME_LIMIT,
        AttemptEnd.PREEMPTED,
        AttemptEnd.MAINTENANCE,
        AttemptEnd.LOST,
        AttemptEnd.STOPPED,
        AttemptEnd.DIVERGED,  # [divergence] max_rollbacks
    }
)
# Ends that a node or the cluster brought about. They have a budget of their own: a bad week of the nodes must not use
# up what the training's own failures are allowed.
NODE_ENDS = frozenset({AttemptEnd.NODE_SILENT, AttemptEnd.NODE_FAILED, AttemptEnd.NODE_CHECK, AttemptEnd.VANISHED})
# A script that knows nothing of us may start at 0 each time: without a newer checkpoint its time limit is no success.
_FREE_ENDS_OF_SCRIPTS = _FREE_ENDS - {AttemptEnd.TIME_LIMIT}

REFUSED = "sbatch refused the job"  # begins the reason of a run that it happened to


@dataclass(frozen=True, slots=True, kw_only=True)
class Aftermath:
    """A run whose newest attempt is over."""

    run: Run
    last: Attempt
    failures: int  # of the training itself: attempts in a row without a newer verified checkpoint
    node_failures: int = 0  # attempts among them that ended with a node


def count_failures(run: Run, attempts: Sequence[Attempt], checkpoints: Sequence[Checkpoint]) -> int:
    """How many attempts in a row count as failures, whatever their cause (see `find_failures`), by their starts."""
    return sum(_weight(run.spec.restart, attempt) for attempt in find_failures(run, attempts, checkpoints))


def _weight(restart: RestartSpec, attempt: Attempt) -> int:
    """Starts inside its job that failed count as attempts do, one less than lead to a hold: other nodes are tried once.

    Its launcher says itself when that can't help.
    """
    if attempt.end in NODE_ENDS:
        return 1
    return max(1, min(attempt.launch + 1 - attempt.planned, restart.max_without_progress - 1))


def find_failures(run: Run, attempts: Sequence[Attempt], checkpoints: Sequence[Checkpoint]) -> tuple[Attempt, ...]:
    """Attempts in a row, newest first, that ended without publishing a checkpoint newer than their start, verified.

    One that is complete and not read back yet counts as progress of the newest attempt until that is done; one of a
    foreign layout counts in any case: nothing better may be to be had.
    """
    newest = max((a.number for a in attempts), default=0)
    found = []
    for attempt in sorted(attempts, key=lambda a: a.number, reverse=True):
        if not attempt.is_over or _is_fruitful(attempt, checkpoints, may_be_unread=attempt.number == newest):
            break
        if run.script is not None and not checkpoints and _is_ahead(attempt, attempts):
            break
        if run.released_at is not None and (attempt.over_at is None or attempt.over_at <= run.released_at):
            break
        if attempt.end not in (_FREE_ENDS if run.script is None else _FREE_ENDS_OF_SCRIPTS):
            found.append(attempt)
    return tuple(found)


def judge_failures(run: Run, last: Attempt, failures: Sequence[Attempt]) -> Aftermath:
    """An end with what it costs: each failure counts against one budget, by its cause."""
    nodes = sum(1 for attempt in failures if attempt.end in NODE_ENDS)
    own = sum(_weight(run.spec.restart, attempt) for attempt in failures if attempt.end not in NODE_ENDS)
    return Aftermath(run=run, last=last, failures=own, node_failures=nodes)


def _is_ahead(attempt: Attempt, attempts: Sequence[Attempt]) -> bool:
    """Whether a script whose checkpoints are not seen got further than every attempt before."""
    before = [a.last_step or 0 for a in attempts if a.number < attempt.number]
    return attempt.last_step is not None and attempt.last_step > max(before, default=0)


def _is_fruitful(attempt: Attempt, checkpoints: Sequence[Checkpoint], *, may_be_unread: bool) -> bool:
    return any(
        (c.verified_at is not None and c.state not in (CheckpointState.FENCED, CheckpointState.SUSPECT))
        or ((may_be_unread or c.stamp) and c.state is CheckpointState.COMPLETE)
        for c in checkpoints
        if c.attempt == attempt.number and c.step > attempt.resume_step
    )


# After an end, the first row that matches says what becomes of the run; none matching, it goes on.
_AFTERMATH_ROWS: tuple[tuple[Callable[[Aftermath], bool], RunState, Callable[[Aftermath], str]], ...] = (
    (
        lambda a: a.run.state is RunState.STOPPING,
        RunState.STOPPED,
        lambda a: a.run.reason or "stopped by a person",
    ),
    (lambda a: a.last.end is AttemptEnd.FINISHED, RunState.FINISHED, lambda a: a.last.end_detail or "finished"),
    (
        lambda a: a.last.end is AttemptEnd.CANCELLED,
        RunState.HELD,
        lambda a: f"job {a.last.job_id} was cancelled through Slurm by a person",
    ),
    (
        lambda a: a.last.end is AttemptEnd.REFUSED and a.run.script is not None and a.last.number == 1,
        RunState.STOPPED,  # who submitted it waits for this answer, as for sbatch's
        lambda a: f"{REFUSED}: {a.last.end_detail}",
    ),
    (
        lambda a: a.last.end is AttemptEnd.REFUSED,
        RunState.HELD,
        lambda a: f"{REFUSED}: {a.last.end_detail}",
    ),
    (
        lambda a: a.last.end is AttemptEnd.DO_NOT_RESTART,
        RunState.HELD,
        lambda a: f"a restart can't cure this: {a.last.end_detail}",
    ),
    (
        lambda a: a.last.end is AttemptEnd.DIVERGED and not (a.last.loss_fault and a.last.loss_fault.is_rolled_back),
        RunState.HELD,
        lambda a: a.last.end_detail or "the loss went wrong",
    ),
    (
        lambda a: a.run.final_step is not None and a.last.resume_step >= a.run.final_step,
        RunState.HELD,
        lambda a: f"attempt {a.last.number} failed after the final step {a.run.final_step}: {a.last.end_detail}",
    ),
    (
        lambda a: a.failures >= a.run.spec.restart.max_without_progress,
        RunState.HELD,
        lambda a: (
            f"{a.failures} {'starts' if a.last.launch else 'attempts'} without a newer verified checkpoint; "
            f"the last one: {a.last.end_detail}"
        ),
    ),
    (
        lambda a: a.node_failures >= a.run.spec.restart.max_node_failures,
        RunState.HELD,
        lambda a: (
            f"{a.node_failures} attempts in a row were lost with a node, without a newer verified checkpoint; "
            f"the last one: {a.last.end_detail}"
        ),
    ),
)


def judge_aftermath(aftermath: Aftermath) -> tuple[RunState, str] | None:
    """(state, reason) that the run comes to after an attempt's end; None: it goes on."""
    return next(((state, why(aftermath)) for matches, state, why in _AFTERMATH_ROWS if matches(aftermath)), None)


def backoff_s(spec: RestartSpec, failures: int) -> float:
    """Seconds between an end and the next attempt: none at first, then doubling up to the maximum."""
    if failures <= 1:
        return 0.0
    return float(min(spec.backoff_max_s, spec.backoff_s * 2 ** min(failures - 2, 30)))


def next_start_at(spec: RestartSpec, failures: int, last: Attempt | None) -> datetime | None:
    """The earliest instant of the next attempt; None: at once."""
    wait = backoff_s(spec, failures)
    if wait <= 0 or last is None or last.over_at is None:
        return None
    return last.over_at + timedelta(seconds=wait)


# ---------------------------------------------------------------- size


def locate(spec: RunSpec, default_partition: str | None) -> RunSpec:
    """The run with the partition that its jobs really go to."""
    if spec.slurm.partition is not None or default_partition is None:
        return spec
    return replace(spec, slurm=replace(spec.slurm, partition=default_partition))


def choose_smaller(
    spec: RunSpec, attempt: Attempt, nodes: Mapping[str, NodeRecord], memory: Mapping[str, NodeMemory]
) -> int:
    """Nodes that a smaller job could have now, where a waiting one wants more than are healthy; else 0.

    Only nodes that are drained, down or broken count as lost, and none that reboots: a new job loses its place in the
    queue.
    """
    lost = {n for n, r in nodes.items() if (r.is_drain_set or r.base is NodeBase.DOWN) and not r.flags & _REBOOTS}
    lost |= {n for n, m in memory.items() if m.verdict is Verdict.BROKEN}
    known = [r.name for r in nodes.values() if _is_in_partition(r, spec)]
    left = len([n for n in known if n not in lost])
    count = choose_count(spec.nodes, left)
    return count if count and left < attempt.nodes_wanted + attempt.spares else 0


_REBOOTS = frozenset({"REBOOT_REQUESTED", "REBOOT_ISSUED"})  # planned ones, for which Slurm drains or downs a node


def _is_in_partition(record: NodeRecord, spec: RunSpec) -> bool:
    wanted = set(spec.slurm.partition.split(",")) if spec.slurm.partition else set()
    return not wanted or not record.partitions or bool(wanted & set(record.partitions))


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """What to ask Slurm for."""

    nodes: int  # to train on; 0: too few
    spares: int = 0
    exclude: tuple[str, ...] = ()
    fit: int = 0
    free: int = 0


def choose_count(spec: NodesSpec, available: int) -> int:
    """The largest count between min and max, a multiple of `multiple_of`, that `available` nodes allow; else 0."""
    best = min(spec.max, available) // spec.multiple_of * spec.multiple_of
    return best if best >= spec.min else 0


def choose_size(
    spec: RunSpec,
    nodes: Mapping[str, NodeRecord],
    memory: Mapping[str, NodeMemory],
    *,
    ours: frozenset[str] = frozenset(),
    silent: frozenset[str] = frozenset(),
) -> Size:
    """How many nodes the next attempt gets.

    Nodes that are free now (or held by our own ended attempt, `ours`) decide where they allow at least the minimum: a
    smaller start now beats a full one in the queue. Else the job queues for what healthy nodes allow. Nodes that are
    `silent` (slurmd's port just now, or stuck with a job that has ended) are left out of this attempt, without a
    verdict.
    """
    known = [r for r in nodes.values() if _is_in_partition(r, spec)]
    fit = [r for r in known if is_fit(r, memory.get(r.name)) and r.name not in silent]
    free = [r for r in fit if r.is_idle or r.name in ours]
    available = len(free) if choose_count(spec.nodes, len(free)) else len(fit)
    count = choose_count(spec.nodes, available)
    unfit = {r.name for r in known} - {r.name for r in fit}
    broken = {n for n, m in memory.items() if m.verdict is Verdict.BROKEN}
    exclude = tuple(sorted(unfit & (broken | silent)))
    spares = max(0, min(spec.nodes.spares, available - count)) if count else 0
    return Size(nodes=count, spares=spares, exclude=exclude, fit=len(fit), free=len(free))


def choose_first_size(spec: RunSpec, nodes: Mapping[str, NodeRecord], memory: Mapping[str, NodeMemory]) -> Size:
    """The size of a script's first submission when too few nodes are healthy now.

    Who submits it waits for Slurm's word as from sbatch: a place in the queue, or that there is no such partition.
    Broken nodes are left out where enough others are left, down or not.
    """
    known = {r.name for r in nodes.values() if _is_in_partition(r, spec)}
    broken = {n for n in known if (m := memory.get(n)) is not None and m.verdict is Verdict.BROKEN}
    exclude = tuple(sorted(broken)) if len(known - broken) >= spec.nodes.min else ()
    return Size(nodes=spec.nodes.min, exclude=exclude)
