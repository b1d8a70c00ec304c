"""A training that stops here and now, and what its dumps tell with this PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer.flight.desync import make_dumps
from trainer.flight.analyse import analyse_folder


@pytest.mark.torch
def test_a_rank_that_sleeps_is_named_with_the_place_where_the_others_wait_for_it(tmp_path: Path) -> None:
    make_dumps("sleeper", tmp_path, has_stacks=True)
    found = analyse_folder(tmp_path, 4)
    assert found is not None
    assert (found.kind, found.culprits, found.confidence) == ("absent", (2,), "high")
    assert "desync.py:" in found.sentence
