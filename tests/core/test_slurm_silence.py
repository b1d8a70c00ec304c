"""A controller that does not answer is waited for; after some minutes someone is told, once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from supervisor.core.rules.outages import TELL_AFTER_S
from supervisor.model import IntentKind, IntentState, Plan, Stale
from tests.core.builders import NOW, ago, attempt, attempts_in, intents_of, plan_for, snapshot, view, world


def silent_for(seconds: float, **parts: Any) -> Plan:
    silence = Stale(why="squeue did not answer in time", since_at=ago(seconds))
    return plan_for(world(attempt(), **parts), snapshot(view=view(), jobs=silence))


def test_an_outage_changes_nothing_and_is_told_after_some_minutes() -> None:
    """Case CO-01."""
    assert intents_of(silent_for(TELL_AFTER_S - 1), IntentKind.NOTIFY) == ()
    plan = silent_for(TELL_AFTER_S)
    (told,) = intents_of(plan, IntentKind.NOTIFY)
    assert told.text == "Slurm has not answered for 5 min (jobs): squeue did not answer in time"
    assert attempts_in(plan) == {}
    assert plan.intents == (told,)


def test_one_outage_is_told_once() -> None:
    (told,) = intents_of(silent_for(900), IntentKind.NOTIFY)
    known = (replace(told, state=IntentState.DONE, settled_at=NOW),)
    assert intents_of(silent_for(900, settled_intents=known), IntentKind.NOTIFY) == ()
