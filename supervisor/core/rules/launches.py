"""Rules about starts of the training inside a job: its interruptions, and the nodes that they name. Pure."""

from __future__ import annotations

from dataclasses import replace

from supervisor.core import launches
from supervisor.core.draft import Draft
from supervisor.core.drills import mark_drill
from supervisor.core.rules.nodes import condemn, suspect
from supervisor.core.sight import Sight
from supervisor.model import Attempt, Interruption, NodeEvent, Verdict


def learn_interruptions(draft: Draft, sight: Sight) -> Attempt:
    """Take in the launcher's records of interruptions that the job survived; returns the attempt as it is then.

    Each is a row of the ledger of its own. Nodes that one names by hard evidence are condemned when it is first seen:
    left out of the next job, and drained within the budget, while the present job goes on without them.
    """
    attempt, view = sight.attempt, sight.view
    if view is None or not view.interruptions:
        return attempt
    known = {i.launch: i for i in draft.interruptions(attempt.run) if i.attempt == attempt.number}
    records = launches.choose_records(view.interruptions, attempt, view.exit)
    planned = attempt.planned
    for record in records:
        before = known.get(record.launch)
        after = mark_drill(draft, attempt, launches.fold_record(record, attempt, before, draft.now), record.evidence)
        planned += int(after.is_planned and not (before is not None and before.is_planned))
        draft.put(after, f"start {record.launch} was interrupted: {after.cause}")
        _blame(draft, attempt, launches.find_blame(record, attempt, before), before)
    settled = launches.count_settled(records, attempt)
    after_attempt = replace(attempt, interruptions_read=settled, planned=planned)
    draft.put(after_attempt, "seen")
    return after_attempt


def _blame(draft: Draft, attempt: Attempt, blamed: tuple[launches.Blame, ...], before: Interruption | None) -> None:
    for blame in blamed:
        if blame.is_hard and before is not None and _amend(draft, attempt, blame, before.kind):
            continue
        judge = condemn if blame.is_hard else suspect
        judge(draft, blame.node, blame.reason, attempt.run, attempt.number)


def _amend(draft: Draft, attempt: Attempt, blame: launches.Blame, kind: str) -> bool:
    """A node that was condemned by this record, which knows better by now: lost, then cut off. False: it was not."""
    memory = draft.node(blame.node)
    if memory.verdict is not Verdict.BROKEN or not memory.reason.startswith(f"{blame.node}: {kind}: "):
        return False
    draft.put(replace(memory, reason=blame.reason), blame.reason)
    event = NodeEvent(
        node=blame.node,
        at=draft.now,
        event="node.judged_broken",
        detail=blame.reason,
        run=attempt.run,
        attempt=attempt.number,
    )
    draft.put(event, blame.reason)
    return True
