"""How often to save: formulas against the exact optimum and against simulation, what is measured, what is told."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.core.interval import (
    CHANGE_TOLD,
    Costs,
    Rate,
    blend_rate,
    choose_interval,
    daly_s,
    expected_loss,
    fold_cost,
    judge_interval,
    measure_rate,
    measure_restart_s,
    prior_node_mtbf_s,
)
from supervisor.model import Attempt, AttemptEnd, CheckpointSpec, Intent, IntentKind, Interruption, Part, RunState
from tests.core.builders import (
    NOW,
    SPEC,
    ago,
    attempt,
    attempt_in,
    intents_of,
    job,
    launch,
    over,
    plan_for,
    progress,
    run,
    snapshot,
    spec,
    view,
    world,
)

HOUR = 3600.0


def loss_of(every_s: float, save_s: float, mtbf_s: float) -> float:
    return expected_loss(every_s, save_s=save_s, mtbf_s=mtbf_s).total


def least_loss(save_s: float, mtbf_s: float) -> float:
    """By golden-section search: the exact optimum, whatever formula."""
    low, high = 1e-4 * save_s, 10 * mtbf_s
    ratio = (math.sqrt(5) - 1) / 2
    for _ in range(200):
        a, b = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, b) if loss_of(a, save_s, mtbf_s) < loss_of(b, save_s, mtbf_s) else (a, high)
    return loss_of(low, save_s, mtbf_s)


def simulate_loss(every_s: float, save_s: float, mtbf_s: float, restart_s: float, segments: int, seed: int) -> float:
    """The share of time lost in a training that fails at random, also while it saves and while it restarts."""
    draw = random.Random(seed)
    clock, next_failure = 0.0, draw.expovariate(1 / mtbf_s)
    for _ in range(segments):
        left = every_s + save_s
        while clock + left > next_failure:
            clock, left = next_failure, restart_s + every_s + save_s
            next_failure = clock + draw.expovariate(1 / mtbf_s)
            while clock + restart_s > next_failure:  # it fails again while it restarts
                clock = next_failure
                next_failure = clock + draw.expovariate(1 / mtbf_s)
        clock += left
    return 1 - segments * every_s / clock


# ---------------------------------------------------------------- formulas


@pytest.mark.parametrize("share", [1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0])
def test_the_loss_at_the_chosen_interval_is_within_one_percent_of_the_optimum(share: float) -> None:
    mtbf_s = 4 * HOUR
    assert loss_of(daly_s(share * mtbf_s, mtbf_s), share * mtbf_s, mtbf_s) <= 1.01 * least_loss(share * mtbf_s, mtbf_s)


@pytest.mark.parametrize("share", [1e-3, 1e-2, 0.1, 1.0])
def test_simulated_trainings_lose_what_was_expected(share: float) -> None:
    mtbf_s, save_s, restart_s = 1000.0, 1000.0 * share, 50.0
    every_s = daly_s(save_s, mtbf_s)
    expected = expected_loss(every_s, save_s=save_s, mtbf_s=mtbf_s, restart_s=restart_s).total
    segments = int(60_000 * mtbf_s / (every_s + save_s) / 20)
    assert simulate_loss(every_s, save_s, mtbf_s, restart_s, segments, seed=7) == pytest.approx(expected, rel=0.06)


@pytest.mark.parametrize("share", [1e-3, 1e-2, 0.1, 1.0])
def test_in_simulated_trainings_no_other_interval_loses_noticeably_less(share: float) -> None:
    mtbf_s = 1000.0
    chosen_s = daly_s(share * mtbf_s, mtbf_s)

    def loss(every_s: float) -> float:
        segments = int(3e6 / (every_s + share * mtbf_s))
        return simulate_loss(every_s, share * mtbf_s, mtbf_s, 50.0, segments, seed=11)

    assert loss(chosen_s) <= min(loss(chosen_s * factor) for factor in (0.4, 0.6, 1.7, 2.5)) * 1.01


@pytest.mark.parametrize(("save_s", "mtbf_h", "exact_s"), [(60, 4, 1275), (600, 2, 2554), (1200, 1, 2200)])
def test_published_optima_are_met(save_s: float, mtbf_h: float, exact_s: float) -> None:
    assert daly_s(save_s, mtbf_h * HOUR) == pytest.approx(exact_s, rel=0.004)


def test_a_save_of_twice_the_mtbf_leaves_the_mtbf() -> None:
    assert daly_s(3 * HOUR, HOUR) == HOUR


_times = st.floats(1e-3, 1e7)


@given(every_s=_times, save_s=_times, mtbf_s=_times, restart_s=st.floats(0, 1e7), durable_s=st.floats(0, 1e7))
def test_a_loss_is_a_share_and_its_parts_are_none_below_0(
    every_s: float, save_s: float, mtbf_s: float, restart_s: float, durable_s: float
) -> None:
    loss = expected_loss(every_s, save_s=save_s, mtbf_s=mtbf_s, restart_s=restart_s, durable_s=durable_s)
    assert min(loss.saving, loss.repeated, loss.restarts) >= -1e-6
    assert -1e-6 <= loss.total <= 1 + 1e-6


@given(save_s=_times, mtbf_s=_times)
def test_a_dearer_save_and_a_rarer_failure_never_make_the_interval_shorter(save_s: float, mtbf_s: float) -> None:
    if save_s < mtbf_s / 4:
        assert daly_s(save_s, mtbf_s) <= daly_s(save_s * 1.5, mtbf_s) * (1 + 1e-9)
    assert daly_s(save_s, mtbf_s) <= daly_s(save_s, mtbf_s * 1.5) * (1 + 1e-9)


# ---------------------------------------------------------------- the run's own failures


def test_without_failures_and_time_the_rate_is_the_prior() -> None:
    rate = blend_rate(failures=0, observed_node_s=0, prior_node_s=1000 * HOUR, nodes=4)
    assert rate.mtbf_s == 250 * HOUR
    assert rate.prior_share == 1


def test_time_without_a_failure_is_added_to_the_prior() -> None:
    rate = blend_rate(failures=0, observed_node_s=1000 * HOUR, prior_node_s=3000 * HOUR, nodes=4)
    assert rate.mtbf_s == 1000 * HOUR
    assert rate.prior_share == 0.75


def test_the_prior_counts_as_one_failure_by_orders_of_magnitude() -> None:
    rate = blend_rate(failures=1, observed_node_s=10 * HOUR, prior_node_s=1000 * HOUR, nodes=1)
    assert rate.mtbf_s == pytest.approx(100 * HOUR)
    assert rate.prior_share == 0.5


def test_a_small_cluster_that_fails_often_is_soon_seen_to() -> None:
    prior_s = prior_node_mtbf_s(None)  # 264 node-days
    rate = blend_rate(failures=6, observed_node_s=12 * HOUR, prior_node_s=prior_s, nodes=2)
    assert HOUR < rate.mtbf_s < 4 * HOUR  # its own: one hour


def test_a_cluster_that_fails_more_rarely_than_the_prior_gets_the_time_that_it_has_shown() -> None:
    rate = blend_rate(failures=1, observed_node_s=9000 * HOUR, prior_node_s=1000 * HOUR, nodes=1)
    assert rate.mtbf_s == pytest.approx(5000 * HOUR)


def test_many_failures_of_its_own_outweigh_the_prior() -> None:
    rate = blend_rate(failures=40, observed_node_s=4000 * HOUR, prior_node_s=6000 * HOUR, nodes=1)
    assert rate.mtbf_s == pytest.approx(100 * HOUR, rel=0.12)
    assert rate.prior_share < 0.03


def test_failures_before_anything_ran_leave_a_time_between_them() -> None:
    assert blend_rate(failures=3, observed_node_s=0, prior_node_s=1000 * HOUR, nodes=8).mtbf_s > 0


@given(failures=st.integers(0, 200), hours=st.floats(0, 1e6), nodes=st.integers(1, 2000))
def test_another_failure_never_raises_the_mtbf(failures: int, hours: float, nodes: int) -> None:
    def mtbf(count: int) -> float:
        observed = hours * HOUR
        return blend_rate(failures=count, observed_node_s=observed, prior_node_s=1e7, nodes=nodes).mtbf_s

    assert mtbf(failures + 1) <= mtbf(failures) * (1 + 1e-9)


def test_the_prior_of_a_node_is_that_of_its_gpus() -> None:
    assert prior_node_mtbf_s(4) == 2 * prior_node_mtbf_s(8) == 2 * prior_node_mtbf_s(None)


def test_time_and_failures_at_another_size_count_by_their_nodes() -> None:
    eight = over(1, AttemptEnd.NODE_SILENT, nodes=tuple(f"n{i}" for i in range(8)), started_at=ago(7260))
    four = attempt(2, nodes=("n1", "n2", "n3", "n4"), started_at=ago(0))
    rate = measure_rate(SPEC, (eight, four), NOW)
    assert rate.observed_node_s == 8 * 7200
    assert rate.failures == 1
    assert rate.mtbf_s == pytest.approx(math.sqrt(prior_node_mtbf_s(None) * 8 * 7200) / 4)


@pytest.mark.parametrize("end", [AttemptEnd.TIME_LIMIT, AttemptEnd.SAVED, AttemptEnd.STOPPED, AttemptEnd.REFUSED])
def test_an_end_that_was_planned_is_no_failure(end: AttemptEnd) -> None:
    assert measure_rate(SPEC, (over(1, end),), NOW).failures == 0


def test_the_restart_time_is_measured_from_the_last_sign_of_progress_to_the_first_new_step() -> None:
    ended = over(1, AttemptEnd.NODE_SILENT, progress_at=ago(500), over_at=ago(480))
    assert measure_restart_s((ended, attempt(2, started_at=ago(430), stepped_at=ago(400)))) == 100


def test_a_restart_inside_a_job_is_measured_too() -> None:
    first = attempt(started_at=ago(590), stepped_at=ago(500))
    inside = Interruption(
        run="gpt",
        attempt=1,
        is_in_job=True,
        kind="node_lost",
        cause="n2 is lost",
        node="n2",
        is_planned=False,
        detected_at=ago(100),
        resumed_at=ago(91),
        parts=(Part(name="detect", seconds=3.0),),
    )
    assert measure_restart_s((first,), (inside,)) == 12
    assert measure_restart_s((first,), (replace(inside, resumed_at=None),)) == 90


def test_before_the_first_failure_the_restart_time_is_that_of_the_start() -> None:
    assert measure_restart_s((attempt(started_at=ago(590), stepped_at=ago(500)),)) == 90


# ---------------------------------------------------------------- the choice

AUTO = CheckpointSpec()
COSTS = Costs(save_s=0.5, durable_s=20, restart_s=120)


def rate_of(mtbf_h: float) -> Rate:
    return Rate(mtbf_s=mtbf_h * HOUR, failures=3, observed_node_s=1e6, prior_share=0.2)


def test_the_interval_lies_where_the_loss_is_least() -> None:
    chosen = choose_interval(AUTO, COSTS, rate_of(24))
    assert chosen.every_s == pytest.approx(math.sqrt(2 * 0.5 * 24 * HOUR), rel=0.01)
    assert not chosen.bound


@pytest.mark.parametrize(("save_s", "every_s"), [(0.0, 60.0), (0.001, 60.0), (300.0, 1800.0)])
def test_the_interval_stays_within_the_bounds_of_the_run_file(save_s: float, every_s: float) -> None:
    chosen = choose_interval(AUTO, replace(COSTS, save_s=save_s, durable_s=save_s), rate_of(24))
    assert chosen.every_s == every_s
    assert chosen.bound


def test_saves_never_come_faster_than_they_become_durable() -> None:
    assert choose_interval(AUTO, replace(COSTS, durable_s=2400), rate_of(24)).every_s == 2400


@given(
    save_s=st.floats(0, 1e5),
    durable_s=st.floats(0, 1e5),
    mtbf_h=st.floats(0.01, 1e6),
    low=st.floats(1, 1e4),
    high=st.floats(1, 1e4),
)
def test_whatever_was_measured_the_interval_keeps_its_bounds(
    save_s: float, durable_s: float, mtbf_h: float, low: float, high: float
) -> None:
    bounds = replace(AUTO, every_min_s=min(low, high), every_max_s=max(low, high))
    costs = Costs(save_s=save_s, durable_s=max(save_s, durable_s), restart_s=60)
    chosen = choose_interval(bounds, costs, rate_of(mtbf_h))
    assert bounds.every_min_s <= chosen.every_s <= max(bounds.every_max_s, costs.durable_s)
    assert math.isfinite(chosen.loss.total)


def test_one_measured_save_of_a_first_attempt_is_not_enough() -> None:
    assert judge_interval(SPEC, (attempt(save_costs_s=(4.6,)),), NOW) is None


def test_a_slow_first_save_does_not_count_once_there_are_others() -> None:
    chosen = judge_interval(SPEC, (attempt(save_costs_s=(4.6, 0.1)),), NOW)
    assert chosen is not None
    assert chosen.costs.save_s == 0.1


def test_what_an_earlier_attempt_has_measured_counts_until_the_new_one_has_saved() -> None:
    chosen = judge_interval(SPEC, (over(1, save_costs_s=(0.3, 0.3)), attempt(2)), NOW)
    assert chosen is not None
    assert chosen.costs.save_s == 0.3


@given(st.lists(st.one_of(st.none(), st.floats()), max_size=20))
def test_whatever_a_training_says_of_its_saves_only_times_are_kept(said: list[float | None]) -> None:
    known: tuple[float, ...] = ()
    for cost in said:
        known = fold_cost(known, cost)
    assert len(known) <= 5
    assert all(math.isfinite(cost) and cost >= 0 for cost in known)


# ---------------------------------------------------------------- telling the training


def running(told_s: float = 600.0, **changes: Any) -> Attempt:
    return attempt(stepped_at=ago(580), checkpoint_every_s=told_s, save_costs_s=(0.5, 0.5), **changes)


def advised(one: Attempt, **parts: Any) -> tuple[Intent | None, Attempt]:
    of = parts.pop("of", run())
    plan = plan_for(world(one, of=of), snapshot(job(), view=view(progress=progress(40), launch=launch()), **parts))
    found = intents_of(plan, IntentKind.ADVISE)
    told = [f for f in plan.facts if isinstance(f.record, Attempt)]
    return (found[0] if found else None), (attempt_in(plan) if told else one)


def test_a_running_training_is_told_a_better_interval_with_its_reason() -> None:
    intent, after = advised(running())
    assert intent is not None
    assert after.checkpoint_every_s == 1800.0
    assert after.advice_seq == 1
    assert "bounded by every_max_s" in intent.reason
    assert "expected loss" in intent.reason


def test_a_small_change_is_not_told() -> None:
    assert advised(running(told_s=1800.0 / (1 + CHANGE_TOLD * 0.9)))[0] is None


def test_a_fixed_interval_is_left_alone() -> None:
    assert advised(running(), of=run(spec=spec(checkpoint={"interval": "fixed"})))[0] is None


def test_a_paused_run_is_told_no_other_interval() -> None:
    assert advised(running(), of=run(is_paused=True))[0] is None


def test_a_save_that_was_asked_for_is_told_once() -> None:
    asked = run(save_asked_at=ago(1), spec=spec(checkpoint={"interval": "fixed"}))
    intent, after = advised(running(), of=asked)
    assert intent is not None
    assert (after.save_requests, after.save_asked_at) == (1, ago(1))
    assert advised(after, of=asked)[0] is None


def test_a_save_that_was_asked_for_before_the_attempt_began_is_not_its_business() -> None:
    asked = run(save_asked_at=ago(1000), spec=spec(checkpoint={"interval": "fixed"}))
    assert advised(running(), of=asked)[0] is None


def test_the_next_attempt_begins_with_the_interval_that_was_told_last() -> None:
    plan = plan_for(world(over(checkpoint_every_s=1234.5), of=run()), snapshot(view=view()))
    assert attempt_in(plan, 2).checkpoint_every_s == 1234.5


def test_nobody_is_told_anything_while_the_run_directory_can_not_be_read() -> None:
    assert advised(running(), runs={})[0] is None


def test_a_held_run_that_still_runs_may_be_asked_to_save() -> None:
    held = run(state=RunState.HELD, save_asked_at=ago(1))
    assert advised(running(), of=held)[0] is not None
