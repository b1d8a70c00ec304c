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
