"""Recovery inside the allocation, as the service sees it: the job goes on, and the next job is the last resort."""

from __future__ import annotations

import signal
import time
from datetime import UTC, datetime

import pytest

from supervisor.model import AttemptEnd, AttemptState, Interruption
from tests.e2e.conftest import OpenStage
from tests.e2e.stage import Stage

pytestmark = pytest.mark.slurm

TAKEN_OVER_WITHIN_S = 15


def test_a_lost_node_is_replaced_inside_the_job_and_a_lost_batch_host_by_the_next_job(open_stage: OpenStage) -> None:
    stage = open_stage(nodes=5)
    stage.submit("r", minimum=2, maximum=2, spares=1, in_job=True)
    stage.await_verified(1)
    first = stage.wait("the training nodes", lambda: a if (a := stage.attempt(1)).training else None)
    host, lost = first.training  # the batch host is the first node of the job
    (spare,) = first.spare_nodes
    stage.sandbox.power_cut(lost)
    stage.end_daemon(signal.SIGKILL)  # one that comes back in the middle of it changes nothing
    stage.start_daemon()
    inside = stage.wait("the recovery inside the job", lambda: find_resumed(stage, 1))
    assert (inside.is_in_job, inside.launch, inside.node, inside.is_planned) == (True, 0, lost, False)
    assert inside.kind == "node_lost"
    assert inside.resume_step
    stage.wait("the drain", lambda: lost in stage.drained())
    assert list(stage.drained()) == [lost]
    again = stage.wait("the second start", lambda: a if (a := stage.attempt(1)).training == (host, spare) else None)
    assert (again.job_id, again.launch, again.spare_nodes) == (first.job_id, 1, (lost,))
    report = stage.status()["runs"][0]
    assert (report["attempt"], report["launch"], report["interruptions_in_job"]) == (1, 1, 1)
    assert report["training_nodes"] == [host, spare]
    stage.wait("its state", lambda: stage.status()["runs"][0]["state"] == "running")

    cut_at = datetime.now(UTC)
    stage.sandbox.power_cut(host)
    stage.wait("the next job", lambda: any(a.job_id for a in stage.attempts() if a.number == 2), TAKEN_OVER_WITHIN_S)
    submitted_at = stage.attempt(2).submitted_at
    assert submitted_at is not None
    assert (submitted_at - cut_at).total_seconds() < TAKEN_OVER_WITHIN_S
    second = stage.await_step(2)
    assert not {host, lost} & {*second.nodes}
    assert stage.attempt(1).state is AttemptState.OVER
    assert [(i.attempt, i.launch, i.node) for i in stage.interruptions()] == [(1, 0, lost), (1, 1, host)]


def test_a_person_who_cancels_the_job_just_after_a_node_was_lost_is_obeyed(open_stage: OpenStage) -> None:
    stage = open_stage(nodes=4)
    stage.submit("r", minimum=2, maximum=2, spares=1, in_job=True)
    first = stage.wait("the training nodes", lambda: a if (a := stage.attempt(1)).training else None)
    stage.await_step(1)
    stage.sandbox.power_cut(first.training[1])
    time.sleep(0.7)  # before the launcher has done anything about it
    stage.sandbox.run("scancel", str(first.job_id))
    held = stage.await_state("held", limit_s=60)  # squeue says COMPLETING until the node is DOWN
    assert "cancelled" in held.reason
    assert [a.end for a in stage.attempts()] == [AttemptEnd.CANCELLED]


def find_resumed(stage: Stage, attempt: int) -> Interruption | None:
    found = [i for i in stage.interruptions() if i.attempt == attempt and i.resumed_at is not None]
    return found[0] if found else None
