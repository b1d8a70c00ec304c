"""Slurm ends a node of a job that has lost its launcher: the next job waits until it is gone."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from tests.trainer.agents import commanding


def test_a_node_that_has_lost_its_launcher_leaves_at_slurms_sigterm_without_a_farewell(tmp_path: Path) -> None:
    with commanding(tmp_path, suspect_after_s=0.7, beat_interval_s=0.1) as node:
        agent = node.start_agent()
        rank = node.begin(0)
        node.order("drill", id="d1", kind="network", for_s=60.0)
        node.until(lambda: not node.is_alive(rank))  # it has given its launcher up
        told_at = time.monotonic()
        os.kill(agent, signal.SIGTERM)
        assert node.agents[0].wait(20) == 128 + signal.SIGTERM
        assert time.monotonic() - told_at < 4.0  # its farewell may take ten seconds where there is somebody to hear it
