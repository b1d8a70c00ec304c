"""Rules about checkpoints: what was published, what must be read back, what may be removed. Pure."""

from __future__ import annotations

from dataclasses import replace

from supervisor.core import checkpoints as checkpoint_rules
from supervisor.core import foreign, unseen
from supervisor.core.draft import Draft
from supervisor.model import (
    Checkpoint,
    CheckpointState,
    Fresh,
    Intent,
    IntentKind,
    IntentState,
    Run,
    RunState,
    RunView,
)
from trainer.contract import checkpoint_name

_UNKNOWN_TELL_S = 60.0
_UNKNOWN_SHOW_S = 3.0  # one late answer of a file system is no reason
_UNKNOWN = "the checkpoint folder can't be looked at: "
_UNSHARED = "checkpoints can't be seen: "
_UNRECOGNISED = "no checkpoint is recognised: "


def learn_checkpoints(draft: Draft, run: Run) -> None:
    """Take in what lies in the run directory; what an over attempt published is fenced."""
    view = draft.view(run.name)
    if view is None:
        return
    if foreign.is_foreign(run.spec.checkpoint):
        _learn_foreign(draft, run, view)
        return
    known = {c.key: c for c in draft.checkpoints(run.name)}
    # the ledger's attempts, not the draft's: what was published before this very look still counts
    aside = draft.world.aside.get(run.name, ())
    ledger = (*draft.world.attempts.get(run.name, ()), *(a for a in aside if a.is_over))
    ahead = {a.number for a in aside if not a.is_over}  # judged once its turn has come
    views = tuple(v for v in view.checkpoints if v.attempt not in ahead)
    learnt = checkpoint_rules.fold_view(
        known, views, ledger, run=run.name, now=draft.now, unknown=view.unknown_checkpoints
    )
    for checkpoint, why in learnt:
        put_checkpoint(draft, checkpoint, why)
    released_at = draft.runs[run.name].released_at
    current = draft.checkpoints(run.name)
    for checkpoint, why in checkpoint_rules.find_brought_back(current, views, ledger, released_at, draft.now):
        put_checkpoint(draft, checkpoint, why)


def _learn_foreign(draft: Draft, run: Run, view: RunView) -> None:
    """Take in what lies in the training's own checkpoint folder, and tell what stands in the way."""
    # Of what was queued ahead, a script's job that has begun publishes too, whether its turn has come or not.
    begun = (a for a in draft.world.aside.get(run.name, ()) if a.started_at is not None)
    ledger = (*draft.world.attempts.get(run.name, ()), *begun)
    newest = max((c.key for c in draft.checkpoints(run.name)), default=None)
    learnt = foreign.fold_foreign(draft.checkpoints(run.name), view, ledger, run=run.name, now=draft.now)
    for checkpoint, why in learnt:
        put_checkpoint(draft, checkpoint, why, is_told=checkpoint.key == newest)
    attempts, released_at = draft.attempts(run.name), draft.runs[run.name].released_at
    for checkpoint, why in foreign.find_forgiven(attempts, draft.checkpoints(run.name), view, released_at):
        put_checkpoint(draft, checkpoint, why)
    barren = foreign.find_barren(attempts, draft.checkpoints(run.name), released_at)
    if barren is not None:
        put_checkpoint(draft, *barren)
    for warning in view.warnings:
        draft.tell(f"warned:{run.name}:{warning}", f"run {run.name}: {warning}", run=run.name)
    why = view.checkpoints_unknown
    if why and view.checkpoints_unknown_s >= _UNKNOWN_TELL_S:
        text = f"{_UNKNOWN}{why}; no attempt is planned meanwhile"
        draft.tell(f"checkpoints-unknown:{run.name}", f"run {run.name}: {text}", run=run.name)
    if not why or view.checkpoints_unknown_s >= _UNKNOWN_SHOW_S:
        draft.show(run.name, _UNKNOWN, f"{_UNKNOWN}{why}{_say_ended(draft, run.name)}" if why else "")
    _tell_unrecognised(draft, run, view)
    _tell_unshared(draft, run, view)


def _say_ended(draft: Draft, name: str) -> str:
    """That a restart waits: the end of a job counts once it can be seen what the job has published."""
    last, jobs = draft.last_attempt(name), draft.snapshot.jobs
    job = jobs.value.get(last.job_id or 0) if last is not None and isinstance(jobs, Fresh) else None
    is_waited_for = job is not None and job.is_ended and last is not None and not last.is_over
    return (
        f"; job {job.job_id} has ended, {job.raw_state}, and nothing follows meanwhile" if job and is_waited_for else ""
    )


