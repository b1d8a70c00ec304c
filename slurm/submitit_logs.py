"""A process's output in two places: torchrun's log of the attempt, which is evidence, and submitit's file, appended.

Two `tee` between the process and its log: what a process says that dies in the next moment, in whatever language, is
in both. submitit's file holds all attempts in their order, as that of a requeued job does.
"""

from __future__ import annotations

import array
import fcntl
import os
import subprocess
import sys
import termios
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_START_LIMIT_S = 30.0  # a shell that puts two programs in the background
_DRAIN_LIMIT_S = 2.0
_DRAIN_POLL_S = 0.005
# Ignored: the group's signals end the process; its tee ends when there is nothing more to read.
_START = """trap '' HUP INT TERM USR1 USR2
tee -a -- "$1" <&{read} >&{log} 2>/dev/null {read}<&- {log}>&- &
echo $!"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tee:
    pid: int
    pipe: int  # a descriptor of ours on its pipe


class JobLogs:
    """Standard output and error of this process; `stderr` None: both go to one file, and stay apart as evidence."""

    def __init__(self, stdout: Path, stderr: Path | None) -> None:
        self._files = {1: stdout, 2: stderr or stdout}
        self._tees: list[_Tee] = []

    def open(self) -> None:
        """From now on everything is in both places. Raises OSError when a file can't be written."""
        for file in self._files.values():
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("ab"):  # also there when nothing is ever said
                pass
        for descriptor, file in self._files.items():
            self._tees.append(_start_tee(descriptor, file))

    def settle(self) -> None:
        """Wait until what was said so far is written; a result is not there before the log of it."""
        with suppress(AttributeError, OSError, ValueError):  # a function may have closed or replaced them
            sys.stdout.flush()
            sys.stderr.flush()
        until = time.monotonic() + _DRAIN_LIMIT_S
        while not all(_is_drained(tee) for tee in self._tees) and time.monotonic() < until:
            time.sleep(_DRAIN_POLL_S)


def _start_tee(descriptor: int, file: Path) -> _Tee:
    """Put a tee in front of a descriptor. It is nobody's child, for a function that waits for all of its own."""
    read_end, write_end = os.pipe()
    log = os.dup(descriptor)
    try:
        started = subprocess.run(
            ["/bin/bash", "-c", _START.format(read=read_end, log=log), "bash", str(file)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            pass_fds=(read_end, log),
            start_new_session=True,
            check=True,
            timeout=_START_LIMIT_S,
        )
        os.dup2(write_end, descriptor)
        return _Tee(pid=int(started.stdout), pipe=write_end)
    except BaseException:
        os.close(write_end)
        raise
    finally:
        os.close(read_end)
        os.close(log)


def _is_drained(tee: _Tee) -> bool:
    """True when its pipe is empty and it sleeps: it waits for more, and has written what it read."""
    waiting = array.array("i", [0])
    fcntl.ioctl(tee.pipe, termios.FIONREAD, waiting)
    if waiting[0]:
        return False
    try:
        state = Path(f"/proc/{tee.pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return True  # it is gone: nothing more comes of waiting
    return state in {"S", "Z"}
