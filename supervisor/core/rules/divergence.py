"""The rule about a loss that went wrong: taken in with the end of the attempt that found it. Pure."""

from __future__ import annotations

from dataclasses import replace

from supervisor.core.divergence import judge_fault, read_fault
from supervisor.core.draft import Draft
from supervisor.core.rules.checkpoints import put_checkpoint, verify_key
from supervisor.core.sight import Sight
from supervisor.model import Attempt, AttemptEnd, IntentState


def take_in_fault(draft: Draft, sight: Sight, over: Attempt) -> Attempt:
    """The attempt with what its training found of its loss and what was decided; checkpoints since then are suspect.

    All of it is committed with the end itself: no later cycle sees one without the other.
    """
    record = sight.view.divergence if sight.view is not None else None
    if record is None and over.end is not AttemptEnd.DIVERGED:
        return over
    run = draft.runs[over.run]
    verdict = judge_fault(run, over, draft.attempts(run.name), draft.checkpoints(run.name), read_fault(record))
    for checkpoint, why in verdict.suspects:
        put_checkpoint(draft, checkpoint, why)
        reading = draft.open_intent(verify_key(checkpoint))
        if reading is not None:
            draft.settle(reading, IntentState.DONE, "suspect: it is not resumed from")
    if over.end is not AttemptEnd.DIVERGED:
        return replace(over, loss_fault=replace(verdict.fault, is_rolled_back=False, decision=""))
    suspect = f"; {len(verdict.suspects)} checkpoints are suspect" if verdict.suspects else ""
    detail = f"{over.end_detail}; {verdict.fault.decision}{suspect}"
    if verdict.fault.is_rolled_back:
        draft.tell(
            f"diverged:{run.name}:{over.number}", f"run {run.name}, attempt {over.number}: {detail}", run=run.name
        )
    return replace(over, loss_fault=verdict.fault, end_detail=detail)
