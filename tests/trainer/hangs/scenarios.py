"""Trainings to record: what each rank does, without torch. A step is the same for all: work, meet the others, done.

`python -m tests.trainer.hangs.scenarios NAME` is one rank of one of them; the recorder starts it.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from trainer.progress import LimitPolicy, ProgressWriter

ENV_RING = "HANGS_RING"  # port where the ranks meet
SAID_HUNG = b"!"


class Rank:
    """One rank of a scenario."""

    def __init__(self) -> None:
        self.rank = int(os.environ["RANK"])
        self.step_number = 0
        self._ring = socket.create_connection(("127.0.0.1", int(os.environ[ENV_RING])))
        self.random = random.Random(self.rank)
        self.progress = ProgressWriter(None, 1, policy=LimitPolicy(), final_step=10**6)
        self.is_last = self.rank == 3

    def meet(self) -> None:
        """A collective: nobody leaves before all have come."""
        self._ring.sendall(b".")
        if not self._ring.recv(1):
            sys.exit(1)

    def step(self, seconds: float = 0.2, *, before: Callable[[], None] = lambda: None) -> None:
        before()
        time.sleep(seconds)
        self.meet()
        self.step_number += 1
        self.progress.step_done(self.step_number)

    def steps(self, count: int, seconds: float = 0.2) -> None:
        for _ in range(count):
            self.step(seconds)

    def save(self, seconds: float) -> None:
        with self.progress.phase("save"):
            time.sleep(seconds)
            self.meet()

    def hang(self) -> None:
        """Say when, and never come back."""
        self._ring.sendall(SAID_HUNG)
        time.sleep(3600)

    def say_hung(self) -> None:
        self._ring.sendall(SAID_HUNG)


def compute(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        sum(range(10_000))


def read(seconds: float) -> None:
    until = time.monotonic() + seconds
    with open("/dev/zero", "rb", buffering=0) as stream:  # noqa: PTH123
        while time.monotonic() < until:
            stream.read(1_000_000)
            time.sleep(0.05)


# ---------------------------------------------------------------- healthy


def slow_saves(r: Rank) -> None:
    for _ in range(3):
        r.steps(12)
        r.save(9.0 if r.rank % 2 else 5.0)
    r.steps(5)


def one_saves(r: Rank) -> None:
    r.steps(15)
    for _ in range(2):
        if r.rank == 0:
            with r.progress.phase("save"):
                time.sleep(11.0)
        r.steps(12)


def one_evaluates(r: Rank) -> None:
    r.steps(10)
    for _ in range(3):
        if r.rank == 0:
            with r.progress.phase("eval"):
                time.sleep(9.5)
        r.steps(8)


def all_evaluate_and_save(r: Rank) -> None:
    for number in range(3):
        r.steps(10)
        r.save(0.3)
        with r.progress.phase("eval"):
            time.sleep(8.0 + r.random.random() * 2)
        if r.rank == 0 and number == 2:  # and a longer one on rank 0 alone
            with r.progress.phase("eval"):
                time.sleep(9.0)
    r.steps(5)


def recompile(r: Rank) -> None:
    r.steps(20)
    r.step(before=lambda: compute(9.0))  # a new shape: nobody says so
    r.steps(15)


def announced_compile(r: Rank) -> None:
    with r.progress.phase("compile"):
        time.sleep(12.0)
    r.steps(15)
    with r.progress.phase("compile"):
        time.sleep(8.0)
    r.steps(15)


def slow_start(r: Rank) -> None:
    time.sleep(12.0 if r.is_last else 1.0)
    r.steps(20)


def restore(r: Rank) -> None:
    with r.progress.phase("restore"):
        time.sleep(14.0 if r.rank == 2 else 6.0)
    r.step_number = 1000
    r.progress.resumed(1000, 12000)
    r.step(4.0)
    r.steps(25)


def data_stall(r: Rank) -> None:
    r.steps(20)
    r.step(5.5 if r.is_last else 0.2)
    r.steps(20)
    r.step(5.5 if r.rank == 1 else 0.2)
    r.steps(10)


def data_stall_on_disk(r: Rank) -> None:
    r.steps(20)
    r.step(before=(lambda: read(12.0)) if r.is_last else (lambda: None))
    r.steps(15)


def growing_stalls(r: Rank) -> None:
    for stall in (3.0, 5.0, 8.5, 13.0):
        r.steps(25)
        r.step(stall if r.is_last else 0.2)
    r.steps(5)


def jittery_steps(r: Rank) -> None:
    together = random.Random(7)
    for _ in range(40):
        r.step(min(4.0, together.lognormvariate(-1.2, 1.2)) * (0.8 + 0.4 * r.random.random()))


def long_steps(r: Rank) -> None:
    for _ in range(9):
        r.step(3.5 + r.random.random())


def growing_steps(r: Rank) -> None:
    for number in range(22):
        r.step(0.1 * 1.18**number)


def slow_end(r: Rank) -> None:
    r.steps(15)
    r.progress.enter("end")
    time.sleep(16.0 if r.rank == 0 else 0.5)
    r.meet()


def steady(r: Rank) -> None:
    r.steps(110)


def save_while_stopped(r: Rank) -> None:
    r.steps(10)
    r.save(8.0)
    r.steps(60)


def stuck_interpreter(r: Rank) -> None:
    r.steps(20)
    if r.rank == 2:
        ctypes.PyDLL(None).usleep(5_000_000)  # native code that keeps the interpreter's lock: nothing is told
    r.steps(20)


def own_pace(r: Rank) -> None:
    """Ranks meet every tenth step only."""
    for number in range(1, 101):
        time.sleep(0.1 + 0.25 * r.random.random())
        r.step_number = number
        if number % 10 == 0:
            r.meet()
        r.progress.step_done(number)


# ---------------------------------------------------------------- hung


def sleeps(r: Rank) -> None:
    r.steps(20)
    if r.is_last:
        r.hang()
    r.steps(1000)


def is_stopped(r: Rank) -> None:
    r.steps(20)
    if r.rank == 1:
        r.say_hung()
        os.kill(os.getpid(), signal.SIGSTOP)
    r.steps(1000)


def keeps_interpreter(r: Rank) -> None:
    r.steps(20)
    if r.is_last:
        r.say_hung()
        ctypes.PyDLL(None).sleep(3600)
    r.steps(1000)


def spins(r: Rank) -> None:
    r.steps(20)
    if r.is_last:
        r.say_hung()
        compute(3600)
    r.steps(1000)


def misses_save(r: Rank) -> None:
    for _ in range(3):
        r.steps(8)
        r.save(0.5)
    r.steps(8)
    if r.is_last:
        r.hang()
    r.save(0.5)
    r.steps(1000)


def hangs_after_evaluation(r: Rank) -> None:
    r.steps(10)
    with r.progress.phase("eval"):
        time.sleep(6.0)
    r.steps(6)
    if r.rank == 0:
        r.hang()
    r.steps(1000)


def all_hang(r: Rank) -> None:
    r.steps(20)
    r.hang()


def hangs_after_long_steps(r: Rank) -> None:
    for _ in range(4):
        r.step(2.0)
    if r.is_last:
        r.hang()
    r.steps(1000)


# ---------------------------------------------------------------- the table


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """`stopped`: (what, at_s, for_s) is stopped: "job", or "agent" of the first node. `rank`, `within_s`: of a hang."""

    act: Callable[[Rank], None]
    stopped: tuple[str, float, float] | None = None
    hung: bool = False
    rank: int | None = None
    within_s: float = 10.0


HEALTHY = {
    act.__name__: Scenario(act=act)
    for act in (
        slow_saves,
        one_saves,
        one_evaluates,
        all_evaluate_and_save,
        recompile,
        announced_compile,
        slow_start,
        restore,
        data_stall,
        data_stall_on_disk,
        growing_stalls,
        jittery_steps,
        long_steps,
        growing_steps,
        slow_end,
        stuck_interpreter,
        own_pace,
    )
} | {
    "suspended_job": Scenario(act=steady, stopped=("job", 8.0, 12.0)),
    "suspended_in_a_save": Scenario(act=save_while_stopped, stopped=("job", 6.0, 14.0)),
    "stopped_agent": Scenario(act=steady, stopped=("agent", 8.0, 9.0)),
}
HUNG = {
    "sleeps": Scenario(act=sleeps, hung=True, rank=None),
    "is_stopped": Scenario(act=is_stopped, hung=True, rank=1),
    "keeps_interpreter": Scenario(act=keeps_interpreter, hung=True, rank=3),
    "spins": Scenario(act=spins, hung=True, rank=None, within_s=25.0),
    "misses_save": Scenario(act=misses_save, hung=True, rank=3),
    "hangs_after_evaluation": Scenario(act=hangs_after_evaluation, hung=True, rank=None),
    "all_hang": Scenario(act=all_hang, hung=True, rank=None),
    "hangs_after_long_steps": Scenario(act=hangs_after_long_steps, hung=True, rank=None, within_s=13.0),
}
SCENARIOS = {**HEALTHY, **HUNG}


if __name__ == "__main__":
    SCENARIOS[sys.argv[1]].act(Rank())