def _tell_unrecognised(draft: Draft, run: Run, view: RunView) -> None:
    """The training saves, it seems, and nothing of it counts: without a word its work would be lost at the next end."""
    last, known = draft.last_attempt(run.name), draft.checkpoints(run.name)
    what = foreign.why_unrecognised(view, run.spec.checkpoint, last, known, draft.now)
    draft.show(run.name, _UNRECOGNISED, f"{_UNRECOGNISED}{what}" if what else "")
    if what:
        draft.tell(f"unrecognised:{run.name}", f"run {run.name}: {_UNRECOGNISED}{what}", run=run.name)


def _tell_unshared(draft: Draft, run: Run, view: RunView) -> None:
    """Nodes that save where nobody else can look: known soon after the start, and kept with the attempt."""
    last = draft.last_attempt(run.name)
    if last is None or last.is_over or view.attempt != last.number:
        return
    nodes = unseen.find_unshared(run, last, view, draft.now)
    text = f"{_UNSHARED}{unseen.describe_unshared(run, nodes)}" if nodes else ""
    draft.show(run.name, _UNSHARED, text)
    draft.put(replace(last, unshared_nodes=nodes), text or "their marks are seen")
    if nodes:
        draft.tell(f"unshared:{run.name}:{last.number}", f"run {run.name}: {text}", run=run.name)


def put_checkpoint(draft: Draft, checkpoint: Checkpoint, why: str, *, is_told: bool = True) -> None:
    """Note a checkpoint; a newly corrupt one is told to someone."""
    before = draft.checkpoint(checkpoint.run, checkpoint.step, checkpoint.attempt)
    draft.put(checkpoint, why)
    was_corrupt = before is not None and before.state is CheckpointState.CORRUPT
    if is_told and checkpoint.state is CheckpointState.CORRUPT and not was_corrupt and why != "gone from disk":
        name = f"step {checkpoint.step} of attempt {checkpoint.attempt}"
        draft.tell(f"corrupt:{checkpoint.path}", f"checkpoint {name} is refused: {why}", run=checkpoint.run)


def verify_key(checkpoint: Checkpoint) -> str:
    """The key of the intent to read a checkpoint back."""
    return f"verify:{checkpoint.run}:{checkpoint.step}:{checkpoint.attempt}"


def learn_verifications(draft: Draft) -> None:
    """Take in what was read back since the last cycle."""
    for result in draft.snapshot.verifications:
        before = draft.checkpoint(result.run, result.step, result.attempt)
        if before is None:
            continue
        learnt = checkpoint_rules.fold_verification(before, result)
        intent = draft.open_intent(verify_key(before))
        if learnt is None:
            draft.note(f"checkpoint step {result.step}: could not be read back: {result.detail}")
            continue
        put_checkpoint(draft, *learnt)
        if intent is not None:
            draft.settle(intent, IntentState.DONE, learnt[1])


def intend_verify(draft: Draft, checkpoint: Checkpoint, why: str) -> None:
    """Have a checkpoint read back."""
    draft.intend(
        Intent(
            kind=IntentKind.VERIFY,
            key=verify_key(checkpoint),
            reason=why,
            run=checkpoint.run,
            attempt=checkpoint.attempt,
            step=checkpoint.step,
        )
    )


def verify_new(draft: Draft, run: Run) -> None:
    """Read new complete checkpoints back beside the running training, where the head node may read that much."""
    limit = run.spec.checkpoint.verify_on_head_max_bytes
    for checkpoint in draft.checkpoints(run.name):
        is_unread = checkpoint.state is CheckpointState.COMPLETE and checkpoint.verified_at is None
        if is_unread and checkpoint.size_bytes <= limit:
            intend_verify(draft, checkpoint, "complete, not read back yet")


def prune(draft: Draft, run: Run) -> None:
    """Have checkpoints removed that are not kept; never the one in use, nor any that the running attempt reads."""
    view = draft.view(run.name)
    if draft.world.is_paused or draft.policy.is_observe_only or view is None:
        return
    if foreign.is_foreign(run.spec.checkpoint):
        return  # they are the training's, and it removes them as it likes
    last = draft.last_attempt(run.name)
    is_running = last is not None and not last.is_over  # what an attempt that is over left behind holds nothing
    if is_running and view.is_lease_unreadable:
        return
    in_use = last.resume_path if last is not None and is_running else None
    leased = view.leased if is_running else ()
    is_held = run.state is not RunState.ACTIVE  # a person may want to look at what is suspect
    for checkpoint in checkpoint_rules.choose_prunable(draft.checkpoints(run.name), run.spec.checkpoint):
        if checkpoint.path == in_use or (checkpoint.state is CheckpointState.SUSPECT and is_held):
            continue
        if checkpoint_name(checkpoint.step, checkpoint.attempt) in leased:
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
