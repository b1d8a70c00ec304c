"""The gap of a recovery and its stages, from built traces."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest

from bench.gap import Gap, find_gap, measure_gap, parse_worker_marks, read_launch_marks, split_gap
from trainer.history import StepLog, StepRecord, loss_path

GAP = Gap(last_step=32, last_at=100.0, first_step=30, first_at=112.0)


def step(number: int, at: float | None) -> StepRecord:
    return StepRecord(step=number, world=3, resumed_from="", loss=1.0, time=at)


def test_the_gap_is_from_the_last_step_before_to_the_first_step_after() -> None:
    gap = measure_gap([step(31, 99.8), step(32, 100.0)], [step(30, 112.0), step(31, 112.2)])
    assert gap == GAP
    assert (gap.seconds, gap.redone_steps) == (12.0, 3)


def test_there_is_no_gap_while_no_step_came_after() -> None:
    assert measure_gap([step(32, 100.0)], []) is None
    assert measure_gap([step(32, None)], [step(33, None)]) is None  # a log of an older release has no times


def test_the_gap_is_read_from_the_step_logs_of_two_attempts(tmp_path: Path) -> None:
    for attempt, numbers in ((1, (1, 2, 3)), (2, (3, 4))):
        log = StepLog(loss_path(tmp_path, attempt), world=1)
        for number in numbers:
            log.append_loss(number, 1.0)
        log.close()
    gap = find_gap(tmp_path, 2)
    assert gap is not None
    assert (gap.last_step, gap.first_step) == (3, 3)
    assert gap.seconds >= 0


@pytest.mark.parametrize("missing", [None, "planned", "launch.started", "resumed"])
def test_the_stages_add_up_to_the_gap_whatever_mark_is_missing(missing: str | None) -> None:
    names = ("detected", "planned", "submitted", "launch.started", "go.sent", "workers.started", "imported", "resumed")
    marks = {name: 101.0 + number for number, name in enumerate(names) if name != missing}
    stages = split_gap(GAP, marks)
    assert sum(stages.values()) == pytest.approx(GAP.seconds)


def test_a_stage_ends_at_its_mark() -> None:
    stages = split_gap(GAP, {"detected": 104.0, "planned": 104.5})
    assert stages == {"notice": 4.0, "decide": 0.5, "first step": 7.5}


def test_the_first_of_several_equal_events_counts(tmp_path: Path) -> None:
    path = tmp_path / "attempts" / "2" / "timing.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text(
        '{"event": "workers.started", "time": 7.5, "node": "n2"}\n'
        '{"event": "workers.started", "time": 7.0, "node": "n1"}\n'
    )
    assert read_launch_marks(tmp_path, 2) == {"workers.started": 7.0}


def test_rank_0s_log_tells_when_it_had_imported_met_and_loaded() -> None:
    log = (
        "[rank0]: 2026-01-02 03:04:05,250 rank 0 INFO torch is imported, 1.87 s after this process began\n"
        "[rank0]: 2026-01-02 03:04:05,500 rank 0 INFO 3 ranks have met, 1.93 s after this process began\n"
        "[rank0]: 2026-01-02 03:04:06,000 rank 0 INFO resumed from step-31.a1: step 31, 372 samples\n"
        "[rank0]: 2026-01-02 03:04:06,100 rank 0 INFO step 32 done 2.77 s after this process began\n"
    )
    began = datetime(2026, 1, 2, 3, 4, 5).astimezone().timestamp()  # local time, as logs are
    marks = {name: at - began for name, at in parse_worker_marks(log).items()}
    assert marks == pytest.approx({"imported": 0.25, "met": 0.5, "resumed": 1.0})
