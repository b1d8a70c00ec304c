"""Ranks forked from a prepared interpreter: what it spares, when it is another one, and when there is none."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.trainer.agents import commanding
from tests.trainer.test_workers import below, eventually, is_alive, write
from tests.trainer.workers_rig import Agent, open_agent

pytestmark = pytest.mark.torch

MEET = """
import os, sys
assert "torch" in sys.modules
import torch, torch.distributed as dist
dist.init_process_group("gloo")
one = torch.ones(1)
dist.all_reduce(one)
dist.destroy_process_group()
print(int(one), os.environ["TORCHELASTIC_USE_AGENT_STORE"], torch.get_num_threads())
"""
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    agent = open_agent(tmp_path_factory.mktemp("warm"), "warm", procs=2, environment=LOOPBACK)
    yield agent
    agent.close()


def test_ranks_have_torch_at_hand_and_meet_in_every_start(pair: Agent) -> None:
    write(pair, MEET)
    for launch in ("0", "1"):
        end = pair.run("train.py", environment={**LOOPBACK, "SUPERVISOR_LAUNCH": launch})
        assert end.kind == "finished", pair.err()
        assert [pair.out(0), pair.out(1)] == ["2 True 1\n"] * 2


def test_a_forked_rank_is_found_by_its_short_name(pair: Agent) -> None:
    write(pair, "print(open('/proc/self/comm').read().strip())")
    assert pair.run("train.py", environment=LOOPBACK).kind == "finished"
    assert [pair.out(0), pair.out(1)] == ["rank0\n", "rank1\n"]


def test_ranks_of_a_node_draw_different_numbers(pair: Agent) -> None:
    write(pair, "import random, numpy, torch; print(random.random(), numpy.random.rand(), torch.rand(1).item())")
    assert pair.run("train.py", environment=LOOPBACK).kind == "finished"
    drawn = [*pair.out(0).split(), *pair.out(1).split()]
    assert len(set(drawn)) == len(drawn) == 6


def test_the_store_is_there_for_ranks_elsewhere_until_the_next_start(pair: Agent) -> None:
    write(pair, "")
    pair.run("train.py", environment=LOOPBACK)
    first = pair.kept()
    assert below(pair.process.pid) == first
    assert len(first) == 2
    pair.run("train.py", environment=LOOPBACK)
    assert len(first & pair.kept()) == 1


def test_a_prepared_interpreter_that_dies_harms_no_rank_and_is_replaced(pair: Agent) -> None:
    write(pair, "import sys, time; print('torch' in sys.modules); time.sleep(60)")
    pair.start("train.py", environment=LOOPBACK)
    pids = pair.pids()
    assert eventually(lambda: pair.out(1) == "True\n")
    for prepared in pair.kept():
        os.kill(prepared, signal.SIGKILL)
    assert eventually(lambda: not pair.kept())
    assert all(is_alive(pid) for pid in pids.values())
    pair.stop()
    write(pair, MEET)
    assert pair.run("train.py", environment=LOOPBACK).kind == "finished"
    assert len(pair.kept()) == 2


def test_the_traceback_of_a_recorded_program_is_in_its_error_file(pair: Agent) -> None:
    write(
        pair,
        """
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main(): raise ValueError("boom")
main()
""",
    )
    end = pair.run("train.py", environment=LOOPBACK)
    told = json.loads(Path(end.error_file).read_text())
    assert told["message"]["message"] == "ValueError: boom"


def test_what_torch_reads_when_it_is_imported_has_an_interpreter_of_its_own(pair: Agent) -> None:
    write(pair, "import sys; print('torch' in sys.modules); import torch; print(torch.get_num_threads())")
    for threads in ("2", "1"):
        pair.run("train.py", environment={**LOOPBACK, "OMP_NUM_THREADS": threads})
        assert pair.out() == f"True\n{threads}\n"


def test_ranks_and_what_is_prepared_end_with_their_agent(tmp_path: Path) -> None:
    agent = open_agent(tmp_path, "warm")
    write(agent, "import time; print('ready'); time.sleep(60)")
    agent.start("train.py")
    pids = {*agent.pids().values(), *agent.kept()}
    assert eventually(lambda: agent.out() == "ready\n")
    agent.process.kill()
    agent.process.communicate()
    assert eventually(lambda: not any(map(is_alive, pids)))


UP = """
import os, pathlib, sys, time
path = pathlib.Path(os.environ["SUPERVISOR_RUN_DIR"], f"up.{os.environ['SUPERVISOR_LAUNCH']}.0")
path.with_suffix(".tmp").write_text(f"{os.getpid()} {'torch' in sys.modules}")
path.with_suffix(".tmp").rename(path)
time.sleep(99)
"""


def test_an_agent_keeps_its_prepared_interpreter_from_one_start_to_the_next(tmp_path: Path) -> None:
    with commanding(tmp_path, UP, worker_start="warm", environment={"WARM_IMPORTS": "numpy"}) as node:
        agent = node.start_agent()
        prepared = []
        for launch in range(2):
            rank = node.begin(launch)
            assert node.up(launch) == [str(rank), "True"]
            prepared.append(find_prepared(agent))
            node.order("stop", launch=launch, grace_s=1.0)
            node.await_said("stopped", launch=launch)
            assert not node.is_alive(rank)
        assert len(set(prepared)) == 1


def find_prepared(agent: int) -> int:
    """The agent's child that runs trainer/warm.py and is no fork of one: those have sessions of their own."""
    (found,) = [
        pid for pid in below(agent) if b"warm.py" in Path(f"/proc/{pid}/cmdline").read_bytes() and os.getsid(pid) != pid
    ]
    return found


