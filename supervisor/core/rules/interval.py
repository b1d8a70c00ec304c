"""Rules about what a running training is told, and its saves: how often, those asked for, those that fail. Pure."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from supervisor.core import checkpoints, interval, saves
from supervisor.core.attempts import SUSPENDED
from supervisor.core.draft import Draft
from supervisor.model import Attempt, AttemptState, Intent, IntentKind, Run

_FAILING = "saves fail: "


def advise(draft: Draft, name: str) -> None:
    """Tell a running training how often to save, when that has changed, and that a save or a drill is asked for.

    And its launcher from where to start it again, when a newer checkpoint may be believed.
    """
    run, last = draft.runs[name], draft.last_attempt(name)
    if last is None or last.state is not AttemptState.RUNNING or draft.view(name) is None:
        return
    if draft.policy.is_observe_only:
        return
    reasons = []
    after, why = _with_interval(draft, run, last)
    reasons += [why] if why else []
    for add in (_with_request, _with_drill):
        after, why = add(run, after)
        reasons += [why] if why else []
    after, why = _with_resume_point(draft, run, after)
    reasons += [why] if why else []
    if not reasons:
        return
    reason = "; ".join(reasons)
    draft.put(replace(after, advice_seq=after.advice_seq + 1), reason)
    draft.intend(
        Intent(
            kind=IntentKind.ADVISE,
            key=f"advise:{name}:{last.number}",
            reason=reason,
            run=name,
            attempt=last.number,
        )
    )


def _with_interval(draft: Draft, run: Run, last: Attempt) -> tuple[Attempt, str]:
    if run.spec.checkpoint.interval == "fixed" or draft.world.is_paused or run.is_paused:
        return last, ""
    chosen = interval.judge_interval(run.spec, draft.attempts(run.name), draft.now)
    told_s = last.checkpoint_every_s or interval.first_every_s(run.spec.checkpoint)
    if chosen is None or not interval.is_worth_telling(told_s, chosen.every_s):
        return last, ""
    every_s = round(chosen.every_s, 1)
    return replace(
        last, checkpoint_every_s=every_s
    ), f"a save every {every_s:.0f} s in place of {told_s:.0f}: {chosen.why}"


def _with_request(run: Run, last: Attempt) -> tuple[Attempt, str]:
    """A request is for the attempt that ran when it was made; one that begins later saves soon enough by itself."""
    asked_at, started_at = run.save_asked_at, last.started_at
    if asked_at is None or started_at is None or asked_at < started_at:
        return last, ""
    if last.save_asked_at is not None and last.save_asked_at >= asked_at:
        return last, ""
    return replace(last, save_requests=last.save_requests + 1, save_asked_at=asked_at), "a save now was asked for"


def _with_drill(run: Run, last: Attempt) -> tuple[Attempt, str]:
    """A drill is for the attempt that ran when it was asked for, and is made once."""
    drill = run.drill
    if drill is None or drill.is_made or drill.attempt != last.number:
        return last, ""
    if last.drill is not None and last.drill.id == drill.id:
        return last, ""
    return replace(last, drill=drill), f"drill {drill.id} ({drill.kind}) was asked for"


def _with_resume_point(draft: Draft, run: Run, last: Attempt) -> tuple[Attempt, str]:
    """Where a start inside the job begins: the newest checkpoint that was read back, of any layout."""
    if run.script is not None or not run.spec.restart.in_job:
        return last, ""
    newest = checkpoints.newest_advisable(draft.checkpoints(run.name), run.spec.checkpoint)
    if newest is None:
        return last, ""
    path = checkpoints.resume_path(run.spec.run_dir, checkpoints.ResumePoint(checkpoint=newest))
    if path in (last.advised_path, "" if last.advised_path else last.resume_path):
        return last, ""
    return replace(last, advised_path=path, advised_step=newest.step), f"step {newest.step} may be resumed from"


def tell_saves(draft: Draft, name: str) -> None:
    """Saves that fail, and work that no verified checkpoint holds: someone is told; the training goes on."""
    run, last = draft.runs[name], draft.last_attempt(name)
    if last is None or last.state is not AttemptState.RUNNING or last.phase == SUSPENDED:
        draft.show(name, _FAILING, "")
        return
    place = str(run.spec.checkpoint.directory or run.spec.paths.checkpoints())
    known = draft.checkpoints(name)
    at_risk = saves.steps_at_risk(last, known, step=last.last_step)
    risk = f"; steps at risk: {at_risk}" if at_risk is not None else ""
    if last.save_failures:
        what = f"{saves.classify_save_error(last.save_error)}: {last.save_error or 'no reason is given'} ({place})"
        draft.show(name, _FAILING, f"{_FAILING}{last.save_failures} in a row; {what}{risk}; the training goes on")
        newest = saves.newest_kept(known)
        text = f"run {name}: a save failed, the training goes on: {what}{risk}"
        draft.tell(f"save-failed:{name}:{last.number}:{newest.step if newest else 0}", text, run=name)
    else:
        draft.show(name, _FAILING, "")
    _tell_age(draft, run, last, risk)


def _tell_age(draft: Draft, run: Run, last: Attempt, risk: str) -> None:
    limit_s = saves.alert_limit_s(run.spec.checkpoint, last)
    newest = saves.newest_kept(draft.checkpoints(run.name))
    since = saves.unsaved_since(last, newest)
    if limit_s is None or since is None or (age_s := _age_s(draft, since)) <= limit_s:
        return
    what = (
        f"the newest verified checkpoint is step {newest.step}" if newest is not None else "no checkpoint is verified"
    )
    text = f"critical: run {run.name}: {what}, and none was for {age_s:.0f} s (limit {limit_s:.0f} s){risk}"
    draft.tell(f"unsaved:{run.name}:{last.number}:{newest.step if newest else 0}", text, run=run.name)


def _age_s(draft: Draft, since: datetime) -> float:
    return (draft.now - since).total_seconds()
