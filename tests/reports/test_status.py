"""What a run is doing, in one word, and what is said of the daemon."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from supervisor.core.reliability import estimate_mtbf
from supervisor.model import (
    Attempt,
    AttemptEnd,
    AttemptState,
    Checkpoint,
    CheckpointState,
    NodesSpec,
    Run,
    RunSpec,
    RunState,
)
from supervisor.reports.liveness import Liveness
from supervisor.reports.status import (
    Status,
    daemon_line,
    fold,
    is_running,
    judge_run,
    mtbf_words,
    state_word,
    status_as_json,
)
from supervisor.store import DaemonRow

NOW = datetime(2026, 1, 2, tzinfo=UTC)
SPEC = RunSpec(name="a", command=("train.py",), root=Path("/shared"), nodes=NodesSpec(min=1, max=2))


def run(state: RunState = RunState.ACTIVE, *, reason: str = "", is_paused: bool = False) -> Run:
    return Run(spec=SPEC, state=state, reason=reason, is_paused=is_paused)


def attempt(number: int, state: AttemptState, *, is_stepping: bool = False, end: AttemptEnd | None = None) -> Attempt:
    return Attempt(
        run="a",
        number=number,
        token=f"t{number}",
        nodes_wanted=1,
        planned_at=NOW,
        state=state,
        stepped_at=NOW if is_stepping else None,
        end=end,
    )


_AHEAD, PLANNED, SUBMITTED, RUNNING, OVER = AttemptState


@pytest.mark.parametrize(
    ("run", "last", "word"),
    [
        (run(), None, "pending"),
        (run(), attempt(1, PLANNED), "pending"),
        (run(), attempt(1, SUBMITTED), "pending"),
        (run(), attempt(1, RUNNING), "starting"),
        (run(), attempt(1, RUNNING, is_stepping=True), "running"),
        (run(), attempt(1, OVER), "recovering"),
        (run(), attempt(2, PLANNED), "recovering"),
        (run(), attempt(2, SUBMITTED), "recovering"),
        (run(), attempt(2, RUNNING), "recovering"),
        (run(), attempt(2, RUNNING, is_stepping=True), "running"),
        (run(reason="waiting: 1 healthy nodes, the minimum is 2"), None, "waiting"),
        (run(reason="waiting: 1 healthy nodes, the minimum is 2"), attempt(1, OVER), "waiting"),
        (run(is_paused=True), attempt(1, OVER), "paused"),
        (run(RunState.HELD, is_paused=True), attempt(1, OVER), "held"),
        (run(RunState.STOPPING), attempt(1, RUNNING, is_stepping=True), "stopping"),
        (run(RunState.STOPPED), attempt(1, OVER), "stopped"),
        (run(RunState.FINISHED), attempt(3, OVER), "finished"),
    ],
)
def test_a_run_is_told_in_one_word(run: Run, last: Attempt | None, word: str) -> None:
    assert state_word(run, last) == word


def checkpoint(step: int, state: CheckpointState) -> Checkpoint:
    return Checkpoint(run="a", step=step, attempt=1, state=state, path=f"/c/{step}", first_seen_at=NOW)


def test_only_a_verified_checkpoint_is_shown_as_verified() -> None:
    found = [checkpoint(10, CheckpointState.VERIFIED)] + [
        checkpoint(20 + i, state) for i, state in enumerate(CheckpointState) if state is not CheckpointState.VERIFIED
    ]
    assert judge_run(run(), [], found, [], NOW).verified_step == 10
    assert judge_run(run(), [], found[1:], [], NOW).verified_step is None


def test_a_run_that_has_done_nothing_has_no_numbers() -> None:
    status = judge_run(run(), [], [], [], NOW)
    assert (status.step, status.mtbf, status.ettr, status.interruptions) == (None, None, None, 0)


def test_the_step_never_lags_behind_what_the_attempt_has_saved() -> None:
    running = dataclasses.replace(attempt(1, RUNNING, is_stepping=True), last_step=7)
    saved = [checkpoint(10, CheckpointState.VERIFIED)]
    assert judge_run(run(), [running], saved, [], NOW).step == 10
    assert judge_run(run(), [dataclasses.replace(running, last_step=12)], saved, [], NOW).step == 12
    assert judge_run(run(), [running], [checkpoint(10, CheckpointState.CORRUPT)], [], NOW).step == 7
    own, foreign = (
        checkpoint(10, CheckpointState.COMPLETE),
        dataclasses.replace(checkpoint(10, CheckpointState.COMPLETE), stamp="of another framework"),
    )
    assert [judge_run(run(), [running], [one], [], NOW).step for one in (own, foreign)] == [7, 10]


def ended(number: int) -> Attempt:
    over = attempt(number, OVER, end=AttemptEnd.CRASHED)
    return dataclasses.replace(over, over_at=NOW, end_detail=f"rank {number} crashed")


def test_a_run_that_recovers_says_why() -> None:
    for live in (PLANNED, SUBMITTED, RUNNING):
        told = judge_run(run(), [ended(1), attempt(2, live)], [], [], NOW)
        assert (told.state, "rank 1 crashed" in told.reason) == ("recovering", True)
    assert judge_run(run(), [ended(1), attempt(2, RUNNING, is_stepping=True)], [], [], NOW).reason == ""


def test_a_back_off_is_told_with_its_end() -> None:
    attempts = [ended(1), ended(2)]
    told = judge_run(run(), attempts, [], [], NOW)
    assert told.next_start_at == NOW + timedelta(seconds=SPEC.restart.backoff_s)
    assert "00:00:15 UTC (back-off)" in told.reason
    assert judge_run(run(), attempts, [], [], NOW + timedelta(minutes=1)).next_start_at is None
    assert judge_run(run(RunState.HELD), attempts, [], [], NOW).next_start_at is None


def status(liveness: Liveness, *, age_s: float | None, summary: str = "1 runs") -> Status:
    row = None
    if age_s is not None:
        cycle_at = NOW - timedelta(seconds=age_s)
        row = DaemonRow(
            pid=1, host="head", version="1", started_at=cycle_at, cycle_at=cycle_at, cycle=3, summary=summary
        )
    return Status(now=NOW, liveness=liveness, daemon=row, is_paused=False, runs=())


ANSWERS = Liveness(is_there=True, is_answering=True)
SILENT = Liveness(is_there=True, is_answering=False, why="no answer within 0.5 s")
DOWN = Liveness(is_there=False, is_answering=False, why="start it")


@pytest.mark.parametrize(
    ("liveness", "age_s", "running"),
    [(ANSWERS, 1, True), (ANSWERS, None, True), (SILENT, 5, True), (SILENT, 300, False), (DOWN, 1, False)],
)
def test_a_daemon_that_is_busy_runs_and_one_that_is_frozen_does_not(
    liveness: Liveness, age_s: float | None, running: bool
) -> None:
    assert is_running(status(liveness, age_s=age_s)) is running


@pytest.mark.parametrize(
    ("liveness", "age_s", "part"),
    [(ANSWERS, 1, "running (pid 1"), (SILENT, 5, "busy"), (SILENT, 300, "frozen?"), (DOWN, 9, "NOT RUNNING")],
)
def test_the_daemon_is_told_in_one_line(liveness: Liveness, age_s: float, part: str) -> None:
    line = daemon_line(status(liveness, age_s=age_s))
    assert part in line
    assert "\n" not in line


def test_a_daemon_that_waits_for_slurm_says_so() -> None:
    waiting = status(ANSWERS, age_s=1, summary="Slurm does not answer (squeue); waiting")
    assert "Slurm does not answer" in daemon_line(waiting)
    assert status_as_json(waiting)["daemon"]["slurm"] == "not answering"


def test_without_a_failure_a_bound_is_shown_and_no_infinity() -> None:
    assert mtbf_words(estimate_mtbf(3600 * 30, 0)) == "> 10.0 h"
    assert mtbf_words(estimate_mtbf(3600 * 30, 3)).startswith("10.0 h (")
    assert mtbf_words(None) == "-"


def test_many_nodes_are_shown_as_slurm_writes_them() -> None:
    assert fold(("n1", "n2")) == "n1,n2"
    assert fold(("n1", "n2", "n3", "n7")) == "n[1-3,7]"


def test_what_holds_up_the_attempt_that_is_to_recover_a_run_is_said_with_the_end_before_it() -> None:
    attempts = [attempt(1, OVER, end=AttemptEnd.CRASHED), attempt(2, PLANNED)]
    held_up = judge_run(run(reason="not submitted yet: write /shared/a"), attempts, [], [], NOW)
    assert held_up.reason == "not submitted yet: write /shared/a; attempt 1 ended, crashed"
