"""Rules about attempts: what is seen of them, how they end, and that nothing of them runs on afterwards. Pure."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from slurm.types import JobRecord
from supervisor.core import checkpoints as checkpoint_rules
from supervisor.core import elastic, launches, restarts
from supervisor.core import nodes as node_rules
from supervisor.core.attempts import fold_attempt, last_step_seen
from supervisor.core.draft import Draft
from supervisor.core.drills import mark_drill
from supervisor.core.ends import Ended, awaits_slurm, judge_end, was_terminated
from supervisor.core.identity import find_strays, is_own
from supervisor.core.reliability import find_resume_step
from supervisor.core.rules.checkpoints import put_checkpoint
from supervisor.core.rules.divergence import take_in_fault
from supervisor.core.rules.launches import learn_interruptions
from supervisor.core.rules.nodes import condemn
from supervisor.core.rules.runs import hold
from supervisor.core.sight import ABSENT_MARGIN_S, Sight, find_sight, has_unregistered, is_alive
from supervisor.joblog import find_log
from supervisor.model import (
    PLANNED_ENDS,
    Attempt,
    AttemptEnd,
    AttemptState,
    Fresh,
    Intent,
    IntentKind,
    IntentState,
    Interruption,
    Run,
    RunState,
    RunView,
    Stale,
)

_CANCEL_SETTLE_S = 5.0  # an answer younger than this after scancel may still show the job
_REFUSED_AGAIN_S = 300.0  # somebody else's job, with our token as its comment, stays theirs
_UNREADABLE = "the run directory can't be read"
_ODD_FILES = "files of the run can't be used"
_UNREADABLE_TELL_S = 180.0
_STRAY_TELL_S = 60.0  # a controller that has lost its state ends the jobs of a node as the node registers
_OWN_END_S = 10.0  # a job whose launcher has said how it ended gets this long to end by itself


def judge_attempt(draft: Draft, run: Run) -> None:
    """Take in what is seen of the newest attempt, and declare it over when it has ended."""
    attempt = draft.last_attempt(run.name)
    if attempt is None or attempt.is_over:
        return
    if attempt.state is AttemptState.PLANNED:
        _judge_planned(draft, run, attempt)
        return
    _tell_unreadable(draft, run)
    _show_odd_files(draft, run)
    sight = find_sight(run, attempt, draft.snapshot, draft.now)
    attempt = fold_attempt(sight)
    sight = replace(sight, attempt=attempt)
    draft.put(attempt, "seen")
    attempt = learn_interruptions(draft, sight)
    sight = replace(sight, attempt=attempt)
    _keep_token(draft, sight)
    _learn_final_step(draft, run, sight.view)
    suspected = node_rules.suspects(sight, draft.records)
    draft.watch(suspected | node_rules.choose_controls(suspected, attempt, draft.records))
    if suspected:
        draft.wake_within(draft.policy.cycle_interval_s / 4)  # the port's silence is confirmed between two cycles
    sight = replace(
        sight,
        silent=node_rules.judge_silence(sight, draft.snapshot.ports),
        failed_by_slurm=node_rules.judge_slurm_failure(sight, draft.snapshot),
        smaller=_choose_smaller(draft, run, attempt),
    )
    ended = judge_end(sight, is_paused=_gives_nothing_up(draft, run))
    if ended is not None:
        _end_attempt(draft, sight, ended)
    elif awaits_slurm(sight) or (was_terminated(sight) and not sight.is_absent):
        draft.ask_slurm()
        draft.wake_within(0.3)
    elif sight.is_absent:
        _look_again(draft, sight)
    elif sight.job is not None and sight.job.is_ended:
        draft.ask_slurm()


def _keep_token(draft: Draft, sight: Sight) -> None:
    """Somebody has put another comment in place of our token: it is put back, once. The job is ours without it."""
    attempt, job, jobs = sight.attempt, sight.job, draft.snapshot.jobs
    if job is None or job.is_ended or job.comment == attempt.token or isinstance(jobs, Stale):
        return
    if _gives_nothing_up(draft, sight.run) or any(i.job_id == job.job_id for i in draft.open_intents(IntentKind.CLAIM)):
        return
    before = [i for i in draft.settled_intents(IntentKind.CLAIM) if (i.run, i.attempt) == (attempt.run, attempt.number)]
    if any(i.state is IntentState.REFUSED or _is_before(jobs.asked_at, i) for i in before):
        return
    key = f"token:{attempt.token}"
    text = f"the comment of job {job.job_id} was changed"
    if all(i.key != key for i in before):
        reason = f"{text}: our token is put back"
        draft.note(f"{attempt.run}: {reason}")
        draft.intend(
            Intent(
                kind=IntentKind.CLAIM,
                key=key,
                reason=reason,
                run=attempt.run,
                attempt=attempt.number,
                job_id=job.job_id,
            )
        )
        return
    text = f"{text} again and is left so: the job is known by its number and the time of its submission"
    draft.note(f"{attempt.run}: {text}")
    draft.tell(f"comment:{attempt.run}", f"run {attempt.run}: {text}", run=attempt.run)


def _is_before(asked_at: datetime, settled: Intent) -> bool:
    """True while an answer may have been given before the intent was done."""
    return settled.settled_at is None or asked_at < settled.settled_at + timedelta(seconds=_CANCEL_SETTLE_S)


def _look_again(draft: Draft, sight: Sight) -> None:
    """The job is absent and nothing says that it has ended: ask again soon, and tell someone if it lives on."""
    attempt = sight.attempt
    draft.ask_slurm()
    draft.wake_within(1.0)
    if not is_alive(sight.view, attempt):
        return
    text = f"job {attempt.job_id} of attempt {attempt.number} is not known to Slurm, but it is alive"
    draft.note(f"{attempt.run}: {text}: no other attempt is planned")
    if _STRAY_TELL_S <= sight.absent_s < float("inf"):
        draft.tell(f"stray:{attempt.run}:{attempt.number}", f"run {attempt.run}: {text}", run=attempt.run)


def _tell_unreadable(draft: Draft, run: Run) -> None:
    """While a run directory can't be read nobody knows how the training is: after some minutes a person should."""
    view, known = draft.snapshot.runs.get(run.name), draft.runs[run.name]
    is_long = isinstance(view, Stale) and (draft.now - view.since_at).total_seconds() > _UNREADABLE_TELL_S
    if isinstance(view, Stale) and is_long:
        text = f"{_UNREADABLE}: {view.why}"
        draft.tell(f"unreadable:{run.name}:{view.since_at:%s}", f"run {run.name}: {text}", run=run.name)
        draft.put(replace(known, reason=text), text)
    elif not isinstance(view, Stale) and known.reason.startswith(_UNREADABLE):
        draft.put(replace(known, reason=""), "the run directory can be read again")


