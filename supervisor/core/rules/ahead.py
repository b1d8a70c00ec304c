"""Rules about the attempt that is queued ahead, so that its time in the queue hides behind the running one. Pure.

Its job depends on the end of the running job, and its launcher waits to be told to begin: until it is promoted it
trains nothing, publishes nothing and counts for nothing. It is promoted when the run goes on as it was, and ended as
not needed in every other case.

A person's own script has no launcher. Its job finds a link that we keep pointing at the newest checkpoint that may be
believed, until the job has begun: it may have read the link then. From then on it trains, also where the run does not
go on: what the folder shows from then on is this attempt's, and is fenced when it turns out not to be needed.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from slurm.pending import is_launch_failure
from slurm.types import JobFlag, JobRecord, JobState
from supervisor.core import checkpoints as checkpoint_rules
from supervisor.core import elastic, foreign, restarts
from supervisor.core.divergence import choose_skips
from supervisor.core.draft import Draft
from supervisor.core.identity import fold_submission, is_own
from supervisor.core.interval import carried_every_s
from supervisor.core.sight import ABSENT_MARGIN_S
from supervisor.model import (
    Attempt,
    AttemptEnd,
    AttemptState,
    CheckpointState,
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
    view = draft.view(name)
    is_elastic = view is None or view.progress is None or view.progress.value.is_elastic
    fixed = elastic.find_next_size(run, last, draft.checkpoints(name), is_elastic=is_elastic)
    spec = elastic.fix_size(restarts.locate(run.spec, draft.snapshot.default_partition), fixed)
    size = restarts.choose_size(spec, records, draft.nodes, ours=frozenset(last.nodes))
    resume = _choose_link(draft, run) if run.script is not None else checkpoint_rules.ResumePoint()
    if not size.nodes or resume.is_lost:
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
        resume_step=resume.step,
        resume_path=checkpoint_rules.resume_path(run.spec.run_dir, resume),
        planned_at=draft.now,
        checkpoint_every_s=carried_every_s(run.spec.checkpoint, draft.attempts(name)),
        skip_samples=choose_skips(run, draft.attempts(name)),
    )
    draft.put(attempt, reason)
    draft.intend(Intent(kind=IntentKind.SUBMIT, key=_submit_key(attempt), reason=reason, run=name, attempt=number))


def _is_wanted(draft: Draft, run: Run, last: Attempt) -> bool:
    before_s = run.spec.restart.queue_ahead_s
    if before_s <= 0 or run.state is not RunState.ACTIVE:
        return False
    if draft.world.is_paused or run.is_paused or draft.policy.is_observe_only:
        return False
    if any(a.number > last.number for a in draft.aside(run.name)):
        return False  # one for each attempt: what was not needed or refused is not tried again
    job = _find_job(draft, last)
    if last.state is not AttemptState.RUNNING or job is None or job.state is not JobState.RUNNING:
        return False
    return job.limit_at is not None and (job.limit_at - draft.now).total_seconds() <= before_s


def learn_begun(draft: Draft, name: str) -> None:
    """Note its submission as Slurm tells it, and that a script's job has begun: it trains, its turn or not."""
    ahead = draft.ahead(name)
    if ahead is None:
        return
    job = _find_job(draft, ahead)
    ahead = fold_submission(ahead, job)
    draft.put(ahead, "seen")
    if ahead.started_at is not None or draft.runs[name].script is None:
        return
    if job is None or job.is_pending or not job.nodes:
        return
    draft.put(replace(ahead, started_at=job.start_at or draft.now), "its job has begun")


def point(draft: Draft, name: str) -> None:
    """Keep the link of a script's job that waits on the newest checkpoint that may be believed."""
    run, ahead = draft.runs[name], draft.ahead(name)
    if ahead is None or run.script is None or not _has_movable_link(ahead) or draft.policy.is_observe_only:
        return
    resume = _choose_link(draft, run)
    path = checkpoint_rules.resume_path(run.spec.run_dir, resume)
    if resume.is_lost or (ahead.resume_path and not path):
        _end(draft, ahead, resume.why if resume.is_lost else "the checkpoint that it would begin from is gone")
    elif path != ahead.resume_path and _may_be_its_own(draft, resume):
        draft.ask_slurm()
    elif path != ahead.resume_path:
        draft.intend(
            Intent(
                kind=IntentKind.PROMOTE,
                key=f"link:{name}:{ahead.number}",
                reason=f"it would begin from {resume.place}",
                text=path,
                run=name,
                attempt=ahead.number,
                step=resume.step,
            )
        )


def _may_be_its_own(draft: Draft, resume: checkpoint_rules.ResumePoint) -> bool:
    """True for a checkpoint that is newer than Slurm's word that the job waits: the job may have begun and made it."""
    if resume.checkpoint is None:
        return False
    jobs = draft.snapshot.jobs
    return not isinstance(jobs, Fresh) or jobs.asked_at < resume.checkpoint.first_seen_at


def _has_movable_link(ahead: Attempt) -> bool:
    """A job that has begun may have read it; before the submission has its answer it stays as it was submitted."""
    return ahead.job_id is not None and ahead.started_at is None