def test_an_interpreter_that_is_stopped_while_it_prepares_starts_nothing(tmp_path: Path) -> None:
    agent = open_agent(tmp_path, "warm")
    try:
        write(agent, "print('ran')")
        agent.start("train.py")
        assert agent.stop() == []
        assert below(agent.process.pid) == set()
        assert agent.wait().kind == "failed"
    finally:
        agent.close()


# ---------------------------------------------------------------- without one


def run_cold(agent: Agent, *command: str) -> str:
    """Output of a rank that had to be a fresh process, twice; and the reason, said once."""
    try:
        for _ in range(2):
            assert agent.run(*command).kind == "finished", agent.console()
            assert agent.out() == "False\n"
        (said,) = [line for line in agent.console().splitlines() if "fresh processes" in line]
        return said
    finally:
        agent.close()


def test_where_threads_run_after_the_imports_nothing_is_forked(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, threading, time\n"
        "if 'warm.py' in ' '.join(sys.orig_argv): threading.Thread(target=time.sleep, args=[60], daemon=True).start()\n"
    )
    environment = {"PYTHONPATH": str(tmp_path)}
    agent = open_agent(tmp_path, "warm", environment=environment)
    write(agent, "import sys; print('torch' in sys.modules)")
    agent.start("train.py", environment=environment)
    assert agent.wait().kind == "finished"
    assert agent.out() == "False\n"
    assert "2 threads run" in agent.console()
    agent.close()


def test_an_interpreter_without_torch_is_not_prepared(tmp_path: Path) -> None:
    python = tmp_path / "python-bare"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    agent = open_agent(tmp_path, "warm", command=[str(python), "train.py"])
    write(agent, "import sys; print('torch' in sys.modules)")
    assert "No module named 'torch'" in run_cold(agent, str(python), "train.py")


def test_a_program_of_its_own_is_not_forked(tmp_path: Path) -> None:
    agent = open_agent(tmp_path, "warm", command=["echo", "False"])
    assert "no Python program" in run_cold(agent, "echo", "False")


def test_a_program_in_a_container_is_not_forked(tmp_path: Path) -> None:
    agent = open_agent(tmp_path, "warm", prefix=["env"])
    write(agent, "import sys; print('torch' in sys.modules)")
    assert "container" in run_cold(agent, "train.py")
