"""What the daemon reads of a real Slurm: a job that someone holds, and a whole run read as JSON."""

from __future__ import annotations

import subprocess

import pytest

from supervisor.model import AttemptEnd
from tests.e2e.conftest import OpenStage
from tests.e2e.stage import Stage

pytestmark = pytest.mark.slurm


def test_a_held_job_is_the_runs_reason_and_the_run_goes_on_once_it_is_released(stage: Stage) -> None:
    """JS-09: no interruption, and nothing is submitted a second time."""
    stage.submit("r", "steps=5", more='[slurm]\noptions = ["--begin=now+1hour"]')
    job_id = stage.wait("the job", lambda: stage.attempt(1).job_id)
    _scontrol(stage, "hold", str(job_id))
    run = stage.wait("the reason", lambda: stage.run() if "waits in Slurm" in stage.run().reason else None)
    assert run.reason.startswith(f"job {job_id} waits in Slurm: JobHeld")
    assert f"scontrol release {job_id}" in run.reason
    _scontrol(stage, "release", str(job_id))
    _scontrol(stage, "update", f"JobId={job_id}", "StartTime=now")
    assert "waits in Slurm" not in stage.await_state("finished").reason
    assert [a.end for a in stage.attempts()] == [AttemptEnd.FINISHED]
    assert stage.interruptions() == ()


def test_a_run_whose_slurm_is_read_as_json_is_resubmitted_and_finishes(open_stage: OpenStage) -> None:
    stage = open_stage(is_up=False)
    settings = stage.config.read_text().replace("[slurm]\n", '[slurm]\nclient = "cli"\nform = "json"\n')
    stage.config.write_text(settings)
    stage.start_daemon()
    stage.submit("r", "steps=4", "plan=1:exit75@2")
    stage.await_state("finished")
    assert [a.end for a in stage.attempts()] == [AttemptEnd.SAVED, AttemptEnd.FINISHED]
    assert "as text from now on" not in stage.daemon_log.read_text()


def _scontrol(stage: Stage, *arguments: str) -> None:
    subprocess.run(["scontrol", *arguments], env=stage.env, check=True, timeout=30)
