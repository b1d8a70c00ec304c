"""What is collected of ranks that hang, from real processes, and that it names the one that the others wait for."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.trainer.hangs.replay import make_spec
from trainer.agent import evidence
from trainer.agent.evidence import collect_evidence, describe_process, find_py_spy, is_caught
from trainer.agent.ranks import RankDesk, make_socket_folder
from trainer.contract import ENV_NODE_SOCKET
from trainer.launching.hangs import Hang, HangWatch
from trainer.launching.missing import choose_outsiders, judge_evidence, name_missing, parse_main_stack, read_stacks

DEADLINE_S = 60.0
LIMIT_S = 4.0

_RANK = """
import ctypes, sys, threading, time
from trainer.progress import ProgressWriter
progress = ProgressWriter(None, 1)
progress.step_done(7)
def wait_for_lock():
    lock = threading.Lock(); lock.acquire(); lock.acquire()
if sys.argv[1] == "native":
    time.sleep(1.0)  # the line comes first
    ctypes.PyDLL(None).sleep(3600)
elif sys.argv[1] == "lock":
    wait_for_lock()
time.sleep(3600)
"""


class Node:
    """A desk, and the ranks that were started beside it."""

    def __init__(self) -> None:
        self.desk = RankDesk(make_socket_folder() / "ranks.sock")
        self.desk.start()
        self.ranks: dict[int, subprocess.Popen[bytes]] = {}

    def start(
        self, rank: int, argv: Sequence[str], environment: Mapping[str, str] | None = None, *, is_linked: bool = True
    ) -> None:
        given = {**os.environ, **(environment or {}), "RANK": str(rank)}
        if is_linked:
            given[ENV_NODE_SOCKET] = str(self.desk.path)
        self.ranks[rank] = subprocess.Popen([sys.executable, *argv], env=given)

    def await_ranks(self, condition: Callable[[dict[int, int]], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition({state["rank"]: state["step"] for state in self.desk.states()}):
            assert time.monotonic() < deadline, self.desk.states()
            time.sleep(0.02)

    def collect(self, folder: Path, log_dir: Path | None = None) -> tuple[list[str], float]:
        began = time.monotonic()
        pids = {rank: process.pid for rank, process in self.ranks.items()}
        return collect_evidence(folder, self.desk, pids, log_dir, LIMIT_S), time.monotonic() - began

    def close(self) -> None:
        for process in self.ranks.values():
            process.kill()
            process.wait()
        self.desk.close()


@pytest.fixture
def node() -> Iterator[Node]:
    node = Node()
    yield node
    node.close()


def test_every_rank_leaves_something_whatever_became_of_it(node: Node, tmp_path: Path) -> None:
    kinds = ("lock", "stop", "native", "sleep")
    for rank, kind in enumerate(kinds):
        node.start(rank, ["-c", _RANK, kind], is_linked=kind != "sleep")
    node.await_ranks(lambda steps: steps == {0: 7, 1: 7, 2: 7})
    node.ranks[1].send_signal(signal.SIGSTOP)
    deadline = time.monotonic() + DEADLINE_S
    while True:  # until rank 2 is in native code
        names, took_s = node.collect(tmp_path)
        texts = {name: (tmp_path / name).read_text() for name in names}
        if "faulthandler" in texts["rank2.stacks.txt"]:
            break
        assert time.monotonic() < deadline, texts["rank2.stacks.txt"]

    assert took_s < LIMIT_S
    assert {f"rank{rank}.proc.txt" for rank in range(4)} <= set(names)
    assert "in wait_for_lock" in texts["rank0.stacks.txt"]
    assert "is stopped (T)" in texts["rank1.proc.txt"]
    assert parse_main_stack(texts["rank2.stacks.txt"])[0].line == 10
    assert all(node.ranks[rank].poll() is None for rank in range(4)), "looking changes nothing"
    assert not list(tmp_path.glob(".*")), "nothing half-written"
    if find_py_spy() is not None:
        assert "py-spy" in texts["rank1.stacks.txt"]
        assert parse_main_stack(texts["rank3.stacks.txt"])[0].line == 13


def test_without_py_spy_a_program_of_any_kind_is_told_by_proc(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evidence, "find_py_spy", lambda: None)
    node.ranks[6] = subprocess.Popen(["sleep", "3600"])

    names, took_s = node.collect(tmp_path)

    assert names == ["rank6.proc.txt"]
    assert "Threads: 1" in (tmp_path / names[0]).read_text()
    assert took_s < LIMIT_S


def test_the_ranks_below_this_process_are_found_by_their_environment(node: Node) -> None:
    node.start(3, ["-c", "import subprocess; subprocess.run(['sleep', '3600'])"], is_linked=False)
    deadline = time.monotonic() + DEADLINE_S
    while (found := evidence.find_rank_processes(os.getpid())) != {3: node.ranks[3].pid}:
        assert time.monotonic() < deadline, found


def test_the_last_lines_of_the_logs_are_kept(node: Node, tmp_path: Path) -> None:
    log = tmp_path / "logs" / "x" / "attempt_0" / "0" / "stderr.log"
    log.parent.mkdir(parents=True)
    log.write_text("x" * 100_000 + "the last words")
    node.ranks[4] = subprocess.Popen(["sleep", "3600"])

    node.collect(tmp_path / "evidence", tmp_path / "logs")

    kept = (tmp_path / "evidence" / "rank4.log.txt").read_text()
    assert kept.endswith("the last words")
    assert len(kept) < 20_000


def test_nccl_is_asked_through_its_pipes_and_a_pipe_without_a_reader_holds_nobody_up(
    node: Node, tmp_path: Path
) -> None:
    pipes = [node.desk.path.parent / f"rank{rank}.pipe" for rank in range(2)]
    for pipe in pipes:
        os.mkfifo(pipe)
    reader = os.open(pipes[1], os.O_RDONLY | os.O_NONBLOCK)
    try:
        _, took_s = node.collect(tmp_path)
        assert os.read(reader, 10) == b"1"
    finally:
        os.close(reader)
    assert took_s < LIMIT_S


def test_a_process_that_is_gone_is_said_to_be_gone() -> None:
    process = subprocess.Popen(["true"])
    process.wait()

    assert describe_process(process.pid) == f"process {process.pid} is gone\n"
    assert not is_caught(process.pid, signal.SIGRTMIN + 6)


def test_a_process_that_does_not_handle_the_signal_is_not_sent_it() -> None:
    with subprocess.Popen(["sleep", "3600"]) as process:
        assert not is_caught(process.pid, signal.SIGRTMIN + 6)
        process.kill()


# ---------------------------------------------------------------- who is missing


@pytest.mark.torch
def test_the_rank_that_does_not_come_to_a_collective_is_named(node: Node, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        "WORLD_SIZE": "3",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCH_FR_BUFFER_SIZE": "2000",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }
    node.start(0, ["-m", "tests.trainer.hangs.gloo_training", "3", "1"], environment)
    node.await_ranks(lambda steps: max(steps.values(), default=0) >= 1)

    hang = _watch_until_hung(node)
    names, _ = node.collect(tmp_path)
    hang = name_missing(hang, tmp_path, world=3)

    kinds = ("stacks.txt", "flight", "proc.txt")
    assert {f"rank{rank}.{kind}" for rank in range(3) for kind in kinds} <= set(names)
    assert (hang.ranks, hang.hint) == ((1,), "a")
    assert hang.named_by in ("flight", "step")  # its last step may have been told later than theirs
    assert any("Flight Recorder" in sentence for sentence in hang.evidence)
    stacks = read_stacks(tmp_path)
    assert stacks[1][0].name == "deadlock"
    assert choose_outsiders(stacks) == (1,), "the stacks alone tell, too"
    assert judge_evidence(Hang(step=4, phase="step", silent_s=9, limit_s=7), None, stacks).ranks == (1,)


def _watch_until_hung(node: Node) -> Hang:
    watch = HangWatch(make_spec(phase_bounds_s={"step": (3.0, 60.0)}))
    watch.begin(0, ["a"], time.monotonic())
    deadline = time.monotonic() + DEADLINE_S
    while True:
        now = time.monotonic()
        assert now < deadline, node.desk.states()
        watch.feed("a", node.desk.states(), now)
        hang = watch.judge(now)
        if hang is not None and len({state["step"] for state in node.desk.states()}) <= 2:
            return hang
        time.sleep(0.1)


_WAITS = """
Thread 1 (S) "MainThread"
  File "/x/trainer/session/waits.py", line 65, in wait
  File "/x/site-packages/torch/distributed/fsdp/a.py", line 3, in unshard
  File "/home/a/train.py", line 44, in step
"""
_ELSEWHERE = """
Thread 7 (most recent call first):
  File "/home/a/other.py", line 1, in work

Current thread 9 (most recent call first):
  File "/home/a/data.py", line 12, in load
"""


def test_without_dumps_the_rank_that_waits_for_nobody_is_named_and_where_each_stands() -> None:
    waiting, elsewhere = parse_main_stack(_WAITS), parse_main_stack(evidence._turn_round(_ELSEWHERE))
    hang = Hang(step=1, phase="step", silent_s=8, limit_s=7, places={0: "a", 1: "b", 2: "c"})

    named = judge_evidence(hang, None, {0: waiting, 1: elsewhere, 2: waiting})
    unnamed = judge_evidence(hang, None, {0: waiting, 1: waiting})

    assert (named.ranks, named.hint, named.named_by) == ((1,), "b", "stacks")
    assert named.evidence[1:] == (
        "rank 1: in load (a/data.py:12)",
        "rank 0, 2: in unshard (fsdp/a.py:3), called in step (a/train.py:44)",
    )
    assert unnamed.ranks == ()
