"""How attempts end, and what becomes of the run, through the whole chain."""

from __future__ import annotations

import json

import pytest

from supervisor.model import AttemptEnd
from tests.e2e.conftest import OpenStage
from tests.e2e.stage import Stage

pytestmark = pytest.mark.slurm


def test_exit_0_finishes_the_run(stage: Stage) -> None:
    stage.submit("r", "steps=5")
    stage.await_state("finished")
    assert [(a.end, a.last_step) for a in stage.attempts()] == [(AttemptEnd.FINISHED, 5)]
    assert stage.status()["runs"][0]["interruptions"] == 0


def test_exit_75_is_resubmitted_at_once_and_counts_as_no_interruption(stage: Stage) -> None:
    stage.submit("r", "steps=10", "plan=1:exit75@6", max_without_progress=1)
    stage.await_state("finished")
    first, second = stage.attempts()
    assert first.end is AttemptEnd.SAVED
    assert second.resume_step == 5
    assert first.over_at is not None
    assert (second.planned_at - first.over_at).total_seconds() < 3
    assert stage.status()["runs"][0]["interruptions"] == 0
    assert stage.drained() == {}


def test_exit_93_holds_the_run_and_drains_nobody(stage: Stage) -> None:
    stage.submit("r", "plan=1:exit93@2")
    held = stage.await_state("held")
    assert "can't cure" in held.reason
    stage.wait("the end", lambda: stage.attempt(1).is_job_gone)
    assert stage.drained() == {}
    assert len(stage.jobs()) == 1


@pytest.mark.torch
def test_the_history_of_a_crash_shows_the_line_of_its_traceback(open_stage: OpenStage) -> None:
    stage = open_stage(nodes=1, has_torch=True)
    stage.submit("r", "plan=1:raise@2", max_without_progress=1)
    stage.await_state("held", limit_s=60)
    interruption = json.loads(stage.do("history", "--json"))["interruptions"][0]
    assert interruption["kind"] == "crashed"
    assert "RuntimeError: the loss is not a number at step 2" in interruption["cause"]
    assert any("job.log" in line for line in interruption["evidence"])


def test_a_run_that_stalls_again_and_again_is_held_with_its_evidence_until_it_is_released(stage: Stage) -> None:
    stage.submit("r", "plan=1:stall@2,2:stall@2", step_max_s=1, max_without_progress=2)
    held = stage.await_state("held")
    assert [a.end for a in stage.attempts()] == [AttemptEnd.STALLED, AttemptEnd.STALLED]
    assert "2 attempts without a newer verified checkpoint" in held.reason
    assert "no progress" in stage.interruptions()[-1].cause
    assert "no progress" in held.reason
    assert len(stage.jobs()) == 2
    stage.do("release", "r")
    stage.await_step(3)


def test_a_job_that_a_person_cancels_holds_the_run(stage: Stage) -> None:
    stage.submit("r")
    job_id = stage.await_step(1).job_id
    stage.sandbox.run("scancel", str(job_id))
    held = stage.await_state("held")
    assert "cancelled" in held.reason
    assert [job.job_id for job in stage.jobs()] == [job_id]


def test_stop_ends_the_job_and_the_run(stage: Stage) -> None:
    stage.submit("r")
    stage.await_step(1)
    stage.do("stop", "r")
    stage.await_state("stopped")
    stage.wait("end of the job", lambda: not any(job.is_live for job in stage.jobs()))
    assert [a.end for a in stage.attempts()] == [AttemptEnd.STOPPED]


def test_a_paused_run_is_not_resubmitted_until_it_is_resumed(stage: Stage) -> None:
    stage.submit("r", "plan=1:exit75@12")
    stage.await_step(1)
    stage.do("pause", "r")
    stage.wait("the end", lambda: stage.attempt(1).is_job_gone)
    stage.wait("a note", lambda: "paused: no new attempt" in stage.daemon_log.read_text())
    assert stage.status()["runs"][0]["state"] == "paused"
    assert len(stage.attempts()) == 1
    stage.do("resume", "r")
    stage.await_step(2)
