"""The daemon comes and goes; runs go on."""

from __future__ import annotations

import signal

import pytest

from tests.e2e.conftest import OpenStage
from tests.e2e.stage import Stage

pytestmark = pytest.mark.slurm


def test_sigterm_leaves_the_job_running_and_the_next_start_adopts_it(stage: Stage) -> None:
    stage.submit("r")
    before = stage.await_step(1)
    assert stage.end_daemon() == 0
    assert [job.is_live for job in stage.jobs()] == [True]
    stage.start_daemon()
    stage.wait("further steps", lambda: (stage.attempt(1).last_step or 0) > (before.last_step or 0) + 10)
    assert [(a.number, a.job_id) for a in stage.attempts()] == [(1, before.job_id)]
    assert len(stage.jobs()) == 1


SUBMIT = ("commit.submit:before", "commit.submit:after", "mark.submit:before", "mark.submit:after")
CANCEL = ("commit.cancel:before", "commit.cancel:after", "mark.cancel:after", "act.cancel:before")


def test_a_daemon_killed_at_each_step_of_submitting_and_cancelling_has_one_job_per_attempt_and_loses_no_run(
    open_stage: OpenStage,
) -> None:
    stage = open_stage(is_up=False)
    stage.start_daemon(kill_at=SUBMIT[0])
    stage.wait("the socket", (stage.directory / "control.sock").exists)
    stage.submit("r", "plan=1:stall@6,2:stall@6", step_max_s=1)
    die_in_turn(stage, (*SUBMIT[1:], "act.submit:before"))
    stage.start_daemon(kill_at=CANCEL[0])
    die_in_turn(stage, CANCEL[1:])
    assert stage.attempt(1).stepped_at is not None
    stage.start_daemon(kill_at="act.submit:after")
    die_in_turn(stage, ("settle.submit:before", "settle.submit:after"))
    stage.start_daemon(kill_at="act.cancel:after")
    die_in_turn(stage, ("settle.cancel:before", "settle.cancel:after"))
    stage.start_daemon()
    stage.await_step(3)
    tokens = [job.comment for job in stage.jobs()]
    assert tokens == [a.token for a in stage.attempts()]
    assert len(tokens) == 3


def die_in_turn(stage: Stage, points: tuple[str, ...]) -> None:
    """The running daemon dies, then one after the other that dies at the next point."""
    stage.await_death("its point")
    for point in points:
        stage.start_daemon(kill_at=point)
        stage.await_death(point)


def test_a_daemon_killed_at_each_step_of_draining_drains_the_node_once_and_goes_on(open_stage: OpenStage) -> None:
    stage = open_stage(nodes=3)
    stage.submit("r")
    node = stage.await_step(1).nodes[0]
    stage.end_daemon(signal.SIGKILL)
    stage.start_daemon(kill_at="commit.drain:before")
    stage.sandbox.power_cut(node)
    die_in_turn(stage, ("commit.drain:after", "mark.drain:after", "act.drain:before"))
    stage.start_daemon(kill_at="act.drain:after")
    die_in_turn(stage, ("settle.drain:before", "settle.drain:after"))
    stage.start_daemon()
    stage.await_step(2)
    assert list(stage.drained()) == [node]
