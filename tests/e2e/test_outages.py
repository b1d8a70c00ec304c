"""Slurm is away, frozen, without memory, or answers with errors: nothing is decided blind, nothing runs twice.

One cluster for all but the one that loses its state; each has its own ledger, daemon and run.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm.sandbox import Sandbox
from supervisor.model import AttemptEnd
from tests.e2e.conftest import OpenStage
from tests.e2e.stage import Stage
from tests.e2e.watcher import watched

pytestmark = pytest.mark.slurm


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    with Sandbox.start(nodes=2, directory=tmp_path_factory.mktemp("outages")) as sandbox:
        yield sandbox


@pytest.fixture
def stage(cluster: Sandbox, tmp_path: Path) -> Iterator[Stage]:
    """A ledger of its own on the shared cluster, without a daemon yet; at its end nothing of it runs on."""
    one = Stage(tmp_path / "stage", cluster)
    yield one
    one.close()
    cluster.run("scancel", "--user=root", f"--user={os.environ.get('USER', 'root')}")
    one.wait("an empty queue", lambda: not any(job.is_live for job in one.jobs()))


def tool_on_path(stage: Stage, tool: str, script: str) -> Path:
    """A folder with a stand-in for one of Slurm's tools: `{real}` is the tool, `{mode}` a file that steers it."""
    real = stage.sandbox.run("sh", "-c", f"command -v {tool}").stdout.strip()
    folder = stage.directory / "bin"
    folder.mkdir(exist_ok=True)
    wrapper = folder / tool
    mode, calls = stage.directory / "mode", stage.directory / "calls"
    mode.write_text("well")
    calls.write_text("")
    wrapper.write_text(script.format(real=real, mode=mode, calls=calls))
    wrapper.chmod(0o755)
    return folder


# ---------------------------------------------------------------- the controller


def test_a_controller_that_is_frozen_for_longer_than_a_commands_time_limit_changes_nothing(stage: Stage) -> None:
    """Case CO-01: the same job is followed on when it is back."""
    stage.start_daemon()
    stage.submit("r")
    first = stage.await_step(1)
    with watched(stage):
        stage.sandbox.freeze_controller()
        stage.wait("word of it", lambda: stage.status()["daemon"]["slurm"] == "not answering")
        stage.sandbox.thaw_controller()
        stage.wait("word of it", lambda: stage.status()["daemon"]["slurm"] == "answering")
        seen = stage.attempt(1).last_step or 0
        stage.wait("new steps", lambda: (stage.attempt(1).last_step or 0) > seen)
    assert [(a.number, a.job_id, a.end) for a in stage.attempts()] == [(1, first.job_id, None)]
    assert stage.interruptions() == ()
    assert stage.drained() == {}


def test_a_controller_that_lost_its_state_starts_no_second_training_beside_the_first(open_stage: OpenStage) -> None:
    """Slurm ends what it does not know as a node registers; until then the attempt is alive, and nothing follows it.

    The new controller gives out the same job numbers again. Without accounting: what the launcher wrote tells how a job
    ended that nobody knows (`s` has saved and wants to go on), and the last observation where it wrote nothing (`r`).
    """
    stage = open_stage()
    stage.submit("r")
    stage.submit("s", "plan=1:exit75@50")
    stage.await_step(1)
    stage.await_step(1, "s")
    stage.await_verified(1)
    slurmds = [pid for node in stage.sandbox.node_names for pid in slurmd_of(stage, node)]
    with watched(stage) as watcher:
        stage.sandbox.stop_controller()
        send(slurmds, signal.SIGSTOP)  # so that the nodes do not register yet
        stage.sandbox.start_controller(without_state=True)
        try:
            stage.wait("a look at it", lambda: "not known to Slurm, but it is alive" in stage.daemon_log.read_text())
            before = (stage.attempt(1).last_step or 0) + 110  # 11 s of steps: longer than an absence must last
            stage.wait("steps of the one that Slurm forgot", lambda: (stage.attempt(1).last_step or 0) > before)
            assert stage.live_attempts() == [1]
            assert stage.jobs() == ()
            assert watcher.training() == {"1"}
        finally:
            send(slurmds, signal.SIGCONT)
        second = stage.await_step(2, limit_s=60)
        other = stage.await_step(2, "s")
    assert (stage.attempt(1).end, stage.attempt(1, "s").end) == (AttemptEnd.VANISHED, AttemptEnd.SAVED)
    assert second.resume_step > 0
    assert other.resume_step == 50
    assert {job.comment for job in stage.jobs() if job.is_live} == {second.token, other.token}
    stage.submit("t")  # its number is one that slurmd still knows: it may refuse to launch it, and Slurm cancels it
    stage.wait("a step of t", lambda: any(a.stepped_at for a in stage.attempts("t")))
    assert all(a.end in (None, AttemptEnd.NODE_FAILED) for a in stage.attempts("t"))
    assert set(stage.drained().values()) <= {"Duplicate jobid"}  # Slurm's own drain


