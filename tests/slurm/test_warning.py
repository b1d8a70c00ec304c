"""What asks Slurm to warn a job ahead of its time limit."""

from __future__ import annotations

import pytest

from slurm.submission import render_warning


@pytest.mark.parametrize("time_limit", [None, "UNLIMITED", "2-00:00:00", "10"])
def test_the_launcher_is_warned_as_long_before_the_limit_as_asked_for(time_limit: str | None) -> None:
    assert render_warning(120, time_limit) == ("--signal=B:USR1@120",)


def test_a_short_limit_leaves_three_quarters_to_the_training() -> None:
    assert render_warning(120, "2:00") == ("--signal=B:USR1@30",)


def test_no_warning_is_asked_for_when_none_is_wanted() -> None:
    assert render_warning(0, "10") == ()
