"""Finds the step that a training prints in its log: for trainings that write no progress file.

The pattern is a person's and may take exponential time: the search has a time limit of its own, kept by an alarm signal
(the matcher looks for signals as it works), so it runs in a process's main thread.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from supervisor.jobfiles import NotAFile, read_from

MAX_BYTES = 256 * 1024  # of the newest part of the log, in one look
MAX_LINE = 4096  # characters of one line that are searched
TIME_LIMIT_S = 0.25
MAX_DIGITS = 15

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSteps:
    """The steps in what was read; where the next look starts; what is wrong with the pattern, for a person."""

    step: int | None = None  # the newest
    first: int | None = None  # None too where the beginning of a long text was passed over
    offset: int = 0
    fault: str = ""


class _TooSlow(Exception):
    pass


def find_step(path: str | Path, pattern: str, *, since: int) -> LogSteps:
    """The newest step in a log after an offset; raises OSError when the log can't be read."""
    try:
        data, start = read_from(path, since, MAX_BYTES)
    except (FileNotFoundError, NotAFile):
        return LogSteps(offset=since)
    end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1  # a line that is still being written comes next time
    if not end and len(data) >= MAX_LINE:
        end = len(data)
    try:
        with _time_limit():
            text = data[:end].decode("utf-8", "replace")
            step = search(text, pattern)
            first = None if step is None or start > since else search(text, pattern, first=True)
            return LogSteps(step=step, first=first, offset=start + end)
    except _TooSlow:
        fault = f"the progress pattern takes too long on {path}: the log is not searched for steps in this attempt"
        return LogSteps(offset=start + end, fault=fault)
    except re.error as error:
        return LogSteps(offset=start + end, fault=f"the progress pattern can't be used: {error}")


def search(text: str, pattern: str, *, first: bool = False) -> int | None:
    """The number in the last line that the pattern finds one in; `first`: in the first one."""
    finder, way = re.compile(pattern), 1 if first else -1
    for line in re.split(r"[\r\n]+", _COLOUR.sub("", text))[::way]:
        for found in list(finder.finditer(line[:MAX_LINE]))[::way]:
            digits = found[1] if finder.groups else found[0]
            if digits and digits.isascii() and digits.isdigit() and len(digits) <= MAX_DIGITS:
                return int(digits)
    return None


@contextmanager
def _time_limit() -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, _raise_too_slow)
    signal.setitimer(signal.ITIMER_REAL, TIME_LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _raise_too_slow(_number: int, _frame: FrameType | None) -> None:
    raise _TooSlow
