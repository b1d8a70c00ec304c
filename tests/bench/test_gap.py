"""The gap of a recovery and its stages, from built traces."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest

from bench.gap import (
    IN_JOB,
    NEW_JOB,
    Gap,
    find_gap,
    measure_gap,
    parse_worker_marks,
    read_launch_marks,
    split_gap,
)
from trainer.history import StepLog, StepRecord, loss_path

GAP = Gap(last_step=32, last_at=100.0, first_step=30, first_at=112.0)


def step(number: int, at: float | None, resumed_from: str = "") -> StepRecord:
    return StepRecord(step=number, world=3, resumed_from=resumed_from, loss=1.0, time=at)


def test_the_gap_is_from_the_last_step_before_to_the_first_step_after() -> None:
    gap = measure_gap([[step(31, 99.8), step(32, 100.0)], [step(30, 112.0), step(31, 112.2)]], since=99.9)
    assert gap == GAP
    assert (gap.seconds, gap.redone_steps) == (12.0, 3)


def test_a_start_within_one_attempt_begins_where_steps_are_done_again() -> None:
    assert measure_gap([[step(31, 99.8), step(32, 100.0), step(30, 112.0), step(31, 112.2)]], since=100.1) == GAP


def test_a_start_that_does_no_step_again_is_told_by_its_checkpoint() -> None:
    log = [step(31, 99.8, "step-20.a1"), step(32, 100.0, "step-20.a1"), step(33, 112.0, "step-32.a1")]
    gap = measure_gap([log], since=100.1)
    assert gap is not None
    assert (gap.seconds, gap.redone_steps) == (12.0, 0)


def test_a_long_step_is_no_gap() -> None:
    assert measure_gap([[step(31, 99.8), step(32, 108.0), step(33, 108.2)]], since=99.9) is None


def test_a_gap_that_was_over_before_the_fault_does_not_count() -> None:
    log = [step(8, 90.0), step(7, 95.0, "step-6.a1"), step(8, 95.2, "step-6.a1"), step(8, 112.0, "step-7.a1")]
    gap = measure_gap([log], since=95.1)
    assert gap is not None
    assert (gap.last_at, gap.first_at) == (95.2, 112.0)


def test_there_is_no_gap_while_no_step_came_after() -> None:
    assert measure_gap([[step(31, 99.8), step(32, 100.0)], []], since=99.0) is None
    assert measure_gap([[step(32, None)], [step(33, None)]], since=99.0) is None  # logs of an older release: no times


def test_the_gap_is_read_from_the_step_logs_of_all_attempts(tmp_path: Path) -> None:
    for attempt, numbers in ((1, (1, 2, 3)), (2, (3, 4))):
        log = StepLog(loss_path(tmp_path, attempt), world=1)
        for number in numbers:
            log.append_loss(number, 1.0)
        log.close()
    gap = find_gap(tmp_path, since=0.0)
    assert gap is not None
    assert (gap.last_step, gap.first_step) == (3, 3)
    assert gap.seconds >= 0


@pytest.mark.parametrize("missing", [None, "planned", "launch.started", "resumed"])
def test_the_stages_add_up_to_the_gap_whatever_mark_is_missing(missing: str | None) -> None:
    names = ("detected", "planned", "submitted", "launch.started", "go.sent", "workers.started", "imported", "resumed")
    marks = {name: 101.0 + number for number, name in enumerate(names) if name != missing}
    assert sum(split_gap(GAP, marks, NEW_JOB).values()) == pytest.approx(GAP.seconds)
    assert sum(split_gap(GAP, marks, IN_JOB).values()) == pytest.approx(GAP.seconds)


def test_a_stage_ends_at_its_mark() -> None:
    stages = split_gap(GAP, {"training.interrupted": 101.5, "go.sent": 102.0}, IN_JOB)
    assert stages == {"notice": 1.5, "stop, check nodes, choose": 0.5, "first step": 10.0}


def test_the_first_of_several_equal_events_after_the_fault_counts(tmp_path: Path) -> None:
    path = tmp_path / "attempts" / "2" / "timing.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text(
        '{"event": "workers.started", "time": 7.5, "node": "n2"}\n'
        '{"event": "workers.started", "time": 7.25, "node": "n1"}\n'
        '{"event": "workers.started", "time": 3.0, "node": "n1"}\n'
    )
    assert read_launch_marks(tmp_path, 2, since=5.0) == {"workers.started": 7.25}
    assert read_launch_marks(tmp_path, 2) == {"workers.started": 3.0}
    assert read_launch_marks(tmp_path, 3) == {}


def test_the_marks_of_rank_0_are_found_in_the_log() -> None:
    log = (
        "[default0]:2026-07-28 10:00:01,500 rank 0 INFO torch is imported, 2.10 s after this process began\n"
        "[default0]:2026-07-28 10:00:02,000 rank 1 INFO 3 ranks have met, 2.60 s after this process began\n"
        "[default0]:2026-07-28 10:00:02,250 rank 0 INFO 3 ranks have met, 2.80 s after this process began\n"
        "[default0]:2026-07-28 10:00:03,000 rank 0 INFO resumed from step-5.a1: step 5, 60 samples\n"
        "[default0]:2026-07-28 10:00:11,500 rank 0 INFO torch is imported, 2.10 s after this process began\n"
    )

    def at(text: str) -> float:
        return datetime.strptime(text, "%Y-%m-%d %H:%M:%S.%f").astimezone().timestamp()

    assert parse_worker_marks(log) == {
        "imported": at("2026-07-28 10:00:01.500"),
        "met": at("2026-07-28 10:00:02.250"),
        "resumed": at("2026-07-28 10:00:03.000"),
    }
    assert parse_worker_marks(log, since=at("2026-07-28 10:00:05.000")) == {"imported": at("2026-07-28 10:00:11.500")}
