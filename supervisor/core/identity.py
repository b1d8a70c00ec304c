"""Whether a job that Slurm shows is an attempt's own: job ids come round, and comments can be changed. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from slurm.types import JobFlag, JobRecord
from supervisor.model import Attempt, AttemptState, Run

_SUBMITTED_WITHIN_S = 120.0  # the submission by our clock and by the controller's
_REQUEUED = frozenset({JobFlag.REQUEUED, JobFlag.REQUEUE_HOLD, JobFlag.SPECIAL_EXIT})


def is_own(job: JobRecord, attempt: Attempt, run: Run) -> bool:
    """True when the job under the attempt's id is the attempt's: ids come round.

    Our token says that it is. Without it nothing is said: the job's owner, an administrator or a plugin may have put
    another comment, or another name, there. Then its owner and its submission decide.
    """
    if job.comment == attempt.token:
        return True
    if _is_anothers(job, attempt):
        return False
    if attempt.slurm_submit_at is not None and job.submit_at is not None:
        return is_seen_submission(job, attempt) or _is_requeued_since(job, attempt)
    if attempt.is_adopted and job.submit_at == attempt.submitted_at:
        return True
    if not attempt.is_adopted and _is_submitted_about_then(job, attempt):
        return True
    return not job.comment and job.name in ("", run.job_name)


def is_seen_submission(job: JobRecord, attempt: Attempt) -> bool:
    """True for the very submission that was seen as the attempt's (job id given), in Slurm's own words."""
    is_seen = attempt.slurm_submit_at is not None and job.submit_at == attempt.slurm_submit_at
    return is_seen and not _is_anothers(job, attempt)


def _is_anothers(job: JobRecord, attempt: Attempt) -> bool:
    return bool(job.user and attempt.slurm_user) and job.user != attempt.slurm_user


def _is_requeued_since(job: JobRecord, attempt: Attempt) -> bool:
    """A requeue is a new submission to Slurm, of the same number; another's job of that number begins at none."""
    if job.submit_at is None or attempt.slurm_submit_at is None or job.submit_at < attempt.slurm_submit_at:
        return False
    return job.restarts > attempt.slurm_restarts or bool(job.flags & _REQUEUED)


def _is_submitted_about_then(job: JobRecord, attempt: Attempt) -> bool:
    """Before it was ever seen: the number that sbatch gave us, of our account, submitted when we did it."""
    if job.submit_at is None or attempt.submitted_at is None or not job.user or job.user != attempt.slurm_user:
        return False
    return abs((job.submit_at - attempt.submitted_at).total_seconds()) <= _SUBMITTED_WITHIN_S


def fold_submission(attempt: Attempt, job: JobRecord | None) -> Attempt:
    """The attempt with its own job's submission, as Slurm tells it: what the job is known by from now on."""
    if job is None or job.submit_at in (None, attempt.slurm_submit_at):
        return attempt
    return replace(attempt, slurm_submit_at=job.submit_at, slurm_user=job.user or attempt.slurm_user)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stray:
    """A live job of a run that should not be."""

    job: JobRecord
    attempt: Attempt
    is_first: bool  # the attempt's own job, which came back after it was gone; else a second one


def find_strays(jobs: Iterable[JobRecord], attempts: Iterable[Attempt], job_name: str) -> Iterator[Stray]:
    """Live jobs that bear an attempt's token or submission and are a second job of it, or were gone already.

    `attempts` of one run, whose jobs have the name `job_name`.
    """
    ours = {a.token: a for a in attempts if a.state not in (AttemptState.PLANNED, AttemptState.AHEAD)}
    numbers = {a.job_id: a for a in ours.values()}
    for job in jobs:
        attempt = numbers.get(job.job_id)
        is_first = attempt is not None and (is_seen_submission(job, attempt) or job.comment == attempt.token)
        if not is_first:
            attempt = ours.get(job.comment) if job.name in ("", job_name) else None
        if attempt is None or not job.is_live or _is_anothers(job, attempt):
            continue  # anybody may put our token on a job
        if not is_first or attempt.is_job_gone:
            yield Stray(job=job, attempt=attempt, is_first=is_first)
