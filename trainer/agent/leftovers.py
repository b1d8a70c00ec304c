"""What an agent of this node that was killed has left behind: ranks that nobody watches would write beside ours."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from trainer.contract import ENV_ATTEMPT, ENV_NODE_SOCKET, ENV_RUN_DIR
from trainer.descendants import choose_descendants, read_parents

NODE_VARIABLE = "SLURMD_NODENAME"  # several nodes of a test cluster share one host
KILL_LIMIT_S = 5.0


def is_leftover(environ: bytes, *, run_dir: str, attempt: int, node: str) -> bool:
    """True for the environment, as /proc shows it, of a rank of this attempt on this node."""
    items = dict(item.split(b"=", 1) for item in environ.split(b"\0") if b"=" in item)
    wanted = {ENV_RUN_DIR: run_dir, ENV_ATTEMPT: str(attempt), NODE_VARIABLE: node}
    is_rank = ENV_NODE_SOCKET.encode() in items  # only an agent's children have it
    return is_rank and all(items.get(name.encode(), b"") == value.encode() for name, value in wanted.items())


def kill_leftovers(run_dir: Path, attempt: int, environment: Mapping[str, str]) -> list[int]:
    """SIGKILL what older agents of this attempt left on this node, with all below it; the pids that were there.

    To be called before this agent starts ranks of its own.
    """
    deadline = time.monotonic() + KILL_LIMIT_S
    found: set[int] = set()
    while True:
        left = _find(str(run_dir), attempt, environment.get(NODE_VARIABLE, ""))
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        found |= left
        if not left or time.monotonic() > deadline:
            return sorted(found)
        time.sleep(0.01)


def _find(run_dir: str, attempt: int, node: str) -> set[int]:
    parents = read_parents()
    roots = [pid for pid in parents if is_leftover(_read_environ(pid), run_dir=run_dir, attempt=attempt, node=node)]
    found = {pid for root in roots for pid in (root, *choose_descendants(parents, root))}
    return found - {os.getpid()}


def _read_environ(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()  # a zombie's is empty
    except OSError:
        return b""
