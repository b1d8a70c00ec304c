"""Whether a loss went wrong, and since when."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.losswatch import Finding, LossPolicy, LossWatch, robust_score

NOISE = [2.0 + 0.1 * math.sin(step * 1.7) for step in range(60)]
SPIKES = LossPolicy(spike_score=10, spike_steps=2, window=32, least=16)


def _watch(losses: list[float], policy: LossPolicy | None = None) -> list[Finding]:
    watch = LossWatch(policy=policy or LossPolicy())
    found = []
    for step, loss in enumerate(losses, start=1):
        watch, finding = watch.observe(step, loss)
        found += [finding] if finding is not None else []
    return found


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_finite_number_is_found_at_its_step(loss: float) -> None:
    (found,) = _watch([2.0, 1.9, loss])
    assert (found.kind, found.onset_step, found.step) == ("nan", 3, 3)


def test_the_onset_is_the_first_of_the_steps_that_were_wrong() -> None:
    (found,) = _watch([2.0, math.nan, math.inf, math.nan], LossPolicy(nan_steps=3))
    assert (found.onset_step, found.step) == (2, 4)


def test_a_single_wrong_step_may_be_forgiven() -> None:
    """A gradient scaler skips such a step."""
    assert _watch([2.0, math.inf, 1.9, math.nan, 1.8], LossPolicy(nan_steps=2)) == []


def test_spikes_are_not_judged_unless_asked_for() -> None:
    assert _watch([*NOISE, 1e9, 1e9, 1e9]) == []


def test_a_jump_that_lasts_is_a_spike_since_its_first_step() -> None:
    found = _watch([*NOISE, 9.0, 9.0], SPIKES)
    assert [(f.kind, f.onset_step, f.step) for f in found] == [("spike", 61, 62)]
    assert found[0].score is not None
    assert found[0].score > 10


def test_one_outlier_is_no_spike_and_does_not_hide_the_next() -> None:
    assert _watch([*NOISE, 9.0, *NOISE], SPIKES) == []
    assert [f.onset_step for f in _watch([*NOISE, 9.0, *NOISE[:20], 9.0, 9.0], SPIKES)] == [82]


def test_a_loss_that_falls_is_no_spike() -> None:
    assert _watch([*NOISE, 0.001, 0.001, 0.001], SPIKES) == []


def test_too_few_losses_are_no_ground_for_a_judgement() -> None:
    assert _watch([*NOISE[:15], 9.0, 9.0], SPIKES) == []


def test_rounding_of_losses_that_hardly_move_is_no_spike() -> None:
    assert _watch([2.0] * 60 + [2.001, 2.001, 2.001], SPIKES) == []


@given(st.lists(st.floats(0.1, 100), min_size=16, max_size=40), st.floats(0.01, 100))
def test_the_score_does_not_depend_on_the_unit_of_the_loss(recent: list[float], unit: float) -> None:
    score = robust_score(200.0, recent)
    assert robust_score(200.0 * unit, [x * unit for x in recent]) == pytest.approx(score, rel=1e-6)


def test_nonsense_in_the_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="least"):
        LossPolicy(window=8, least=16)
    with pytest.raises(ValueError, match="negative"):
        LossPolicy(spike_score=-1)
