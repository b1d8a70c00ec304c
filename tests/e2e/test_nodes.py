"""Nodes die, fill up, are cut off and come back."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from slurm.types import NodeBase
from supervisor.model import AttemptEnd, CheckpointState
from tests.e2e.conftest import OpenStage
from tests.e2e.stage import Stage
from trainer.contract import RunPaths

pytestmark = pytest.mark.slurm

ACTED_WITHIN_S = 8

SWEEP = """[sweep]
interval_s = 0.3
[sweep.limits]
disk_paths = ["{scratch}"]
disk_min_free_fraction = 0.01
disk_min_free_bytes = 0
"""


@pytest.mark.parametrize("position", [1, 0], ids=["another node", "the batch host"])
def test_a_power_cut_is_acted_upon_within_8_s(open_stage: OpenStage, position: int) -> None:
    stage = open_stage(nodes=4)  # two more: those that the batch host leaves behind are COMPLETING for long
    stage.submit("r", minimum=2, maximum=2)
    stage.await_verified(1)
    lost = sorted(stage.attempt(1).nodes)[position]
    cut_at = datetime.now(UTC)
    stage.sandbox.power_cut(lost)
    stage.wait("the drain", lambda: lost in stage.drained(), ACTED_WITHIN_S)
    stage.wait("the successor", lambda: any(a.job_id for a in stage.attempts() if a.number == 2), ACTED_WITHIN_S)
    submitted_at = stage.attempt(2).submitted_at
    assert submitted_at is not None
    assert (submitted_at - cut_at).total_seconds() < ACTED_WITHIN_S
    assert stage.node(lost).base is not NodeBase.DOWN  # Slurm has not noticed yet
    assert f"supervisor: {lost}: no heartbeat" in stage.drained()[lost]
    second = stage.await_step(2)
    assert lost not in second.nodes
    assert second.resume_step > 0
    assert list(stage.drained()) == [lost]
    assert_each_met_on_its_own_first_node(stage)


def assert_each_met_on_its_own_first_node(stage: Stage) -> None:
    """Case RR-10: the second attempt does not look for the first one's endpoint."""
    meetings = []
    for attempt in stage.attempts():
        told = RunPaths(stage.directory / "runs" / "r").attempt_dir(attempt.number) / "meeting"
        address, rendezvous = told.read_text().split()
        assert address == stage.node(min(attempt.nodes)).address
        meetings.append(rendezvous)
    assert len({*meetings}) == len(meetings) == 2


@pytest.mark.usefixtures("namespaces_permitted")
def test_a_full_scratch_disk_gets_exactly_that_node_drained(open_stage: OpenStage) -> None:
    stage = open_stage(nodes=3, mode="isolated", is_up=False, sweep=SWEEP)
    stage.sandbox.run("scontrol", "update", "nodename=n1", "state=drain", "reason=fan, ask Kim")
    stage.start_daemon()
    stage.wait("a sweep", lambda: "source.changed" in stage.daemon_log.read_text())
    stage.sandbox.fill_scratch("n1")
    stage.sandbox.fill_scratch("n3")
    stage.wait("the drain", lambda: "n3" in stage.drained())
    drained = stage.drained()
    assert sorted(drained) == ["n1", "n3"]
    assert drained["n1"] == "fan, ask Kim"
    assert drained["n3"].startswith("supervisor: disk")


def test_a_run_shrinks_to_its_minimum_waits_below_it_and_goes_on_when_a_node_returns(open_stage: OpenStage) -> None:
    stage = open_stage(nodes=4)
    stage.submit("r", minimum=2, maximum=3)
    assert len(stage.await_step(1).nodes) == 3
    stage.await_verified(1)
    stage.sandbox.run("scontrol", "update", "nodename=n3", "state=drain", "reason=fan, ask Kim")
    for node in ("n2", "n3"):
        stage.sandbox.power_cut(node)
    second = stage.await_step(2)
    assert sorted(second.nodes) == ["n1", "n4"]
    assert stage.drained()["n3"] == "fan, ask Kim"
    stage.sandbox.power_cut("n4")
    stage.wait("waiting", lambda: stage.status()["runs"][0]["state"] == "waiting")
    assert "1 healthy nodes, the minimum is 2" in stage.status()["runs"][0]["reason"]
    stage.sandbox.revive("n4")
    stage.wait("its return", lambda: stage.node("n4").is_responding)
    stage.sandbox.run("scontrol", "update", "nodename=n4", "state=resume")
    third = stage.await_step(3)
    assert sorted(third.nodes) == ["n1", "n4"]


@pytest.mark.usefixtures("namespaces_permitted")
def test_what_a_node_that_was_cut_off_still_publishes_never_counts(open_stage: OpenStage) -> None:
    stage = open_stage(nodes=2, mode="isolated")
    stage.submit("r", "step_s=0.2", "plan=2:exit75@9")
    zombie = stage.await_step(1)
    stage.await_verified(1)
    stage.sandbox.cable_cut(zombie.nodes[0])
    third = stage.await_step(3, limit_s=60)
    over = stage.attempt(1)
    assert over.end in (AttemptEnd.NODE_SILENT, AttemptEnd.NODE_FAILED)
    fenced = [c for c in stage.checkpoints() if c.attempt == 1 and c.state is CheckpointState.FENCED]
    assert fenced
    assert max(c.step for c in fenced) > third.resume_step
    assert third.resume_path.endswith(f"step-{third.resume_step}.a2")
