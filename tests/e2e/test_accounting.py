"""The end of a job that the controller has forgotten: from accounting, with a real slurmdbd and MariaDB.

The launcher leaves no exit record here, as when its node dies: only Slurm knows how the job ended.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pytest

from slurm.client import CliClient
from slurm.sandbox import Sandbox, SandboxUnavailable
from slurm.sandbox.installed import require_accounting
from slurm.submitted import read_release, read_submitted
from slurm.types import JobState
from supervisor.model import AttemptEnd, AttemptState
from tests.e2e.stage import NO_SWEEP, Stage
from tests.e2e.watcher import watched

pytestmark = pytest.mark.slurm

# Stands in for the launcher's interpreter: what is done depends on the run that it is started for.
_MUTE = """#!/bin/sh
case "$*" in
  */runs/ended/*) while [ ! -e {go} ]; do sleep 0.2; done; exit 0 ;;
  */runs/killed/*) while [ ! -e {go} ]; do sleep 0.2; done; exit 137 ;;
esac
exec sleep 1000
"""
ENDS = {
    "ended": AttemptEnd.FINISHED,
    "killed": AttemptEnd.CRASHED,
    "cancelled": AttemptEnd.CANCELLED,
    "limited": AttemptEnd.TIME_LIMIT,
    "lost": AttemptEnd.NODE_FAILED,
}


@pytest.fixture(scope="session")
def accounting_installed() -> None:
    try:
        require_accounting()
    except SandboxUnavailable as missing:
        pytest.skip(str(missing))


@pytest.fixture
def stage(accounting_installed: None, tmp_path: Path) -> Iterator[Stage]:
    parts = "PartitionName=first Nodes=n1\nPartitionName=second Nodes=n2"
    with Sandbox.start(
        nodes=2, accounting=True, min_job_age_s=2, extra_conf=parts, directory=tmp_path / "sandbox"
    ) as sandbox:
        one = Stage(tmp_path / "stage", sandbox, sweep=NO_SWEEP)
        (tmp_path / "stage" / "python").write_text(_MUTE.format(go=tmp_path / "go"))
        yield one
        one.close()


def test_ends_that_nobody_watched_are_told_apart_by_accounting_once_it_answers(stage: Stage, tmp_path: Path) -> None:
    """Cases CO-02, CO-03: COMPLETED, exit 137, cancelled by a person, time limit, node failure.

    The daemon is away while they end, the controller forgets them, and slurmdbd is away for most of that time.
    The database also holds ended jobs of the same numbers from before the controller lost its state (SB-11).
    """
    use_up_numbers(stage, 2 * len(ENDS))  # sbatch --test-only takes one too
    stage.start_daemon()
    for name in ENDS:
        partition = "second" if name == "lost" else "first"
        stage.submit(name, more=f'[slurm]\npartition = "{partition}"\ntime_limit = "60"\n')
    for name in ENDS:
        stage.wait(f"{name} running", partial(is_running, stage, name))
    jobs = {name: stage.attempt(1, name).job_id for name in ENDS}
    assert {*jobs.values()} <= {*range(1, 2 * len(ENDS) + 1)}
    stage.end_daemon()
    stage.sandbox.stop_accounting()
    soon = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + 1))
    ask(stage, "scontrol", "update", f"JobId={jobs['limited']}", f"EndTime={soon}")
    ask(stage, "scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=burnt")
    ask(stage, "scancel", str(jobs["cancelled"]))
    (tmp_path / "go").touch()
    stage.wait("only the one that waits for its limit", lambda: {j.job_id for j in stage.jobs()} == {jobs["limited"]})
    stage.start_daemon()
    stage.wait("word of slurmdbd", lambda: is_silence_said(stage))
    stage.wait("a look at it", lambda: len(stage.attempts("ended")) == 1)
    assert all(not stage.attempt(1, name).is_over for name in ENDS)
    stage.end_daemon()
    stage.sandbox.start_accounting()
    stage.wait("an empty queue", lambda: not stage.jobs(), 60)
    stage.start_daemon()
    for name in ENDS:
        stage.wait(f"the end of {name}", partial(is_over, stage, name), 60)
    assert {name: stage.attempt(1, name).end for name in ENDS} == ENDS
    assert stage.attempt(1, "killed").exit_code in (9, 137)  # sacct before 25.11 takes 128 off
    assert "a person" in stage.await_state("held", "cancelled").reason
    assert stage.await_state("finished", "ended").name == "ended"


def test_accounting_knows_the_line_of_a_job_that_is_to_be_adopted_and_the_end_of_one_that_was_never_eligible(
    stage: Stage,
) -> None:
    """Before 25.11 the controller does not tell it, and nothing else knows --signal."""
    script = stage.directory / "own.sh"
    script.write_text("#!/bin/sh\nsleep 600\n")
    ask(stage, "sbatch", "--hold", "--signal=B:USR1@60", "-Jown", str(script), "two words")
    client = CliClient(parent=stage.env)
    release = read_release(client.fetch_cluster().version)
    stage.wait("the submit line", lambda: client.describe_job(1).submit_line)
    found = read_submitted(client.describe_job(1), release=release)
    assert found.options == ("--hold", "--signal=B:USR1@60", "--job-name=own")
    assert (found.arguments, found.is_certain) == (("two", "words"), False)
    ask(stage, "scancel", "1")
    since = datetime.now(UTC) - timedelta(minutes=10)
    stage.wait("an end that came before it was eligible", lambda: is_listed(client, since, JobState.CANCELLED))


def test_runs_begin_and_end_while_slurmdbd_is_frozen(stage: Stage) -> None:
    """Case CO-03: the controller queues what it has to tell; who asks accounting is told nothing within the limit."""
    well = Stage(stage.directory / "well", stage.sandbox)
    try:
        well.start_daemon()
        well.submit("r", "steps=30")
        well.await_step(1)
        with watched(well):
            stage.sandbox.freeze_accounting()
            well.submit("s", "plan=1:exit75@10")
            well.await_state("finished")
            assert well.await_step(2, "s").resume_step == 10
        stage.sandbox.thaw_accounting()
        ends = {name: [a.end for a in well.attempts(name)] for name in ("r", "s")}
        well.assert_one_job_per_attempt()
    finally:
        well.close()
    assert ends == {"r": [AttemptEnd.FINISHED], "s": [AttemptEnd.SAVED, None]}
    listed = ("sacct", "-n", "-X", "-P", "--starttime=now-1hours", "-oState")
    stage.wait("what was queued", lambda: "COMPLETED" in stage.sandbox.run(*listed).stdout)


def use_up_numbers(stage: Stage, count: int) -> None:
    """Let the database know jobs 1 to `count`, and the controller begin at 1 again."""
    for _ in range(count):
        ask(stage, "sbatch", "--output=/dev/null", "--wrap=exit 0")
    listed = ("sacct", "-n", "-X", "-P", "--starttime=now-1hours", "-oState")
    stage.wait("their ends", lambda: stage.sandbox.run(*listed).stdout.split() == ["COMPLETED"] * count)
    stage.sandbox.stop_controller()
    stage.sandbox.start_controller(without_state=True)
    stage.wait("idle nodes", lambda: all(node.is_idle for node in stage.slurm.fetch_nodes().nodes))


def is_listed(client: CliClient, since: datetime, state: JobState) -> bool:
    return any(job.state is state and job.name == "own" for job in client.fetch_ended_jobs(since=since).jobs)


def is_running(stage: Stage, name: str) -> bool:
    return any(a.state is AttemptState.RUNNING for a in stage.attempts(name))


def is_over(stage: Stage, name: str) -> bool:
    return stage.attempt(1, name).is_over


def ask(stage: Stage, *argv: str) -> None:
    done = stage.sandbox.run(*argv)
    assert done.returncode == 0, done.stderr


def is_silence_said(stage: Stage) -> bool:
    said = (json.loads(line) for line in stage.daemon_log.read_text().splitlines() if line.startswith("{"))
    return any(s.get("source") == "sacct" and s["reason"].startswith("no answer") for s in said)
