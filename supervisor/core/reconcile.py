"""The order of the rules: world, snapshot, policy and now in, one plan out. Pure: no I/O, no clock, no log.

Level-triggered: whatever happened while nobody looked, the current values are enough. Each rule reads what the rules
before it wrote in the same cycle, and stays silent (with a note) when a source that it needs is stale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timedelta

from slurm.types import JobRecord, NodeRecord
from supervisor.core import attempts as attempt_rules
from supervisor.core import checkpoints as checkpoint_rules
from supervisor.core import drains, restarts
from supervisor.core import nodes as node_rules
from supervisor.core.draft import Draft
from supervisor.model import (
    PLANNED_ENDS,
    Attempt,
    AttemptEnd,
    AttemptState,
    Checkpoint,
    CheckpointState,
    CheckRow,
    Fresh,
    Intent,
    IntentKind,
    IntentState,
    Interruption,
    NodeEvent,
    Plan,
    Policy,
    Run,
    RunState,
    RunView,
    Snapshot,
    Stale,
    Verdict,
    World,
)
from trainer.contract import RunPaths

_CANCEL_SETTLE_S = 5.0  # an answer younger than this after scancel may still show the job
_CANDIDATES = 61  # nodes beside the run's own size whose ports are looked at before a restart
_CANDIDATES_WAIT_S = 3.0
_OWN_END_S = 10.0  # a job whose launcher has said how it ended gets this long to end by itself


def reconcile(world: World, snapshot: Snapshot, policy: Policy, now: datetime) -> Plan:
    """What was learnt and what is meant, each with its reason."""
    draft = Draft(world, snapshot, policy, now)
    _learn_sweeps(draft)
    _learn_drift(draft)
    _learn_verifications(draft)
    for run in world.runs:
        _learn_checkpoints(draft, run)
        _judge_attempt(draft, run)
        _learn_resumed(draft, run.name)
        _clear_jobs(draft, run.name)
        _clear_twins(draft, run.name)
        _verify_new(draft, draft.runs[run.name])
        _prune(draft, draft.runs[run.name])
        _settle_run(draft, run.name)
        _start(draft, run.name)
        _pace(draft, run.name)
    _drain(draft)
    return draft.plan()


# ---------------------------------------------------------------- nodes


def _learn_sweeps(draft: Draft) -> None:
    if not draft.snapshot.sweeps:
        return
    limit = drains.drain_limit(draft.policy, _cluster_size(draft))
    is_mass = node_rules.is_mass_failure(draft.snapshot.sweeps, limit)
    if is_mass:
        draft.tell("mass-check-failure", "a check fails on many nodes at once: the check is suspected, none is drained")
    for checks in draft.snapshot.sweeps:
        before = draft.node(checks.node)
        after = node_rules.fold_checks(before, checks, draft.policy.drain, is_mass=is_mass)
        draft.put(after, "sweep")
        if after.failing != before.failing:
            for result in checks.results:
                if result.ok is False or result.check in before.failing:
                    draft.put(CheckRow(node=checks.node, at=checks.at, result=result), "check changed")
        _note_verdict(draft, before.verdict, after.node, after.verdict, after.reason)


def _note_verdict(draft: Draft, before: Verdict, node: str, after: Verdict, reason: str) -> None:
    if before is not after:
        event = NodeEvent(node=node, at=draft.now, event=f"node.judged_{after.value}", detail=reason)
        draft.put(event, reason or after.value)


def _cluster_size(draft: Draft) -> int:
    return len(draft.snapshot.nodes.value) if isinstance(draft.snapshot.nodes, Fresh) else 0


def _learn_drift(draft: Draft) -> None:
    """Drains that someone else lifted or took over, and those that they set on nodes that are broken anyway."""
    nodes = draft.snapshot.nodes
    if isinstance(nodes, Stale):
        return
    for memory in list(draft.nodes.values()):
        record = nodes.value.get(memory.node)
        if record is None or _is_draining(draft, memory.node):
            continue
        after = node_rules.judge_drift(memory, record, nodes.asked_at)
        if after is not None:
            lifted = after.verdict is Verdict.HEALTHY
            found = "drain.taken_over" if memory.is_drained_by_us else "drain.found"
            event = "drain.lifted_by_other" if lifted else found
            draft.put(after, event)
            detail = memory.drain_reason if lifted else f"{record.reason} [{record.reason_user}]"
            draft.put(NodeEvent(node=memory.node, at=draft.now, event=event, detail=detail), event)


def _drain(draft: Draft) -> None:
    broken = [m for m in draft.nodes.values() if m.verdict is Verdict.BROKEN and not m.is_drained_by_us]
    if not broken:
        return
    if isinstance(draft.snapshot.nodes, Stale):
        draft.note(f"no node is drained blind: {draft.snapshot.nodes.why}")
        return
    records = draft.snapshot.nodes.value
    waiting = [
        m for m in broken if m.node in records and not records[m.node].is_drain_set and not _is_draining(draft, m.node)
    ]
    done = draft.settled_intents(IntentKind.DRAIN, within_s=draft.policy.drain.window_s)
    used = sum(i.state is IntentState.DONE for i in done) + len(draft.open_intents(IntentKind.DRAIN))
    for memory in broken:
        if _is_draining(draft, memory.node):
            continue
        candidate = drains.Candidate(
            memory=memory,
            record=records.get(memory.node),
            policy=draft.policy,
            is_paused=draft.world.is_paused,
            used=used,
            limit=drains.drain_limit(draft.policy, len(records)),
            waiting=len(waiting),
            refusals=drains.find_refusals(draft.settled_intents(IntentKind.DRAIN), memory),
        )
        kept = drains.judge_drain(candidate)
        if kept is not None:
            draft.note(f"{memory.node} is not drained: {kept}")
            if candidate.waiting > candidate.limit or candidate.used >= candidate.limit:
                draft.tell(
                    f"drain-budget:{memory.node}:{memory.since_at:%s}", f"{memory.node}: {kept}", node=memory.node
                )
            continue
        used += 1
        text = drains.render_drain_reason(draft.policy.owner_tag, memory, draft.now)
        draft.intend(
            Intent(kind=IntentKind.DRAIN, key=f"drain:{memory.node}", reason=memory.reason, node=memory.node, text=text)
        )


def _is_draining(draft: Draft, node: str) -> bool:
    return draft.open_intent(f"drain:{node}") is not None


def _condemn(draft: Draft, node: str, reason: str, run: str, attempt: int) -> None:
    before = draft.node(node)
    after = node_rules.condemn(before, reason, draft.now)
    draft.put(after, reason)
    if after is not before:
        event = NodeEvent(node=node, at=draft.now, event="node.judged_broken", detail=reason, run=run, attempt=attempt)
        draft.put(event, reason)


# ---------------------------------------------------------------- checkpoints


def _view(draft: Draft, run: str) -> RunView | None:
    view = draft.snapshot.runs.get(run)
    return view.value if isinstance(view, Fresh) else None


def _learn_checkpoints(draft: Draft, run: Run) -> None:
    view = _view(draft, run.name)
    if view is None:
        return
    known = {c.key: c for c in draft.checkpoints(run.name)}
    # the ledger's attempts, not the draft's: what was published before this very look still counts
    ledger = draft.world.attempts.get(run.name, ())
    learnt = checkpoint_rules.fold_view(
        known, view.checkpoints, ledger, run=run.name, now=draft.now, unknown=view.unknown_checkpoints
    )
    for checkpoint, why in learnt:
        _put_checkpoint(draft, checkpoint, why)


def _put_checkpoint(draft: Draft, checkpoint: Checkpoint, why: str) -> None:
    before = draft.checkpoint(checkpoint.run, checkpoint.step, checkpoint.attempt)
    draft.put(checkpoint, why)
    was_corrupt = before is not None and before.state is CheckpointState.CORRUPT
    if checkpoint.state is CheckpointState.CORRUPT and not was_corrupt and why != "gone from disk":
        name = f"step {checkpoint.step} of attempt {checkpoint.attempt}"
        draft.tell(f"corrupt:{checkpoint.path}", f"checkpoint {name} is refused: {why}", run=checkpoint.run)


def _verify_key(checkpoint: Checkpoint) -> str:
    return f"verify:{checkpoint.run}:{checkpoint.step}:{checkpoint.attempt}"


def _learn_verifications(draft: Draft) -> None:
    for result in draft.snapshot.verifications:
        before = draft.checkpoint(result.run, result.step, result.attempt)
        if before is None:
            continue
        learnt = checkpoint_rules.fold_verification(before, result)
        intent = draft.open_intent(_verify_key(before))
        if learnt is None:
            draft.note(f"checkpoint step {result.step}: could not be read back: {result.detail}")
            continue
        _put_checkpoint(draft, *learnt)
        if intent is not None:
            draft.settle(intent, IntentState.DONE, learnt[1])


def _intend_verify(draft: Draft, checkpoint: Checkpoint, why: str) -> None:
    draft.intend(
        Intent(
            kind=IntentKind.VERIFY,
            key=_verify_key(checkpoint),
            reason=why,
            run=checkpoint.run,
            attempt=checkpoint.attempt,
            step=checkpoint.step,
        )
    )


def _verify_new(draft: Draft, run: Run) -> None:
    """Read new complete checkpoints back beside the running training, where the head node may read that much."""
    limit = run.spec.checkpoint.verify_on_head_max_bytes
    for checkpoint in draft.checkpoints(run.name):
        if checkpoint.state is CheckpointState.COMPLETE and checkpoint.size_bytes <= limit:
            _intend_verify(draft, checkpoint, "complete, not read back yet")


def _prune(draft: Draft, run: Run) -> None:
    if draft.world.is_paused or draft.policy.is_observe_only or _view(draft, run.name) is None:
        return
    last = draft.last_attempt(run.name)
    in_use = last.resume_path if last is not None and not last.is_over else None
    for checkpoint in checkpoint_rules.choose_prunable(draft.checkpoints(run.name), run.spec.checkpoint):
        if checkpoint.path == in_use:
            continue
        draft.intend(
            Intent(
                kind=IntentKind.PRUNE,
                key=f"prune:{run.name}:{checkpoint.step}:{checkpoint.attempt}",
                reason=f"older than the last {run.spec.checkpoint.keep_last} verified checkpoints",
                run=run.name,
                attempt=checkpoint.attempt,
                step=checkpoint.step,
            )
        )


# ---------------------------------------------------------------- attempts


def _records(draft: Draft) -> Mapping[str, NodeRecord] | None:
    return draft.snapshot.nodes.value if isinstance(draft.snapshot.nodes, Fresh) else None


def _judge_attempt(draft: Draft, run: Run) -> None:
    attempt = draft.last_attempt(run.name)
    if attempt is None or attempt.is_over:
        return
    if attempt.state is AttemptState.PLANNED:
        _judge_planned(draft, run, attempt)
        return
    sight = attempt_rules.find_sight(run, attempt, draft.snapshot, draft.now)
    attempt = attempt_rules.fold_attempt(sight)
    sight = replace(sight, attempt=attempt)
    draft.put(attempt, "seen")
    _learn_final_step(draft, run, sight.view)
    suspected = node_rules.suspects(sight, _records(draft))
    draft.watch(suspected | node_rules.choose_controls(suspected, attempt, _records(draft)))
    if suspected:
        draft.wake_within(draft.policy.cycle_interval_s / 4)  # the port's silence is confirmed between two cycles
    sight = replace(
        sight,
        silent=node_rules.judge_silence(sight, draft.snapshot.ports),
        failed_by_slurm=node_rules.judge_slurm_failure(sight, draft.snapshot),
        smaller=_choose_smaller(draft, run, attempt),
    )
    ended = attempt_rules.judge_end(sight, is_paused=draft.world.is_paused or run.is_paused)
    if ended is not None:
        _end_attempt(draft, sight, ended)
    elif sight.job is not None and sight.job.is_ended:
        draft.ask_slurm()


def _choose_smaller(draft: Draft, run: Run, attempt: Attempt) -> int:
    nodes = draft.snapshot.nodes
    if isinstance(nodes, Stale) or attempt.submitted_at is None or nodes.asked_at < attempt.submitted_at:
        return 0
    spec = restarts.locate(run.spec, draft.snapshot.default_partition)
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


def _end_attempt(draft: Draft, sight: attempt_rules.Sight, ended: attempt_rules.Ended) -> None:
    """Declare the attempt over: from here on it is fenced."""
    attempt = sight.attempt
    over = replace(
        attempt,
        state=AttemptState.OVER,
        over_at=draft.now,
        end=ended.end,
        end_detail=ended.detail,
        exit_code=ended.exit_code,
        last_step=attempt_rules.last_step_seen(sight),
    )
    draft.put(over, ended.detail)
    if ended.end is AttemptEnd.CHECKPOINT_REJECTED:
        _count_load_failure(draft, sight)
    reasons = {s.node: s.evidence for s in (*sight.silent, *sight.failed_by_slurm)}
    for node in ended.nodes:
        said = ended.detail if ended.detail.startswith(f"{node}:") else f"{node}: {ended.detail}"
        _condemn(draft, node, reasons.get(node, said), attempt.run, attempt.number)
    if ended.end not in _NO_INTERRUPTION:
        draft.put(
            Interruption(
                run=attempt.run,
                attempt=attempt.number,
                kind=ended.end.value,
                cause=ended.detail,
                node=ended.nodes[0] if ended.nodes else ended.hint,
                is_planned=ended.end in PLANNED_ENDS,
                detected_at=draft.now,
                last_step=over.last_step,
                evidence=ended.evidence,
            ),
            ended.detail,
        )
    if not ended.is_curable:
        _hold(draft, attempt.run, f"a restart can't cure this: {ended.detail}")
    draft.ask_slurm()
    draft.wake_within(0)


_NO_INTERRUPTION = frozenset(
    {AttemptEnd.RESIZED, AttemptEnd.FINISHED, AttemptEnd.STOPPED, AttemptEnd.REFUSED, AttemptEnd.LOST}
)


def _count_load_failure(draft: Draft, sight: attempt_rules.Sight) -> None:
    attempt, outcome = sight.attempt, sight.view.outcome if sight.view is not None else None
    detail = outcome.message if outcome is not None and outcome.message else "rejected by the training"
    for checkpoint in draft.checkpoints(attempt.run):
        if checkpoint.path == attempt.resume_path:
            _put_checkpoint(draft, *checkpoint_rules.fold_load_failure(checkpoint, detail))


def _learn_resumed(draft: Draft, run: str) -> None:
    attempt = draft.last_attempt(run)
    if attempt is None or attempt.stepped_at is None:
        return
    for interruption in draft.interruptions(run):
        if interruption.resumed_at is None and interruption.attempt < attempt.number:
            after = replace(interruption, resumed_at=attempt.stepped_at, resume_step=attempt.resume_step)
            draft.put(after, f"first new step of attempt {attempt.number}")


def _clear_jobs(draft: Draft, run: str) -> None:
    """End what Slurm still runs of attempts that are over, and note when it is gone."""
    for attempt in draft.attempts(run):
        if not attempt.is_over or attempt.is_job_gone:
            continue
        if attempt.job_id is None or _is_gone(draft, attempt):
            draft.put(replace(attempt, is_job_gone=True), "Slurm runs nothing of it any more")
            continue
        draft.ask_slurm()
        draft.wake_within(0.3)
        if _ends_by_itself(draft, attempt):
            continue
        is_paused = draft.world.is_paused and attempt.end is not AttemptEnd.STOPPED
        if not is_paused and not draft.policy.is_observe_only and not _was_cancelled_just_now(draft, attempt.job_id):
            _intend_cancel(draft, attempt, attempt.job_id, f"attempt {attempt.number} is over: {attempt.end_detail}")


def _clear_twins(draft: Draft, run: str) -> None:
    """End a second job of one attempt: sbatch's lost request may arrive long after it was looked up and sent again."""
    jobs = draft.snapshot.jobs
    if isinstance(jobs, Stale) or draft.world.is_paused or draft.policy.is_observe_only:
        return
    ours = {a.token: a for a in draft.attempts(run) if a.state is not AttemptState.PLANNED}
    for job in jobs.value.values():
        attempt = ours.get(job.comment)
        if attempt is None or job.job_id == attempt.job_id or not job.is_live or job.name not in ("", run):
            continue
        if not _was_cancelled_just_now(draft, job.job_id):
            _intend_cancel(draft, attempt, job.job_id, f"a second job of attempt {attempt.number}")


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


