"""The launcher and its node agents, run by a script in place of srun: how a step starts and how its end is told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.trainer.attempts import RIG, ROOT, SLEEP, Attempt, attempt, environment_of, eventually
from trainer.contract import AttemptSpec, NodeReport, Outcome, parse, write_json

__all__ = ["attempt"]


def test_a_training_that_finishes_everywhere_ends_with_zero(attempt: Attempt) -> None:
    attempt.start("", nodes=3)
    record = attempt.end()
    assert (record.exit_code, record.job_id) == (0, 7)
    assert record.nodes == {"n1": 0, "n2": 0, "n3": 0}


def test_ranks_follow_the_order_of_the_nodes(attempt: Attempt) -> None:
    program = """
import os, pathlib
pathlib.Path(os.environ['RIG_DIR'], os.environ['RANK']).write_text(os.environ['SLURMD_NODENAME'])
"""
    attempt.start(program, nodes=3)
    assert attempt.end().exit_code == 0
    assert [(attempt.rig / str(rank)).read_text() for rank in range(3)] == ["n1", "n2", "n3"]


def test_a_failing_worker_gives_the_job_its_exit_code_and_its_node(attempt: Attempt) -> None:
    attempt.start("import os, time; os._exit(42) if os.environ['RANK'] == '1' else time.sleep(99)", nodes=2)
    record = attempt.end()
    assert (record.exit_code, record.node) == (42, "n2")
    assert "rank 1" in record.reason
    assert parse(NodeReport, attempt.paths.node_report(1, "n2").read_bytes()).exit_code == 42


def test_the_trainings_own_word_decides_the_exit_code(attempt: Attempt) -> None:
    write_json(attempt.paths.outcome(1), Outcome(attempt=1, exit_code=78, message="said so"))
    attempt.start("raise SystemExit(1)", nodes=1)
    record = attempt.end()
    assert (record.exit_code, record.reason) == (78, "said so")


def test_the_word_of_another_attempt_does_not_count(attempt: Attempt) -> None:
    write_json(attempt.paths.outcome(1), Outcome(attempt=2, exit_code=75))
    attempt.start("raise SystemExit(3)", nodes=1)
    assert attempt.end().exit_code == 3


def checks(condition: str, detail: str = "full") -> tuple[str, ...]:
    bad = f'[{{"check":"disk","ok":false,"detail":"{detail}"}}]'
    return ("/bin/sh", "-c", f"if {condition}; then echo '{bad}'; else echo '[]'; fi")


def test_a_node_that_fails_its_checks_is_replaced_by_a_spare(attempt: Attempt) -> None:
    attempt.start("", nodes=2, allocated=3, start_checks=checks("test $SLURMD_NODENAME = n1"))
    record = attempt.end()
    assert (record.exit_code, record.nodes) == (0, {"n1": 76, "n2": 0, "n3": 0})
    report = parse(NodeReport, attempt.paths.node_report(1, "n1").read_bytes())
    assert [check.detail for check in report.checks] == ["full"]


def test_a_spare_that_is_not_needed_does_not_train(attempt: Attempt) -> None:
    attempt.start(SLEEP, nodes=1, allocated=2)
    assert eventually(lambda: attempt.is_up(0))
    assert eventually(lambda: (report := attempt.report()) and report.nodes["n2"].state == "spare")
    assert not attempt.is_up(1)


def test_too_few_healthy_nodes_end_the_attempt_and_name_the_bad_one(attempt: Attempt) -> None:
    attempt.start(SLEEP, nodes=2, start_checks=checks("test $SLURMD_NODENAME = n2"))
    record = attempt.end()
    assert (record.exit_code, record.node) == (76, "n2")
    assert "full" in record.reason
    assert not attempt.is_up(0)


def test_checks_that_do_not_answer_do_not_stop_the_training(attempt: Attempt) -> None:
    attempt.start("", nodes=1, start_checks=("/bin/sh", "-c", "sleep 9"), start_checks_timeout_s=0.3)
    assert attempt.end().exit_code == 0
    report = parse(NodeReport, attempt.paths.node_report(1, "n1").read_bytes())
    assert [check.ok for check in report.checks] == [None]


def test_cancelling_leaves_no_process(attempt: Attempt) -> None:
    escape = "import subprocess; subprocess.Popen(['setsid', 'sh', '-c', 'trap \"\" TERM; sleep 98 & sleep 99'])\n"
    attempt.start(escape + SLEEP, nodes=2)
    assert eventually(lambda: attempt.is_up(0, 1))
    assert attempt.process is not None
    attempt.process.terminate()
    assert eventually(lambda: attempt.process and attempt.process.poll() is not None, deadline_s=5)
    assert attempt.end().exit_code == 143
    assert eventually(lambda: not attempt.processes(), deadline_s=1)


def test_a_frozen_node_is_reported_silent_and_named_when_nobody_acts(attempt: Attempt) -> None:
    attempt.start(SLEEP, nodes=2, suspect_after_s=0.6)
    assert eventually(lambda: attempt.is_up(0, 1))
    os.kill(attempt.agent_pid("n2"), signal.SIGSTOP)
    assert eventually(lambda: attempt.silent() == ("n2",), deadline_s=2)
    record = attempt.end()
    assert (record.exit_code, record.node, record.nodes["n2"]) == (77, "n2", None)


def test_a_cancelled_job_still_names_its_silent_node(attempt: Attempt) -> None:
    attempt.start(SLEEP, nodes=2, suspect_after_s=0.6)
    assert eventually(lambda: attempt.is_up(0, 1))
    os.kill(attempt.agent_pid("n2"), signal.SIGSTOP)
    assert eventually(lambda: attempt.silent() == ("n2",))
    assert attempt.process is not None
    attempt.process.terminate()
    record = attempt.end()
    assert (record.exit_code, record.node) == (143, "n2")


def test_a_node_that_answers_again_is_not_silent(attempt: Attempt) -> None:
    attempt.start(SLEEP, nodes=2, suspect_after_s=0.6)
    assert eventually(lambda: attempt.is_up(0, 1))
    os.kill(attempt.agent_pid("n2"), signal.SIGSTOP)
    assert eventually(lambda: attempt.silent() == ("n2",))
    os.kill(attempt.agent_pid("n2"), signal.SIGCONT)
    assert eventually(lambda: attempt.silent() == ())


def test_victims_of_a_silent_node_are_not_blamed(attempt: Attempt) -> None:
    program = SLEEP.replace(
        "time.sleep(99)", "time.sleep(99 if os.environ['RANK'] == '1' else 0.3); raise SystemExit(1)"
    )
    attempt.start(program, nodes=2, suspect_after_s=1.0)
    assert eventually(lambda: attempt.is_up(0, 1))
    os.kill(attempt.agent_pid("n2"), signal.SIGSTOP)
    record = attempt.end()
    assert (record.exit_code, record.node, record.nodes["n1"]) == (77, "n2", 1)


def test_a_killed_agent_is_named_with_what_srun_says_of_it(attempt: Attempt) -> None:
    attempt.start(SLEEP, nodes=2)
    assert eventually(lambda: attempt.is_up(0, 1))
    os.kill(attempt.agent_pid("n2"), signal.SIGKILL)
    record = attempt.end()
    assert (record.exit_code, record.node) == (137, "n2")


def test_a_killed_agent_ends_the_attempt_while_srun_waits_for_what_it_left_behind(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RIG_SILENT_S", "30")
    (attempt.rig / "srun.mute").touch()
    attempt.start(SLEEP, nodes=2, suspect_after_s=0.5)
    assert eventually(lambda: attempt.is_up(0, 1))
    os.kill(attempt.agent_pid("n2"), signal.SIGKILL)
    record = attempt.end()
    assert (record.exit_code, record.node) == (1, "n2")
    assert "without a word" in record.reason


def test_a_node_without_its_launcher_stops_its_ranks(attempt: Attempt) -> None:
    attempt.start(SLEEP, nodes=2)
    assert eventually(lambda: attempt.is_up(0, 1))
    assert attempt.process is not None
    attempt.process.kill()
    assert eventually(lambda: not [pid for pid in attempt.processes() if _is_worker(pid)], deadline_s=5)


def test_a_suspended_job_goes_on_where_it_stopped(attempt: Attempt) -> None:
    attempt.start(SLEEP, nodes=2, suspect_after_s=1.0)
    assert eventually(lambda: attempt.is_up(0, 1))
    pids = attempt.processes()
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    resume_at = time.monotonic() + 2.5  # longer than a node goes on without its launcher, in this rig
    assert eventually(lambda: time.monotonic() > resume_at)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    before = attempt.report()
    assert before is not None
    assert eventually(lambda: (report := attempt.report()) and report.seq > before.seq + 2)
    report = attempt.report()
    assert report is not None
    assert (report.phase, report.silent) == ("running", ())
    assert set(pids) <= set(attempt.processes())


def test_a_step_that_cannot_be_created_ends_with_sruns_words(attempt: Attempt, tmp_path: Path) -> None:
    refusing = tmp_path / "bin" / "srun"
    refusing.parent.mkdir()
    refusing.write_text("#!/bin/sh\necho 'srun: error: Unable to create step for job 7: Access denied' >&2\nexit 1\n")
    refusing.chmod(0o755)
    attempt.start("", nodes=1, path=f"{refusing.parent}:{os.environ['PATH']}")
    record = attempt.end()
    assert (record.exit_code, record.node) == (1, None)
    assert "Access denied" in record.reason


def _is_worker(pid: int) -> bool:
    return b"\0LOCAL_RANK=" in environment_of(pid)


def test_a_request_to_save_reaches_the_workers_only(attempt: Attempt) -> None:
    program = "import signal, sys; signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))\n" + SLEEP
    attempt.start(program, nodes=2)
    assert eventually(lambda: attempt.is_up(0, 1))
    assert attempt.process is not None
    attempt.process.send_signal(signal.SIGUSR1)
    record = attempt.end()
    assert (record.exit_code, record.nodes) == (75, {"n1": 75, "n2": 75})


def test_a_request_to_save_waits_until_the_training_can_take_it(attempt: Attempt) -> None:
    program = """