def _show_odd_files(draft: Draft, run: Run) -> None:
    """Files that are not what the contract says count as unknown; which ones is the run's reason while it has none."""
    view, known = draft.snapshot.runs.get(run.name), draft.runs[run.name]
    if not isinstance(view, Fresh):
        return
    lines = view.value.unreadable
    more = f" (and {len(lines) - 1} more)" if len(lines) > 1 else ""
    text = f"{_ODD_FILES}: {lines[0]}{more}" if lines else ""
    if known.reason != text and (not known.reason or known.reason.startswith(_ODD_FILES)):
        draft.put(replace(known, reason=text), text or "every file of the run can be read")


def _gives_nothing_up(draft: Draft, run: Run) -> bool:
    """True while nothing that runs may be ended by us: only ends that have happened count then."""
    return draft.world.is_paused or run.is_paused or draft.policy.is_observe_only


def _choose_smaller(draft: Draft, run: Run, attempt: Attempt) -> int:
    nodes = draft.snapshot.nodes
    if attempt.state is not AttemptState.SUBMITTED or attempt.submitted_at is None:
        return 0
    if isinstance(nodes, Stale) or nodes.asked_at < attempt.submitted_at:
        return 0
    before = [a for a in draft.attempts(run.name) if a.number < attempt.number]
    resumed = checkpoint_rules.find_resumed(attempt, draft.checkpoints(run.name), run.spec.run_dir)
    fixed = elastic.find_fixed_size(run, before, resumed)
    spec = elastic.fix_size(restarts.locate(run.spec, draft.snapshot.default_partition), fixed)
    return restarts.choose_smaller(spec, attempt, nodes.value, draft.nodes)


