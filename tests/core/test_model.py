"""What is derived from the domain types, and the plan in the making."""

from __future__ import annotations

from dataclasses import replace

import pytest

from supervisor.core.draft import Draft
from supervisor.model import IntentKind, IntentState, Interruption, Policy, World
from tests.core.builders import NOW, snapshot, spec, submit_intent, world


@pytest.mark.parametrize(("procs", "gpus", "count"), [(None, None, 1), (None, 8, 8), (4, 8, 4), (2, None, 2)])
def test_a_node_gets_as_many_processes_as_asked_else_as_it_has_gpus_else_one(
    procs: int | None, gpus: int | None, count: int
) -> None:
    assert spec(nodes={"procs_per_node": procs}, slurm={"gpus_per_node": gpus}).procs_per_node == count


INTERRUPTION = Interruption(
    run="gpt", attempt=1, kind="crashed", cause="", node=None, is_planned=False, detected_at=NOW, last_step=30
)


def test_an_interruption_that_is_not_resumed_has_cost_nobody_knows_what() -> None:
    assert (INTERRUPTION.recovery_s, INTERRUPTION.lost_steps) == (None, None)


@pytest.mark.parametrize(("last", "resumed", "lost"), [(30, 20, 10), (30, 30, 0), (20, 30, 0), (None, 20, None)])
def test_steps_done_again_are_lost(last: int | None, resumed: int, lost: int | None) -> None:
    assert replace(INTERRUPTION, last_step=last, resume_step=resumed).lost_steps == lost


def test_an_intent_that_was_meant_and_withdrawn_in_one_cycle_leaves_no_trace() -> None:
    draft = Draft(World(), snapshot(), Policy(), NOW)
    draft.intend(submit_intent())
    draft.withdraw(submit_intent(), "not wanted")
    assert (draft.plan().intents, draft.plan().withdrawn) == ((), ())


def test_a_note_is_said_once() -> None:
    draft = Draft(world(), snapshot(), Policy(), NOW)
    draft.note("blind")
    draft.note("blind")
    assert draft.plan().notes == ("blind",)


def test_an_intent_that_was_taken_back_or_settled_in_this_cycle_is_not_open_any_more() -> None:
    known = replace(world(), open_intents=(submit_intent(1), submit_intent(2)))
    draft = Draft(known, snapshot(), Policy(), NOW)
    draft.withdraw(submit_intent(1), "not wanted")
    draft.settle(submit_intent(2), IntentState.DONE, "seen")
    assert (draft.open_intent("submit:gpt:1"), draft.open_intent("submit:gpt:2")) == (None, None)
    assert draft.open_intents(IntentKind.SUBMIT) == ()
