"""What a script's job leaves behind that Slurm has forgotten, before its number was known. Pure.

sbatch's answer was lost, the daemon was away, and without accounting a controller forgets a job soon after its end: the
look-up by token then finds nothing, though the attempt has run. A person's script leaves no record of ours, but it has
a log, checkpoints, perhaps progress. To submit the same attempt again would take it back to where this one began.
A sign that is not the attempt's own costs one restart; one that is missed costs the work.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from supervisor.model import Attempt, Checkpoint, LogFile, RunView

# Times of files are the file server's, whose clock may be behind ours.
_CLOCK_MARGIN_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Traces:
    """Signs that an attempt has run, as sentences.

    `is_learnt`: all that it has published is in the ledger, so that nothing of it is fenced when the attempt is over.
    `last_step`: the newest that is known of it.
    """

    signs: tuple[str, ...]
    is_learnt: bool
    last_step: int | None = None
    stamp: tuple[object, ...] = ()  # changes while something goes on


def find_traces(
    attempt: Attempt,
    view: RunView,
    logs: Sequence[LogFile],
    *,
    checkpoints: Sequence[Checkpoint],
    others: Collection[int],
) -> Traces | None:
    """`checkpoints`: all of the run that the ledger knows; `others`: ids of jobs that are not this attempt's."""
    published = [c for c in checkpoints if c.attempt == attempt.number and _is_further(c.step, attempt)]
    unlearnt = _find_unlearnt(attempt, view, checkpoints)
    own_logs = [log for log in logs if _is_own_log(log, attempt, others)]
    progress = view.progress.value if view.progress is not None else None
    steps = [*(c.step for c in published), *unlearnt, *([progress.step] if progress is not None else [])]
    signs = (
        *(f"the checkpoint of step {c.step}" for c in published[-1:]),
        *(f"a checkpoint of step {step}" for step in unlearnt[-1:] if not published),
        *([f"progress up to step {progress.step}"] if progress is not None else []),
        *(f"the log {log.name}" for log in own_logs[:1]),
    )
    if not signs:
        return None
    return Traces(
        signs=signs,
        is_learnt=not unlearnt and not view.unsettled_paths,
        last_step=max(steps, default=None),
        stamp=(*((log.name, log.size_bytes) for log in own_logs), progress and progress.seq, *steps),
    )


def _is_further(step: int, attempt: Attempt) -> bool:
    return step > attempt.resume_step or not attempt.resume_path


def _find_unlearnt(attempt: Attempt, view: RunView, checkpoints: Sequence[Checkpoint]) -> list[int]:
    """Steps of whole checkpoints that the ledger does not know, under their own name or as another of that step."""
    places = {(c.path, c.stamp) for c in checkpoints}
    keys = {c.key for c in checkpoints}
    return sorted(
        v.step
        for v in view.checkpoints
        if v.is_complete
        and (v.path, v.stamp) not in places
        and not keys & {(v.step, attempt.number), (v.step, v.attempt)}
        if _is_further(v.step, attempt)
    )


def _is_own_log(log: LogFile, attempt: Attempt, others: Collection[int]) -> bool:
    """Begun since the attempt was planned: by a name of its own, or in a file that all attempts write to."""
    if log.changed_at_s < attempt.planned_at.timestamp() - _CLOCK_MARGIN_S:
        return False
    return log.job_id not in others if log.job_id is not None else log.size_bytes != attempt.log_offset
