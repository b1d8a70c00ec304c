"""The srun that starts the agents from another node, with other programs in its place."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from trainer.launching.relay import relayed

RELAY = (sys.executable, "-m", "trainer.launching.relay")


def start(*command: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([*RELAY, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def read_line(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().decode().strip()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_the_command_and_its_children_are_killed_when_the_input_ends_and_that_is_no_failure() -> None:
    with start("sh", "-c", "trap '' TERM INT HUP; sleep 100 & echo $!; wait") as relay:
        child = int(read_line(relay))
        assert is_running(child)
        assert relay.stdin is not None
        relay.stdin.close()
        assert relay.wait(20) == 0
    deadline = time.monotonic() + 20
    while is_running(child):
        assert time.monotonic() < deadline


def test_an_srun_that_fails_ends_the_relay_which_does_not_look_like_an_agent_that_failed() -> None:
    with start("sh", "-c", "exit 3") as relay:
        assert relay.wait(20) == 0


def test_what_comes_on_the_input_is_passed_over() -> None:
    with start("sh", "-c", "echo up; sleep 0.3; echo done") as relay:
        assert read_line(relay) == "up"
        assert relay.stdin is not None
        relay.stdin.write(b"x")
        relay.stdin.flush()
        assert read_line(relay) == "done"
        assert relay.wait(20) == 0


def test_the_relayed_command_runs_on_the_other_node() -> None:
    command = relayed(["srun", "--nodes=3", "agent"], "n2", ["python3", "-P"])
    assert command[0] == "srun"
    assert "--nodelist=n2" in command
    assert command[-6:] == ["-P", "-m", "trainer.launching.relay", "srun", "--nodes=3", "agent"]
