"""Saves and losses through the whole chain: advice, a save asked for, saves that fail, a loss that went wrong."""

from __future__ import annotations

import pytest

from supervisor.model import AttemptEnd, CheckpointState, SkippedSamples
from tests.e2e.conftest import OpenStage
from tests.e2e.stage import RIG, Stage
from trainer import contract

pytestmark = pytest.mark.slurm

ROLLBACK = '[divergence]\non_nan = "rollback"\n'


def suspects(stage: Stage) -> set[int]:
    return {c.step for c in stage.checkpoints() if c.state is CheckpointState.SUSPECT}


def test_a_run_whose_loss_went_wrong_goes_back_and_leaves_the_batch_out(stage: Stage) -> None:
    stage.submit("r", "steps=14", "save_every=3", "plan=1:diverge@9", "step_s=0.2", more=ROLLBACK)
    stage.await_state("finished", limit_s=60)
    first, second = stage.attempts()
    assert first.end is AttemptEnd.DIVERGED
    assert second.resume_step < 9
    assert suspects(stage) <= {9}
    assert (stage.run().spec.paths.attempt_dir(2) / "skips").read_text() == "8-9"
    assert stage.drained() == {}
    assert [i.kind for i in stage.interruptions()] == ["diverged"]


def test_a_run_whose_loss_went_wrong_is_held_and_goes_on_from_before_it_when_it_is_released(stage: Stage) -> None:
    stage.submit("r", "steps=14", "save_every=3", "plan=1:diverge@7", "step_s=0.2")
    held = stage.await_state("held")
    assert "the loss is not a number since step 7" in held.reason
    stage.do("release", "--skip-batches", "r")
    stage.await_state("finished", limit_s=60)
    assert stage.attempt(2).resume_step in (3, 6)
    assert (stage.run().spec.paths.attempt_dir(2) / "skips").read_text() == "6-7"


def test_a_save_that_is_asked_for_is_made_now(stage: Stage) -> None:
    stage.submit("r", "save_every=100000")
    stage.await_step(1)
    assert stage.supervisor("save", "r", "--dry-run").returncode == 0
    assert stage.run().save_asked_at is None
    stage.do("save", "r")
    assert stage.await_verified(1).step > 0
    stage.do("stop", "r")
    stage.await_state("stopped")
    assert stage.supervisor("save", "r").returncode == 4


def test_a_running_training_is_told_the_interval_that_follows_from_its_saves(stage: Stage) -> None:
    stage.submit("r", "save_s=0.5", more='[checkpoint]\ninterval = "auto"\nevery_max_s = 900\n')
    stage.await_step(1)
    path = stage.run().spec.paths.advice(1)
    stage.wait("advice", path.exists)
    advice = contract.parse(contract.Advice, path.read_bytes())
    assert (advice.checkpoint_every_s, advice.save_requests) == (900.0, 0)
    saves = stage.status()["runs"][0]["saves"]
    assert saves["every_s"] == 900.0
    assert 0 < saves["loss"] < 0.1
    assert "expected loss" in stage.do("status", "r")
    assert "a failure every" in stage.do("plan", "--run", "r")


def test_saves_that_fail_are_told_with_the_steps_at_risk_and_the_training_goes_on(stage: Stage) -> None:
    """CK-08, CK-17: class filesystem (quota) with the path; no node is drained."""
    stage.submit("r", "save_error=[Errno_122]_Disk_quota_exceeded")
    stage.wait("the reason", lambda: "saves fail" in stage.run().reason)
    report = stage.status()["runs"][0]
    assert "filesystem (quota)" in report["reason"]
    assert str(stage.run().spec.paths.checkpoints()) in report["reason"]
    assert report["state"] == "running"
    assert report["steps_at_risk"] == report["step"] > 0
    assert report["verified_step"] is None
    assert stage.drained() == {}


def test_copies_to_object_storage_that_fail_are_told_and_shown(stage: Stage) -> None:
    stage.submit("r", "upload_error=no_such_bucket", more='[checkpoint]\nobject_url = "nope://x"\n')
    stage.wait("the reason", lambda: "no such bucket" in stage.run().reason)
    found = stage.status()["runs"][0]["saves"]["object_storage"]
    assert (found["url"], found["newest"], found["error"]) == ("nope://x", None, "no such bucket")
    assert found["failures"] >= 5
    assert "object storage nope://x: newest there none" in stage.do("status", "r")


@pytest.mark.torch
def test_a_training_on_the_checkpointer_gets_past_a_sample_that_makes_its_loss_no_number(open_stage: OpenStage) -> None:
    """From the batch to the ledger and back: found, gone back from, left out, and finished with sound weights."""
    stage = open_stage(nodes=1, has_torch=True)
    stage.submit("r", script=RIG / "poisoned.py", more=ROLLBACK)
    stage.await_state("finished", limit_s=120)
    first, second = stage.attempts()
    assert (first.end, second.end) == (AttemptEnd.DIVERGED, AttemptEnd.FINISHED)
    assert first.loss_fault is not None
    assert first.loss_fault.onset_step == 10
    assert second.resume_step < 10
    assert second.skip_samples == (SkippedSamples(first=9 * 4, end=10 * 4),)
    assert all(c.step < 10 or c.attempt == 2 for c in stage.checkpoints() if c.state is CheckpointState.VERIFIED)