def _learn_final_step(draft: Draft, run: Run, view: RunView | None) -> None:
    if view is None or view.progress is None or view.progress.value.final_step in (None, run.final_step):
        return
    draft.put(replace(draft.runs[run.name], final_step=view.progress.value.final_step), "announced by the training")


def _judge_planned(draft: Draft, run: Run, attempt: Attempt) -> None:
    """An attempt whose submission has no outcome yet. Only an intent that was never tried can be taken back."""
    intent = draft.open_intent(f"submit:{run.name}:{attempt.number}")
    if run.state is RunState.STOPPING and (intent is None or intent.tries == 0):
        if intent is not None:
            draft.withdraw(intent, "the run was stopped")
        over = replace(attempt, state=AttemptState.OVER, over_at=draft.now, end=AttemptEnd.STOPPED, is_job_gone=True)
        draft.put(over, "stopped before it was submitted")


def _end_attempt(draft: Draft, sight: Sight, ended: Ended) -> None:
    """Declare the attempt over: from here on it is fenced."""
    attempt = sight.attempt
    over = replace(
        attempt,
        state=AttemptState.OVER,
        over_at=draft.now,
        end=ended.end,
        end_detail=ended.detail,
        exit_code=ended.exit_code,
        last_step=last_step_seen(sight),
    )
    over = take_in_fault(draft, sight, over)
    draft.put(over, over.end_detail)
    if ended.end is AttemptEnd.CHECKPOINT_REJECTED:
        _count_load_failure(draft, sight)
    reasons = {s.node: s.evidence for s in (*sight.silent, *sight.failed_by_slurm)}
    for node in ended.nodes:
        said = ended.detail if ended.detail.startswith(f"{node}:") else f"{node}: {ended.detail}"
        condemn(draft, node, reasons.get(node, said), attempt.run, attempt.number)
    if ended.end not in _NO_INTERRUPTION:
        _put_interruption(draft, over, _last_launch(sight), ended, _with_log(sight, ended))
    if not ended.is_curable:
        hold(draft, attempt.run, f"a restart can't cure this: {ended.detail}")
    draft.ask_slurm()
    draft.wake_within(0)


def _put_interruption(draft: Draft, over: Attempt, launch: int, ended: Ended, evidence: tuple[str, ...]) -> None:
    known = next((i for i in draft.interruptions(over.run) if (i.attempt, i.launch) == (over.number, launch)), None)
    was_counted = known is not None and known.is_planned
    if known is not None and ended.end in PLANNED_ENDS and not known.is_planned:
        return  # the start had failed before somebody ended the attempt: the failure is what is told
    found = Interruption(
        run=over.run,
        attempt=over.number,
        launch=launch,
        kind=ended.end.value,
        cause=over.end_detail,
        node=ended.nodes[0] if ended.nodes else ended.hint,
        is_planned=ended.end in PLANNED_ENDS,
        detected_at=draft.now,
        last_step=over.last_step,
        evidence=evidence,
    )
    marked = mark_drill(draft, over, found)
    if marked.drill and not was_counted and not found.is_planned:
        draft.put(replace(over, planned=over.planned + 1), over.end_detail)
    draft.put(marked, ended.detail)


def _last_launch(sight: Sight) -> int:
    """The start that the end of the attempt has interrupted: what the launcher says of it alone is no other one."""
    view, attempt = sight.view, sight.attempt
    records = launches.choose_records(view.interruptions, attempt, view.exit) if view is not None else ()
    return min(max([attempt.launch, *(r.launch + 1 for r in records if r.training)]), launches.MAX_LAUNCHES)


_NO_INTERRUPTION = frozenset(
    {AttemptEnd.RESIZED, AttemptEnd.FINISHED, AttemptEnd.STOPPED, AttemptEnd.REFUSED, AttemptEnd.LOST}
)


def _with_log(sight: Sight, ended: Ended) -> tuple[str, ...]:
    """The evidence, without what the cause says already, and where to read on."""
    log = find_log(sight.run, sight.attempt, user="") or (sight.run.script.output if sight.run.script else "not known")
    return (*(line for line in ended.evidence if line != ended.detail), f"log: {log}")


