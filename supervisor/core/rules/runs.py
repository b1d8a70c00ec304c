"""Rules about runs: what becomes of one after an attempt, and when the next attempt is planned. Pure."""

from __future__ import annotations

from dataclasses import replace

from supervisor.core import checkpoints as checkpoint_rules
from supervisor.core import elastic, foreign, restarts, unseen
from supervisor.core import nodes as node_rules
from supervisor.core.divergence import choose_skips
from supervisor.core.draft import Draft
from supervisor.core.identity import find_strays
from supervisor.core.interval import carried_every_s
from supervisor.core.rules import ahead as ahead_rules
from supervisor.core.rules.checkpoints import intend_verify
from supervisor.model import (
    PLANNED_ENDS,
    Attempt,
    AttemptEnd,
    Fresh,
    Intent,
    IntentKind,
    Run,
    RunState,
    Stale,
)

_SAY_AFTER_S = 60.0  # what holds a restart up for longer is the run's reason
_CANDIDATES = 61  # nodes beside the run's own size whose ports are looked at before a restart
_CANDIDATES_WAIT_S = 3.0
_NOT_AT_0 = (
    "starting at 0 by itself would throw the work away: bring one back and release the run, or, to begin at 0 on "
    "purpose, submit it under another name, with a run directory of its own"
)


def hold(draft: Draft, run: str, reason: str) -> None:
    """Hold a run for a person, and tell someone."""
    before = draft.runs[run]
    if before.state is RunState.ACTIVE:
        draft.put(replace(before, state=RunState.HELD, reason=reason, changed_at=draft.now), reason)
        draft.tell(f"held:{run}:{draft.now:%s}", f"run {run} is held: {reason}", run=run)


def settle_run(draft: Draft, name: str) -> None:
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
    failures = restarts.find_failures(run, draft.attempts(name), draft.checkpoints(name))
    judged = restarts.judge_aftermath(restarts.judge_failures(run, last, failures))
    if judged is None:
        return
    state, reason = judged
    if state is RunState.HELD:
        hold(draft, name, reason)
        return
    draft.put(replace(run, state=state, reason=reason, changed_at=draft.now), reason)
    draft.tell(f"{state.value}:{name}:{last.number}", f"run {name} is {state.value}: {reason}", run=name)


def start(draft: Draft, name: str) -> None:
    """Plan the next attempt, or say why not."""
    run, last = draft.runs[name], draft.last_attempt(name)
    candidates = _watch_candidates(draft, run, last)
    why_not = _judge_start(draft, run, last) or _judge_candidates(draft, last, candidates)
    if why_not:
        draft.note(f"{name}: {why_not}")
        return
    if not _is_startable(run, last):
        return
    ahead = draft.ahead(name)
    if ahead is not None and ahead.started_at is not None:
        ahead_rules.promote_begun(draft, run, ahead)
        return
    resume, records = _choose_resume(draft, run, last), draft.records
    if resume is None or records is None:
        return
    ours = frozenset(last.nodes) if last is not None else frozenset()
    if ahead is not None:
        ours |= ahead_rules.find_nodes(draft, ahead)
    silent = node_rules.silent_ports(draft.snapshot.ports) & candidates
    silent |= node_rules.find_stuck(draft.snapshot, draft.now)
    fixed = _find_fixed_size(draft, run, last, resume)
    if why := elastic.judge_size(run.spec, fixed):
        hold(draft, name, f"{why}. Release the run to resume on as many as there are")
        return
    spec = elastic.fix_size(restarts.locate(run.spec, draft.snapshot.default_partition), fixed)
    size = restarts.choose_size(spec, records, draft.nodes, ours=ours, silent=silent)
    if ahead is not None:
        ahead_rules.promote(draft, run, ahead, resume, fit=size.fit, fixed=fixed)
        return
    if not size.nodes and run.script is not None and last is None:
        size = restarts.choose_first_size(spec, records, draft.nodes)
    if not size.nodes:
        text = f"waiting: {size.fit} healthy nodes, the minimum is {spec.nodes.min}"
        if fixed is not None and spec.nodes.min > run.spec.nodes.min:
            text = f"waiting: {size.fit} healthy nodes, {spec.nodes.min} are needed again: {fixed.why}"
        draft.note(f"{name}: {text}")
        draft.put(replace(run, reason=text), text)
        draft.wake_within(draft.policy.poll_interval_s)
        return
    _plan_attempt(draft, run, resume, size)


def _find_fixed_size(
    draft: Draft, run: Run, last: Attempt | None, resume: checkpoint_rules.ResumePoint
) -> elastic.FixedSize | None:
    """The only size that the resume point allows, unless a person was asked about it and said: go on."""
    fixed = elastic.find_fixed_size(run, draft.attempts(run.name), resume.checkpoint)
    if not elastic.judge_size(run.spec, fixed):
        return fixed
    ended_at = last.over_at if last is not None else None
    is_answered = run.released_at is not None and (ended_at is None or ended_at <= run.released_at)
    return None if is_answered else fixed


def _is_startable(run: Run, last: Attempt | None) -> bool:
    return run.state is RunState.ACTIVE and (last is None or last.is_over)