def _is_gone(draft: Draft, attempt: Attempt) -> bool:
    """True when an answer that was asked for after the submission shows the job ended, completing, or not at all."""
    jobs = draft.snapshot.jobs
    if isinstance(jobs, Stale) or attempt.submitted_at is None:
        return False
    job: JobRecord | None = jobs.value.get(attempt.job_id) if attempt.job_id is not None else None
    if job is not None and attempt_rules.is_own(job, attempt):
        return job.is_ended
    return jobs.asked_at > attempt.submitted_at + timedelta(seconds=attempt_rules.ABSENT_MARGIN_S)


def _was_cancelled_just_now(draft: Draft, job_id: int) -> bool:
    jobs = draft.snapshot.jobs
    for intent in draft.settled_intents(IntentKind.CANCEL):
        if intent.job_id != job_id or intent.settled_at is None:
            continue
        if isinstance(jobs, Stale) or jobs.asked_at < intent.settled_at + timedelta(seconds=_CANCEL_SETTLE_S):
            return True
    return False


# ---------------------------------------------------------------- runs


def _hold(draft: Draft, run: str, reason: str) -> None:
    before = draft.runs[run]
    if before.state is RunState.ACTIVE:
        draft.put(replace(before, state=RunState.HELD, reason=reason, changed_at=draft.now), reason)
        draft.tell(f"held:{run}:{draft.now:%s}", f"run {run} is held: {reason}", run=run)


