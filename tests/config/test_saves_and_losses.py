"""The keys of a run file about saves and about a loss that goes wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from supervisor.config import ConfigError, parse_run_file, render_run_file
from supervisor.core.interval import first_every_s
from supervisor.model import RunSpec

HERE = Path("/home/ann/run.toml")
GOOD = 'name = "gpt"\ncommand = ["train.py"]\nroot = "/shared"\n[nodes]\nmin = 1\nmax = 2\n'


def parsed(more: str = "") -> RunSpec:
    return parse_run_file(GOOD + more, path=HERE)


def test_without_a_word_the_interval_is_chosen_by_the_service() -> None:
    assert parsed().checkpoint.interval == "auto"


def test_an_interval_that_a_person_gives_is_not_changed_unasked() -> None:
    assert parsed("[checkpoint]\nevery_s = 300\n").checkpoint.interval == "fixed"
    assert parsed('[checkpoint]\nevery_s = 300\ninterval = "auto"\n').checkpoint.interval == "auto"


@pytest.mark.parametrize("more", ["", "[checkpoint]\nevery_s = 300\n", '[divergence]\non_nan = "rollback"\n'])
def test_the_canonical_run_file_means_the_same(more: str) -> None:
    spec = parsed(more)
    assert parse_run_file(render_run_file(spec), path=HERE) == spec


def test_where_an_automatic_interval_starts_lies_within_its_bounds() -> None:
    spec = parsed('[checkpoint]\nevery_s = 5\ninterval = "auto"\n')
    assert first_every_s(spec.checkpoint) == 60.0
    assert first_every_s(parsed("[checkpoint]\nevery_s = 5\n").checkpoint) == 5.0


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("[checkpoint]\nevery_min_s = 0\n", "every_min_s must be above 0"),
        ("[checkpoint]\nevery_min_s = 900\nevery_max_s = 60\n", "every_min_s (900) is more than every_max_s (60)"),
        ("[checkpoint]\nalert_after_s = -1\n", "alert_after_s must be 0 (three intervals) or more"),
        ('[checkpoint]\nunfinished_markers = ["a/b"]\n', "unfinished_markers"),
        ('[checkpoint]\nunfinished_markers = [""]\n', "unfinished_markers"),
        ('[checkpoint]\ninterval = "often"\n', "is none of auto, fixed"),
        ('[divergence]\non_nan = "ignore"\n', "is none of hold, rollback"),
        ("[divergence]\nrollback_checkpoints = 0\n", "rollback_checkpoints must be at least 1"),
        ("[divergence]\nmax_rollbacks = -1\n", "max_rollbacks must be 0 or more"),
        ("[divergence]\nspike_score = 1\n", "ordinary noise"),
        ("[divergence]\nspike_score = -1\n", "spike_score must be 0 (off) or more"),
        ("[divergence]\nspike_window = 5\n", "spike_window must be at least 32"),
    ],
)
def test_what_makes_no_sense_is_refused(more: str, said: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.toml") as caught:
        parsed(more)
    assert said in str(caught.value)
