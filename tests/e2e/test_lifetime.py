"""The daemon comes and goes; runs go on."""

from __future__ import annotations

import signal

import pytest

from supervisor.model import CheckpointState
from tests.e2e.conftest import OpenStage
from tests.e2e.stage import Stage
from trainer.contract import MANIFEST_NAME

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
    tokens = [job.comment for job in sorted(stage.jobs(), key=lambda job: job.job_id)]
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


PRUNE = ("commit.prune:before", "commit.prune:after", "mark.prune:after", "settle.prune:before")
NOTIFY = ("commit.notify:after", "mark.notify:after", "settle.notify:before", "settle.notify:after")


def test_a_daemon_killed_while_checkpoints_are_verified_and_pruned_and_people_told_ends_with_all_of_it_done(
    open_stage: OpenStage,
) -> None:
    stage = open_stage(nodes=1)
    stage.submit("r", "save_every=3", more="[checkpoint]\nkeep_last = 2")
    job_id = stage.await_step(1).job_id
    stage.end_daemon(signal.SIGKILL)
    stage.start_daemon(kill_at="commit.verify:before")
    die_in_turn(stage, ("commit.verify:after", *PRUNE, "settle.prune:after"))
    stage.start_daemon(kill_at="commit.notify:before")
    stage.sandbox.run("scancel", str(job_id))
    die_in_turn(stage, NOTIFY)
    stage.start_daemon()
    stage.wait("every intent settled", lambda: not stage.open_intents())
    assert stage.run().state == "held"
    kept = {c.path for c in stage.checkpoints() if c.state is CheckpointState.VERIFIED}
    assert len(kept) >= 2
    published = stage.run().spec.paths.checkpoints().glob(f"*/{MANIFEST_NAME}")
    assert {str(manifest.parent) for manifest in published} == kept
    assert [job.job_id for job in stage.jobs()] == [job_id]


@pytest.mark.parametrize("taken", ["ledger.db", "ledger.db-wal"])
def test_a_ledger_that_is_removed_under_the_daemon_costs_nothing_that_it_knew(stage: Stage, taken: str) -> None:
    stage.submit("r")
    job_id = stage.await_step(1).job_id
    stage.wait("a backup of the first hour", lambda: list(stage.directory.glob("ledger.db.backup-*")))
    (stage.directory / taken).unlink()
    daemon = stage.daemon
    assert daemon is not None
    stage.wait("its end", lambda: daemon.poll() is not None)
    stage.start_daemon()
    assert stage.status()["daemon"]["paused"] == (taken == "ledger.db")
    stage.do("resume")
    assert stage.attempt(1).job_id == job_id
    step = stage.attempt(1).last_step or 0
    stage.wait("a later step", lambda: (stage.attempt(1).last_step or 0) > step)
    assert [job.job_id for job in stage.jobs()] == [job_id]
