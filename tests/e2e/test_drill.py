"""A slow node is replaced, then a node's power is cut by `supervisor drill`: on a training of the reference script.

One after the other on the same training: its start is what takes time.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from supervisor.drillmake import find_ranks
from tests.e2e.conftest import OpenStage
from tests.e2e.stage import Stage

pytestmark = [pytest.mark.slurm, pytest.mark.torch, pytest.mark.usefixtures("namespaces_permitted")]

_RUN_FILE = """
name = "r"
command = ["-m", "trainer.example.train", "--steps", "100000", "--step-sleep", "0.1"]
root = "{root}"
[nodes]
min = 3
max = 3
spares = 2
start_checks = false
[checkpoint]
every_s = 1
keep_last = 4
[restart]
backoff_s = 0
queue_ahead_s = 0
[straggler]
ratio = 1.5
window_steps = 20
action = "replace"
"""


def test_a_pulsed_node_is_replaced_at_a_checkpoint_and_a_drill_of_a_power_cut_passes_every_check(
    open_stage: OpenStage,
) -> None:
    stage = open_stage(nodes=5, mode="isolated", has_torch=True)
    _train(stage)
    slow = _launch_report(stage)["training"][1]
    assert _slow_down(stage, slow) == {slow}
    stage.wait("its replacement", lambda: slow not in _launch_report(stage)["training"])
    stage.wait("a step after it", lambda: [i for i in stage.interruptions() if i.resumed_at is not None])
    (interruption,) = stage.interruptions()
    assert (interruption.kind, interruption.node) == ("straggler", slow)
    found = _drill(stage)
    assert {check["check"]: check["ok"] for check in found["checks"]} == dict.fromkeys(
        ("recovered", "checkpoint", "loss", "samples", "node", "ledger"), True
    )
    assert (found["how"], found["rung"]) == (f"power of {found['node']} cut", 2)
    assert not {found["node"], slow} & set(found["after"]["training"])
    (kept,) = (stage.directory / "runs/r/drills").glob("*-node.json")
    assert json.loads(kept.read_text()) == found


def _train(stage: Stage) -> None:
    path: Path = stage.directory / "r.toml"
    path.write_text(_RUN_FILE.format(root=stage.directory / "runs"))
    stage.do("submit", "--no-visibility-check", str(path))
    stage.await_verified(1, limit_s=90)


def _launch_report(stage: Stage) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((stage.directory / "runs/r/attempts/1/launch.json").read_text())
    return report


def _slow_down(stage: Stage, node: str) -> set[str]:
    """Stop and continue its ranks until somebody is named; every node that was."""

    def pulse() -> set[str]:
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in find_ranks(stage.sandbox.node_pids(node), "r").values():
                os.kill(pid, number)
            time.sleep(0.12)
        report = _launch_report(stage)
        named = {straggler["node"] for straggler in report["stragglers"]}
        return named | ({node} if node not in report["training"] else set())

    return stage.wait("a straggler", pulse)


def _drill(stage: Stage) -> dict[str, Any]:
    ended = stage.supervisor("drill", "r", "--kill", "node", "--timeout-s", "60", "--json")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout)
    return found
