"""A failure that a person wants to see recovered from: who may ask for it, of which run, and that it is kept once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from supervisor.model import AttemptState, Drill, Run, RunState
from tests.control.test_requests import ANN, BOB, asked, peer, run
from tests.control.test_save_request import Running

ASKED: dict[str, Any] = {"run": "llama", "kind": "process", "id": "ab12"}


def running(one: Run | None = None, state: AttemptState = AttemptState.RUNNING) -> Running:
    ledger = Running(one or run(), state)
    ledger.attempt = replace(ledger.attempt, nodes=("n1", "n2"))
    return ledger


def test_a_drill_is_asked_for_by_the_owner_and_kept() -> None:
    ledger = running()
    reply = asked(ledger, "drill", **ASKED, node="n2", at_step=70)
    assert (reply["ok"], reply["id"], reply["attempt"]) == (True, "ab12", 1)
    assert ledger.runs["llama"].drill == Drill(id="ab12", kind="process", node="n2", at_step=70, attempt=1)
    assert ledger.requests == [(ANN, "drill llama")]


def test_the_same_drill_again_changes_nothing() -> None:
    ledger = running()
    asked(ledger, "drill", **ASKED)
    again = asked(ledger, "drill", **{**ASKED, "kind": "node"})
    assert again["ok"]
    assert ledger.runs["llama"].drill == Drill(id="ab12", kind="process", attempt=1)


def test_somebody_else_may_not_make_a_run_fail() -> None:
    ledger = running()
    assert asked(ledger, "drill", peer(BOB), **ASKED)["code"] == "not_allowed"
    assert ledger.runs["llama"].drill is None


@pytest.mark.parametrize("state", [AttemptState.PLANNED, AttemptState.SUBMITTED, AttemptState.OVER])
def test_a_run_that_does_not_run_can_not_fail_on_purpose(state: AttemptState) -> None:
    assert asked(running(state=state), "drill", **ASKED)["code"] == "conflict"


def test_a_run_that_is_not_started_again_inside_its_job_takes_no_drill() -> None:
    one = run(RunState.ACTIVE)
    by_job = replace(one, spec=replace(one.spec, restart=replace(one.spec.restart, in_job=False)))
    assert asked(running(by_job), "drill", **ASKED)["code"] == "conflict"


@pytest.mark.parametrize(
    "odd",
    [
        {"kind": "fire"},
        {"kind": None},
        {"id": ""},
        {"id": "../x"},
        {"id": 7},
        {"id": "a" * 33},
        {"node": "n9"},
        {"node": 2},
        {"at_step": -1},
        {"at_step": True},
        {"at_step": "70"},
    ],
)
def test_what_is_no_drill_is_refused(odd: dict[str, Any]) -> None:
    ledger = running()
    assert asked(ledger, "drill", **{**ASKED, **odd})["code"] == "bad_input"
    assert ledger.runs["llama"].drill is None


def test_a_dry_run_makes_nothing_fail() -> None:
    ledger = running()
    assert asked(ledger, "drill", **ASKED, dry_run=True)["dry_run"]
    assert ledger.runs["llama"].drill is None