def _watch_candidates(draft: Draft, run: Run, last: Attempt | None) -> frozenset[str]:
    """Look at the ports of the nodes that may be next when an attempt has ended badly: others may have gone with it."""
    records = draft.records
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
    if unknown := _why_unknown(draft, run):
        return f"no attempt is planned blind: {unknown}"
    not_needed = (a for a in draft.aside(run.name) if a.is_over)
    if any(not a.is_job_gone for a in (*draft.attempts(run.name), *not_needed)):
        return "the job of an earlier attempt is not gone yet"
    known = (*draft.attempts(run.name), *draft.aside(run.name))
    if isinstance(snapshot.jobs, Fresh) and any(find_strays(snapshot.jobs.value.values(), known, run.job_name)):
        return "a job of an earlier attempt has come back"
    failures = restarts.count_failures(run, draft.attempts(run.name), draft.checkpoints(run.name))
    at = restarts.next_start_at(run.spec.restart, failures, last)
    ahead = draft.ahead(run.name)
    if ahead is not None and ahead.started_at is not None:
        at = None  # it trains already
    if run.script is not None and last is not None and last.end is AttemptEnd.SAVED:
        at = None  # where it saved may not be known, and so not count; it said that it did
    if at is not None and at > draft.now:
        draft.wake_within((at - draft.now).total_seconds())
        return f"attempt {(last.number if last else 0) + 1} waits until {at:%H:%M:%S} UTC (back-off)"
    return None


def _why_unknown(draft: Draft, run: Run) -> str:
    """Why nothing can be said of the checkpoints of a foreign layout now; it is the run's reason while it lasts."""
    view = draft.view(run.name)
    if view is None or not foreign.is_foreign(run.spec.checkpoint):
        return ""
    why = foreign.why_unknown(view, draft.checkpoints(run.name))
    why = why or foreign.why_unsettled(view, draft.last_attempt(run.name), draft.now)
    before = draft.runs[run.name]
    if why and before.reason != (text := f"waiting: {why}"):
        draft.put(replace(before, reason=text), text)
    return why


def _choose_resume(draft: Draft, run: Run, last: Attempt | None) -> checkpoint_rules.ResumePoint | None:
    """The resume point, or None while something must be read back first (or the run was held)."""
    since = last.over_at if last is not None else None
    is_foreign = foreign.is_foreign(run.spec.checkpoint)
    choose = foreign.choose_foreign_resume if is_foreign else checkpoint_rules.choose_resume
    resume = choose(draft.checkpoints(run.name), run.spec.checkpoint, since=since)
    view = draft.view(run.name)
    if is_foreign and resume.checkpoint is None and view is not None and run.released_at is None:
        none_whole = foreign.why_none_whole(view, draft.attempts(run.name))
        if none_whole and not resume.read_back and not resume.is_lost:
            hold(draft, run.name, f"{none_whole}. Take them away, or release the run to begin at 0")
            return None
    if resume.checkpoint is None and not resume.read_back and not resume.is_lost:
        has_folder = view is None or view.has_checkpoint_folder
        known = draft.checkpoints(run.name)
        why_unseen = unseen.why_unseen(run, draft.attempts(run.name), known, has_folder=has_folder)
        if why_unseen:
            hold(draft, run.name, f"{why_unseen}. Mend that, or release the run to begin at 0")
            return None
    if resume.is_lost:
        hold(draft, run.name, f"{resume.why}; {_NOT_AT_0}")
        return None
    for checkpoint in resume.read_back:
        intend_verify(draft, checkpoint, "to be read back before the run resumes from it")
    if resume.read_back:
        text = f"waiting: checkpoint step {resume.read_back[0].step} is read back before the restart"
        draft.note(f"{run.name}: {text}")
        if last is not None and last.over_at is not None and (draft.now - last.over_at).total_seconds() > _SAY_AFTER_S:
            draft.put(replace(run, reason=text), text)
        draft.wake_within(0.5)
        return None
    return resume


def _plan_attempt(draft: Draft, run: Run, resume: checkpoint_rules.ResumePoint, size: restarts.Size) -> None:
    number = draft.next_number(run.name)
    reason = f"{size.nodes} of {size.fit} healthy nodes, from {resume.place}"
    attempt = Attempt(
        run=run.name,
        number=number,
        token=run.token(number),
        nodes_wanted=size.nodes,
        spares=size.spares,
        exclude=size.exclude,
        resume_step=resume.step,
        resume_path=checkpoint_rules.resume_path(run.spec.run_dir, resume),
        planned_at=draft.now,
        checkpoint_every_s=carried_every_s(run.spec.checkpoint, draft.attempts(run.name)),
        skip_samples=choose_skips(run, draft.attempts(run.name)),
    )
    draft.put(attempt, reason)
    if run.reason:
        draft.put(replace(run, reason=""), "goes on")
    draft.intend(
        Intent(kind=IntentKind.SUBMIT, key=f"submit:{run.name}:{number}", reason=reason, run=run.name, attempt=number)
    )
    draft.ask_slurm()


def pace(draft: Draft, name: str) -> None:
    """How soon to look again."""
    last = draft.last_attempt(name)
    if last is None or last.is_over:
        return
    draft.wake_within(draft.policy.cycle_interval_s)
    if last.stepped_at is None or draft.open_intents(IntentKind.VERIFY):
        draft.wake_within(draft.policy.cycle_interval_s / 2)
