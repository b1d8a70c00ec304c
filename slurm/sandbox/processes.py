"""Processes by their place in the tree: who descends from whom, and ending, freezing or thawing all of them."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_STOPPED = frozenset("Tt")
_GONE = frozenset("ZX")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStat:
    """The part of /proc/PID/stat that tells one process from another that got its number later."""

    pid: int
    parent: int
    state: str
    started: int  # clock ticks since boot


def read_stat(pid: int) -> ProcessStat | None:
    """The process' line in /proc, or None when it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the name before may hold spaces and brackets
    return ProcessStat(pid=pid, parent=int(fields[1]), state=fields[0], started=int(fields[19]))


def is_alive(pid: int, started: int) -> bool:
    """True while this very process exists and is no zombie."""
    found = read_stat(pid)
    return found is not None and found.started == started and found.state not in _GONE


def read_descendants(root: int) -> tuple[ProcessStat, ...]:
    """Every live process below `root`, parents before children."""
    by_parent: dict[int, list[ProcessStat]] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208  (names only: a Path per process is slow)
        found = read_stat(int(name)) if name.isdigit() else None
        if found is not None and found.state not in _GONE:
            by_parent.setdefault(found.parent, []).append(found)
    below: list[ProcessStat] = []
    queue = [root]
    while queue:
        children = by_parent.get(queue.pop(0), [])
        below += children
        queue += [child.pid for child in children]
    return tuple(below)


def freeze_below(root: int) -> None:
    """SIGSTOP to everything below `root`, again until nothing new appeared in between."""
    for _ in range(50):
        running = [p.pid for p in read_descendants(root) if p.state not in _STOPPED]
        if not running:
            return
        send(running, signal.SIGSTOP)
        time.sleep(0.005)  # a process in a system call stops a moment later


def thaw_below(root: int) -> None:
    """SIGCONT to everything below `root`."""
    send([p.pid for p in read_descendants(root)], signal.SIGCONT)


def kill_below(root: int, *, deadline_s: float = 5.0) -> None:
    """SIGKILL to everything below `root`; stopped first, so that nobody forks away meanwhile."""
    freeze_below(root)
    doomed = read_descendants(root)
    send([p.pid for p in doomed], signal.SIGKILL)
    await_true(lambda: not any(is_alive(p.pid, p.started) for p in doomed), deadline_s=deadline_s)


def send(pids: Iterable[int], number: signal.Signals) -> None:
    """The signal to each; a process that is already gone is no error."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def await_true(condition: Callable[[], bool], *, deadline_s: float, every_s: float = 0.02) -> bool:
    """True as soon as the condition holds; False when it does not within `deadline_s`."""
    end = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(every_s)
    return True


_LIBC = ctypes.CDLL(None, use_errno=True)


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Ask the kernel to signal this process when its parent ends, however it ends."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
