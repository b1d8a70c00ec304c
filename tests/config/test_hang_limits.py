"""HD-08: what the limits of silence in a run file may be. None given is the default, 0 is off, the rest is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from supervisor.config import ConfigError, parse_run_file

HERE = Path("/data/run.toml")
RUN = 'name = "r"\ncommand = ["x.py"]\nroot = "/runs"\n[nodes]\nmin = 2\nmax = 2\n[progress]\n'
PHASES = ("start", "restore", "compile", "step", "save", "eval", "end")


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("value", ["-1", '"abc"', "nan", "inf", "true", "[]"])
def test_a_limit_that_is_no_time_is_refused(phase: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{phase}_max_s"):
        parse_run_file(f"{RUN}{phase}_max_s = {value}\n", path=HERE)


@pytest.mark.parametrize("phase", PHASES)
def test_zero_is_off_and_a_number_is_seconds(phase: str) -> None:
    off = parse_run_file(f"{RUN}{phase}_max_s = 0\n", path=HERE)
    some = parse_run_file(f"{RUN}{phase}_max_s = 300\n", path=HERE)

    assert off.progress.bounds(phase)[1] == 0
    assert some.progress.bounds(phase)[1] == 300
