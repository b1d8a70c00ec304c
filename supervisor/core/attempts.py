"""What an attempt is now: running, its nodes, its first new step and its newest one. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime

from slurm.types import JobState
from supervisor.core.identity import fold_submission
from supervisor.core.interval import fold_cost
from supervisor.core.launches import fold_launch, is_of_earlier_launch, settle_recovery, since_launch_s
from supervisor.core.sight import Sight
from supervisor.model import (
    UNREPORTED,
    Attempt,
    AttemptState,
    Run,
    RunView,
    Seen,
)
from trainer import contract

PROGRESS_STORE_EVERY_S = 5.0
SUSPENDED = "suspended"  # the phase of an attempt whose job Slurm has stopped; kept until the training goes on


def fold_attempt(sight: Sight) -> Attempt:
    """The attempt with what is seen of it: running, nodes, first new step, newest step (stored every few seconds)."""
    attempt = sight.attempt
    view, job = sight.view, sight.job
    attempt = fold_submission(attempt, job)
    attempt = _fold_uploads(attempt, view.uploads) if view is not None else attempt
    if attempt.state is AttemptState.SUBMITTED and (
        (view is not None and view.launch is not None) or (job is not None and job.state is JobState.RUNNING)
    ):
        attempt = replace(attempt, state=AttemptState.RUNNING, started_at=sight.now)
    if job is not None and job.restarts > attempt.slurm_restarts:
        attempt = replace(attempt, slurm_restarts=job.restarts)
    if not attempt.nodes and job is not None and job.nodes and not job.is_pending:
        attempt = replace(attempt, nodes=job.nodes)
    if not attempt.nodes and view is not None and view.launch is not None and view.launch.value.nodes:
        attempt = replace(attempt, nodes=tuple(sorted(view.launch.value.nodes)))
    if view is not None and view.launch is not None:
        attempt = fold_launch(attempt, view.launch.value, sight.now)
    if sight.is_suspended:
        return _fold_suspension(attempt, sight.now)
    if view is not None and view.progress is None and attempt.stepped_at is None:
        attempt = _fold_unreported(attempt, view, sight.now, sight.run)
    if view is not None and view.progress is not None:
        attempt = _fold_progress(attempt, view.progress, view.first_step, sight.now)
        attempt = _fold_saves(attempt, view.progress.value)
    if view is not None:
        attempt = settle_recovery(attempt, tells_steps=view.progress is not None, now=sight.now)
    return attempt


def _fold_suspension(attempt: Attempt, now: datetime) -> Attempt:
    """Remember when the job was last seen suspended: the silence of that time does not count as a stall later."""
    if attempt.phase == SUSPENDED and not _is_due(attempt, now):
        return attempt
    return replace(attempt, phase=SUSPENDED, progress_at=now)


def _is_due(attempt: Attempt, now: datetime) -> bool:
    return attempt.progress_at is None or (now - attempt.progress_at).total_seconds() >= PROGRESS_STORE_EVERY_S


def since_suspension_s(attempt: Attempt, now: datetime) -> float:
    """Seconds since the job was last seen suspended; infinite once the training has gone on."""
    if attempt.phase != SUSPENDED or attempt.progress_at is None:
        return math.inf
    return (now - attempt.progress_at).total_seconds()


_UNREPORTED_AFTER_S = 30.0
_NO_LOG_AFTER_S = 5.0


def _fold_unreported(attempt: Attempt, view: RunView, now: datetime, run: Run) -> Attempt:
    """Workers run and nobody has told of progress for a while: the script does not; it counts as under way.

    Without a launcher (a batch script of the person's own) Slurm's word that the job runs has to do.
    """
    is_running = run.script is not None or (view.launch is not None and view.launch.value.phase == "running")
    if not is_running or attempt.started_at is None:
        return attempt
    ran_s = (now - attempt.started_at).total_seconds()
    is_quiet = run.script is not None and not run.spec.progress.pattern
    if attempt.phase != UNREPORTED and is_quiet and _shows_life(view, ran_s):
        attempt = replace(attempt, phase=UNREPORTED, progress_at=now)
    if ran_s < _UNREPORTED_AFTER_S:
        return attempt  # a first step that is told may still come: it counts then
    since = now
    if attempt.phase == UNREPORTED and attempt.progress_at is not None:
        since = attempt.progress_at
    return replace(attempt, stepped_at=since, phase=UNREPORTED, progress_at=since)


def _shows_life(view: RunView, ran_s: float) -> bool:
    """A script's log has grown; where nothing is known of its log, it has run for a few seconds."""
    return view.log.value > 0 if view.log is not None else ran_s >= _NO_LOG_AFTER_S


def _fold_progress(attempt: Attempt, seen: Seen[contract.Progress], first_step: int | None, now: datetime) -> Attempt:
    progress = seen.value
    if progress.attempt != attempt.number or seen.unchanged_s >= since_suspension_s(attempt, now):
        return attempt
    if is_of_earlier_launch(attempt, progress.launch):
        return attempt
    if progress.launch is None and seen.unchanged_s >= since_launch_s(attempt, now):
        return attempt  # its writer can't tell, and it has not changed since this start
    has_stepped = progress.phase != "start" and progress.step > attempt.resume_step
    is_first = attempt.stepped_at is None and has_stepped
    is_news = progress.step != attempt.last_step or progress.phase != attempt.phase
    if not is_first and not (_is_due(attempt, now) and is_news):
        return attempt
    return replace(
        attempt,
        first_step=first_step if attempt.first_step is None else attempt.first_step,
        last_step=max(progress.step, attempt.last_step or 0),
        phase=progress.phase,
        progress_at=now,
        stepped_at=now if is_first else attempt.stepped_at,
    )


_ERROR_CHARS = 500
_NAME_CHARS = 100


def _fold_saves(attempt: Attempt, progress: contract.Progress) -> Attempt:
    """What the training tells of its saves: their cost, the newest good one, failures in a row."""
    if progress.attempt != attempt.number:
        return attempt
    total_s = progress.save_total_s
    is_time = total_s is not None and math.isfinite(total_s) and total_s >= 0
    return replace(
        attempt,
        save_costs_s=fold_cost(attempt.save_costs_s, progress.save_blocking_s),
        save_total_s=total_s if is_time else attempt.save_total_s,
        saved_step=progress.saved_step if progress.saved_step is not None else attempt.saved_step,
        save_failures=max(0, progress.save_failures),
        save_error=progress.save_error[:_ERROR_CHARS] if progress.save_failures > 0 else "",
    )


def _fold_uploads(attempt: Attempt, reports: Sequence[contract.UploadReport]) -> Attempt:
    """What the nodes tell of copying to object storage; a node that fails says more than the first, which waits."""
    own = [report for report in reports if report.attempt == attempt.number]
    if not own:
        return attempt
    leader = own[0]
    cause = max(own[1:], key=lambda r: r.failures, default=leader)
    where = f"node {cause.node}: " if cause is not leader else ""
    return replace(
        attempt,
        uploaded=leader.uploaded[:_NAME_CHARS] or attempt.uploaded,
        upload_failures=max(0, leader.failures),
        upload_error=f"{where}{cause.error}"[:_ERROR_CHARS] if leader.failures > 0 else "",
    )


def last_step_seen(sight: Sight) -> int | None:
    """The newest step known, from the progress file where it can be read."""
    steps = [sight.attempt.last_step]
    progress = sight.view.progress.value if sight.view is not None and sight.view.progress is not None else None
    if progress is not None and not is_of_earlier_launch(sight.attempt, progress.launch):
        steps.append(progress.step)
    return max((s for s in steps if s is not None), default=None)
