"""What the running attempt reads, or copies to object storage, is not pruned under it."""

from __future__ import annotations

from typing import Any

from supervisor.model import IntentKind, Plan
from tests.core.builders import (
    attempt,
    checkpoint,
    checkpoint_view,
    intents_of,
    job,
    launch,
    over,
    plan_for,
    progress,
    snapshot,
    view,
    world,
)

FIVE = [checkpoint(step) for step in (100, 200, 300, 400, 500)]


def plan_with(one: Any = None, **seen: Any) -> Plan:
    views = tuple(checkpoint_view(c.step, c.attempt) for c in FIVE)
    look = view(launch=launch(), progress=progress(), checkpoints=views, **seen)
    return plan_for(world(one or attempt(), checkpoints=FIVE), snapshot(job(), view=look))


def pruned(plan: Plan) -> list[int | None]:
    return [intent.step for intent in intents_of(plan, IntentKind.PRUNE)]


def test_a_checkpoint_that_is_leased_by_the_running_attempt_stays_and_the_others_go() -> None:
    assert pruned(plan_with()) == [100, 200]
    assert pruned(plan_with(leased=("step-100.a1",))) == [200]
    assert pruned(plan_with(leased=("step-100.a1", "step-200.a1", "step-900.a7"))) == []


def test_nothing_is_pruned_while_a_lease_does_not_tell_what_it_is_about() -> None:
    assert pruned(plan_with(is_lease_unreadable=True)) == []


def test_what_an_attempt_that_is_over_left_behind_holds_nothing() -> None:
    ended = over(1)
    assert pruned(plan_with(ended, leased=("step-100.a1",), is_lease_unreadable=True)) == [100, 200]
