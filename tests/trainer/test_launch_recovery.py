"""Recovery inside the allocation: real launcher, agents and ranks here; what is lost was stopped or killed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.trainer.attempts import STARTS, Attempt, attempt, environment_of, eventually
from tests.trainer.checkpoints import write_checkpoint
from trainer.contract import Advice, DrillRequest, Outcome, write_json

__all__ = ["attempt"]

NOWHERE = ("255.255.255.255", 6818)  # nothing can be connected to there


@pytest.fixture
def slurmd() -> Iterator[tuple[str, int]]:
    """Where a kernel answers."""
    with closing(socket.create_server(("127.0.0.1", 0), backlog=64)) as listener:
        yield ("127.0.0.1", int(listener.getsockname()[1]))


def end_start(attempt: Attempt, launch: int, code: int = 0, rank: int | None = None) -> None:
    name = f"end.{launch}" if rank is None else f"end.{launch}.{rank}"
    (attempt.rig / f"{name}.new").write_text(str(code))
    (attempt.rig / f"{name}.new").rename(attempt.rig / name)


def test_a_failed_rank_is_followed_by_a_start_on_the_same_nodes(attempt: Attempt) -> None:
    attempt.start(STARTS, nodes=2, in_job=True)
    assert eventually(lambda: attempt.is_up(0, 1, launch=0))
    end_start(attempt, 0, 9, rank=1)
    assert eventually(lambda: attempt.is_up(0, 1, launch=1))
    record = attempt.interruption()
    assert (record.kind, record.nodes, record.hint, record.training) == ("process", (), "n2", ("n1", "n2"))
    assert "rank 1" in record.cause
    end_start(attempt, 1)
    ended = attempt.end()
    assert (ended.exit_code, ended.launches, ended.bad_nodes, ended.next) == (0, 2, (), "")


def test_ranks_of_the_old_start_are_gone_before_the_next_begins(attempt: Attempt) -> None:
    attempt.start("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + STARTS, nodes=2, in_job=True)
    assert eventually(lambda: attempt.is_up(0, 1, launch=0))
    old = int(attempt.said(0, 0)[3])
    end_start(attempt, 0, 9, rank=1)
    assert eventually(lambda: attempt.is_up(0, launch=1))
    assert old not in attempt.processes()


def test_a_lost_node_is_replaced_by_the_spare_in_its_place(attempt: Attempt, slurmd: tuple[str, int]) -> None:
    ports = {"n1": slurmd, "n2": slurmd, "n3": NOWHERE, "n4": slurmd}
    attempt.start(STARTS, nodes=3, allocated=4, in_job=True, suspect_after_s=1.0, ports=ports)
    assert eventually(lambda: attempt.is_up(0, 1, 2, launch=0))
    os.kill(attempt.agent_pid("n3"), signal.SIGSTOP)
    assert eventually(lambda: attempt.is_up(0, 1, 2, launch=1))
    assert [attempt.said(rank, 1)[0] for rank in range(3)] == ["n1", "n2", "n4"]
    record = attempt.interruption()
    assert (record.kind, record.nodes, record.training) == ("node_lost", ("n3",), ("n1", "n2", "n4"))
    end_start(attempt, 1)
    ended = attempt.end()
    assert (ended.exit_code, ended.bad_nodes) == (0, ())  # its own record has told of n3


def test_a_node_whose_kernel_answers_is_frozen_and_only_after_the_longer_time(
    attempt: Attempt, slurmd: tuple[str, int]
) -> None:
    ports = {"n1": slurmd, "n2": slurmd, "n3": slurmd}
    attempt.start(STARTS, nodes=2, allocated=3, in_job=True, suspect_after_s=0.8, liveness_timeout_s=2.0, ports=ports)
    assert eventually(lambda: attempt.is_up(0, 1, launch=0))
    os.kill(attempt.agent_pid("n2"), signal.SIGSTOP)
    assert eventually(lambda: attempt.is_up(0, 1, launch=1))
    record = attempt.interruption()
    assert (record.kind, record.nodes) == ("node_frozen", ("n2",))
    assert record.parts_s["detect"] >= 2.0


def test_no_rank_beside_a_frozen_agent_lives_on_beside_the_new_start(attempt: Attempt, slurmd: tuple[str, int]) -> None:
    ports = {"n1": slurmd, "n2": slurmd, "n3": slurmd}
    attempt.start(STARTS, nodes=2, allocated=3, in_job=True, suspect_after_s=0.8, liveness_timeout_s=1.0, ports=ports)
    assert eventually(lambda: attempt.is_up(0, 1, launch=0))
    frozen, old = attempt.agent_pid("n2"), int(attempt.said(1, 0)[3])
    os.kill(frozen, signal.SIGSTOP)
    assert eventually(lambda: attempt.is_up(0, launch=1))
    assert not environment_of(old)  # gone, or a zombie of the agent that is frozen
    assert attempt.agent_pid("n2") != frozen


def test_agents_that_are_killed_during_a_back_off_are_waited_for(attempt: Attempt, slurmd: tuple[str, int]) -> None:
    ports = {"n1": slurmd, "n2": slurmd}
    attempt.start(STARTS, nodes=2, in_job=True, suspect_after_s=1.0, backoff_s=1.5, ports=ports)
    assert eventually(lambda: attempt.is_up(0, 1, launch=0))
    end_start(attempt, 0, 9)
    assert eventually(lambda: attempt.is_up(0, 1, launch=1))
    end_start(attempt, 1, 9)
    assert eventually(lambda: (report := attempt.report()) and (report.phase, report.launch) == ("recovering", 1))
    for node in ("n1", "n2"):
        os.kill(attempt.agent_pid(node), signal.SIGKILL)
    assert eventually(lambda: attempt.is_up(0, 1, launch=2))


def test_a_killed_agent_has_a_successor_on_its_node(attempt: Attempt, slurmd: tuple[str, int]) -> None:
    attempt.start(STARTS, nodes=2, in_job=True, suspect_after_s=2.0, ports={"n1": slurmd, "n2": slurmd})
    assert eventually(lambda: attempt.is_up(0, 1, launch=0))
    first = attempt.agent_pid("n2")
    os.kill(first, signal.SIGKILL)
    assert eventually(lambda: attempt.is_up(0, 1, launch=1))
    assert attempt.agent_pid("n2") != first
    record = attempt.interruption()
    assert (record.kind, record.nodes, record.hint, record.training) == ("agent_killed", (), "n2", ("n1", "n2"))
    end_start(attempt, 1)
    assert attempt.end().exit_code == 0


def test_agents_that_are_killed_together_have_one_successor_each(attempt: Attempt, slurmd: tuple[str, int]) -> None:
    attempt.start(STARTS, nodes=2, in_job=True, suspect_after_s=1.0, ports={"n1": slurmd, "n2": slurmd})
    assert eventually(lambda: attempt.is_up(0, 1, launch=0))
    for node in ("n1", "n2"):
        os.kill(attempt.agent_pid(node), signal.SIGKILL)
    assert eventually(lambda: attempt.is_up(0, 1, launch=1))
    end_start(attempt, 1)
    record = attempt.end()
    assert (record.exit_code, record.launches) == (0, 2)


def test_a_node_that_is_lost_while_another_failure_is_recovered_from_is_left_out(
    attempt: Attempt, slurmd: tuple[str, int]
) -> None:
    checks = ("/bin/sh", "-c", "sleep 2; echo '[]'")
    ports = {"n1": slurmd, "n2": NOWHERE, "n3": slurmd}
    attempt.start(STARTS, nodes=2, allocated=3, in_job=True, suspect_after_s=1.0, ports=ports, start_checks=checks)
    assert eventually(lambda: attempt.is_up(0, 1, launch=0))
    end_start(attempt, 0, 9, rank=0)
    assert eventually(lambda: (report := attempt.report()) and report.phase == "recovering")
    os.kill(attempt.agent_pid("n2"), signal.SIGSTOP)
    assert eventually(lambda: attempt.is_up(0, 1, launch=1))
    record = attempt.interruption()
    assert (record.nodes, record.training) == (("n2",), ("n1", "n3"))


def test_a_file_system_that_hangs_stops_no_recovery(attempt: Attempt) -> None:
    attempt.dir.mkdir(parents=True)
    for name in ("advice.json", "outcome.json"):
        os.mkfifo(attempt.dir / name)  # whoever opens it waits for ever
    attempt.start(STARTS, nodes=1, in_job=True)
    assert eventually(lambda: attempt.is_up(0, launch=0))
    end_start(attempt, 0, 9)
    assert eventually(lambda: attempt.is_up(0, launch=1))
    end_start(attempt, 1)
    assert attempt.end().exit_code == 0


def test_fewer_nodes_train_where_there_is_no_spare(attempt: Attempt, slurmd: tuple[str, int]) -> None:
    ports = {"n1": slurmd, "n2": NOWHERE, "n3": slurmd}
    attempt.start(STARTS, nodes=3, nodes_min=1, node_multiple=2, in_job=True, suspect_after_s=1.0, ports=ports)
    assert eventually(lambda: attempt.is_up(0, 1, 2, launch=0))
    os.kill(attempt.agent_pid("n2"), signal.SIGSTOP)
    assert eventually(lambda: attempt.is_up(0, 1, launch=1))
    assert [attempt.said(rank, 1)[:2] for rank in (0, 1)] == [["n1", "2"], ["n3", "2"]]


def test_too_few_nodes_end_the_attempt_at_once_and_name_the_bad_one(attempt: Attempt, slurmd: tuple[str, int]) -> None:
    attempt.start(STARTS, nodes=2, in_job=True, suspect_after_s=1.0, ports={"n1": slurmd, "n2": NOWHERE})
    assert eventually(lambda: attempt.is_up(0, 1, launch=0))
    os.kill(attempt.agent_pid("n2"), signal.SIGSTOP)
    record = attempt.end()
    assert (record.exit_code, record.node, record.bad_nodes, record.next) == (77, "n2", ("n2",), "resubmit")
    assert "fewer than 2 nodes" in record.reason


def test_the_next_start_begins_from_the_newest_verified_checkpoint(attempt: Attempt) -> None:
    attempt.start(STARTS, nodes=1, in_job=True)
    assert eventually(lambda: attempt.is_up(0, launch=0))
    for step, is_verified in ((10, True), (20, True), (30, False)):
        write_checkpoint(attempt.paths, step, attempt=1, is_verified=is_verified)
    end_start(attempt, 0, 9)
    assert eventually(lambda: attempt.is_up(0, launch=1))
    assert attempt.said(0, 1)[2] == "20"
    assert attempt.interruption().resume_step == 20


def test_starts_without_progress_have_an_end(attempt: Attempt) -> None:
    attempt.start("raise SystemExit(9)", nodes=1, in_job=True, max_without_progress=3, backoff_s=0.2)
    record = attempt.end()
    assert (record.exit_code, record.launches, record.next) == (9, 3, "hold")
    assert attempt.interruption(1).parts_s["wait"] == pytest.approx(0.2)


def test_a_start_whose_port_was_taken_is_made_again_with_another_port(attempt: Attempt) -> None:
    program = """
