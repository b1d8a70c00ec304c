"""What `supervisor doctor` says of the Python that starts the training."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Service


def look_at(service: Service, python: str) -> dict[str, Any]:
    config = service.folder / "supervisor.toml"
    config.write_text(f'[launcher]\npython = "{python}"\n')
    report = json.loads(service.call("doctor", "--json", "--config", str(config)).stdout)
    return next(check for check in report["checks"] if check["what"] == "launcher.python")


def stand_in(folder: Path, script: str) -> str:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.torch
def test_a_python_with_torch_is_fine(service: Service) -> None:
    assert look_at(service, sys.executable)["ok"] is True


def test_a_python_without_torch_is_a_warning_with_its_cure(service: Service) -> None:
    found = look_at(service, stand_in(service.folder, "echo torch"))
    assert (found["ok"], found["warning"]) == (None, True)
    assert "pip install" in found["detail"]
    assert "command" in found["detail"]


@pytest.mark.parametrize("script", ["echo trainer torch", "echo broken >&2; exit 3"])
def test_a_python_without_the_launcher_cannot_be_used(service: Service, script: str) -> None:
    assert look_at(service, stand_in(service.folder, script))["ok"] is False


def test_a_python_that_is_not_there_is_told(service: Service) -> None:
    found = look_at(service, "/does/not/exist/python")
    assert found["ok"] is False
    assert "is not there" in found["detail"]
