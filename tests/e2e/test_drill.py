"""`supervisor drill` on a training of the reference script: a node's power is cut, and everything about it checked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.conftest import OpenStage
from tests.e2e.stage import Stage

pytestmark = [pytest.mark.slurm, pytest.mark.torch, pytest.mark.usefixtures("namespaces_permitted")]

_RUN_FILE = """
name = "r"
command = ["-m", "trainer.example.train", "--steps", "100000", "--step-sleep", "0.1"]
root = "{root}"
[nodes]
min = 2
max = 2
spares = 1
start_checks = false
[checkpoint]
every_s = 1
keep_last = 4
[restart]
backoff_s = 0
queue_ahead_s = 0
"""


def test_a_drill_that_cuts_a_nodes_power_passes_every_check_and_is_reported(open_stage: OpenStage) -> None:
    stage = open_stage(nodes=3, mode="isolated", has_torch=True)
    _train(stage)
    ended = stage.supervisor("drill", "r", "--kill", "node", "--timeout-s", "60", "--json")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads(ended.stdout)
    assert {check["check"]: check["ok"] for check in found["checks"]} == dict.fromkeys(
        ("recovered", "checkpoint", "loss", "samples", "node", "ledger"), True
    )
    assert (found["how"], found["rung"]) == (f"power of {found['node']} cut", 2)
    assert found["node"] not in found["after"]["training"]
    (kept,) = (stage.directory / "runs/r/drills").glob("*-node.json")
    assert json.loads(kept.read_text()) == found


def _train(stage: Stage) -> None:
    path: Path = stage.directory / "r.toml"
    path.write_text(_RUN_FILE.format(root=stage.directory / "runs"))
    stage.do("submit", "--no-visibility-check", str(path))
    stage.await_verified(1, limit_s=90)