def _settle_run(draft: Draft, name: str) -> None:
    """What becomes of a run whose newest attempt is over."""
    run, last = draft.runs[name], draft.last_attempt(name)
    if last is None:
        if run.state is RunState.STOPPING:
            draft.put(replace(run, state=RunState.STOPPED, changed_at=draft.now), "stopped before its first attempt")
        return
    if not last.is_over or run.state not in (RunState.ACTIVE, RunState.STOPPING):
        return
    if run.released_at is not None and last.over_at is not None and last.over_at <= run.released_at:
        return  # a person has looked at this end and said: go on
    failures = restarts.count_failures(run, draft.attempts(name), draft.checkpoints(name))
    aftermath = restarts.Aftermath(run=run, last=last, failures=failures)
    judged = restarts.judge_aftermath(aftermath)
    if judged is None:
        return
    state, reason = judged
    if state is RunState.HELD:
        _hold(draft, name, reason)
        return
    draft.put(replace(run, state=state, reason=reason, changed_at=draft.now), reason)
    draft.tell(f"{state.value}:{name}:{last.number}", f"run {name} is {state.value}: {reason}", run=name)


def _start(draft: Draft, name: str) -> None:
    """Plan the next attempt, or say why not."""
    run, last = draft.runs[name], draft.last_attempt(name)
    candidates = _watch_candidates(draft, run, last)
    why_not = _judge_start(draft, run, last) or _judge_candidates(draft, last, candidates)
    if why_not:
        draft.note(f"{name}: {why_not}")
        return
    if not _is_startable(run, last):
        return
    resume, records = _choose_resume(draft, run, last), _records(draft)
    if resume is None or records is None:
        return
    ours = frozenset(last.nodes) if last is not None else frozenset()
    silent = node_rules.silent_ports(draft.snapshot.ports) & candidates
    spec = restarts.locate(run.spec, draft.snapshot.default_partition)
    size = restarts.choose_size(spec, records, draft.nodes, ours=ours, silent=silent)
    if not size.nodes:
        text = f"waiting: {size.fit} healthy nodes, the minimum is {run.spec.nodes.min}"
        draft.note(f"{name}: {text}")
        draft.put(replace(run, reason=text), text)
        draft.wake_within(draft.policy.poll_interval_s)
        return
    _plan_attempt(draft, run, last, resume, size)