def _count_load_failure(draft: Draft, sight: Sight) -> None:
    attempt, outcome = sight.attempt, sight.view.outcome if sight.view is not None else None
    detail = outcome.message if outcome is not None and outcome.message else "rejected by the training"
    rejected = _rejected_path(sight)
    for checkpoint in draft.checkpoints(attempt.run):
        if checkpoint.path == rejected:
            put_checkpoint(draft, *checkpoint_rules.fold_load_failure(checkpoint, detail))


def _rejected_path(sight: Sight) -> str:
    """What the last start of the training was given; a start inside the job begins where its launcher knew of."""
    attempt, outcome = sight.attempt, sight.view.outcome if sight.view is not None else None
    if attempt.launch == 0:
        return attempt.resume_path
    if outcome is not None and outcome.attempt == attempt.number and outcome.checkpoint:
        return outcome.checkpoint
    return attempt.advised_path if attempt.advised_step == attempt.launch_step else ""


def learn_resumed(draft: Draft, run: str) -> None:
    """The down time ends with the first new step, the cost of an interruption when the lost steps are done again."""
    attempt = draft.last_attempt(run)
    if attempt is None or attempt.stepped_at is None:
        return
    step = _newest_step(draft, attempt)
    for known in draft.interruptions(run):
        after = known
        if known.attempt == attempt.number and known.is_in_job:
            _learn_resumed_inside(draft, attempt, known, step)
        if known.attempt >= attempt.number:
            continue
        if after.resumed_at is None:
            step_of = known.resume_step if _has_own_resume_step(known) else find_resume_step(attempt)
            after = replace(after, resumed_at=attempt.stepped_at, resume_step=step_of)
            draft.put(after, f"first new step of attempt {attempt.number}")
        if after.caught_up_at is None and step >= (after.last_step or 0):
            draft.put(replace(after, caught_up_at=draft.now), f"step {after.last_step} is reached again")


def _has_own_resume_step(known: Interruption) -> bool:
    """A start that followed inside the job, and failed too, has begun where its launcher says."""
    return known.is_in_job and known.resume_step is not None


def _learn_resumed_inside(draft: Draft, attempt: Attempt, known: Interruption, step: int) -> None:
    """The launcher says when a start that followed has stepped; one that did not was followed by another."""
    after = known
    if known.resumed_at is None and (resumed_at := _find_resumed(draft, attempt, known)) is not None:
        after = replace(known, resumed_at=resumed_at)
        draft.put(after, "a later start of the training is under way")
        _settle_record(draft, known)
    is_past = attempt.launch > known.launch and after.resumed_at is not None
    if is_past and after.caught_up_at is None and step >= (after.last_step or 0):
        why = "is not known" if after.last_step is None else f"{after.last_step} is reached again"
        draft.put(replace(after, caught_up_at=draft.now), f"step {why}")


def _settle_record(draft: Draft, known: Interruption) -> None:
    """Its record is not read again: it may say for ever that nothing was resumed, and the ledger has its row."""
    newest = draft.last_attempt(known.run)
    if newest is not None and newest.number == known.attempt and newest.interruptions_read <= known.launch:
        draft.put(replace(newest, interruptions_read=known.launch + 1), "the interruption is settled")


def _find_resumed(draft: Draft, attempt: Attempt, known: Interruption) -> datetime | None:
    """When the training went on, where the launcher has not said so of the very next start.

    It sees neither steps that are only in the log, nor those of a training that tells none: that one goes on when its
    launcher says that it recovers no longer.
    """
    later = (i for i in draft.interruptions(known.run) if i.attempt == known.attempt and i.launch > known.launch)
    told = min((i.resumed_at for i in later if i.resumed_at is not None), default=None)
    if told is not None or attempt.launch <= known.launch:
        return told
    view = draft.view(attempt.run)
    if view is None or view.launch is None or attempt.recovering:
        return None
    if view.progress is None:
        return attempt.launched_at
    return draft.now if (attempt.last_step or 0) > (attempt.launch_step or 0) else None


def _newest_step(draft: Draft, attempt: Attempt) -> int:
    view = draft.view(attempt.run)
    progress = view.progress.value if view is not None and view.progress is not None else None
    is_own_step = progress is not None and progress.attempt == attempt.number
    is_own_step = is_own_step and not launches.is_of_earlier_launch(attempt, progress.launch if progress else None)
    seen = progress.step if progress is not None and is_own_step else 0
    return max(seen, attempt.last_step or 0)


