"""The submission of an attempt that is queued ahead, and how its launcher is told to begin."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from supervisor.model import Attempt, AttemptEnd, AttemptState, Intent, IntentKind, IntentState, RunState
from supervisor.store import Store
from tests.daemon.test_executor import Bench, planned
from tests.fakes import FakeClock, Fault

AHEAD = AttemptState.AHEAD


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """A run whose first attempt runs in job 1."""
    clock = FakeClock()
    with Store.open(tmp_path / "ledger.db", now=clock.now()) as store:
        bench = Bench(store, clock)
        bench.mean(
            Intent(kind=IntentKind.SUBMIT, key="submit:gpt:1", reason="go", run="gpt", attempt=1), planned(bench)
        )
        bench.settle()
        bench.slurm.advance(5)
        yield bench


def queue(bench: Bench) -> None:
    second = planned(bench, number=2, token="sup:gpt:2", state=AHEAD)
    bench.mean(Intent(kind=IntentKind.SUBMIT, key="submit:gpt:2", reason="go", run="gpt", attempt=2), second)


def second(bench: Bench) -> Attempt:
    return next(a for a in (*bench.store.load_attempts("gpt"), *bench.store.load_aside("gpt")) if a.number == 2)


def test_it_is_submitted_behind_the_running_job_and_told_to_wait(bench: Bench) -> None:
    queue(bench)
    bench.settle()
    assert (second(bench).state, second(bench).job_id) == (AHEAD, 2)
    assert bench.slurm.request_of(2).dependency == "afterany:1,singleton"
    assert bench.disk.specs[2].is_ahead
    bench.slurm.advance(60)
    assert bench.slurm.job(2).start_at is None


def test_a_job_whose_reply_was_lost_is_found_and_still_waits(bench: Bench) -> None:
    queue(bench)
    bench.slurm.plan("submit", Fault.LOST_REPLY)
    bench.settle()
    bench.after(5)
    assert (second(bench).state, second(bench).job_id) == (AHEAD, 2)


def test_a_request_that_was_lost_is_not_repeated(bench: Bench) -> None:
    """Nobody knows by then whether it will be needed: the attempt after the running one is submitted at its time."""
    queue(bench)
    bench.slurm.plan("submit", Fault.LOST_REQUEST)
    bench.settle()
    bench.after(bench.settings.slurm.submit_lookup_wait_s + 1)
    assert (second(bench).end, second(bench).is_job_gone) == (AttemptEnd.NOT_NEEDED, True)
    assert len(bench.slurm.jobs()) == 1


def test_a_refusal_is_no_end_of_the_run(bench: Bench) -> None:
    queue(bench)
    bench.slurm.plan("submit", Fault.REFUSED)
    bench.settle()
    assert second(bench).end is AttemptEnd.NOT_NEEDED
    assert [a.number for a in bench.store.load_attempts("gpt")] == [1]


def promote(bench: Bench, **changes: object) -> None:
    first = bench.store.load_attempts("gpt")[0]
    over = replace(first, state=AttemptState.OVER, end=AttemptEnd.SAVED, over_at=bench.clock.now(), is_job_gone=True)
    turn = replace(second(bench), state=AttemptState.SUBMITTED, resume_step=40, resume_path="/c/step-40.a1")
    intent = Intent(kind=IntentKind.PROMOTE, key="promote:gpt:2", reason="its turn", run="gpt", attempt=2)
    bench.mean(intent, over, replace(turn, **changes))  # type: ignore[arg-type]


def test_its_launcher_is_told_to_begin_and_from_where(bench: Bench) -> None:
    queue(bench)
    bench.settle()
    promote(bench)
    bench.settle()
    told = bench.disk.specs[2]
    assert (told.is_ahead, told.resume_step, told.resume_from) == (False, 40, "/c/step-40.a1")
    assert bench.intent.state is IntentState.DONE


def test_a_file_system_that_does_not_answer_is_tried_again(bench: Bench) -> None:
    queue(bench)
    bench.settle()
    promote(bench)
    bench.disk.is_hanging = True
    bench.settle()
    assert bench.disk.specs[2].is_ahead
    bench.disk.is_hanging = False
    bench.after(120)
    assert not bench.disk.specs[2].is_ahead


def test_one_that_is_over_is_not_told_to_begin(bench: Bench) -> None:
    queue(bench)
    bench.settle()
    promote(bench, state=AttemptState.OVER, end=AttemptEnd.STOPPED, over_at=bench.clock.now())
    bench.settle()
    assert bench.disk.specs[2].is_ahead
    assert bench.intent.state is IntentState.WITHDRAWN


def test_one_whose_reply_was_lost_is_found_after_its_turn_has_come_and_begins(bench: Bench) -> None:
    queue(bench)
    bench.slurm.plan("submit", Fault.LOST_REPLY)
    bench.settle()
    promote(bench, state=AttemptState.PLANNED)
    bench.after(5)
    assert (second(bench).state, second(bench).job_id) == (AttemptState.SUBMITTED, 2)
    assert not bench.disk.specs[2].is_ahead


def test_its_lost_submission_is_settled_too_while_the_run_is_held(bench: Bench) -> None:
    queue(bench)
    bench.slurm.plan("submit", Fault.LOST_REPLY)
    bench.settle()
    bench.set_run(state=RunState.HELD)
    bench.after(5)
    assert second(bench).job_id == 2  # known, so it can be cancelled
