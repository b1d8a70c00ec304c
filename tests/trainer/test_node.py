"""What a node makes of its orders: torchrun's arguments, the environment, probes, processes and logs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainer.agent.leftovers import is_agent, is_leftover
from trainer.agent.outage import RESTART_FLOOR_S, STOP_S, derive_patience
from trainer.agent.place import Place, parse_place
from trainer.agent.probe import ProbeRun, parse_checks
from trainer.agent.program import choose_program, fill_command
from trainer.agent.surroundings import (
    find_interface,
    hold_port,
    is_listening,
    threads_per_process,
    training_environment,
)
from trainer.agent.words import find_worker_log, is_port_taken, is_victim, read_tail
from trainer.beats import ChannelError
from trainer.contract import AttemptSpec, CheckResult, ContractError
from trainer.descendants import choose_descendants, read_parents, signal_ranks
from trainer.node import main

ROOT = Path(__file__).parents[2]


def spec(*command: str, **values: object) -> AttemptSpec:
    return AttemptSpec(run="r", attempt=3, command=command or ("train.py",), nodes=2, **values)  # type: ignore[arg-type]


@pytest.mark.torch
def test_a_training_is_not_given_names_that_its_pytorch_warns_of() -> None:
    environment = found_environment({})
    assert "TORCH_FR_BUFFER_SIZE" in environment
    assert "TORCH_NCCL_TRACE_BUFFER_SIZE" not in environment


@pytest.mark.parametrize(
    ("command", "python", "arguments"),
    [
        (("train.py", "--lr", "1"), "/ours", ("train.py", "--lr", "1")),
        (("-m", "pkg.train"), "/ours", ("-m", "pkg.train")),
        (("python", "train.py"), "/ours", ("train.py",)),
        (("python3", "-m", "pkg"), "/ours", ("-m", "pkg")),
        (("/env/bin/python", "train.py"), "/env/bin/python", ("train.py",)),
        (("/env/bin/python3.12", "-m", "pkg"), "/env/bin/python3.12", ("-m", "pkg")),
        (("python", "-u", "train.py"), "/ours", ("--no-python", "python", "-u", "train.py")),
        (("bash", "train.sh"), "/ours", ("--no-python", "bash", "train.sh")),
        (("python-like.py",), "/ours", ("python-like.py",)),
    ],
)
def test_a_command_becomes_torchruns_program(command: tuple[str, ...], python: str, arguments: tuple[str, ...]) -> None:
    program = choose_program(command, "/ours")
    assert (program.python, program.arguments) == (python, arguments)


@pytest.mark.parametrize(
    "message", [{}, {"rank": "x"}, {"rank": 0, "nodes": 1, "master_addr": "a", "master_port": None}]
)
def test_a_go_without_a_place_is_an_error(message: dict[str, object]) -> None:
    with pytest.raises(ChannelError):
        parse_place({"type": "go", **message})


def found_environment(given: dict[str, str], **values: object) -> dict[str, str]:
    return training_environment(spec(**values), Path("/run"), given, launch=2, socket=Path("/tmp/s/node.sock"))


def test_the_training_sees_the_contract_and_not_the_secret() -> None:
    found = found_environment({"SUPERVISOR_LAUNCHER_SECRET": "s", "SUPERVISOR_LAUNCHER": "h:1", "HOME": "/h"})
    assert (found["SUPERVISOR_ATTEMPT"], found["SUPERVISOR_RUN_DIR"], found["HOME"]) == ("3", "/run", "/h")
    assert "SUPERVISOR_LAUNCHER_SECRET" not in found
    assert "SUPERVISOR_LAUNCHER" not in found


def test_the_run_file_wins_over_what_is_given_and_both_over_ours() -> None:
    found = found_environment({"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "9"}, environment={"OMP_NUM_THREADS": "2"})
    assert (found["NCCL_DEBUG"], found["OMP_NUM_THREADS"]) == ("INFO", "2")


def test_evidence_of_each_start_has_its_own_folder() -> None:
    assert found_environment({})["TORCH_FR_DUMP_TEMP_FILE"].startswith("/run/attempts/3/evidence/2/")


def test_ranks_know_their_start_and_where_their_agent_listens() -> None:
    found = found_environment({})
    assert (found["SUPERVISOR_LAUNCH"], found["SUPERVISOR_NODE_SOCKET"]) == ("2", "/tmp/s/node.sock")


def filled(*template: str) -> tuple[str, ...]:
    place = Place(
        launch=1, rank=0, nodes=1, master_addr="a", master_port=1, rdzv_id="i", resume_from="/c/{run}", resume_step=9
    )
    return fill_command(spec("train.py", "5", command_template=template), Path("/run"), place)


def test_each_start_fills_the_placeholders_of_the_command_anew() -> None:
    assert filled("x.py", "--from={resume_from}@{resume_step}", "{run_dir}/{run}.{attempt}", "{other}") == (
        "x.py",
        "--from=/c/{run}@9",  # what a path holds is no placeholder
        "/run/r.3",
        "{other}",
    )


def test_a_command_without_a_template_stays_as_it_is() -> None:
    assert filled() == ("train.py", "5")


def test_processes_share_the_cpus_that_slurm_gave() -> None:
    assert threads_per_process({"SLURM_CPUS_ON_NODE": "96"}, 8) == 12
    assert threads_per_process({"SLURM_CPUS_ON_NODE": "1"}, 8) == 1
    assert threads_per_process({}, 1) == len(os.sched_getaffinity(0))


def test_checks_are_read_from_what_the_probes_print() -> None:
    found = parse_checks(b'[{"check":"disk","ok":false,"value":3,"limit":5.5}]')
    assert found == (CheckResult(check="disk", ok=False, value=3.0, limit=5.5),)


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b'[{"check":"disk"}]', b'[{"check":1,"ok":true}]', b"[" * 9999])
def test_anything_else_that_probes_print_is_an_error(data: bytes) -> None:
    with pytest.raises(ContractError):
        parse_checks(data)


def results_of(probe: ProbeRun) -> tuple[CheckResult, ...]:
    stop = time.monotonic() + 5
    while (results := probe.poll()) is None and time.monotonic() < stop:
        time.sleep(0.01)
    assert results is not None
    return results


def test_a_probe_is_polled_without_waiting_for_it() -> None:
    probe = ProbeRun(("/bin/sh", "-c", "exec sleep 5"), limit_s=0.2, environment={})
    assert probe.poll() is None
    assert results_of(probe)[0].ok is None


@pytest.mark.parametrize("argv", [("/bin/echo", "no JSON"), ("/no/such/program",), ("/bin/false",)])
def test_probes_that_cannot_tell_are_unknown_and_say_why(argv: tuple[str, ...]) -> None:
    (result,) = results_of(ProbeRun(argv, limit_s=5, environment={}))
    assert result.ok is None
    assert result.detail


def test_the_address_leads_to_its_interface() -> None:
    assert find_interface("127.0.0.1") == "lo"
    assert find_interface("203.0.113.9") == ""


def test_a_held_port_is_closed_until_somebody_listens_on_it() -> None:
    with hold_port() as held:
        assert not is_listening("127.0.0.1", held.getsockname()[1])


def test_descendants_are_found_through_every_generation() -> None:
    assert choose_descendants({2: 1, 3: 2, 4: 3, 9: 8}, 1) == [2, 3, 4]
    assert read_parents()[os.getpid()] == os.getppid()


def test_nothing_survives_also_when_it_hides_in_a_session_of_its_own() -> None:
    program = """
