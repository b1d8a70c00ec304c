"""Slurm's answers get lost, come late or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import OpenStage
from tests.e2e.stage import Stage

pytestmark = pytest.mark.slurm

LOSE_ANSWER = """#!/bin/sh
echo called >> {calls}
{sbatch} "$@" >/dev/null
echo "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation" >&2
exit 1
"""


def test_a_job_whose_submission_was_not_confirmed_is_found_by_its_token(open_stage: OpenStage, tmp_path: Path) -> None:
    stage = open_stage(is_up=False)
    sbatch = stage.sandbox.run("sh", "-c", "command -v sbatch").stdout.strip()
    wrapper = tmp_path / "bin" / "sbatch"
    wrapper.parent.mkdir()
    wrapper.write_text(LOSE_ANSWER.format(calls=tmp_path / "calls", sbatch=sbatch))
    wrapper.chmod(0o755)
    stage.start_daemon(path_first=wrapper.parent)
    stage.submit("r")
    attempt = stage.await_step(1)
    assert [job.job_id for job in stage.jobs()] == [attempt.job_id]
    assert (tmp_path / "calls").read_text() == "called\n"


def test_a_frozen_controller_is_waited_for_and_nothing_is_decided_meanwhile(stage: Stage) -> None:
    stage.submit("r", "plan=1:exit75@40")
    stage.await_step(1)
    stage.sandbox.freeze_controller()
    sit_out(stage)
    stage.sandbox.thaw_controller()
    go_on(stage)


def test_a_stopped_controller_is_waited_for_and_nothing_is_decided_meanwhile(stage: Stage) -> None:
    stage.submit("r", "plan=1:exit75@40")
    stage.await_step(1)
    stage.sandbox.stop_controller()
    sit_out(stage)
    stage.sandbox.start_controller()
    go_on(stage)


def sit_out(stage: Stage) -> None:
    """The training ends while nobody can be asked: that is noticed, and its successor has to wait."""
    stage.wait("word of it", lambda: stage.status()["daemon"]["slurm"] == "not answering")
    stage.wait("the end of the attempt", lambda: stage.attempt(1).is_over)
    stage.wait("the reason to wait", lambda: "no attempt is planned blind" in stage.daemon_log.read_text())
    assert len(stage.attempts()) == 1
    assert "does not answer" in stage.do("status")


def go_on(stage: Stage) -> None:
    stage.await_step(2)
    stage.wait("word of it", lambda: stage.status()["daemon"]["slurm"] == "answering", 10)
    assert len(stage.jobs()) == 2
    assert stage.drained() == {}


def test_a_daemon_that_starts_while_slurm_is_down_waits_and_submits_later(open_stage: OpenStage) -> None:
    stage = open_stage(is_up=False)
    stage.sandbox.stop_controller()
    stage.start_daemon()
    stage.wait("word of it", lambda: "does not answer" in stage.do("status"))
    assert "Slurm does not answer" in stage.do("submit", "--no-visibility-check", str(stage.write_run("r")))
    stage.sandbox.start_controller()
    stage.await_step(1)