def _is_startable(run: Run, last: Attempt | None) -> bool:
    return run.state is RunState.ACTIVE and (last is None or last.is_over)


def _watch_candidates(draft: Draft, run: Run, last: Attempt | None) -> frozenset[str]:
    """Look at the ports of the nodes that may be next when an attempt has ended badly: others may have gone with it."""
    records = _records(draft)
    if not _is_startable(run, last) or last is None or last.end in PLANNED_ENDS or records is None:
        return frozenset()
    fit = [n for n, r in records.items() if node_rules.is_fit(r, draft.nodes.get(n))]
    first = sorted(fit, key=lambda n: (n not in last.nodes, not records[n].is_idle, n))
    candidates = frozenset(first[: run.spec.nodes.max + run.spec.nodes.spares + _CANDIDATES])
    draft.watch(candidates)
    return candidates


def _judge_candidates(draft: Draft, last: Attempt | None, candidates: frozenset[str]) -> str | None:
    """Why the start waits for a look at the candidates' ports; None: it need not."""
    if last is None or last.over_at is None or not candidates - draft.snapshot.ports.keys():
        return None
    if (draft.now - last.over_at).total_seconds() > _CANDIDATES_WAIT_S:
        return None
    draft.wake_within(0.2)
    return "the ports of the next nodes are looked at first"


