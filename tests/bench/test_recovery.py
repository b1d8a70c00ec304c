"""What bench-recovery makes of its seconds: ratios, targets that are missed or that nobody measured, overhead."""

from __future__ import annotations

import threading
import time

import pytest

from bench import recovery_peers
from bench.gap import Gap
from bench.overhead import rate_steps, step_s
from bench.recovery_peers import Turns
from bench.recovery_result import TARGETS, Findings, Recovery, judge, median_parts, rate
from bench.report import Target
from bench.stage import BenchFailed
from trainer.history import StepRecord

WITHIN = {t.key: t.at_most if t.at_most is not None else t.at_least for t in TARGETS}


def recovery(way: str, seconds: float, **more: float) -> Recovery:
    gap = Gap(last_step=9, last_at=100.0, first_step=8, first_at=100.0 + seconds)
    return Recovery(way=way, node="n2", gap=gap, acted_s=more.get("acted_s"), parts_s={"stop": more.get("stop", 0.1)})


def past(target: Target) -> float:
    return target.at_most * 1.01 if target.at_most is not None else (target.at_least or 0) * 0.99


def test_numbers_at_their_targets_miss_none() -> None:
    assert judge(WITHIN) == []


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.key)
def test_a_number_past_its_target_is_named_alone(target: Target) -> None:
    (missed,) = judge({**WITHIN, target.key: past(target)})
    assert missed.startswith(f"{target.key} is ")


def test_a_number_that_was_not_measured_is_no_success() -> None:
    assert judge({**WITHIN, "hang_s": None}) == ["hang_s was not measured"]


def test_ratios_are_those_of_medians_and_the_shorter_of_two_is_told_by_its_name() -> None:
    findings = Findings()
    findings.starts_s += [3.0, 4.0, 50.0]
    for way, seconds in (("spare", 5.0), ("spare_warm", 2.0), ("requeue", 150.0), ("nvrx", 40.0), ("shrink", 6.0)):
        for off in (-0.5, 0.0, 30.0):
            findings.add(recovery(way, seconds + off))
    findings.add(recovery("hang", 12.0, acted_s=8.5))
    result = rate(findings, {"overhead_percent": 0.2})
    assert result["spare_vs_start"] == 1.25
    assert result["spare_warm_vs_start"] == 0.5
    assert result["requeue_vs_spare"] == 30.0
    assert result["nvrx_vs_spare"] == 8.0
    assert result["requeue_vs_shrink"] == 25.0
    assert result["hang_s"] == 8.5
    assert result["overhead_percent"] == 0.2
    assert result["worker_vs_torchrun"] is None
    assert "worker_vs_torchrun was not measured" in result["missed"]


def test_a_part_that_some_recoveries_lack_is_the_median_of_the_others() -> None:
    assert median_parts([{"stop": 1.0, "check": 2.0}, {"stop": 3.0}]) == {"stop": 2.0, "check": 2.0}


# ---------------------------------------------------------------- the others, side by side


def test_jobs_are_broken_one_after_the_other_in_their_order_and_not_too_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery_peers, "_SPACING_S", 0.05)
    turns, cuts = Turns(), []

    def work(number: int) -> None:
        turns.take(number)
        turns.await_cut()
        cuts.append((number, time.monotonic()))
        turns.give()

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in (2, 0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [number for number, _ in cuts] == [0, 1, 2]
    assert cuts[2][1] - cuts[0][1] >= 0.09


# ---------------------------------------------------------------- overhead


def log(*times: float) -> list[StepRecord]:
    return [StepRecord(step=n, world=2, resumed_from="", loss=1.0, time=t) for n, t in enumerate(times)]


def test_a_step_takes_the_mean_of_those_that_ended_within_a_turn() -> None:
    times = [10 + 0.1 * n for n in range(31)]
    late = [time + (0.3 if time > 11.2 else 0.0) for time in times]
    assert step_s(log(0.0, *times, 50.0), 9.0, 20.0) == pytest.approx(0.1)
    assert step_s(log(*late), 9.0, 20.0) == pytest.approx(0.11)
    assert step_s(log(*times), 12.5, 20.0) is None  # too few to tell


def test_overhead_is_the_median_of_the_pairs_and_turns_without_steps_are_left_out() -> None:
    rated = rate_steps([0.1, 0.2, 0.1, None], [0.101, 0.2, 0.2, 0.1])
    assert rated["percent"] == pytest.approx(1.0)
    assert rated["percent_of_pairs"] == [1.0, 0.0, 100.0]
    assert rated["error_percent"] == pytest.approx(1.2533 * 1.4826 * 1.0 / 3**0.5, abs=1e-3)
    assert rated["step_ms"] == [100.0, 200.0]


def test_overhead_that_nobody_could_measure_is_a_failure() -> None:
    with pytest.raises(BenchFailed):
        rate_steps([None], [0.1])
