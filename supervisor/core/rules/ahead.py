"""Rules about the attempt that is queued ahead, so that its time in the queue hides behind the running one. Pure.

Its job depends on the end of the running job, and its launcher waits to be told to begin: until it is promoted it
trains nothing, publishes nothing and counts for nothing. It is promoted when the run goes on as it was, and ended as
not needed in every other case.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from slurm.pending import is_launch_failure
from slurm.types import JobFlag, JobRecord, JobState
from supervisor.core import attempts as attempt_rules
from supervisor.core import checkpoints as checkpoint_rules
from supervisor.core import restarts
from supervisor.core.draft import Draft
from supervisor.model import (
    Attempt,
    AttemptEnd,
    AttemptState,
    Fresh,
    Intent,
    IntentKind,
    Run,
    RunState,
    Verdict,
)


def queue(draft: Draft, name: str) -> None:
    """Submit the next attempt behind the running one when that one's time limit is near."""
    run, last, records = draft.runs[name], draft.last_attempt(name), draft.records
    if last is None or records is None or not _is_wanted(draft, run, last):
        return
    spec = restarts.locate(run.spec, draft.snapshot.default_partition)
    size = restarts.choose_size(spec, records, draft.nodes, ours=frozenset(last.nodes))
    if not size.nodes:
        return
    number = draft.next_number(name)
    reason = f"the time limit of attempt {last.number} is near: the next job is queued behind it"
    attempt = Attempt(
        run=name,
        number=number,
        token=run.token(number),
        state=AttemptState.AHEAD,
        nodes_wanted=size.nodes,
        spares=size.spares,
        exclude=size.exclude,
        planned_at=draft.now,
    )
    draft.put(attempt, reason)
    draft.intend(Intent(kind=IntentKind.SUBMIT, key=_submit_key(attempt), reason=reason, run=name, attempt=number))


def _is_wanted(draft: Draft, run: Run, last: Attempt) -> bool:
    before_s = run.spec.restart.queue_ahead_s
    if before_s <= 0 or run.script is not None or run.state is not RunState.ACTIVE:
        return False
    if draft.world.is_paused or run.is_paused or draft.policy.is_observe_only:
        return False
    if any(a.number > last.number for a in draft.aside(run.name)):
        return False  # one for each attempt: what was not needed or refused is not tried again
    job = _find_job(draft, last)
    if last.state is not AttemptState.RUNNING or job is None or job.state is not JobState.RUNNING:
        return False
    return job.limit_at is not None and (job.limit_at - draft.now).total_seconds() <= before_s


def clear(draft: Draft, name: str) -> None:
    """End the attempt that is queued ahead when it will not be needed."""
    ahead = draft.ahead(name)
    if ahead is not None and (why := _why_not_needed(draft, draft.runs[name], ahead)):
        _end(draft, ahead, why)


def _why_not_needed(draft: Draft, run: Run, ahead: Attempt) -> str:
    if run.state is not RunState.ACTIVE:
        return f"the run is {run.state}"
    condemned = {n for n, m in draft.nodes.items() if m.verdict is Verdict.BROKEN} - set(ahead.exclude)
    if condemned:
        return f"{', '.join(sorted(condemned))} must not be given to it"
    job = _find_job(draft, ahead)
    if job is None:
        return "its job is gone from Slurm" if _is_absent(draft, ahead) else ""
    if job.is_ended:
        return f"its job ended ({job.raw_state})"
    if job.restarts > 0 or JobFlag.REQUEUED in job.flags or is_launch_failure(job.reason):
        return f"Slurm requeued its job ({job.raw_state} {job.reason})"
    return ""


def promote(draft: Draft, run: Run, ahead: Attempt, resume: checkpoint_rules.ResumePoint, *, fit: int) -> None:
    """Make it the run's newest attempt, with a resume point chosen as for any other; `fit`: healthy nodes."""
    if fit < ahead.nodes_wanted + ahead.spares:
        _end(draft, ahead, f"{fit} healthy nodes are left, it wants {ahead.nodes_wanted + ahead.spares}")
        return
    reason = f"its turn has come, from {resume.place}"
    promoted = replace(
        ahead,
        state=AttemptState.SUBMITTED if ahead.job_id is not None else AttemptState.PLANNED,
        resume_step=resume.step,
        resume_path=checkpoint_rules.resume_path(run.spec.run_dir, resume),
    )
    draft.put(promoted, reason)
    if run.reason:
        draft.put(replace(run, reason=""), "goes on")
    draft.intend(
        Intent(
            kind=IntentKind.PROMOTE,
            key=f"promote:{run.name}:{ahead.number}",
            reason=reason,
            run=run.name,
            attempt=ahead.number,
        )
    )
    draft.ask_slurm()
    draft.wake_within(0)


def find_nodes(draft: Draft, ahead: Attempt) -> frozenset[str]:
    """The nodes that its job has been given already, where it waits to be told to begin."""
    job = _find_job(draft, ahead)
    return frozenset(job.nodes) if job is not None and job.state is JobState.RUNNING else frozenset()


def _end(draft: Draft, ahead: Attempt, why: str) -> None:
    """Over, as not needed; a job that it has is cancelled by the rule for what is over."""
    intent = draft.open_intent(_submit_key(ahead))
    if intent is not None and intent.tries > 0:
        draft.note(f"{ahead.run}: attempt {ahead.number} is not needed, but its submission is not settled yet")
        draft.wake_within(1.0)
        return
    if intent is not None:
        draft.withdraw(intent, why)
    over = replace(
        ahead,
        state=AttemptState.OVER,
        over_at=draft.now,
        end=AttemptEnd.NOT_NEEDED,
        end_detail=why,
        is_job_gone=ahead.job_id is None,
    )
    draft.put(over, f"not needed: {why}")
    draft.wake_within(0)


def _submit_key(attempt: Attempt) -> str:
    return f"submit:{attempt.run}:{attempt.number}"


def _find_job(draft: Draft, attempt: Attempt) -> JobRecord | None:
    jobs = draft.snapshot.jobs
    if not isinstance(jobs, Fresh) or attempt.job_id is None:
        return None
    job = jobs.value.get(attempt.job_id)
    return job if job is not None and attempt_rules.is_own(job, attempt) else None


def _is_absent(draft: Draft, ahead: Attempt) -> bool:
    """True when an answer that was asked for well after the submission does not hold its job."""
    jobs = draft.snapshot.jobs
    if not isinstance(jobs, Fresh) or ahead.job_id is None or ahead.submitted_at is None:
        return False
    return jobs.asked_at > ahead.submitted_at + timedelta(seconds=attempt_rules.ABSENT_MARGIN_S)