import subprocess, time
from trainer.descendants import kill_descendants, read_parents, set_process_ties
set_process_ties()
subprocess.run(["sh", "-c", "setsid sh -c 'trap \\"\\" TERM HUP; sleep 97 & sleep 97' &"])
while list(read_parents().values()).count(__import__("os").getpid()) == 0:
    time.sleep(0.01)
assert kill_descendants() == []
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=20)
    assert not any(b"sleep\x0097" in _command_line(pid) for pid in read_parents())


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_the_end_of_a_log_is_read_and_a_missing_one_is_empty(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"x" * 100 + b"\xffend")
    assert read_tail(log, 4) == "\ufffdend"
    assert read_tail(tmp_path / "none", 4) == ""


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("RuntimeError: gloo: Connection closed by peer [10.0.0.2]:1234. This is typically", True),
        ("ncclRemoteError: remote process exited or there was a network error", True),
        ("ValueError: boom", False),
        ("Connection reset by peer" + "\n" * 9999 + "ValueError: boom", False),
        ("", False),
    ],
)
def test_last_words_tell_a_victim(words: str, expected: bool) -> None:
    assert is_victim(words) is expected


def test_the_newest_error_log_of_a_rank_is_found(tmp_path: Path) -> None:
    for at, name in ((1, "7.1.0_a"), (2, "7.1.1_b")):
        log = tmp_path / name / "attempt_0" / "1" / "stderr.log"
        log.parent.mkdir(parents=True)
        log.touch()
        os.utime(log, (at, at))
    found = find_worker_log(tmp_path, 1)
    assert found is not None
    assert "7.1.1_b" in str(found)
    assert find_worker_log(tmp_path, 0) is None


