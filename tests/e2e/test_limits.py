"""Time limits, preemption, and what people do to a job with Slurm's own tools, through the whole chain."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest

from slurm.sandbox import Sandbox
from supervisor.model import Attempt, AttemptEnd
from tests.e2e.conftest import OpenStage
from tests.e2e.stage import Stage

pytestmark = pytest.mark.slurm

SAVES = ("save_every=100000", "saves=*")  # nothing but the request makes it save

PREEMPTION = """
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
PartitionName=low Nodes=ALL PriorityTier=1 PreemptMode={mode} GraceTime={grace_s}
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF
"""


def ask(stage: Stage, *command: str) -> str:
    """One of Slurm's own tools, as a person uses it."""
    ended = stage.sandbox.run(*command)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


def await_end(stage: Stage, number: int = 1, limit_s: float = 30) -> Attempt:
    stage.wait(f"the end of attempt {number}", lambda: stage.attempt(number).is_over, limit_s)
    return stage.attempt(number)


# ---- the warning before the time limit


@pytest.fixture(scope="module")
def warned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """Two runs whose jobs came near their time limit: "saves" does as it is asked, "ignores" goes on until it is ended.

    Slurm looks at time limits every 30 s, so this happens once.
    """
    directory = tmp_path_factory.mktemp("limits")
    with Sandbox.start(nodes=2, directory=directory / "sandbox") as sandbox:
        stage = Stage(directory / "stage", sandbox)
        stage.start_daemon()
        stage.submit("saves", *SAVES, max_without_progress=1)
        stage.submit("ignores", max_without_progress=1)
        for name, limit in (("saves", "TimeLimit=1"), ("ignores", "EndTime=now+1")):
            stage.await_step(1, name)
            if name == "ignores":
                stage.await_verified(1, name)
            ask(stage, "scontrol", "update", f"JobId={stage.attempt(1, name).job_id}", limit)
        for name in ("saves", "ignores"):
            stage.await_step(2, name, limit_s=75)
        yield stage
        stage.assert_one_job_per_attempt()
        stage.close()


def test_slurms_own_warning_makes_the_training_save_and_the_next_job_is_submitted_at_once(warned: Stage) -> None:
    first, second = warned.attempt(1, "saves"), warned.attempt(2, "saves")
    assert (first.end, first.exit_code) == (AttemptEnd.SAVED, 75)
    assert first.over_at is not None
    assert second.resume_step == first.last_step
    assert (second.planned_at - first.over_at).total_seconds() < 3
    assert [i.is_planned for i in warned.interruptions("saves")] == [True]


def test_a_training_that_ignores_the_warning_goes_on_from_its_last_checkpoint(warned: Stage) -> None:
    first, second = warned.attempt(1, "ignores"), warned.attempt(2, "ignores")
    assert first.end is AttemptEnd.TIME_LIMIT
    assert first.last_step is not None
    assert 0 < second.resume_step <= first.last_step
    assert [i.is_planned for i in warned.interruptions("ignores")] == [True]


# ---- preemption


def preempt(stage: Stage) -> int:
    """A short job of more weight takes the whole cluster; its number."""
    return int(ask(stage, "sbatch", "--parsable", "-p", "high", "-N1", "--exclusive", "--wrap=sleep 1"))


def submit_to(stage: Stage, partition: str, *training: str) -> Attempt:
    stage.submit("r", *training, max_without_progress=1, more=f'[slurm]\npartition = "{partition}"')
    return stage.await_step(1)


def test_a_preemption_that_sends_our_signal_leaves_time_to_save(open_stage: OpenStage) -> None:
    user_signal = "SlurmctldParameters=preempt_send_user_signal"
    stage = open_stage(nodes=1, extra_conf=f"{PREEMPTION.format(mode='CANCEL', grace_s=30)}{user_signal}\n")
    submit_to(stage, "low", *SAVES)
    preempt(stage)
    first = await_end(stage)
    assert first.end is AttemptEnd.SAVED
    assert stage.await_step(2).resume_step == first.last_step


@pytest.mark.parametrize(("mode", "grace_s"), [("CANCEL", 30), ("REQUEUE", 0)])
def test_any_other_preemption_costs_no_restart_and_drains_nobody(
    open_stage: OpenStage, mode: str, grace_s: int
) -> None:
    """With a grace time Slurm sends SIGTERM to every process of the step, torchrun and ranks among them.

    REQUEUE: a job that Slurm may not requeue is cancelled, and it is we who submit the next one.
    """
    stage = open_stage(nodes=1, extra_conf=PREEMPTION.format(mode=mode, grace_s=grace_s))
    job_id = submit_to(stage, "low", "save_every=100000").job_id
    other = preempt(stage)
    first = await_end(stage)
    second = stage.await_step(2)
    assert (first.end, first.slurm_restarts) == (AttemptEnd.PREEMPTED, 0)
    assert {job.job_id for job in stage.jobs()} >= {job_id, other, second.job_id}
    assert stage.run().state == "active"
    assert stage.drained() == {}


# ---- what people do with Slurm's own tools


