"""What trainer.node started and what came of it: nothing of it may survive the node's end. Standard library only."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

KILL_LIMIT_S = 5.0  # a process that survives SIGKILL longer hangs in the kernel; waiting does not cure it

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def set_process_ties() -> None:
    """Adopt orphans of our descendants, and end when slurmstepd does."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)


def read_parents() -> dict[int, int]:
    """Parent of every process, zombies included."""
    parents = {}
    for entry in os.listdir("/proc"):  # noqa: PTH208 - names only, many times a second
        if entry.isdecimal():
            with contextlib.suppress(OSError, ValueError, IndexError):
                stat = Path(f"/proc/{entry}/stat").read_text(errors="replace")
                parents[int(entry)] = int(stat.rpartition(")")[2].split()[1])
    return parents


def choose_descendants(parents: Mapping[int, int], root: int) -> list[int]:
    """Every process below `root`, nearest first."""
    children: dict[int, list[int]] = {}
    for pid, parent in parents.items():
        children.setdefault(parent, []).append(pid)
    found, front = [], [root]
    while front:
        front = [child for pid in front for child in children.get(pid, ())]
        found += front
    return found


def kill_descendants(limit_s: float = KILL_LIMIT_S) -> list[int]:
    """SIGKILL everything below this process until nothing is left; the pids that would not go.

    As subreaper we inherit the orphans, so killing a parent hides none of its children from us.
    """
    deadline = time.monotonic() + limit_s
    while True:
        left = choose_descendants(read_parents(), os.getpid())
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.01)


def signal_workers(number: int, runner_pid: int, *, workers: int, told: set[int]) -> bool:
    """Send a signal to each training process that takes it; True when none of `workers` is left to be told.

    A worker is torchrun's child with a local rank. One that would die of the signal is not told: it may still
    be importing, and the next call finds it ready; or it is a shell around the training, which then is told itself.
    `told`: who has had it; grows.
    """
    parents = read_parents()
    done = 0
    for worker in [pid for pid, parent in parents.items() if parent == runner_pid and _is_worker(pid)]:
        takers = _find_takers(number, worker, parents)
        for pid in takers:
            if pid not in told:
                told.add(pid)
                with contextlib.suppress(OSError):
                    os.kill(pid, number)
        done += bool(takers)
    return done >= workers


def _is_worker(pid: int) -> bool:
    """Torchrun starts each worker in a session of its own; one that was forked has torchrun's own first environment."""
    try:
        return os.getsid(pid) == pid or b"\0LOCAL_RANK=" in b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


def _find_takers(number: int, worker: int, parents: Mapping[int, int]) -> list[int]:
    """The worker, or the nearest processes below it, that have a use for the signal."""
    front = [worker]
    while front:
        takers = [pid for pid in front if takes_signal(pid, number)]
        if takers:
            return takers
        front = [pid for pid, parent in parents.items() if parent in front]
    return []


def takes_signal(pid: int, number: int) -> bool:
    """True when a process has a handler for the signal, or waits for it with sigwait or a signalfd."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        return False
    masks = dict(line.split(":\t", 1) for line in text.splitlines() if line.startswith(("SigCgt:", "SigBlk:")))
    return any(int(mask, 16) >> (number - 1) & 1 for mask in masks.values())


def has_children(pid: int) -> bool:
    """True when a process has started another one."""
    return pid in read_parents().values()