def test_a_node_without_a_launcher_says_who_starts_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["/nowhere"]) == 127
    assert "trainer.launch" in capsys.readouterr().err


RANK = """
import os, signal, time
signal.signal(signal.SIGUSR1, lambda *_: os._exit(7))
print("ready", flush=True)
time.sleep(60)
"""


@pytest.fixture
def rank() -> Iterator[subprocess.Popen[bytes]]:
    rank = subprocess.Popen([sys.executable, "-c", RANK], stdout=subprocess.PIPE)
    assert rank.stdout is not None
    rank.stdout.readline()
    yield rank
    rank.kill()
    rank.stdout.close()
    rank.wait(10)


def test_a_rank_is_told_once(rank: subprocess.Popen[bytes]) -> None:
    told: set[int] = set()
    assert signal_ranks(signal.SIGUSR1, [rank.pid], told=told)
    assert told == {rank.pid}
    assert rank.wait(10) == 7


def test_a_process_without_a_handler_is_left_alone(rank: subprocess.Popen[bytes]) -> None:
    """SIGUSR2 would end it; the call that finds it ready tells it."""
    told: set[int] = set()
    assert not signal_ranks(signal.SIGUSR2, [rank.pid], told=told)
    assert told == set()
    assert rank.poll() is None


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"SUPERVISOR_NODE_SOCKET": "/s", "SUPERVISOR_ATTEMPT": "3", "SUPERVISOR_RUN_DIR": "/r"}, True),
        ({"SUPERVISOR_NODE_SOCKET": "/s", "SUPERVISOR_ATTEMPT": "2", "SUPERVISOR_RUN_DIR": "/r"}, False),
        ({"SUPERVISOR_NODE_SOCKET": "/s", "SUPERVISOR_ATTEMPT": "3", "SUPERVISOR_RUN_DIR": "/other"}, False),
        ({"SUPERVISOR_ATTEMPT": "3", "SUPERVISOR_RUN_DIR": "/r"}, False),  # the batch script's own processes
        ({}, False),
    ],
)
def test_a_rank_of_an_older_agent_is_known_by_its_environment(environ: dict[str, str], expected: bool) -> None:
    data = b"\0".join(f"{k}={v}".encode() for k, v in {**environ, "SLURMD_NODENAME": "n1"}.items())
    assert is_leftover(data, run_dir="/r", attempt=3, node="n1") is expected
    assert not is_leftover(data, run_dir="/r", attempt=3, node="n2")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("/usr/bin/python3", "-P", "-m", "trainer.node", "/r/attempts/3"), True),
        (("/usr/bin/python3", "-m", "trainer.node", "/r/attempts/2"), False),
        (("/usr/bin/srun", "-N2", "python3", "-m", "trainer.node", "/r/attempts/3"), False),
        (("python3", "-m", "trainer.launching.relay", "--", "srun", "-m", "trainer.node", "/r/attempts/3"), False),
        ((), False),
    ],
)
def test_an_older_agent_is_known_by_its_command(words: tuple[str, ...], expected: bool) -> None:
    assert is_agent("".join(f"{word}\0" for word in words).encode(), "/r/attempts/3") is expected


def test_a_node_that_reaches_nobody_gives_up_before_others_can_write_in_its_place() -> None:
    patience = derive_patience(spec(suspect_after_s=3.0, beat_interval_s=1.0))
    assert patience.unreachable_s + STOP_S <= 3.0 + RESTART_FLOOR_S
    assert patience.unreachable_s >= 3.0  # nor before the launcher would give up the node itself
    assert patience.silent_s == 10.0


def test_a_port_that_is_taken_is_told_by_the_last_words() -> None:
    assert is_port_taken("RuntimeError: The server socket has failed to bind. code: -98, name: EADDRINUSE")
    assert not is_port_taken("ValueError: boom")
