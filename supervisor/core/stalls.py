"""Whether an attempt has hung: silence beyond the limit of its phase. Pure."""

from __future__ import annotations

from dataclasses import replace

from supervisor.core.attempts import since_suspension_s
from supervisor.core.launches import RECOVERING, STALL_MARGIN_S, is_in_hand, is_of_earlier_launch, since_launch_s
from supervisor.core.sight import Sight
from supervisor.model import (
    AttemptState,
    ProgressSpec,
)


def judge_stall(sight: Sight) -> str | None:
    """One sentence when the progress file has been silent for longer than its phase allows; None otherwise.

    The limit is the one that the job announces (learnt from observed durations), kept within the run file's bounds;
    without an announcement it is the upper bound. Ages are measured by the observer's monotonic clock. The
    launcher judges first, by the same limits: the training has hung here when it has not acted for a margin.
    """
    attempt, view = sight.attempt, sight.view
    if attempt.state is not AttemptState.RUNNING or view is None:
        return None
    if sight.is_suspended or not sight.jobs_are_fresh:  # without an answer of squeue nobody knows whether it is
        return None
    suspended_ago_s = since_suspension_s(attempt, sight.now)
    has_judge = sight.run.script is None and sight.run.spec.restart.in_job
    if is_in_hand(sight) and view.launch is not None and view.launch.value.phase == RECOVERING:
        return None  # how long that may take is another question
    suspended_ago_s = min(suspended_ago_s, since_launch_s(attempt, sight.now))
    if view.progress is None or view.progress.value.attempt != attempt.number:
        return _judge_silent_log(sight, suspended_ago_s)
    progress = view.progress.value
    if is_of_earlier_launch(attempt, progress.launch):
        progress = replace(progress, phase="start", limit_s=None, step=attempt.launch_step or 0)
    announced_s = progress.limit_s
    if announced_s is not None and not has_judge:
        announced_s = max(announced_s, _FLOOR_S)
    limit = choose_limit(progress.phase, announced_s, sight.run.spec.progress)
    if limit is not None and has_judge:
        limit += STALL_MARGIN_S  # of a launcher that is silent itself, its nodes tell more, and sooner
    silent_s = min(view.progress.unchanged_s, suspended_ago_s)
    if limit is None or silent_s <= limit:
        return None
    return (
        f"no progress for {silent_s:.0f} s in phase {progress.phase} after step {progress.step} (limit {limit:.0f} s)"
    )


def _judge_silent_log(sight: Sight, suspended_ago_s: float) -> str | None:
    """A script that reports no progress is judged by its log, with the limit of the start: it may print seldom."""
    limit = choose_limit("start", None, sight.run.spec.progress)
    log = sight.view.log if sight.view is not None else None
    if sight.run.script is not None and log is None:
        return None  # where a person's script writes may not be known: Slurm alone judges it then
    started_at = sight.attempt.started_at
    waited_s = log.unchanged_s if log is not None else (sight.now - started_at).total_seconds() if started_at else 0.0
    waited_s = min(waited_s, suspended_ago_s)
    if limit is None or waited_s <= limit:
        return None
    option = "progress.start_max_s" if sight.run.script is None else "--supervise-stall-s"
    return (
        f"no steps are told, and nothing new in the log for {waited_s:.0f} s "
        f"(limit {option} = {limit:.0f} s; 0 turns it off)"
    )


_FLOOR_S = 20.0  # Slurm is asked every 15 s: a job that was suspended in between is silent for as long


def choose_limit(phase: str, announced_s: float | None, spec: ProgressSpec) -> float | None:
    """Seconds of silence allowed in a phase; None when detection is off for it (maximum 0)."""
    low, high = spec.bounds(phase)
    if high <= 0:
        return None
    return high if announced_s is None else min(max(announced_s, low), high)
