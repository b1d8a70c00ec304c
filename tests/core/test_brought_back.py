"""A checkpoint that was lost and brought back by hand counts once a person has released the run, and is read back."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from supervisor.core.checkpoints import find_brought_back
from supervisor.model import Checkpoint, CheckpointState, IntentKind
from tests.core.builders import (
    NOW,
    ago,
    attempts_in,
    checkpoint,
    checkpoint_view,
    checkpoints_in,
    intents_of,
    over,
    plan_for,
    run,
    run_in,
    snapshot,
    view,
    world,
)

LOST = checkpoint(100, state=CheckpointState.CORRUPT, detail="gone from disk")


def brought_back(*, released_at: datetime | None, known: Checkpoint = LOST, **seen: Any) -> list[Checkpoint]:
    views, attempts = [checkpoint_view(100, **seen)], [over(1, over_at=ago(100))]
    return [c for c, _ in find_brought_back([known], views, attempts, released_at, NOW)]


def test_it_is_complete_again_and_not_yet_verified() -> None:
    (again,) = brought_back(released_at=ago(10))
    assert (again.state, again.verified_at, again.detail) == (CheckpointState.COMPLETE, None, "")


def test_without_a_release_after_the_end_of_the_last_attempt_it_stays_refused() -> None:
    assert brought_back(released_at=None) == []
    assert brought_back(released_at=ago(200)) == []


def test_one_that_is_not_whole_or_was_found_corrupt_by_the_nodes_stays_refused() -> None:
    assert brought_back(released_at=ago(10), is_complete=False) == []
    assert brought_back(released_at=ago(10), is_rejected_by_nodes=True) == []


def test_one_that_is_refused_again_is_not_tried_a_second_time_for_the_same_release() -> None:
    (again,) = brought_back(released_at=ago(10))
    refused = checkpoint(100, state=CheckpointState.CORRUPT, first_seen_at=again.first_seen_at)
    assert brought_back(released_at=ago(10), known=refused) == []


def test_what_was_fenced_or_pruned_does_not_come_back() -> None:
    for state in (CheckpointState.FENCED, CheckpointState.PRUNED):
        assert brought_back(released_at=ago(10), known=checkpoint(100, state=state)) == []


def test_one_that_does_not_load_stays_refused_however_whole_it_is() -> None:
    unloadable = checkpoint(100, state=CheckpointState.CORRUPT, load_failures=2)
    assert brought_back(released_at=ago(10), known=unloadable) == []


def test_a_released_run_has_what_was_brought_back_read_before_it_goes_on() -> None:
    seen = snapshot(view=view(checkpoints=(checkpoint_view(100),)))
    plan = plan_for(world(over(1, over_at=ago(100)), of=run(released_at=ago(10)), checkpoints=[LOST]), seen)
    assert checkpoints_in(plan)[100, 1].state is CheckpointState.COMPLETE
    assert [intent.step for intent in intents_of(plan, IntentKind.VERIFY)] == [100]
    assert attempts_in(plan) == {}


def test_a_record_of_the_nodes_from_before_the_end_is_no_reading_back() -> None:
    again = checkpoint(100, state=CheckpointState.COMPLETE, first_seen_at=NOW)
    seen = snapshot(view=view(checkpoints=(checkpoint_view(100, is_verified_by_nodes=True),)))
    plan = plan_for(world(over(1, over_at=ago(100)), of=run(released_at=ago(10)), checkpoints=[again]), seen)
    assert [intent.step for intent in intents_of(plan, IntentKind.VERIFY)] == [100]
    assert attempts_in(plan) == {}


def test_a_run_that_is_held_because_nothing_can_be_used_says_how_to_begin_at_0_on_purpose() -> None:
    corrupt = checkpoint(100, state=CheckpointState.CORRUPT, detail="damaged")
    plan = plan_for(world(over(1, over_at=ago(100)), checkpoints=[corrupt]), snapshot(view=view()))
    held = run_in(plan)
    assert held is not None
    assert "submit it under another name, with a run directory of its own" in held.reason
