"""The script in the README trains, saves, and goes on."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT
from tests.trainer.groups import on_ranks
from trainer.storage.stored import find_checkpoints

pytestmark = pytest.mark.torch


def _run(script: Path, arguments: list[str]) -> object:
    sys.argv = [str(script), *arguments]
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        return end.code
    return None


def test_the_script_in_the_readme_trains_saves_and_goes_on(tmp_path: Path) -> None:
    section = (ROOT / "README.md").read_text().partition("### A script that is made for it")[2]
    text = section.partition("```python\n")[2].partition("```")[0]
    script = tmp_path / "train.py"
    script.write_text(text)
    run_dir = tmp_path / "run"
    assert on_ranks(2, _run, script, ["6", str(run_dir)], is_joined=False) == [0, 0]
    assert on_ranks(2, _run, script, ["9", str(run_dir)], is_joined=False) == [0, 0]
    found = find_checkpoints(run_dir / "checkpoints")
    assert [(f.step, f.attempt, f.is_verified) for f in found] == [(6, 1, True), (9, 2, True)]
    assert len(text.splitlines()) <= 50