def _judge_start(draft: Draft, run: Run, last: Attempt | None) -> str | None:
    """Why no attempt is planned now, or None: plan one."""
    snapshot = draft.snapshot
    if not _is_startable(run, last):
        return None
    if draft.world.is_paused or run.is_paused:
        return "paused: no new attempt"
    if draft.policy.is_observe_only:
        return "observe only: an attempt would be planned"
    for source, what in ((snapshot.jobs, "squeue"), (snapshot.nodes, "scontrol"), (snapshot.runs.get(run.name), "")):
        if isinstance(source, Stale):
            return f"no attempt is planned blind: {what or 'run directory'}: {source.why}"
    if snapshot.runs.get(run.name) is None:
        return "the run directory has not been read yet"
    if any(not a.is_job_gone for a in draft.attempts(run.name)):
        return "the job of an earlier attempt is not gone yet"
    failures = restarts.count_failures(run, draft.attempts(run.name), draft.checkpoints(run.name))
    at = restarts.next_start_at(run.spec.restart, failures, last)
    if at is not None and at > draft.now:
        draft.wake_within((at - draft.now).total_seconds())
        return f"attempt {(last.number if last else 0) + 1} waits until {at:%H:%M:%S} UTC (back-off)"
    return None


def _choose_resume(draft: Draft, run: Run, last: Attempt | None) -> checkpoint_rules.ResumePoint | None:
    """The resume point, or None while something must be read back first (or the run was held)."""
    since = last.over_at if last is not None else None
    resume = checkpoint_rules.choose_resume(draft.checkpoints(run.name), run.spec.checkpoint, since=since)
    if resume.is_lost:
        _hold(draft, run.name, f"{resume.why}; starting at 0 by itself would throw the work away")
        return None
    for checkpoint in resume.read_back:
        _intend_verify(draft, checkpoint, "to be read back before the run resumes from it")
    if resume.read_back:
        draft.note(f"{run.name}: checkpoint step {resume.read_back[0].step} is read back before the restart")
        draft.wake_within(0.5)
        return None
    return resume


