"""The processes of a sandbox's node that are a training's ranks, however they were started."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

from bench.stage import BenchFailed, Stage


def signal_rank(stage: Stage, node: str, local_rank: int, number: signal.Signals) -> int:
    """Send a signal to one rank; returns its pid. Raises BenchFailed when the node has no such rank."""
    pid = find_rank(stage.sandbox.node_pids(node), local_rank)
    if pid is None:
        raise BenchFailed(f"{node} has no process of local rank {local_rank}")
    os.kill(pid, number)
    return pid


def find_rank(pids: tuple[int, ...], local_rank: int) -> int | None:
    """The process of a rank; those that it started itself look like it and don't count."""
    found = {pid for pid in pids if _is_rank(pid, local_rank)}
    return next((pid for pid in sorted(found) if _parent(pid) not in found), None)


def _is_rank(pid: int, local_rank: int) -> bool:
    # A rank that was forked from a prepared interpreter shows that one's environment, but has its own output.
    root = Path("/proc") / str(pid)
    with suppress(OSError):
        output = (root / "fd" / "1").readlink()
        if output.name == "stdout.log" and output.parent.name == str(local_rank):
            return True
        if b"trainer.example.train" not in (root / "cmdline").read_bytes().split(b"\0"):
            return False
        return f"LOCAL_RANK={local_rank}".encode() in (root / "environ").read_bytes().split(b"\0")
    return False


def _parent(pid: int) -> int:
    with suppress(OSError):
        return int((Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
    return 0
