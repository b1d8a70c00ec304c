"""A training that saves where this machine can't see it: known soon, said clearly, and never begun at 0 again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from supervisor.core.unseen import MARKS_S, find_unshared, why_unseen
from supervisor.model import AttemptEnd, IntentKind, RunState
from tests.core.builders import (
    NOW,
    ago,
    attempt,
    attempt_in,
    attempts_in,
    checkpoint,
    intents_of,
    job,
    launch,
    over,
    plan_for,
    ports,
    progress,
    run,
    run_in,
    run_state,
    snapshot,
    spec,
    view,
    world,
)

LOCAL = run(spec=spec(checkpoint={"directory": Path("/local/ckpt"), "layout": "dcp"}))
SEEN = ("1-n1", "1-n2")


def unshared(*marks: str, started_s: float = MARKS_S + 1, of: Any = LOCAL, **parts: Any) -> tuple[str, ...]:
    one = attempt(started_at=ago(started_s))
    return find_unshared(of, one, view(launch=launch(), node_marks=marks, **parts), NOW)


def test_a_node_whose_mark_does_not_show_saves_where_nobody_else_can_look() -> None:
    """CK-20: node-local /local/ckpt; here nothing of it is seen."""
    assert unshared() == ("n1", "n2")
    assert unshared("1-n1") == ("n2",)
    assert unshared(*SEEN) == ()


def test_a_mark_of_an_earlier_attempt_is_no_proof() -> None:
    """CK-20: the file system may have been unmounted since."""
    assert unshared("0-n1", "2-n2") == ("n1", "n2")


def test_while_nothing_can_be_known_nobody_is_accused() -> None:
    assert unshared(started_s=MARKS_S / 2) == ()
    assert unshared(checkpoints_unknown="no answer") == ()
    assert unshared(of=replace(LOCAL, spec=spec(checkpoint={"layout": "dcp"}))) == ()
    unchecked = replace(LOCAL.spec, nodes=replace(LOCAL.spec.nodes, start_checks=False))
    assert unshared(of=replace(LOCAL, spec=unchecked)) == ()


def test_it_is_told_and_is_the_runs_reason_while_the_training_goes_on() -> None:
    """CK-20: a clear error."""
    seen = view(launch=launch(), progress=progress(40), has_checkpoint_folder=False)
    plan = plan_for(world(attempt(started_at=ago(300), stepped_at=ago(200)), of=LOCAL), snapshot(job(), view=seen))
    assert attempt_in(plan).unshared_nodes == ("n1", "n2")
    shown = run_in(plan)
    assert shown is not None
    assert "/local/ckpt as n1, n2 sees it is not the folder that this machine sees" in shown.reason
    assert any("file system that all of them share" in i.text for i in intents_of(plan, IntentKind.NOTIFY))
    assert not intents_of(plan, IntentKind.CANCEL)


@pytest.mark.parametrize("changes", [{"unshared_nodes": ("n1",)}, {"saved_step": 2000}])
def test_a_run_that_has_saved_out_of_sight_is_held_and_does_not_begin_at_0(changes: dict[str, Any]) -> None:
    """CK-20: not "no checkpoint, start from 0"."""
    ended = over(1, AttemptEnd.NODE_SILENT, is_job_gone=True, **changes)
    there = snapshot(view=view(), ports=ports(n1=0, n2=0, n3=0, n4=0))
    plan = plan_for(world(ended, of=LOCAL), there)
    assert run_state(plan) is RunState.HELD
    assert 2 not in attempts_in(plan)
    released = replace(LOCAL, released_at=ago(1))
    assert attempts_in(plan_for(world(ended, of=released), there))[2].resume_step == 0


def test_a_script_whose_folder_is_not_even_there_after_hours_is_held() -> None:
    """CK-20: a script leaves no marks; that its folder is nowhere after two hours of training says as much."""
    ended = over(1, AttemptEnd.NODE_SILENT, started_at=ago(7260), is_job_gone=True)
    there = snapshot(view=view(has_checkpoint_folder=False), ports=ports(n1=0, n2=0, n3=0, n4=0))
    plan = plan_for(world(ended, of=LOCAL), there)
    assert run_state(plan) is RunState.HELD
    shown = run_in(plan)
    assert shown is not None
    assert "/local/ckpt is not even there" in shown.reason
    young = replace(ended, started_at=ago(1200))
    assert attempts_in(plan_for(world(young, of=LOCAL), there))[2].resume_step == 0


def test_a_run_whose_checkpoints_are_seen_is_not_out_of_sight() -> None:
    assert why_unseen(LOCAL, (over(1, saved_step=2000),), (checkpoint(1000),)) == ""
    assert why_unseen(LOCAL, (over(1),), ()) == ""