import os, pathlib, sys
pathlib.Path(os.environ['RIG_DIR'], 'port.' + os.environ['SUPERVISOR_LAUNCH']).write_text(os.environ['MASTER_PORT'])
if os.environ['SUPERVISOR_LAUNCH'] == '0':
    sys.exit('OSError: [Errno 98] Address already in use')
"""
    attempt.start(program, nodes=1, in_job=True)
    record = attempt.end()
    assert (record.exit_code, record.launches) == (0, 2)
    assert (attempt.interruption().kind, attempt.interruption().nodes) == ("start_failed", ())
    assert (attempt.rig / "port.0").read_text() != (attempt.rig / "port.1").read_text()


def test_a_training_that_ends_at_once_with_zero_is_finished(attempt: Attempt) -> None:
    attempt.start("", nodes=2, in_job=True)
    record = attempt.end()
    assert (record.exit_code, record.launches, record.next) == (0, 1, "")
    assert "after its start" in record.reason


def test_a_step_that_fails_again_and_again_is_held(attempt: Attempt) -> None:
    program = """
import json, os, pathlib, time
path = pathlib.Path(os.environ['SUPERVISOR_RUN_DIR'], 'progress', 'a1.json')
path.parent.mkdir(exist_ok=True)
launch = int(os.environ['SUPERVISOR_LAUNCH'])
path.with_suffix('.new').write_text(json.dumps({'attempt': 1, 'step': 7, 'time': 1.0, 'launch': launch}))
path.with_suffix('.new').rename(path)
time.sleep(1.3)
raise SystemExit(9)
"""
    attempt.start(program, nodes=1, in_job=True, max_without_progress=2)
    record = attempt.end()
    assert (record.exit_code, record.launches, record.next) == (9, 2, "hold")
    assert "step 7" in record.reason


def test_a_training_that_has_said_how_it_ended_is_not_started_again(attempt: Attempt) -> None:
    attempt.start(STARTS, nodes=2, in_job=True)
    assert eventually(lambda: attempt.is_up(0, 1, launch=0))
    write_json(attempt.paths.outcome(1), Outcome(attempt=1, exit_code=78, message="said so"))
    end_start(attempt, 0, 1)
    record = attempt.end()
    assert (record.exit_code, record.launches) == (78, 1)


def test_ranks_that_are_done_while_others_work_are_no_end_and_no_failure(attempt: Attempt) -> None:
    attempt.start(STARTS, nodes=2, in_job=True)
    assert eventually(lambda: attempt.is_up(0, 1, launch=0))
    end_start(attempt, 0, 0, rank=1)
    assert eventually(lambda: (report := attempt.report()) and report.nodes["n2"].state == "ended")
    assert attempt.process is not None
    assert attempt.process.poll() is None
    end_start(attempt, 0, 0, rank=0)
    assert (attempt.end().exit_code, attempt.end().launches) == (0, 1)


def test_a_late_beat_a_stopped_launcher_and_a_stepped_clock_interrupt_nothing(
    attempt: Attempt, slurmd: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RIG_CLOCK_STEP_S", "3600")
    monkeypatch.setenv("RIG_PATIENCE_S", "15")
    ports = {"n1": slurmd, "n2": slurmd}
    attempt.start(STARTS, nodes=2, in_job=True, suspect_after_s=0.4, liveness_timeout_s=3.0, ports=ports)
    assert eventually(lambda: attempt.is_up(0, 1, launch=0))
    assert attempt.process is not None
    for pid, seconds in ((attempt.agent_pid("n2"), 0.9), (attempt.process.pid, 5.0)):
        os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)  # the stop itself
        os.kill(pid, signal.SIGCONT)
        assert eventually(lambda: attempt.silent() == ())
    before = attempt.report()
    assert before is not None
    assert eventually(lambda: (report := attempt.report()) and report.seq > before.seq + 1)
    assert (attempt.launch(), (attempt.dir / "interruptions").exists()) == (0, False)
    report = attempt.report()
    assert report is not None
    assert report.time > time.time() + 1800  # the clock did step


def test_a_suspended_job_goes_on_where_it_stopped(attempt: Attempt, slurmd: tuple[str, int]) -> None:
    ports = {"n1": slurmd, "n2": slurmd}
    attempt.start(STARTS, nodes=2, in_job=True, suspect_after_s=0.8, liveness_timeout_s=2.0, ports=ports)
    assert eventually(lambda: attempt.is_up(0, 1, launch=0))
    pids = attempt.processes()
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(2.5)  # the suspension: longer than anybody waits for a node or a launcher here
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    before = attempt.report()
    assert before is not None
    assert eventually(lambda: (report := attempt.report()) and report.seq > before.seq + 3)
    assert (attempt.launch(), attempt.silent()) == (0, ())
    assert set(pids) <= set(attempt.processes())


def test_a_node_that_comes_back_does_not_disturb_and_may_be_used_later(
    attempt: Attempt, slurmd: tuple[str, int]
) -> None:
    ports = {"n1": slurmd, "n2": NOWHERE, "n3": slurmd}
    attempt.start(STARTS, nodes=2, allocated=3, in_job=True, suspect_after_s=1.0, ports=ports)
    assert eventually(lambda: attempt.is_up(0, 1, launch=0))
    os.kill(attempt.agent_pid("n2"), signal.SIGSTOP)
    assert eventually(lambda: attempt.launch() == 1)
    os.kill(attempt.agent_pid("n2"), signal.SIGCONT)
    assert eventually(lambda: (report := attempt.report()) and report.nodes["n2"].state == "spare")
    assert attempt.launch() == 1
    for pid in (attempt.agent_pid("n3"), int(attempt.said(1, 1)[3])):
        os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: attempt.is_up(0, 1, launch=2))
    assert attempt.interruption(1).kind == "agent_killed"


def test_a_second_launcher_of_an_attempt_is_refused_and_touches_nothing(attempt: Attempt) -> None:
    attempt.start(STARTS, nodes=1, in_job=True)
    assert eventually(lambda: attempt.is_up(0, launch=0))
    first = attempt.process
    assert first is not None
    environment = {**os.environ, "SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1", "SLURM_JOB_NODELIST": "n1"}
    command = [sys.executable, "-m", "trainer.launch", str(attempt.dir)]
    second = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=20, check=False)
    assert second.returncode == 80
    assert f"process {first.pid} on n1" in second.stderr
    assert not attempt.paths.exit_record(1).exists()
    end_start(attempt, 0)
    assert attempt.end().exit_code == 0


def test_an_attempt_whose_launcher_is_dead_may_have_another(attempt: Attempt) -> None:
    attempt.start(STARTS, nodes=1, in_job=True)
    assert eventually(lambda: attempt.is_up(0, launch=0))
    assert attempt.process is not None
    attempt.process.kill()
    attempt.process.wait()
    assert eventually(lambda: not attempt.processes())
    attempt.start(STARTS, nodes=1, in_job=True)
    end_start(attempt, 0)
    assert attempt.end().exit_code == 0


STEPS = """
import os, pathlib, time
from trainer.progress import LimitPolicy, ProgressWriter
rank, launch = int(os.environ['RANK']), int(os.environ['SUPERVISOR_LAUNCH'])
path = pathlib.Path(os.environ['SUPERVISOR_RUN_DIR'], 'progress', 'a1.json') if rank == 0 else None
writer = ProgressWriter(path, 1, policy=LimitPolicy(min_s=0.5), min_interval_s=0.1)
first = int(os.environ['SUPERVISOR_RESUME_STEP'])
writer.resumed(first, 0)
for step in range(first + 1, first + 41):
    time.sleep(0.05)
    while launch == 0 and step == 20 + (rank == 0):  # one rank hangs, the other waits for it
        time.sleep(0.01)
    writer.step_done(step)