def _plan_attempt(
    draft: Draft, run: Run, last: Attempt | None, resume: checkpoint_rules.ResumePoint, size: restarts.Size
) -> None:
    number = (last.number if last is not None else 0) + 1
    point = resume.checkpoint
    path = str(RunPaths(run.spec.run_dir).checkpoint(point.step, point.attempt)) if point else ""
    at = f"step {point.step} ({resume.why})" if point else f"the beginning ({resume.why})"
    reason = f"{size.nodes} of {size.fit} healthy nodes, from {at}"
    attempt = Attempt(
        run=run.name,
        number=number,
        token=f"sup:{run.name}:{number}:{int(run.created_at.timestamp()):x}",
        nodes_wanted=size.nodes,
        spares=size.spares,
        exclude=size.exclude,
        resume_step=point.step if point else 0,
        resume_path=path,
        planned_at=draft.now,
    )
    draft.put(attempt, reason)
    if run.reason:
        draft.put(replace(run, reason=""), "goes on")
    draft.intend(
        Intent(kind=IntentKind.SUBMIT, key=f"submit:{run.name}:{number}", reason=reason, run=run.name, attempt=number)
    )
    draft.ask_slurm()


def _pace(draft: Draft, name: str) -> None:
    """How soon to look again."""
    last = draft.last_attempt(name)
    if last is None or last.is_over:
        return
    draft.wake_within(draft.policy.cycle_interval_s)
    if last.stepped_at is None or draft.open_intents(IntentKind.VERIFY):
        draft.wake_within(draft.policy.cycle_interval_s / 2)


__all__ = ["reconcile"]
