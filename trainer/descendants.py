"""What trainer.node started and what came of it: nothing of it may survive the node's end. Standard library only."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Collection, Iterable, Mapping
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


def choose_descendants(parents: Mapping[int, int], root: int, kept: Collection[int] = ()) -> list[int]:
    """Every process below `root`, nearest first, but for those in `kept` and what is below them."""
    children: dict[int, list[int]] = {}
    for pid, parent in parents.items():
        children.setdefault(parent, []).append(pid)
    found, front = [], [root]
    while front:
        front = [child for pid in front for child in children.get(pid, ()) if child not in kept]
        found += front
    return found


def kill_descendants(limit_s: float = KILL_LIMIT_S, kept: Collection[int] = ()) -> list[int]:
    """SIGKILL everything below this process until nothing is left; the pids that would not go.

    As subreaper we inherit the orphans, so killing a parent hides none of its children from us. `kept`: children
    that go on, with all that is below them.
    """
    deadline = time.monotonic() + limit_s
    while True:
        left = choose_descendants(read_parents(), os.getpid(), kept)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in left:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.01)


def signal_ranks(number: int, ranks: Iterable[int], *, told: set[int]) -> bool:
    """Send a signal to each rank that takes it, or to what below it does; True when every one of them has had it.

    One that would die of the signal is not told: it may still be importing, and the next call finds it ready; or it
    is a shell around the training, which then is told itself. `told`: who has had it; grows.
    """
    parents = read_parents()
    is_done = True
    for rank in ranks:
        takers = _find_takers(number, rank, parents)
        is_done = is_done and bool(takers)
        for pid in takers:
            if pid not in told:
                told.add(pid)
                with contextlib.suppress(OSError):
                    os.kill(pid, number)
    return is_done


def find_workers(runner_pid: int) -> dict[int, int]:
    """Torchrun's workers: local rank to process."""
    found = {}
    for pid, parent in read_parents().items():
        if parent == runner_pid:
            with contextlib.suppress(OSError, ValueError):
                entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                named = next((entry for entry in entries if entry.startswith(b"LOCAL_RANK=")), b"")
                found[int(named.removeprefix(b"LOCAL_RANK="))] = pid
    return found


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