def test_a_job_that_an_admin_requeues_is_ended_and_the_run_goes_on_in_one_of_ours(stage: Stage) -> None:
    """Our jobs are --no-requeue, so Slurm refuses until somebody changes that."""
    stage.submit("r")
    job_id = stage.await_step(1).job_id
    refused = stage.sandbox.run("scontrol", "requeue", str(job_id))
    assert refused.returncode != 0
    assert not stage.attempt(1).is_over
    ask(stage, "scontrol", "update", f"JobId={job_id}", "Requeue=1")
    ask(stage, "scontrol", "requeue", str(job_id))
    first = await_end(stage)
    assert first.end is AttemptEnd.PREEMPTED
    assert "requeued by an administrator" in first.end_detail
    second = stage.await_step(2)
    states = {job.job_id: job.is_ended for job in stage.jobs()}
    assert states == {job_id: True, second.job_id: False}


def test_a_job_that_is_held_waits_until_a_person_releases_it(stage: Stage) -> None:
    others = ask(stage, "sbatch", "--parsable", "-N2", "--exclusive", "--wrap=sleep 100")
    stage.submit("r")
    job_id = stage.wait("a job", lambda: stage.attempts() and stage.attempt(1).job_id)
    ask(stage, "scontrol", "hold", str(job_id))
    ask(stage, "scancel", others)
    stage.wait("the reason", lambda: "held until someone releases it" in stage.run().reason)
    ask(stage, "srun", "-N2", "--exclusive", "true")  # there is room for it
    assert [(job.job_id, job.is_pending) for job in stage.jobs() if job.is_live] == [(job_id, True)]
    assert stage.run().state == "active"
    ask(stage, "scontrol", "release", str(job_id))
    assert stage.await_step(1).job_id == job_id
    stage.wait("no reason", lambda: not stage.run().reason)


def test_a_suspended_job_is_no_stall_and_goes_on_when_it_is_resumed(stage: Stage) -> None:
    stage.submit("r", step_max_s=1)
    job_id = stage.await_step(1).job_id
    ask(stage, "scontrol", "suspend", str(job_id))
    stage.wait("suspended", lambda: stage.attempt(1).phase == "suspended")
    told = stage.run().spec.paths.progress(1)
    stage.wait("silence for longer than a stall may last", lambda: time.time() - told.stat().st_mtime > 2)
    ask(stage, "scontrol", "resume", str(job_id))
    resumed_at = time.time()
    stage.wait("steps for longer than a stall may last", lambda: told.stat().st_mtime > resumed_at + 1.5)
    assert stage.live_attempts() == [1]
    assert stage.interruptions() == ()


# ---- the next job, queued behind the running one

ALWAYS_S = 2 * 365 * 86400  # Slurm gives a job without a time limit a year


def submit_with_successor(stage: Stage) -> int:
    """A run that trains in job 1; the number of the job that waits behind it."""
    stage.submit("r", *SAVES, queue_ahead_s=ALWAYS_S)
    first = stage.await_step(1).job_id

    def waiting() -> int | None:
        jobs = [job for job in stage.jobs() if job.is_pending and job.reason == "Dependency"]
        return jobs[0].job_id if jobs and jobs[0].job_id != first else None

    return stage.wait("a job behind it", waiting)


def ask_to_save(stage: Stage) -> None:
    ask(stage, "scancel", "--signal=USR1", "--batch", str(stage.attempt(1).job_id))


def test_the_next_job_waits_behind_the_running_one_and_trains_within_seconds_of_its_end(stage: Stage) -> None:
    behind = submit_with_successor(stage)
    assert stage.live_attempts() == [1]
    stage.wait("its number in the report", lambda: stage.status()["runs"][0]["next_job_id"] == behind)
    ask_to_save(stage)
    second = stage.await_step(2)
    first = stage.attempt(1)
    assert (first.end, second.job_id, second.resume_step) == (AttemptEnd.SAVED, behind, first.last_step)
    assert second.submitted_at is not None
    assert second.stepped_at is not None
    assert first.over_at is not None
    assert second.submitted_at < first.over_at
    assert (second.stepped_at - first.over_at).total_seconds() < 10
    assert stage.live_attempts() == [2]


def test_a_job_that_starts_while_the_daemon_is_dead_trains_nothing_until_it_is_told_from_where(stage: Stage) -> None:
    behind = submit_with_successor(stage)
    stage.end_daemon(signal.SIGKILL)
    ask_to_save(stage)
    stage.wait("its start", lambda: any(j.job_id == behind and not j.is_pending for j in stage.jobs()))
    log = stage.run().spec.paths.attempt_dir(2) / "job.log"
    stage.wait("its word", lambda: log.exists() and "waits to be told to begin" in log.read_text())
    assert not stage.run().spec.paths.progress(2).exists()
    stage.start_daemon()
    second = stage.await_step(2)
    assert (second.job_id, second.resume_step) == (behind, stage.attempt(1).last_step)


def test_a_cancelled_run_keeps_no_job_behind_it(stage: Stage) -> None:
    submit_with_successor(stage)
    ask(stage, "scancel", str(stage.attempt(1).job_id))
    stage.await_state("held")
    stage.wait("no job", lambda: all(job.is_ended for job in stage.jobs()))
    assert [a.end for a in stage.attempts()] == [AttemptEnd.CANCELLED]


def test_stop_ends_the_job_that_waits_too(stage: Stage) -> None:
    submit_with_successor(stage)
    stage.do("stop", "r")
    stage.await_state("stopped")
    stage.wait("no job", lambda: all(job.is_ended for job in stage.jobs()))