import os, pathlib, signal, sys, time
rig = pathlib.Path(os.environ['RIG_DIR'])
(rig / ('up.' + os.environ['RANK'])).touch()
while not (rig / 'go').exists():
    time.sleep(0.01)
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
time.sleep(99)
"""
    attempt.start(program, nodes=2)
    assert eventually(lambda: attempt.is_up(0, 1))
    assert attempt.process is not None
    attempt.process.send_signal(signal.SIGUSR1)
    assert eventually(lambda: "save.requested" in (attempt.dir / "timing.jsonl").read_text())
    (attempt.rig / "go").touch()
    assert attempt.end().nodes == {"n1": 75, "n2": 75}


def test_a_request_to_save_reaches_the_training_inside_a_shell(attempt: Attempt) -> None:
    program = """
import subprocess, sys
inner = '; '.join([
    'import os, pathlib, signal, sys, time',
    'signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))',
    'pathlib.Path(os.environ["RIG_DIR"], "up." + os.environ["RANK"]).touch()',
    'time.sleep(99)',
])
sys.exit(subprocess.call([sys.executable, '-c', inner]))
"""
    attempt.start(program, nodes=1)
    assert eventually(lambda: attempt.is_up(0))
    assert attempt.process is not None
    attempt.process.send_signal(signal.SIGUSR1)
    assert attempt.end().exit_code == 75


@pytest.mark.parametrize("is_launcher_too", [False, True])
def test_the_exit_record_says_whether_the_nodes_alone_were_terminated(attempt: Attempt, is_launcher_too: bool) -> None:
    attempt.start(SLEEP, nodes=2)
    assert eventually(lambda: attempt.is_up(0, 1))
    assert attempt.process is not None
    if is_launcher_too:
        attempt.process.send_signal(signal.SIGTERM)
    for node in ("n1", "n2"):
        os.kill(attempt.agent_pid(node), signal.SIGTERM)
    record = attempt.end()
    assert (record.exit_code, record.is_step_terminated) == (143, not is_launcher_too)


def test_the_training_is_started_again_on_all_nodes_together(attempt: Attempt) -> None:
    program = """
