"""Processes beside a training take no module of the working directory for the standard library's or for ours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import trainer
from tests.trainer.folders import make_checkpoint
from tests.trainer.test_mover import place_of, there
from trainer.children import order_places, python_command
from trainer.storage.mover import start_mover

HOME = str(Path(trainer.__file__).parent.parent)


@pytest.fixture
def _amid_namesakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "namesakes"
    folder.mkdir()
    for name in ("queue", "socket", "json", "runpy", "xxhash", "trainer"):
        (folder / f"{name}.py").write_text("raise SystemExit('a namesake')\n")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", ["", str(folder), *sys.path])  # as of a script that lies there


@pytest.mark.usefixtures("_amid_namesakes")
def test_a_module_of_ours_runs_amid_namesakes() -> None:
    command = python_command("trainer.storage.objects", "--help")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout


@pytest.mark.usefixtures("_amid_namesakes")
def test_the_mover_copies_amid_namesakes(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "run" / "checkpoints", 1)
    mover = start_mover(place_of(tmp_path))
    assert mover is not None
    assert mover.close(30)
    assert there(tmp_path) == ["step-1.a1"]


@pytest.mark.torch
@pytest.mark.usefixtures("_amid_namesakes")
def test_the_writer_saves_amid_namesakes(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from tests.trainer.saving.crew import crew

    with crew(tmp_path, [[torch.ones(5)]]) as one:
        assert one.save(1)[0].is_verified


def test_nothing_shadows_the_standard_library_nor_this_package() -> None:
    standard = os.__file__.removesuffix("/os.py")
    ours = order_places(["", "/run/script", "/venv/lib/site-packages", standard, f"{standard}/lib-dynload", "/more"])
    assert ours == [standard, f"{standard}/lib-dynload", HOME, "/venv/lib/site-packages", "/run/script", "/more"]
