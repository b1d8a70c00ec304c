"""MTBF with its interval, ETTR, and how often to save: known numbers, and what holds for all of them."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from supervisor.core.reliability import (
    PlanError,
    estimate_mtbf,
    ettr,
    plan_saves,
    poisson_cdf,
    run_mtbf,
    running_s,
    waste,
    young_s,
)
from supervisor.model import Attempt, Interruption

T0 = datetime(2026, 1, 1, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return T0 + timedelta(seconds=seconds)


def attempt(
    number: int,
    *,
    submitted: float,
    started: float | None,
    over: float | None = None,
    stepped: float | None = None,
    progress: float | None = None,
    steps: tuple[int, int] = (0, 0),
) -> Attempt:
    """`steps`: resumed from, and newest seen. Times in seconds after T0."""
    return Attempt(
        run="a",
        number=number,
        token=f"t{number}",
        nodes_wanted=2,
        planned_at=at(submitted),
        submitted_at=at(submitted),
        started_at=None if started is None else at(started),
        stepped_at=None if stepped is None else at(stepped),
        progress_at=None if progress is None else at(progress),
        over_at=None if over is None else at(over),
        resume_step=steps[0],
        last_step=steps[1],
    )


def interruption(number: int, *, planned: bool = False) -> Interruption:
    return Interruption(
        run="a",
        attempt=number,
        kind="node_silent",
        cause="n1 went silent",
        node="n1",
        is_planned=planned,
        detected_at=T0,
    )


# ---------------------------------------------------------------- MTBF

# Garwood's exact limits of a Poisson mean, 90 % two-sided (published tables, e.g. Ulm 1990): count, lower, upper.
KNOWN_LIMITS = [
    (1, 0.0513, 4.7439),
    (2, 0.3554, 6.2958),
    (5, 1.9701, 10.5130),
    (10, 5.4254, 16.9622),
    (20, 13.2547, 29.0620),
]


@pytest.mark.parametrize(("count", "lower", "upper"), KNOWN_LIMITS)
def test_the_interval_is_the_exact_poisson_one(count: int, lower: float, upper: float) -> None:
    mtbf = estimate_mtbf(3600 * 100, count)
    assert mtbf.mtbf_h == pytest.approx(100 / count)
    assert mtbf.low_h == pytest.approx(100 / upper, rel=1e-4)
    assert mtbf.high_h == pytest.approx(100 / lower, rel=1e-3)


def test_without_an_interruption_there_is_a_lower_bound_of_a_third_and_no_infinity() -> None:
    mtbf = estimate_mtbf(3600 * 300, 0)
    assert mtbf.is_bound
    assert mtbf.mtbf_h is None
    assert mtbf.high_h is None
    assert mtbf.low_h == pytest.approx(300 / -math.log(0.05))
    assert mtbf.low_h == pytest.approx(100, rel=0.01)


@settings(deadline=None)
@given(st.integers(0, 500), st.floats(1, 1e9))
def test_the_estimate_lies_in_its_interval(count: int, observed_s: float) -> None:
    mtbf = estimate_mtbf(observed_s, count)
    assert 0 < mtbf.low_h < math.inf
    if mtbf.mtbf_h is not None and mtbf.high_h is not None:
        assert mtbf.low_h < mtbf.mtbf_h < mtbf.high_h < math.inf


@settings(deadline=None)
@given(st.integers(0, 300), st.floats(0.01, 400))
def test_the_distribution_function_is_a_probability_that_falls_with_the_mean(count: int, mean: float) -> None:
    assert 0 <= poisson_cdf(count, mean * 1.1) <= poisson_cdf(count, mean) + 1e-9 <= 1 + 1e-9


def test_the_distribution_function_has_its_textbook_values() -> None:
    assert poisson_cdf(0, 1) == pytest.approx(0.36788, abs=1e-5)
    assert poisson_cdf(3, 2.5) == pytest.approx(0.75758, abs=1e-5)
    assert poisson_cdf(10, 10) == pytest.approx(0.58304, abs=1e-5)


@pytest.mark.parametrize(("observed_s", "count"), [(-1, 0), (math.nan, 1), (math.inf, 1), (10, -1)])
def test_an_observation_that_makes_no_sense_is_refused(observed_s: float, count: int) -> None:
    with pytest.raises(PlanError):
        estimate_mtbf(observed_s, count)


def test_queued_time_is_not_observed_time() -> None:
    attempts = [attempt(1, submitted=0, started=1000, over=4600), attempt(2, submitted=4600, started=None)]
    assert running_s(attempts, at(9000)) == 3600


def test_running_time_can_be_counted_from_an_instant_on() -> None:
    attempts = [attempt(1, submitted=0, started=0, over=1000), attempt(2, submitted=1000, started=1000)]
    assert running_s(attempts, at(1600), since=at(900)) == 700


def test_planned_ends_do_not_count_against_a_run() -> None:
    attempts = [attempt(1, submitted=0, started=0, over=3600), attempt(2, submitted=3600, started=3600)]
    mtbf = run_mtbf(attempts, [interruption(1), interruption(1, planned=True)], at(7200))
    assert mtbf is not None
    assert (mtbf.mtbf_h, mtbf.interruptions) == (2.0, 1)


def test_a_run_that_has_not_run_has_no_mtbf() -> None:
    assert run_mtbf([attempt(1, submitted=0, started=None)], [], at(100)) is None


# ---------------------------------------------------------------- ETTR


def test_without_a_step_there_is_no_ratio() -> None:
    assert ettr([attempt(1, submitted=0, started=10)], at(100)) is None


def test_start_up_is_no_productive_time_and_queueing_is_left_out() -> None:
    only = attempt(1, submitted=0, started=500, stepped=520, progress=600, over=600, steps=(0, 80))
    assert ettr([only], at(9999)) == pytest.approx(0.8)


def test_steps_that_are_done_again_are_taken_off() -> None:
    first = attempt(1, submitted=0, started=0, stepped=0, progress=100, over=100, steps=(0, 100))
    second = attempt(2, submitted=100, started=None, steps=(75, 75))
    assert ettr([first], at(100)) == pytest.approx(1.0)
    assert ettr([first, second], at(100)) == pytest.approx(0.75)


def test_a_walk_back_past_an_attempt_takes_from_the_one_before_it_too() -> None:
    first = attempt(1, submitted=0, started=0, stepped=0, progress=100, over=100, steps=(0, 100))
    second = attempt(2, submitted=100, started=100, stepped=100, progress=200, over=200, steps=(100, 200))
    third = attempt(3, submitted=200, started=200, stepped=200, progress=300, over=300, steps=(50, 150))
    assert ettr([first, second, third], at(300)) == pytest.approx(150 / 300)


def test_an_attempt_that_never_stepped_loses_nothing() -> None:
    first = attempt(1, submitted=0, started=0, stepped=0, progress=100, over=100, steps=(0, 100))
    failed = attempt(2, submitted=100, started=100, over=100, steps=(0, 0))
    third = attempt(3, submitted=100, started=100, stepped=100, progress=200, over=200, steps=(100, 200))
    assert ettr([first, failed, third], at(200)) == pytest.approx(1.0)


def test_silence_before_it_was_noticed_and_the_restart_are_losses() -> None:
    first = attempt(1, submitted=0, started=0, stepped=0, progress=100, over=110, steps=(0, 100))
    second = attempt(2, submitted=110, started=130, stepped=150, progress=250, over=250, steps=(100, 200))
    # 250 s of wall clock, of which 20 s in the queue; 100 s + 100 s productive
    assert ettr([first, second], at(999)) == pytest.approx(200 / 230)


def test_a_live_attempt_counts_up_to_its_newest_progress() -> None:
    only = attempt(1, submitted=0, started=0, stepped=0, progress=50, steps=(0, 50))
    assert ettr([only], at(100)) == pytest.approx(0.5)


_spans = st.tuples(*[st.floats(0, 1000)] * 4)


@settings(deadline=None)
@given(st.lists(st.tuples(_spans, st.integers(0, 500), st.integers(0, 500)), max_size=5))
def test_a_ratio_lies_between_0_and_1(drawn: list[tuple[tuple[float, float, float, float], int, int]]) -> None:
    attempts, clock = [], 0.0
    for number, ((queue, start, step, wait), first, steps) in enumerate(drawn, 1):
        started, stepped = clock + queue, clock + queue + start
        over = stepped + step + wait
        attempts.append(
            attempt(
                number,
                submitted=clock,
                started=started,
                stepped=stepped,
                progress=stepped + step,
                over=over,
                steps=(first, first + steps),
            )
        )
        clock = over
    ratio = ettr(attempts, at(clock))
    assert ratio is None or 0 <= ratio <= 1


# ---------------------------------------------------------------- saving


@pytest.mark.parametrize(("save_s", "interval_min", "lost_percent"), [(60, 109, 2.0), (5, 31, 0.7)])
def test_512_gpus_with_a_restart_of_600_s(save_s: float, interval_min: int, lost_percent: float) -> None:
    plan = plan_saves(512, save_s, 600)
    assert round(plan.mtbf_h, 1) == 99.0
    assert round(plan.interval_min) == interval_min
    assert round(plan.lost_percent, 1) == lost_percent


def test_young_agrees_with_the_exact_optimum_while_the_save_is_short() -> None:
    assert young_s(60, 4 * 3600) == pytest.approx(1315, abs=1)


@settings(deadline=None)
@given(st.floats(0.1, 100), st.floats(1, 1000), st.floats(1e5, 1e7), st.floats(0.5, 2))
def test_no_other_interval_loses_less(save_s: float, restart_s: float, mtbf_s: float, factor: float) -> None:
    best = young_s(save_s, mtbf_s)
    assert waste(best, save_s, restart_s, mtbf_s) <= waste(best * factor, save_s, restart_s, mtbf_s) + 1e-12


def test_a_save_that_is_long_against_the_mtbf_is_said_to_be_rough() -> None:
    assert plan_saves(16_384, 3600, 600).is_rough
    assert not plan_saves(512, 60, 600).is_rough


@pytest.mark.parametrize(
    ("gpus", "save_s", "restart_s", "name"),
    [
        (0, 60, 600, "--gpus"),
        (-5, 60, 600, "--gpus"),
        (512, 0, 600, "--save-s"),
        (512, -1, 600, "--save-s"),
        (512, math.nan, 600, "--save-s"),
        (512, 60, -1, "--restart-s"),
        (512, 60, math.inf, "--restart-s"),
    ],
)
def test_an_argument_that_makes_no_sense_is_named(gpus: int, save_s: float, restart_s: float, name: str) -> None:
    with pytest.raises(PlanError, match=name):
        plan_saves(gpus, save_s, restart_s)