import os, time
if os.environ['SUPERVISOR_LAUNCH'] == '0':
    time.sleep(99) if os.environ['RANK'] == '0' else os._exit(9)
"""
    attempt.start(program, nodes=2, in_job=True)
    assert attempt.end().nodes == {"n1": 0, "n2": 0}


def test_a_training_that_fails_once_too_often_is_not_restarted(attempt: Attempt) -> None:
    attempt.start("raise SystemExit(9)", nodes=2, in_job=True, max_without_progress=2)
    assert attempt.end().exit_code == 9


def test_a_training_that_ends_on_purpose_is_not_restarted_in_its_attempt(attempt: Attempt) -> None:
    """79: the loss went wrong; the workers would go on from a checkpoint that is suspect."""
    program = """
import os, pathlib
started = pathlib.Path(os.environ['RIG_DIR'], 'first.' + os.environ['RANK'])
code = 0 if started.exists() else 79
started.touch()
raise SystemExit(code)
"""
    attempt.start(program, nodes=2, in_job=True)
    assert attempt.end().exit_code == 79


def test_an_absent_node_is_replaced_by_a_spare(attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RIG_CONNECT_S", "2")
    attempt.start("", nodes=2, allocated=3, absent="n2")
    record = attempt.end()
    assert (record.exit_code, record.nodes) == (0, {"n1": 0, "n2": None, "n3": 0})


def test_an_absent_node_without_a_spare_is_named(attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RIG_CONNECT_S", "2")
    attempt.start(SLEEP, nodes=2, absent="n2")
    record = attempt.end()
    assert (record.exit_code, record.node) == (77, "n2")


def test_a_report_that_cannot_be_written_does_not_stop_the_training(attempt: Attempt) -> None:
    attempt.paths.launch_report(1).mkdir(parents=True)
    attempt.start("", nodes=1)
    assert attempt.end().exit_code == 0


def test_without_srun_the_reason_is_told(attempt: Attempt, tmp_path: Path) -> None:
    attempt.start("", nodes=1, path=str(tmp_path))
    record = attempt.end()
    assert record.exit_code == 127
    assert "srun" in record.reason


def test_an_unreadable_specification_is_refused_with_its_reason(attempt: Attempt) -> None:
    attempt.dir.mkdir(parents=True)
    (attempt.dir / "attempt.json").write_text("{")
    command = [sys.executable, "-m", "trainer.launch", str(attempt.dir)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 127
    assert "not JSON" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_python_of_the_training_is_told_and_not_retried(attempt: Attempt) -> None:
    attempt.start("", nodes=1, in_job=True, command=("/no/such/python", "x.py"), launcher=("-m", "trainer.launch"))
    record = attempt.end()
    assert record.exit_code == 127
    assert "/no/such/python" in record.reason


@pytest.mark.torch
def test_a_forked_workers_exit_code_and_last_words_come_through_torchrun(attempt: Attempt) -> None:
    program = """