def _choose_link(draft: Draft, run: Run) -> checkpoint_rules.ResumePoint:
    """As for a resubmission now, except that what must still be read back is passed over: it can't be waited for."""
    is_foreign = foreign.is_foreign(run.spec.checkpoint)
    choose = foreign.choose_foreign_resume if is_foreign else checkpoint_rules.choose_resume
    known = draft.checkpoints(run.name)
    resume = choose(known, run.spec.checkpoint, since=None)
    while resume.checkpoint is None and resume.read_back:
        passed = {c.key for c in resume.read_back}
        known = tuple(c for c in known if c.key not in passed)
        resume = choose(known, run.spec.checkpoint, since=None)
        if resume.is_lost:  # what was passed over may turn out to be good
            return checkpoint_rules.ResumePoint(why="no checkpoint is read back yet")
    return resume


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
    if why := _why_unsound(draft, run, ahead):
        return why
    job = _find_job(draft, ahead)
    if job is None:
        is_gone = ahead.started_at is None and _is_absent(draft, ahead)
        return "its job is gone from Slurm" if is_gone else ""
    if job.is_ended and ahead.started_at is None:
        return f"its job ended ({job.raw_state})"
    if job.restarts > 0 or JobFlag.REQUEUED in job.flags or is_launch_failure(job.reason):
        return f"Slurm requeued its job ({job.raw_state} {job.reason})"
    return ""


def _why_unsound(draft: Draft, run: Run, ahead: Attempt) -> str:
    """A script's job reads its environment once, and its link once it has begun: neither may be what is wrong now."""
    if run.script is None:
        return ""
    if choose_skips(run, draft.attempts(run.name)) != ahead.skip_samples:
        return "the batches that are left out have changed since it was submitted"
    suspect = {c.path for c in draft.checkpoints(run.name) if c.state is CheckpointState.SUSPECT}
    has_read_it = ahead.started_at is not None and ahead.resume_path in suspect
    return "it has begun from a checkpoint that is suspect now" if has_read_it else ""


def promote(
    draft: Draft,
    run: Run,
    ahead: Attempt,
    resume: checkpoint_rules.ResumePoint,
    *,
    fit: int,
    fixed: elastic.FixedSize | None = None,
) -> None:
    """Make it the run's newest attempt, with a resume point chosen as for any other; `fit`: healthy nodes."""
    if fixed is not None and fixed.nodes not in (0, ahead.nodes_wanted):
        _end(draft, ahead, f"it wants {ahead.nodes_wanted} nodes, and {fixed.nodes} are needed: {fixed.why}")
        return
    if fit < ahead.nodes_wanted + ahead.spares:
        _end(draft, ahead, f"{fit} healthy nodes are left, it wants {ahead.nodes_wanted + ahead.spares}")
        return
    path = checkpoint_rules.resume_path(run.spec.run_dir, resume)
    if run.script is not None and path != ahead.resume_path:
        draft.note(f"{run.name}: attempt {ahead.number} waits for its link to point at step {resume.step}")
        draft.wake_within(0.2)
        return
    reason = f"its turn has come, from {resume.place}"
    promoted = replace(
        ahead,
        state=AttemptState.SUBMITTED if ahead.job_id is not None else AttemptState.PLANNED,
        resume_step=resume.step,
        resume_path=path,
    )
    if run.script is None:  # a script's environment was fixed when it was submitted
        every_s = carried_every_s(run.spec.checkpoint, draft.attempts(run.name))
        skips = choose_skips(run, draft.attempts(run.name))
        promoted = replace(promoted, checkpoint_every_s=every_s, skip_samples=skips)
    _put_promoted(draft, run, promoted, reason)
    if run.script is None:
        draft.intend(
            Intent(
                kind=IntentKind.PROMOTE,
                key=f"promote:{run.name}:{ahead.number}",
                reason=reason,
                run=run.name,
                attempt=ahead.number,
            )
        )


def promote_begun(draft: Draft, run: Run, ahead: Attempt) -> None:
    """A script's job that has begun: from where its link pointed at then, and on the nodes that it has."""
    place = f"step {ahead.resume_step}" if ahead.resume_path else "the beginning"
    _put_promoted(draft, run, replace(ahead, state=AttemptState.RUNNING), f"it has begun already, from {place}")


def _put_promoted(draft: Draft, run: Run, promoted: Attempt, reason: str) -> None:
    draft.put(promoted, reason)
    if run.reason:
        draft.put(replace(run, reason=""), "goes on")
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
    _fence(draft, over)
    draft.wake_within(0)


def _fence(draft: Draft, over: Attempt) -> None:
    """What was first seen after its job had begun does not count: nobody can say that it is not this one's."""
    if over.started_at is None:
        return
    for checkpoint in draft.checkpoints(over.run):
        is_usable = checkpoint.is_usable
        is_its_own = checkpoint.attempt == over.number or checkpoint.first_seen_at >= over.started_at
        if is_usable and is_its_own and checkpoint.stamp:
            why = f"published after attempt {over.number}, which was not needed, had begun"
            draft.put(replace(checkpoint, state=CheckpointState.FENCED, detail=why), why)


def _submit_key(attempt: Attempt) -> str:
    return f"submit:{attempt.run}:{attempt.number}"


def _find_job(draft: Draft, attempt: Attempt) -> JobRecord | None:
    jobs = draft.snapshot.jobs
    if not isinstance(jobs, Fresh) or attempt.job_id is None:
        return None
    job = jobs.value.get(attempt.job_id)
    return job if job is not None and is_own(job, attempt, draft.runs[attempt.run]) else None


def _is_absent(draft: Draft, ahead: Attempt) -> bool:
    """True when an answer that was asked for well after the submission does not hold its job."""
    jobs = draft.snapshot.jobs
    if not isinstance(jobs, Fresh) or ahead.job_id is None or ahead.submitted_at is None:
        return False
    return jobs.asked_at > ahead.submitted_at + timedelta(seconds=ABSENT_MARGIN_S)
