"""Rules about jobs that are held up: that can't be submitted, wait for what does not come, never let go. Pure.

None is an interruption, and none ends an attempt: they are said to someone, once.
"""

from __future__ import annotations

from dataclasses import replace

from slurm.pending import PendingKind, classify_pending
from slurm.types import JobRecord
from supervisor.core import nodes as node_rules
from supervisor.core.draft import Draft
from supervisor.core.identity import is_own
from supervisor.model import Attempt, AttemptState, Fresh, RunState, Stale

_TELL_AFTER_S = 60.0  # a reason may pass while the cluster is being reconfigured
_WAITS = " waits in Slurm: "
_UNSUBMITTED = "not submitted yet: "
_SHOW_AFTER_S = 3.0  # what passes at once is no reason


def tell_waiting(draft: Draft, name: str) -> None:
    """Why the run's job does not start, where that does not pass by itself; it is the run's reason until it has."""
    run, attempt, jobs = draft.runs[name], draft.last_attempt(name), draft.snapshot.jobs
    if isinstance(jobs, Stale):
        return
    job = _find_waiting(draft, attempt) if run.state is RunState.ACTIVE else None
    text = _explain(job) if job is not None else ""
    if text and (not run.reason or _WAITS in run.reason):
        draft.put(replace(run, reason=text), text)
    elif not text and _WAITS in run.reason and run.state is RunState.ACTIVE:
        draft.put(replace(run, reason=""), "its job is held up no more")
    if job is not None and attempt is not None and _is_for_a_person(job) and _age_s(draft, attempt) > _TELL_AFTER_S:
        draft.tell(f"waiting:{name}:{attempt.number}:{job.reason}", f"run {name}: {text}", run=name)


def _find_waiting(draft: Draft, attempt: Attempt | None) -> JobRecord | None:
    jobs = draft.snapshot.jobs
    if attempt is None or attempt.state is not AttemptState.SUBMITTED or not isinstance(jobs, Fresh):
        return None
    job = jobs.value.get(attempt.job_id or 0)
    return job if job is not None and job.is_pending and _is_own(draft, job, attempt) else None


def _is_own(draft: Draft, job: JobRecord, attempt: Attempt) -> bool:
    return is_own(job, attempt, draft.runs[attempt.run])


def _is_for_a_person(job: JobRecord) -> bool:
    return classify_pending(job.reason).kind in (PendingKind.HELD, PendingKind.BLOCKED)


def _age_s(draft: Draft, attempt: Attempt) -> float:
    return (draft.now - attempt.submitted_at).total_seconds() if attempt.submitted_at else 0.0


def _explain(job: JobRecord) -> str:
    """A sentence for people; empty while the job only waits for its turn."""
    found = classify_pending(job.reason)
    match found.kind:
        case PendingKind.WAITS:
            return ""
        case PendingKind.NODES:
            nodes = f": {', '.join(found.nodes[:20])}" if found.nodes else ""
            what = f"nodes that it needs are down, drained or reserved{nodes}"
        case PendingKind.HELD:
            what = f"it is held until someone releases it (scontrol release {job.job_id})"
        case PendingKind.BLOCKED:
            what = "it does not start as it was submitted"
    return f"job {job.job_id}{_WAITS}{job.reason}; {what}"


def tell_unsubmitted(draft: Draft, name: str) -> None:
    """Why an attempt that is planned has no job: what is in the way of its submission, which is tried again."""
    attempt = draft.last_attempt(name)
    planned = attempt if attempt is not None and attempt.state is AttemptState.PLANNED else None
    intent = draft.open_intent(f"submit:{name}:{planned.number}") if planned is not None else None
    if planned is None or intent is None or not intent.outcome:
        draft.show(name, _UNSUBMITTED, "")
        return
    age_s = (draft.now - planned.planned_at).total_seconds()
    if age_s < _SHOW_AFTER_S:
        return
    hint = "; the service's unit may see it read-only (ReadWritePaths)" if _READ_ONLY in intent.outcome else ""
    text = f"{_UNSUBMITTED}{intent.outcome.removeprefix('no answer: ')}{hint}"
    draft.show(name, _UNSUBMITTED, text)
    # A silent Slurm is told by itself (outages).
    if age_s >= _TELL_AFTER_S and isinstance(draft.snapshot.jobs, Fresh):
        draft.tell(f"unsubmitted:{planned.token}", f"run {name}: {text}", run=name)


_READ_ONLY = "Read-only file system"


def tell_stuck(draft: Draft, name: str) -> None:
    """A job of the run that has ended and does not leave its nodes: they are of no use until someone looks."""
    jobs = draft.snapshot.jobs
    if isinstance(jobs, Stale):
        return
    for attempt in draft.attempts(name):
        job = jobs.value.get(attempt.job_id or 0)
        if job is None or not _is_own(draft, job, attempt) or not node_rules.is_stuck(job, draft.now):
            continue
        nodes = ", ".join(job.nodes[:20]) or "its nodes"
        text = f"job {job.job_id} is stuck completing on {nodes}: a process there can't be ended, or an epilog hangs"
        draft.note(f"{name}: {text}")
        draft.tell(f"stuck:{job.job_id}:{attempt.token}", f"run {name}: {text}", run=name, node=(job.nodes or ("",))[0])