def slurmd_of(stage: Stage, node: str) -> list[int]:
    found = []
    for pid in stage.sandbox.node_pids(node):
        line = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if os.path.basename(line[0]) == b"slurmd":  # noqa: PTH119  (bytes)
            found.append(pid)
    assert found
    return found


def send(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        os.kill(pid, number)


# ---------------------------------------------------------------- answers that are none

SQUEUE = """#!/bin/sh
echo called >> {calls}
case $(cat {mode}) in
  well) exec {real} "$@" ;;
  half) {real} "$@" | head -c 40; echo 'squeue: error: Zero Bytes were transmitted or received' >&2; exit 1 ;;
  nothing) exit 0 ;;
  standby) echo 'slurm_load_jobs error: Slurm backup controller in standby mode' >&2; exit 1 ;;
esac
"""


def test_an_answer_of_squeue_that_is_none_ends_no_attempt(stage: Stage) -> None:
    """Cases CO-01, CO-02: errors, half a list, and nothing at all with exit 0."""
    mode, calls = stage.directory / "mode", stage.directory / "calls"
    stage.config.write_text(stage.config.read_text().replace("[slurm]", '[slurm]\nclient = "cli"'))  # not by pyslurm
    stage.start_daemon(path_first=tool_on_path(stage, "squeue", SQUEUE))
    stage.submit("r")
    first = stage.await_step(1)
    with watched(stage):
        for word in ("half", "nothing", "standby"):
            calls.write_text("")
            mode.write_text(word)
            stage.wait(f"a question while squeue is {word}", lambda: "called" in calls.read_text())
            if word != "nothing":  # a silence is said; an empty list is looked at again
                stage.wait(f"word of {word}", lambda: stage.status()["daemon"]["slurm"] == "not answering")
            assert stage.live_attempts() == [1], word
            mode.write_text("well")
            calls.write_text("")
            stage.wait(f"the end of {word}", lambda: stage.status()["daemon"]["slurm"] == "answering")
            stage.wait(f"an answer after {word}", lambda: "called" in calls.read_text())
    assert [(a.job_id, a.end) for a in stage.attempts()] == [(first.job_id, None)]


SBATCH = """#!/bin/sh
echo called >> {calls}
{real} "$@" >/dev/null
exec sleep 600
"""


def test_a_submission_that_our_time_limit_killed_after_slurm_took_it_is_found_and_not_sent_again(stage: Stage) -> None:
    """Also what rate limiting does up to 24.05: the client sleeps for ever."""
    stage.start_daemon(path_first=tool_on_path(stage, "sbatch", SBATCH))
    stage.submit("r")
    with watched(stage):
        attempt = stage.await_step(1)
    assert (stage.directory / "calls").read_text() == "called\n"
    assert [job.job_id for job in stage.jobs() if job.comment == attempt.token] == [attempt.job_id]


# ---------------------------------------------------------------- a controller that stands by


@pytest.mark.usefixtures("namespaces_permitted")
def test_a_run_goes_on_while_the_backup_controller_takes_over_and_while_the_first_takes_back(tmp_path: Path) -> None:
    """Case CO-02. The tools ask a standby again and again, for longer than our time limit; what is submitted meanwhile
    is taken once.
    """
    with Sandbox.start(nodes=2, mode="isolated", standby=True, directory=tmp_path / "sandbox") as sandbox:
        stage = Stage(tmp_path / "stage", sandbox)
        try:
            stage.start_daemon()
            stage.submit("r")
            first = stage.await_step(1)
            with watched(stage):
                sandbox.stop_controller()
                stage.submit("s")
                stage.wait("word of it", lambda: "no answer: squeue" in stage.daemon_log.read_text())
                stage.await_step(1, "s")  # by the backup
                sandbox.start_controller()
                stage.submit("t", "plan=1:exit75@5")
                stage.await_step(2, "t")  # by the first one: it knows the jobs of the backup
            assert [(a.job_id, a.end) for a in stage.attempts()] == [(first.job_id, None)]
            assert [a.end for a in stage.attempts("s")] == [None]
            assert stage.interruptions() == stage.interruptions("s") == ()
            stage.assert_one_job_per_attempt()
        finally:
            stage.close()


# ---------------------------------------------------------------- a launch that Slurm gives up


def test_a_run_goes_on_elsewhere_when_a_prolog_fails_and_slurm_cancels_its_job(
    open_stage: OpenStage, tmp_path: Path
) -> None:
    """Case JS-08. Slurm drains the node, writes a line into the job's log, and may not requeue: no person did that."""
    prolog = tmp_path / "prolog"
    prolog.write_text(f"#!/bin/sh\nmkdir {tmp_path}/failed || exit 0\nsleep 2\nexit 1\n")  # one launch fails
    prolog.chmod(0o755)
    stage = open_stage(extra_conf=f"Prolog={prolog}")
    stage.submit("r")
    second = stage.await_step(2)
    assert stage.attempt(1).end is AttemptEnd.NODE_FAILED
    assert list(stage.drained().values()) == ["Prolog error"]
    assert not {*second.nodes} & {*stage.drained()}
