"""How soon Slurm is asked again, when every answer is wanted at once."""

from __future__ import annotations

import pytest

from supervisor.slurmwatch import choose_gap_s


@pytest.mark.parametrize(
    ("spent_s", "gap_s"),
    [(0.02, 0.25), (0.2, 0.8), (0.5, 2.0), (10.0, 12.0), (60.0, 62.0)],
    ids=["quick", "slow", "slower", "timed out", "silent for long"],
)
def test_a_slow_controller_is_given_rest_and_a_silent_one_is_asked_again_soon(spent_s: float, gap_s: float) -> None:
    assert choose_gap_s(spent_s) == gap_s


@pytest.mark.parametrize(("rounds", "rest_s"), [(1, 2), (2, 4), (3, 8), (4, 16), (5, 30), (6, 30), (9999, 30)])
def test_the_rest_after_silence_doubles_up_to_a_cap(rounds: int, rest_s: float) -> None:
    """Case CO-06."""
    assert choose_gap_s(30, rounds) == 30 + rest_s


@pytest.mark.parametrize("jitter", [-1.0, -0.3, 0.5, 1.0])
def test_daemons_that_lost_one_controller_do_not_come_back_in_step(jitter: float) -> None:
    assert choose_gap_s(0, 5, jitter) == pytest.approx(30 * (1 + 0.2 * jitter))
