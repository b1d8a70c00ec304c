"""The store that fresh ranks find served: from the second start on, and rank 0's own where that can't be."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from tests.trainer.agents import Commander, commanding
from tests.trainer.test_workers import below, eventually, is_alive, write
from tests.trainer.workers_rig import Agent, open_agent

pytestmark = pytest.mark.torch

TELL = 'import os; print(os.environ["TORCHELASTIC_USE_AGENT_STORE"])'
MEET = """
import os
import torch, torch.distributed as dist
dist.init_process_group("gloo")
one = torch.ones(1)
dist.all_reduce(one)
dist.destroy_process_group()
print(int(one), os.environ["TORCHELASTIC_USE_AGENT_STORE"])
"""
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}


def is_served(agent: Agent) -> bool:
    """Whether the ranks of one more start find a store that is none of theirs."""
    assert agent.run("train.py", environment=LOOPBACK).kind == "finished", agent.err()
    return agent.out() == "True\n"


def settle(agent: Agent) -> None:
    """Have it serve stores."""
    write(agent, TELL)
    agent.settle()
    assert eventually(lambda: is_served(agent))


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    with closing(open_agent(tmp_path_factory.mktemp("store"), "direct", procs=2, environment=LOOPBACK)) as agent:
        write(agent, TELL)
        assert not is_served(agent)
        assert agent.kept() == set()
        yield agent


@pytest.fixture
def agent(opened: Agent) -> Agent:
    """One that serves stores by now."""
    settle(opened)
    return opened


def test_ranks_meet_at_a_store_that_outlives_them_until_the_next_start(agent: Agent) -> None:
    write(agent, MEET)
    stores = []
    for _ in range(2):
        assert agent.run("train.py", environment=LOOPBACK).kind == "finished", agent.err()
        assert [agent.out(0), agent.out(1)] == ["2 True\n"] * 2
        stores.append(agent.kept())  # ranks of other nodes may still need it
        agent.settle()
    assert [len(kept) for kept in stores] == [2, 2]
    assert len(stores[0] & stores[1]) == 1


def test_what_serves_and_the_store_end_with_their_agent(tmp_path: Path) -> None:
    with closing(open_agent(tmp_path, "direct", environment=LOOPBACK)) as agent:
        write(agent, TELL)
        is_served(agent)
        settle(agent)
        kept = agent.kept()
    assert len(kept) == 2
    assert not any(map(is_alive, kept))


def test_a_killed_rank_takes_the_store_with_it_and_the_next_start_has_another(agent: Agent) -> None:
    write(agent, "import os; print(os.environ['TORCHELASTIC_USE_AGENT_STORE']); import time; time.sleep(60)")
    agent.start("train.py", environment=LOOPBACK)
    assert eventually(lambda: agent.out() == "True\n")
    os.kill(agent.pids()[0], signal.SIGKILL)
    assert agent.wait().exit_code == 137
    agent.stop(0.0)
    assert below(agent.process.pid) == agent.kept()
    assert len(agent.kept()) == 1
    write(agent, MEET)
    agent.run("train.py", environment=LOOPBACK)
    assert agent.out() == "2 True\n"


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_where_what_serves_is_stopped_or_gone_rank_0_serves(agent: Agent, number: signal.Signals) -> None:
    (serving,) = agent.kept() - {pid for pid in agent.kept() if os.getsid(pid) == pid}
    os.kill(serving, number)
    write(agent, MEET)
    agent.run("train.py", environment=LOOPBACK)
    assert agent.out() == "2 False\n"
    assert agent.kept() == set()
    settle(agent)


def test_a_port_that_is_taken_is_told_as_that(agent: Agent) -> None:
    write(agent, "import time; time.sleep(60)")
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        agent.start("train.py", environment=LOOPBACK, port=other.getsockname()[1])
        end = agent.wait()
    assert (end.kind, end.is_port_taken) == ("start_failed", True)


def test_a_program_that_opens_a_store_itself_meets_there_too(agent: Agent) -> None:
    write(
        agent,
        """
