"""What older agents of this node have left behind: ranks that nobody watches would write beside ours.

An agent is replaced when the launcher holds it for dead. One that lives after all would fight with its successor for
the place at the launcher, so it goes, too.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from trainer.contract import ENV_ATTEMPT, ENV_NODE_SOCKET, ENV_RUN_DIR, RunPaths
from trainer.descendants import choose_descendants, read_parents

NODE_VARIABLE = "SLURMD_NODENAME"  # several nodes of a test cluster share one host
KILL_LIMIT_S = 5.0


def is_leftover(environ: bytes, *, run_dir: str, attempt: int, node: str) -> bool:
    """True for the environment, as /proc shows it, of a rank of this attempt on this node."""
    items = dict(item.split(b"=", 1) for item in environ.split(b"\0") if b"=" in item)
    wanted = {ENV_RUN_DIR: run_dir, ENV_ATTEMPT: str(attempt), NODE_VARIABLE: node}
    is_rank = ENV_NODE_SOCKET.encode() in items  # only an agent's children have it
    return is_rank and all(items.get(name.encode(), b"") == value.encode() for name, value in wanted.items())


def is_agent(command: bytes, attempt_dir: str) -> bool:
    """True for the command line, as /proc shows it, of an agent of this attempt; srun's, which holds it, is none."""
    words = command.decode(errors="replace").rstrip("\0").split("\0")
    return words[-3:] == ["-m", "trainer.node", attempt_dir] and not any(Path(word).name == "srun" for word in words)


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
    attempt_dir = str(RunPaths(Path(run_dir)).attempt_dir(attempt))
    own = {os.getpid(), *_find_ancestors(parents)}
    roots = [
        pid
        for pid in parents.keys() - own
        if is_leftover(environ := _read(pid, "environ"), run_dir=run_dir, attempt=attempt, node=node)
        or (is_agent(_read(pid, "cmdline"), attempt_dir) and _node_of(environ) == node)
    ]
    found = {pid for root in roots for pid in (root, *choose_descendants(parents, root))}
    return found - {os.getpid()}


def _find_ancestors(parents: Mapping[int, int]) -> list[int]:
    found, pid = [], os.getpid()
    while (pid := parents.get(pid, 0)) > 0:
        found.append(pid)
    return found


def _node_of(environ: bytes) -> str:
    prefix = f"{NODE_VARIABLE}=".encode()
    items = [item.removeprefix(prefix) for item in environ.split(b"\0") if item.startswith(prefix)]
    return items[0].decode(errors="replace") if items else ""


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()  # a zombie's is empty
    except OSError:
        return b""
