"""A save that a person asks for, and a release that leaves batches out: who may, when, and what is kept of it."""

from __future__ import annotations

from dataclasses import replace

from supervisor.model import Attempt, AttemptState, Run, RunState
from tests.control.test_requests import ANN, BOB, NOW, Ledger, asked, peer, run


class Running(Ledger):
    """Its run has an attempt in this state."""

    def __init__(self, one: Run, state: AttemptState = AttemptState.RUNNING) -> None:
        super().__init__(one)
        self.attempt = Attempt(
            run=one.name, number=1, token="t", state=state, nodes_wanted=1, planned_at=NOW, last_step=40
        )

    def load_attempts(self, run: str) -> tuple[Attempt, ...]:
        return (self.attempt,) if run == self.attempt.run else ()


def test_a_save_is_asked_for_by_the_owner_and_kept() -> None:
    ledger = Running(run())
    reply = asked(ledger, "save", run="llama")
    assert reply["ok"]
    assert "after step 40" in reply["message"]
    assert ledger.runs["llama"].save_asked_at == NOW
    assert ledger.requests == [(ANN, "save llama")]


def test_a_training_that_has_told_of_no_save_may_not_look_at_its_advice_and_the_answer_says_so() -> None:
    ledger = Running(run())
    assert "advice.json" in asked(ledger, "save", run="llama")["message"]
    ledger.attempt = replace(ledger.attempt, save_costs_s=(0.5,))
    assert "advice.json" not in asked(ledger, "save", run="llama")["message"]


def test_somebody_else_may_not_ask_for_a_save() -> None:
    ledger = Running(run())
    assert asked(ledger, "save", peer(BOB), run="llama")["code"] == "not_allowed"
    assert ledger.runs["llama"].save_asked_at is None


def test_a_run_that_does_not_run_can_not_save() -> None:
    for state in (AttemptState.PLANNED, AttemptState.SUBMITTED, AttemptState.OVER):
        assert asked(Running(run(), state), "save", run="llama")["code"] == "conflict"


def test_a_dry_run_asks_for_nothing() -> None:
    ledger = Running(run())
    assert asked(ledger, "save", run="llama", dry_run=True)["dry_run"]
    assert ledger.runs["llama"].save_asked_at is None


def test_a_release_leaves_batches_out_only_when_it_is_asked_to() -> None:
    for skips, kept in ((False, None), (True, NOW)):
        ledger = Ledger(run(RunState.HELD))
        assert asked(ledger, "release", run="llama", skip_batches=skips)["ok"]
        assert ledger.runs["llama"].skips_released_at == kept
        assert ledger.runs["llama"].released_at == NOW