def clear_jobs(draft: Draft, run: str) -> None:
    """End what Slurm still runs of attempts that are over, and note when it is gone."""
    for attempt in (*draft.attempts(run), *draft.aside(run)):
        if not attempt.is_over or attempt.is_job_gone:
            continue
        if attempt.job_id is None or _is_gone(draft, attempt):
            draft.put(replace(attempt, is_job_gone=True), "Slurm runs nothing of it any more")
            continue
        draft.ask_slurm()
        draft.wake_within(0.3)
        if _ends_by_itself(draft, attempt) or _is_anothers(draft, attempt):
            continue
        is_paused = draft.world.is_paused and attempt.end is not AttemptEnd.STOPPED
        if not is_paused and not draft.policy.is_observe_only and not _was_cancelled_just_now(draft, attempt.job_id):
            _intend_cancel(draft, attempt, attempt.job_id, f"attempt {attempt.number} is over: {attempt.end_detail}")


def clear_twins(draft: Draft, run: str) -> None:
    """End a second job of one attempt, and one that came back after it was gone.

    sbatch's lost request may arrive long after it was looked up and sent again; an ended job may be requeued by hand;
    a controller may have shown half a list.
    """
    jobs = draft.snapshot.jobs
    if isinstance(jobs, Stale) or draft.world.is_paused or draft.policy.is_observe_only:
        return
    known = (*draft.attempts(run), *draft.aside(run))
    for stray in find_strays(jobs.value.values(), known, draft.runs[run].job_name):
        if not _was_cancelled_just_now(draft, stray.job.job_id):
            why = "is over, and its job came back" if stray.is_first else "has a second job"
            _intend_cancel(draft, stray.attempt, stray.job.job_id, f"attempt {stray.attempt.number} {why}")


def _intend_cancel(draft: Draft, attempt: Attempt, job_id: int, why: str) -> None:
    draft.ask_slurm()
    draft.intend(
        Intent(
            kind=IntentKind.CANCEL,
            key=f"cancel:{job_id}",
            reason=why,
            run=attempt.run,
            attempt=attempt.number,
            job_id=job_id,
        )
    )


def _ends_by_itself(draft: Draft, attempt: Attempt) -> bool:
    """The launcher has written its exit record: the job is about to end under its own exit code."""
    if attempt.exit_code is None or attempt.over_at is None:
        return False
    return (draft.now - attempt.over_at).total_seconds() < _OWN_END_S


def _is_anothers(draft: Draft, attempt: Attempt) -> bool:
    """Under the attempt's job id an answer shows somebody else's job, from before ours or after it: ids wrap."""
    jobs = draft.snapshot.jobs
    job = jobs.value.get(attempt.job_id) if isinstance(jobs, Fresh) and attempt.job_id is not None else None
    return job is not None and not is_own(job, attempt, draft.runs[attempt.run])


def _is_gone(draft: Draft, attempt: Attempt) -> bool:
    """True when an answer that was asked for after the submission shows the job ended, completing, or not at all."""
    jobs = draft.snapshot.jobs
    if isinstance(jobs, Stale) or attempt.submitted_at is None:
        return False
    job: JobRecord | None = jobs.value.get(attempt.job_id) if attempt.job_id is not None else None
    if job is not None and is_own(job, attempt, draft.runs[attempt.run]):
        return job.is_ended
    is_unregistered = has_unregistered(attempt, draft.snapshot.nodes)
    if is_unregistered or is_alive(draft.view(attempt.run), attempt):
        return False  # Slurm does not know it, and it may run on
    return jobs.asked_at > attempt.submitted_at + timedelta(seconds=ABSENT_MARGIN_S)


def _was_cancelled_just_now(draft: Draft, job_id: int) -> bool:
    jobs = draft.snapshot.jobs
    for intent in draft.settled_intents(IntentKind.CANCEL):
        if intent.job_id != job_id or intent.settled_at is None:
            continue
        wait_s = _REFUSED_AGAIN_S if intent.state is IntentState.REFUSED else _CANCEL_SETTLE_S
        if isinstance(jobs, Stale) or jobs.asked_at < intent.settled_at + timedelta(seconds=wait_s):
            return True
    return False
