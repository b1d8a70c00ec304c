"""The first process of a node: it starts slurmd, adopts whatever slurmd leaves behind, and ends with the node.

On an isolated node it is process 1 of the node's namespaces; on a loopback node it adopts orphans by request, so that
in both modes "all processes of the node" are the ones below it. It gets one JSON argument and reads words from its
standard input:

    slurmd    bring the node's network up (the first time) and start slurmd unless it runs

It says `up` once when the node's namespaces are ready.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from typing import Any

from slurm.sandbox.processes import adopt_orphans, kill_below


def main() -> None:
    """Be the node until killed."""
    plan: dict[str, Any] = json.loads(sys.argv[1])
    os.chdir("/")
    if plan["isolated"]:
        _furnish(plan)
    else:
        adopt_orphans()
    wake = _wake_on_child()
    os.write(1, b"up\n")
    slurmd: int | None = None
    while True:
        ready, _, _ = select.select([0, wake], [], [])
        if wake in ready:
            os.read(wake, 4096)
            gone = _reap()
            slurmd = None if slurmd in gone else slurmd
        if 0 in ready:
            word = os.read(0, 4096).decode()
            if not word:  # the keeper is gone, and so is the node
                kill_below(os.getpid())
                return
            if "slurmd" in word and slurmd is None:
                slurmd = _start_slurmd(plan)


def _furnish(plan: dict[str, Any]) -> None:
    socket.sethostname(plan["node"])
    _run("mount", "--bind", plan["hosts"], "/etc/hosts")
    with contextlib.suppress(subprocess.CalledProcessError):  # a machine may have no resolv.conf to cover
        _run("mount", "--bind", plan["resolv"], "/etc/resolv.conf")
    _run("mount", "-t", "tmpfs", "-o", f"size={plan['scratch_bytes']},mode=1777", "scratch", plan["scratch"])
    _run("mount", "-t", "tmpfs", "-o", f"size={plan['shm_bytes']},mode=1777", "shm", "/dev/shm")  # noqa: S108
    _run("ip", "link", "set", "lo", "up")


def _start_slurmd(plan: dict[str, Any]) -> int:
    if plan["isolated"] and not _has_address(plan["address"]):
        _run("ip", "addr", "add", f"{plan['address']}/24", "dev", "eth0")
        _run("ip", "link", "set", "eth0", "up")
    log = os.open(plan["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    # Not subprocess: its own bookkeeping of children would take the exit status that the loop above waits for.
    streams = [(os.POSIX_SPAWN_DUP2, null, 0), (os.POSIX_SPAWN_DUP2, log, 1), (os.POSIX_SPAWN_DUP2, log, 2)]
    argv = plan["slurmd"]
    pid = os.posix_spawn(argv[0], argv, os.environ, file_actions=streams, setsid=True)
    os.close(log)
    os.close(null)
    return pid


def _has_address(address: str) -> bool:
    shown = subprocess.run(
        ["ip", "-o", "addr", "show", "dev", "eth0"], capture_output=True, text=True, check=True, timeout=10
    )
    return f"{address}/" in shown.stdout


def _run(*argv: str) -> None:
    subprocess.run(argv, check=True, timeout=10, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


def _wake_on_child() -> int:
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return read_end


def _reap() -> list[int]:
    gone = []
    with contextlib.suppress(ChildProcessError):
        while (pid := os.waitpid(-1, os.WNOHANG)[0]) > 0:
            gone.append(pid)
    return gone


if __name__ == "__main__":
    main()
