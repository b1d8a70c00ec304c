"""Real ranks on gloo of which a node may use little of the processor. Pulses of SIGSTOP: tests/e2e/test_drill.py."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from trainer.contract import AttemptSpec
from trainer.launching.stragglers import StragglerWatch

NODES = {0: "n1", 1: "n1", 2: "n2", 3: "n3", 4: "n3"}
CPU_GROUPS = Path("/sys/fs/cgroup/cpu")
DEADLINE_S = 60


class Ranks:
    """A running training, watched as the launcher would."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.watch = StragglerWatch(
            AttemptSpec(run="r", attempt=1, command=("t",), nodes=3, straggler_ratio=2.0, straggler_window=10)
        )
        self.watch.begin(time.monotonic(), NODES)
        self.step = 0

    def look(self) -> set[str]:
        """The nodes that are named now."""
        now = time.monotonic()
        for rank, node in NODES.items():
            path = self.folder / f"rank{rank}.json"
            if path.exists():
                told = json.loads(path.read_text())
                self.step = max(self.step, int(told.get("timed_step", 0)))
                self.watch.feed(now, node, [told])
        return {straggler.node for straggler in self.watch.judge(now)}

    def pids(self, node: str) -> list[int]:
        return [
            json.loads((self.folder / f"rank{rank}.json").read_text())["pid"]
            for rank, where in NODES.items()
            if where == node
        ]

    def seen_until(self, is_over: Callable[[set[str]], bool], between: Callable[[], None]) -> set[str]:
        """Every node that was named until then."""
        seen: set[str] = set()
        until = time.monotonic() + DEADLINE_S
        while time.monotonic() < until:
            named = self.look()
            seen |= named
            if is_over(named):
                return seen
            between()
        raise AssertionError(f"not within {DEADLINE_S} s; named: {seen}; step {self.step}")


@contextmanager
def training(folder: Path) -> Iterator[Ranks]:
    with (folder / "log").open("wb") as log:
        running = subprocess.Popen(
            [sys.executable, "-m", "tests.trainer.slow_ranks", str(folder), str(len(NODES))],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    try:
        yield Ranks(folder)
    finally:
        running.communicate(timeout=30)


def pause() -> None:
    time.sleep(0.05)


def pulse(pids: list[int], *, stopped_s: float, running_s: float) -> None:
    for number, rest_s in ((signal.SIGSTOP, stopped_s), (signal.SIGCONT, running_s)):
        for pid in pids:
            os.kill(pid, number)
        time.sleep(rest_s)


@contextmanager
def processor_limit(pids: list[int], percent: int) -> Iterator[Callable[[], None]]:
    """Let these processes have so little; yields what to do meanwhile."""
    if not os.access(CPU_GROUPS, os.W_OK):  # as cpulimit does it
        yield lambda: pulse(pids, stopped_s=0.1, running_s=percent / 1000)
        return
    group = CPU_GROUPS / f"slow-ranks-{os.getpid()}"
    group.mkdir()
    try:
        (group / "cpu.cfs_period_us").write_text("100000")
        (group / "cpu.cfs_quota_us").write_text(str(percent * 1000))
        for pid in pids:
            (group / "cgroup.procs").write_text(str(pid))
        yield pause
    finally:
        for pid in pids:
            (CPU_GROUPS / "cgroup.procs").write_text(str(pid))
        group.rmdir()


@pytest.mark.torch
def test_a_limit_of_its_processor_time_names_the_node_and_no_other_and_healthy_ranks_are_never_named(
    tmp_path: Path,
) -> None:
    """Both sources of waits are needed: unseen ones of either model would make all ranks look slow."""
    with training(tmp_path) as ranks:
        assert ranks.seen_until(lambda _: ranks.step > 25, pause) == set()
        with processor_limit(ranks.pids("n2"), percent=4) as meanwhile:
            assert ranks.seen_until(lambda named: "n2" in named, meanwhile) == {"n2"}
