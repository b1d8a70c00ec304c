"""All that one cycle knows about one attempt, gathered from the snapshot. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from slurm.types import JobFlag, JobRecord, JobState, NodeBase, NodeRecord
from supervisor.core.identity import is_own
from supervisor.model import (
    Attempt,
    Cause,
    Fresh,
    Run,
    RunView,
    Snapshot,
    Stale,
)

ABSENT_MARGIN_S = 10.0  # a job younger than this may be missing from an answer that was under way
SECOND_LOOK_S = 10.0  # how long a job must stay absent, and its files unchanged, before it counts as gone


@dataclass(frozen=True, slots=True, kw_only=True)
class Silence:
    """A node of an attempt that is gone, and what says so."""

    node: str
    evidence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """All that one cycle knows about one attempt."""

    run: Run
    attempt: Attempt
    now: datetime
    view: RunView | None = None  # None: the run directory could not be read
    is_blind: bool = False  # it did not answer, so that what was published since the last look is not known
    job: JobRecord | None = None
    is_absent: bool = False  # a fresh answer does not hold the job
    absent_s: float = math.inf  # for how long answers have not held it
    jobs_are_fresh: bool = False
    jobs_asked_at: datetime | None = None
    accounting: JobRecord | None = None
    accounting_is_stale: bool = False
    has_accounting: bool = False  # it answered
    is_unregistered: bool = False  # a node of it has not registered with the controller yet
    cause: Cause | None = None
    taken: frozenset[str] = frozenset()  # its nodes that planned work has taken
    unlaunchable: frozenset[str] = frozenset()  # its nodes that Slurm has drained because a launch failed there
    lost: tuple[Silence, ...] = ()  # its nodes that Slurm calls DOWN or not responding now, other than for a reboot
    silent: tuple[Silence, ...] = ()
    failed_by_slurm: tuple[Silence, ...] = ()
    smaller: int = 0  # nodes that a smaller job could have, while the present one waits for more than are healthy

    @property
    def is_suspended(self) -> bool:
        """True while Slurm has stopped the job's processes: their silence says nothing."""
        return self.job is not None and (self.job.state is JobState.SUSPENDED or JobFlag.STOPPED in self.job.flags)


def find_sight(run: Run, attempt: Attempt, snapshot: Snapshot, now: datetime) -> Sight:
    """Gather what the snapshot says of one attempt (silent nodes are added by supervisor.core.nodes)."""
    view = snapshot.runs.get(run.name)
    seen = view.value if isinstance(view, Fresh) and view.value.attempt == attempt.number else None
    job: JobRecord | None = None
    is_absent = False
    if isinstance(snapshot.jobs, Fresh) and attempt.job_id is not None:
        found = snapshot.jobs.value.get(attempt.job_id)
        job = found if found is not None and is_own(found, attempt, run) else None
        is_absent = job is None and _is_settled(attempt, snapshot.jobs.asked_at)
    accounting = None
    if isinstance(snapshot.ended, Fresh) and attempt.job_id is not None:
        found = snapshot.ended.value.get(attempt.job_id)
        is_ours = found is not None and is_own(found, attempt, run) and _is_same_submission(found, attempt)
        accounting = found if is_ours else None
    return Sight(
        run=run,
        attempt=attempt,
        now=now,
        view=seen,
        is_blind=not isinstance(view, Fresh) or bool(view.value.checkpoints_unknown),
        job=job,
        is_absent=is_absent,
        absent_s=snapshot.absent_s.get(attempt.job_id or 0, math.inf),
        jobs_are_fresh=isinstance(snapshot.jobs, Fresh),
        jobs_asked_at=snapshot.jobs.asked_at if isinstance(snapshot.jobs, Fresh) else None,
        accounting=accounting,
        accounting_is_stale=isinstance(snapshot.ended, Stale),
        has_accounting=isinstance(snapshot.ended, Fresh),
        is_unregistered=has_unregistered(attempt, snapshot.nodes),
        cause=snapshot.causes.get(run.name),
        taken=_find_taken(attempt, snapshot),
        unlaunchable=_find_unlaunchable(job.nodes if job is not None else attempt.nodes, snapshot),
        lost=_find_lost(attempt.nodes or (job.nodes if job is not None else ()), snapshot),
    )


_PLANNED_WORK = frozenset({"MAINTENANCE", "REBOOT_ISSUED"})


def _find_taken(attempt: Attempt, snapshot: Snapshot) -> frozenset[str]:
    """Nodes in a maintenance reservation or in a reboot that was asked for: Slurm drops the flag when they are late."""
    if not isinstance(snapshot.nodes, Fresh):
        return frozenset()
    records = (snapshot.nodes.value.get(node) for node in attempt.nodes)
    return frozenset(r.name for r in records if r is not None and r.flags & _PLANNED_WORK)


def is_alive(view: RunView | None, attempt: Attempt) -> bool:
    """True while an attempt's own files still change, whatever Slurm knows of its job.

    A controller that lost its state knows no job, though the nodes run on until they register with it (seconds; a node
    that is cut off: for ever). A second training must not start beside such a one.
    """
    if view is None or view.attempt != attempt.number or view.exit is not None:
        return False
    ages = [seen.unchanged_s for seen in (view.launch, view.progress, view.log) if seen is not None]
    return min(ages, default=math.inf) < SECOND_LOOK_S


_LAUNCH_REASONS = ("Prolog error", "batch job complete failure", "Duplicate jobid")  # Slurm's own, 22.05 to 25.11


def _find_unlaunchable(nodes: Iterable[str], snapshot: Snapshot) -> frozenset[str]:
    if not isinstance(snapshot.nodes, Fresh):
        return frozenset()
    records = (snapshot.nodes.value.get(node) for node in nodes)
    drained = [r for r in records if r is not None and r.is_drain_set]
    return frozenset(r.name for r in drained if r.reason.startswith(_LAUNCH_REASONS))


def has_unregistered(attempt: Attempt, nodes: Fresh[Mapping[str, NodeRecord]] | Stale) -> bool:
    """True while the controller has not heard from a node of the attempt since it came up: it may run on there.

    Slurm ends what it does not know as a node registers, and calls a node DOWN that does not within SlurmdTimeout.
    """
    if isinstance(nodes, Stale):
        return False
    records = (nodes.value.get(node) for node in attempt.nodes)
    return any(record is not None and record.base is NodeBase.UNKNOWN for record in records)


def _find_lost(nodes: Iterable[str], snapshot: Snapshot) -> tuple[Silence, ...]:
    if not isinstance(snapshot.nodes, Fresh):
        return ()
    records = (snapshot.nodes.value.get(node) for node in nodes)
    lost = (r for r in records if r is not None and not r.is_responding and not r.flags & _PLANNED_WORK)
    return tuple(Silence(node=r.name, evidence=f"{r.name}: Slurm says {r.raw_state}") for r in lost)


def _is_settled(attempt: Attempt, asked_at: datetime) -> bool:
    return attempt.submitted_at is not None and asked_at > attempt.submitted_at + timedelta(seconds=ABSENT_MARGIN_S)


def _is_same_submission(job: JobRecord, attempt: Attempt) -> bool:
    if job.submit_at is None or attempt.submitted_at is None:
        return False
    return job.submit_at >= attempt.submitted_at - timedelta(minutes=5)