import os
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), 2, os.environ["RANK"] == "0", wait_for_workers=False)
store.set(os.environ["RANK"], "up")
store.wait(["0", "1"])
print(os.environ["TORCHELASTIC_USE_AGENT_STORE"])
""",
    )
    assert is_served(agent)


def test_without_torch_rank_0_serves_whatever_it_serves(tmp_path: Path) -> None:
    python = tmp_path / "python-bare"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    with closing(open_agent(tmp_path, "direct", command=[str(python), "train.py"])) as agent:
        write(agent, TELL)
        agent.settle()
        for _ in range(2):
            assert agent.run(str(python), "train.py").kind == "finished"
            assert agent.out() == "False\n"
        assert eventually(lambda: refuses(agent))


def refuses(agent: Agent) -> bool:
    agent.settle()
    return agent.kept() == set()


@pytest.mark.parametrize("prefix", [("env",), ()])
def test_nothing_is_prepared_in_a_container_or_for_another_program(tmp_path: Path, prefix: tuple[str, ...]) -> None:
    command = ("train.py",) if prefix else ("--no-python", "true")
    with closing(open_agent(tmp_path, "direct", command=command, prefix=prefix)) as agent:
        agent.settle()
        assert agent.kept() == set()


STEPPING = """
import json, os, pathlib, socket, sys, time
line = socket.socket(socket.AF_UNIX)
line.connect(os.environ["SUPERVISOR_NODE_SOCKET"])
launch = int(os.environ["SUPERVISOR_LAUNCH"])
for message in (
    {"type": "hello", "rank": 0, "local_rank": 0, "pid": os.getpid(), "launch": launch},
    {"type": "progress", "step": 7, "phase": sys.argv[1], "limit_s": 60.0, "step_s": 0.1, "own_s": 0.1},
):
    line.sendall(json.dumps(message).encode() + b"\\n")
path = pathlib.Path(os.environ["SUPERVISOR_RUN_DIR"], f"up.{launch}.0")
path.with_suffix(".tmp").write_text(f"{os.getpid()} {os.environ['TORCHELASTIC_USE_AGENT_STORE']}")
path.with_suffix(".tmp").rename(path)
time.sleep(99)
"""


def has_told(node: Commander, phase: str) -> bool:
    return any(rank.get("phase") == phase for beat in node.said("beat") for rank in beat["ranks"])


def prepared(agent: int) -> bool:
    return any(b"warm.py" in (Path("/proc") / str(pid) / "cmdline").read_bytes() for pid in below(agent))


def test_the_first_node_prepares_a_store_once_the_training_steps(tmp_path: Path) -> None:
    with commanding(tmp_path, STEPPING, command=(str(tmp_path / "train.py"), "step")) as node:
        agent = node.start_agent()
        node.begin(0)
        node.until(lambda: prepared(agent))
        node.order("stop", launch=0, grace_s=1.0)
        node.await_said("stopped", launch=0)
        launch, told = 0, "False"
        while told == "False" and launch < 100:  # torch takes its time
            launch += 1
            node.go(launch)
            told = node.up(launch)[1]
            node.order("stop", launch=launch, grace_s=1.0)
            node.await_said("stopped", launch=launch)
        assert told == "True"


def test_nothing_is_prepared_while_it_starts_nor_on_another_node(tmp_path: Path) -> None:
    for folder, phase, place in (("a", "start", {}), ("b", "step", {"rank": 1, "nodes": 2})):
        (tmp_path / folder).mkdir()
        with commanding(tmp_path / folder, STEPPING, command=(str(tmp_path / folder / "train.py"), phase)) as node:
            agent = node.start_agent()
            node.await_said("checked")
            node.go(0, **place)
            node.until(partial(has_told, node, phase))
            node.listen(0.6)  # two looks at the training
            assert not prepared(agent)
