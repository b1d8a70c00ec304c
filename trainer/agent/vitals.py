"""What /proc says of a rank's process and those below it: whether they work, wait, or are stopped."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from trainer.beats import Message
from trainer.descendants import choose_descendants, read_parents

BUSY_CORES = 0.3  # so much of a core, over a second or more, is work
BUSY_READ_BYTES_PER_S = 1e6
BUSY_MEMORY_S = 3.0  # work that was seen so recently counts still

_GPU_DEVICES = ("/dev/nvidia", "/dev/kfd")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Vitals:
    """Of one rank. `state`: the main thread's letter in /proc, "" when it is gone."""

    state: str
    is_busy: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counters:
    at: float
    cpu_s: float
    read_bytes: int


def read_state(pid: int) -> str:
    """The letter of a process's main thread: R, S, D, T (stopped), t (traced), Z; "" when it is gone."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    return ""


def read_cpu_s(pid: int) -> float:
    """CPU time of a process and of its children that have ended; 0 when it is gone."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / _TICKS_PER_S
    return 0.0


def read_bytes_read(pid: int) -> int:
    """Bytes that a process has read, from whatever; 0 when it is gone or not ours."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        return int(Path(f"/proc/{pid}/io").read_text().split()[1])
    return 0


def uses_gpu(pid: int) -> bool:
    """True when a process has a GPU open: it may spin while it waits for one, and its CPU time says nothing."""
    with contextlib.suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208 - names only
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{pid}/fd/{fd}").startswith(_GPU_DEVICES):  # noqa: PTH115
                    return True
    return False


class VitalsWatch:
    """Compares two looks at the same process."""

    def __init__(self) -> None:
        self._seen: dict[int, _Counters] = {}
        self._busy_at: dict[int, float] = {}

    def look(self, pids: Iterable[int], now: float) -> dict[int, Vitals]:
        """The vitals of these processes, what they started included."""
        parents = read_parents()
        found = {}
        for pid in pids:
            family = [pid, *choose_descendants(parents, pid)]
            working = family[1:] if uses_gpu(pid) else family
            counters = _Counters(
                at=now, cpu_s=sum(map(read_cpu_s, working)), read_bytes=sum(map(read_bytes_read, family))
            )
            before = self._seen.get(pid)
            is_waiting_for_disk = any(read_state(member) == "D" for member in family)
            if is_waiting_for_disk or (before is not None and _is_work(before, counters)):
                self._busy_at[pid] = now
            self._seen[pid] = counters
            is_busy = now - self._busy_at.get(pid, -BUSY_MEMORY_S) < BUSY_MEMORY_S
            found[pid] = Vitals(state=read_state(pid), is_busy=is_busy)
        self._forget(now)
        return found

    def _forget(self, now: float) -> None:
        for pid in [pid for pid, seen in self._seen.items() if now - seen.at > BUSY_MEMORY_S]:
            del self._seen[pid]
            self._busy_at.pop(pid, None)

    def read_signs(self, pids: Mapping[int, int], log_dir: Path | None, now: float) -> list[Message]:
        """Signs of life of ranks that say nothing themselves: {rank: pid}."""
        vitals = self.look(pids.values(), now)
        log_bytes = _sum_log_bytes(log_dir)
        return [
            {
                "rank": rank,
                "pid": pid,
                "log_bytes": log_bytes,
                "cpu_s": round(self._seen[pid].cpu_s, 2),  # of its children, too
                "state": vitals[pid].state,
            }
            for rank, pid in sorted(pids.items())
        ]


def _is_work(before: _Counters, now: _Counters) -> bool:
    elapsed = now.at - before.at
    if elapsed <= 0:
        return False
    is_computing = (now.cpu_s - before.cpu_s) / elapsed >= BUSY_CORES
    return is_computing or (now.read_bytes - before.read_bytes) / elapsed >= BUSY_READ_BYTES_PER_S


def _sum_log_bytes(log_dir: Path | None) -> int:
    """Bytes of all logs of a node's ranks."""
    total = 0
    if log_dir is not None:
        with contextlib.suppress(OSError):
            for path in log_dir.rglob("std*.log"):
                total += path.stat().st_size
    return total
