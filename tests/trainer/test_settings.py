"""A Checkpointer's settings that make no sense are refused by name, before anything is begun."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from trainer.session.settings import check_settings

_GOOD: dict[str, Any] = {
    "every_s": None,
    "every_steps": 0,
    "when_busy": "skip",
    "on_failure": "go_on",
    "staging": "auto",
    "max_failures": None,
    "keep_last": 2,
    "final_wait_s": 600.0,
    "extra": (),
}


@pytest.mark.parametrize(
    "odd",
    [
        {"every_s": -1.0},
        {"every_s": math.nan},
        {"every_s": math.inf},
        {"every_steps": -3},
        {"when_busy": "x"},
        {"on_failure": "explode"},
        {"staging": "x"},
        {"max_failures": -1},
        {"keep_last": 0},
        {"final_wait_s": 0.0},
        {"final_wait_s": math.nan},
        {"extra": ("ema", "loss watch")},
    ],
)
def test_a_setting_that_makes_no_sense_is_named(odd: dict[str, Any]) -> None:
    (name,) = odd
    with pytest.raises(ValueError, match=name):
        check_settings(**{**_GOOD, **odd})


@pytest.mark.parametrize("fine", [{}, {"every_s": 0.0}, {"every_steps": 5}, {"when_busy": "wait"}, {"keep_last": 1}])
def test_what_makes_sense_passes(fine: dict[str, Any]) -> None:
    check_settings(**{**_GOOD, **fine})


@pytest.mark.torch
def test_a_run_directory_may_be_given_as_text(tmp_path: Path) -> None:
    import torch

    from trainer.checkpoint import Checkpointer

    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Checkpointer(model=model, optimizer=optimizer, run_dir=str(tmp_path / "run")) as checkpointer:
        assert checkpointer.place.run_dir == tmp_path / "run"
        checkpointer.close(saves=False)
    with pytest.raises(ValueError, match="every_steps"):
        Checkpointer(model=model, optimizer=optimizer, run_dir=str(tmp_path / "run"), every_steps=-1)
