"""Every file that a process and its children touch, and with whose rights: by strace."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

STRACE = shutil.which("strace")
_CALLS = "%file,clone,clone3,fork,vfork,setuid,setreuid,setresuid"
_LINE = re.compile(r"^(\d+) +(.*)$")
_BECOME = re.compile(r"^set(?:res|re)?uid\((\d+)")
_CHILD = re.compile(r"(?:^|<\.\.\. )(?:clone3?|v?fork)\b.* = (\d+)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Touch:
    """One system call that named a file."""

    uid: int
    call: str


@contextmanager
def watched(pid: int, record: Path) -> Iterator[None]:
    """Writes down what this process and all that it starts from now on do with files."""
    assert STRACE is not None
    argv = [STRACE, "-f", "-qq", "-y", "-s", "4096", "-e", f"trace={_CALLS}", "-e", "signal=none", "-o", str(record)]
    process = subprocess.Popen([*argv, "-p", str(pid)], stderr=subprocess.PIPE)
    try:
        until = time.monotonic() + 20
        while not _is_traced(pid):
            assert process.poll() is None, process.stderr and process.stderr.read()
            assert time.monotonic() < until
            time.sleep(0.02)
        yield
    finally:
        process.send_signal(signal.SIGINT)  # detaches
        with suppress(subprocess.TimeoutExpired):
            process.wait(5)
        process.kill()  # it sometimes stays; each line is written at once, and the kernel lets go of what it watched
        process.wait(20)
        assert process.stderr is not None
        process.stderr.close()


def _is_traced(pid: int) -> bool:
    """All of its threads."""
    tasks = list(Path(f"/proc/{pid}/task").iterdir())
    return all(re.search(r"^TracerPid:\t[1-9]", (task / "status").read_text(), re.MULTILINE) for task in tasks)


def read_touches(record: Path, folder: Path) -> list[Touch]:
    """The calls that named something in this folder, or that were made in it; the watched process began as root."""
    lines = [found.groups() for line in record.read_text(errors="replace").splitlines() if (found := _LINE.match(line))]
    became: dict[str, list[tuple[int, int]]] = {}
    parents: dict[str, tuple[int, str]] = {}
    for number, (pid, call) in enumerate(lines):
        if found := _BECOME.match(call):
            became.setdefault(pid, []).append((number, int(found[1])))
        elif found := _CHILD.search(call):
            parents[found[1]] = (number, pid)

    def uid_at(number: int, pid: str) -> int:
        own = [uid for at, uid in became.get(pid, ()) if at <= number]
        if own:
            return own[-1]
        return uid_at(*parents[pid]) if pid in parents else 0

    return [
        Touch(uid=uid_at(number, pid), call=call) for number, (pid, call) in enumerate(lines) if f"{folder}" in call
    ]