writer.close()
"""


def test_a_hang_is_followed_by_a_start_and_its_evidence_is_kept(attempt: Attempt) -> None:
    bounds = {"step": (0.8, 900.0)}
    attempt.start(STEPS, nodes=2, in_job=True, phase_bounds_s=bounds)
    ended = attempt.end()
    assert (ended.exit_code, ended.launches) == (0, 2)
    record = attempt.interruption()
    assert (record.kind, record.hint, record.nodes, record.last_step) == ("hang", "n2", (), 20)
    stacks = attempt.paths.evidence(1, 0) / "rank1.stacks.txt"
    assert "time.sleep(0.01)" in stacks.read_text() or "train.py" in stacks.read_text()
    assert record.resumed_at is not None
    assert {"detect", "stop", "check", "start", "first_step"} <= set(record.parts_s)


def test_a_drill_is_made_once_and_told_in_the_record(attempt: Attempt) -> None:
    attempt.start(STARTS, nodes=2, in_job=True)
    assert eventually(lambda: attempt.is_up(0, 1, launch=0))
    drill = DrillRequest(id="d1", kind="process")
    write_json(attempt.paths.advice(1), Advice(attempt=1, seq=1, checkpoint_every_s=60, drill=drill))
    assert eventually(lambda: attempt.is_up(0, 1, launch=1))
    record = attempt.interruption()
    assert (record.kind, record.hint) == ("process", "n2")
    assert any("drill d1: process on n2" in line for line in record.evidence)
    write_json(attempt.paths.advice(1), Advice(attempt=1, seq=2, checkpoint_every_s=60, drill=drill))
    lines = [json.loads(line)["event"] for line in (attempt.dir / "timing.jsonl").read_text().splitlines()]
    assert lines.count("drill.sent d1 process") == 1


def test_a_failed_check_before_a_start_takes_the_node_out(attempt: Attempt) -> None:
    script = 'if test "$SLURMD_NODENAME" = n2 -a -e "$RIG_DIR/broken"; then echo \'[{"check":"disk","ok":false}]\'; '
    checks = ("/bin/sh", "-c", script + "else echo '[]'; fi")
    attempt.start(STARTS, nodes=2, allocated=3, in_job=True, start_checks=checks)
    assert eventually(lambda: attempt.is_up(0, 1, launch=0))
    (attempt.rig / "broken").touch()
    end_start(attempt, 0, 9, rank=0)
    assert eventually(lambda: attempt.is_up(0, 1, launch=1))
    assert attempt.said(1, 1)[0] == "n3"
    assert attempt.interruption().nodes == ("n2",)


def test_the_first_start_takes_fewer_nodes_where_that_is_allowed(attempt: Attempt) -> None:
    checks = ("/bin/sh", "-c", 'test $SLURMD_NODENAME != n2 && echo \'[]\' || echo \'[{"check":"disk","ok":false}]\'')
    attempt.start(STARTS, nodes=3, nodes_min=2, in_job=True, start_checks=checks)
    assert eventually(lambda: attempt.is_up(0, 1, launch=0))
    assert [attempt.said(rank, 0)[0] for rank in (0, 1)] == ["n1", "n3"]


def test_a_start_inside_the_allocation_is_forbidden_where_the_run_says_so(attempt: Attempt) -> None:
    attempt.start(STARTS, nodes=1, in_job=False)
    assert eventually(lambda: attempt.is_up(0, launch=0))
    end_start(attempt, 0, 9)
    record = attempt.end()
    assert (record.exit_code, record.launches, record.next) == (9, 1, "")
