"""Failures made on purpose: which interruption of the ledger a drill has made. Pure.

Such an interruption is planned: it says nothing of how often the run fails.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from supervisor.core.draft import Draft
from supervisor.model import Attempt, Drill, Interruption

FOLLOWS_S = 600.0  # what comes later than this after a drill was asked for has another reason


def mark_drill(draft: Draft, attempt: Attempt, found: Interruption, evidence: Sequence[str] = ()) -> Interruption:
    """The interruption as made by the run's newest drill, if it was; each drill makes one.

    `evidence`: of the launcher's record, which names a drill that it has sent to a node.
    """
    run = draft.runs[attempt.run]
    known = next((i for i in draft.interruptions(run.name) if _place(i) == _place(found)), None)
    if known is not None and known.drill:
        return replace(found, drill=known.drill, is_planned=True)
    drill = run.drill
    if drill is None or drill.is_seen or drill.attempt != attempt.number:
        return found
    named = {*found.nodes, *([found.node] if found.node else [])}
    if not _is_of(drill, evidence, named, draft.now.timestamp(), is_in_job=found.is_in_job):
        return found
    draft.put(replace(run, drill=replace(drill, is_seen=True)), f"drill {drill.id} led to: {found.cause}")
    return replace(found, drill=drill.id, is_planned=True)


def _is_of(drill: Drill, evidence: Sequence[str], named: Collection[str], now_s: float, *, is_in_job: bool) -> bool:
    """A launcher says which drill it has sent; of what was made elsewhere, place and time must do."""
    is_near = 0 <= now_s - drill.asked_at <= FOLLOWS_S
    if is_in_job and not drill.is_made:
        is_told = any(line.startswith(f"drill {drill.id}: ") for line in evidence)
        return is_told and (is_near or drill.at_step is not None)
    return is_near and (not named or not drill.node or drill.node in named)


def _place(interruption: Interruption) -> tuple[int, int]:
    return interruption.attempt, interruption.launch