import sys
from torch import distributed
distributed.init_process_group("gloo")
distributed.barrier()
if distributed.get_rank() == 1:
    print("no more data", file=sys.stderr)
    sys.exit(42)
distributed.barrier()
"""
    environment = {"SUPERVISOR_FORK_WORKERS": "1", "OMP_NUM_THREADS": "1"}
    attempt.start(program, nodes=2, environment=environment, launcher=("-m", "trainer.launch"))
    record = attempt.end()
    assert (record.exit_code, record.node) == (42, "n2")
    assert "no more data" in parse(NodeReport, attempt.paths.node_report(1, "n2").read_bytes()).log_tail


def test_timing_lines_say_where_the_seconds_of_a_start_go(attempt: Attempt) -> None:
    attempt.start("", nodes=2)
    attempt.end()
    text = (attempt.dir / "timing.jsonl").read_text()
    for event in ("launch.started", "step.started", "node.connected", "checks.finished", "go.sent", "node.ended"):
        assert f'"event": "{event}"' in text, event


def test_one_that_was_queued_ahead_waits_and_then_does_what_its_file_says_by_then(attempt: Attempt) -> None:
    program = """
import os, pathlib
pathlib.Path(os.environ['RIG_DIR'], 'resumed').write_text(os.environ['SUPERVISOR_RESUME_STEP'])
"""
    attempt.start(program, nodes=1, is_ahead=True)
    assert attempt.process is not None
    assert not eventually(lambda: attempt.report() or (attempt.rig / "n1.pid").exists(), 0.5)
    spec = parse(AttemptSpec, (attempt.dir / "attempt.json").read_bytes())
    write_json(attempt.dir / "attempt.json", replace(spec, is_ahead=False, resume_step=40))
    assert attempt.end().exit_code == 0
    assert (attempt.rig / "resumed").read_text() == "40"


def test_one_that_is_never_told_to_begin_gives_its_nodes_back(attempt: Attempt) -> None:
    launcher = ("-c", "import sys; from trainer import launch; sys.exit(launch.main(promotion_limit_s=0.3))")
    attempt.start(SLEEP, nodes=1, is_ahead=True, launcher=launcher)
    record = attempt.end()
    assert record.exit_code == 75
    assert "not told to begin" in record.reason


def test_an_option_that_srun_does_not_know_is_told_and_holds_the_run(attempt: Attempt, tmp_path: Path) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "srun").write_text("#!/bin/sh\necho \"srun: unrecognized option '--container-image=x'\" >&2\nexit 1\n")
    (folder / "srun").chmod(0o755)
    attempt.start(SLEEP, nodes=2, path=f"{folder}:{os.environ['PATH']}")
    record = attempt.end()
    assert (record.exit_code, record.next) == (1, "hold")
    assert "srun: unrecognized option '--container-image=x'" in record.reason


def test_a_training_that_terminates_its_own_agent_has_failed_itself(attempt: Attempt, tmp_path: Path) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "scontrol").write_text(
        "#!/bin/sh\ntest $2 = show -a $3 = job && echo JobState=RUNNING PreemptTime=None\n"
    )
    (folder / "scontrol").chmod(0o755)
    program = "import os, signal, time; os.kill(os.getppid(), signal.SIGTERM); time.sleep(9)"
    attempt.start(program, nodes=1, worker_start="direct", path=f"{folder}:{RIG}:{os.environ['PATH']}")
    record = attempt.end()
    assert (record.exit_code, record.is_step_terminated) == (143, False)
