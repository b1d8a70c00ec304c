"""Ends a writer that holds memory protected and gets on no more: the training would wait in a page fault for ever.

A process of its own, because neither the writer (stopped, say) nor the rank (the thread that waits may hold Python's
lock) can be relied on. It counts beats instead of reading a clock: when the whole job is suspended, so is the count.
"""

from __future__ import annotations

import os
import select
import signal
import struct
import time
from contextlib import suppress

_ARM = struct.Struct("!d")
_BEAT_S = 0.05
_BEATS_IN_A_LIMIT = 8  # that are passed on: each wakes the guard


class Guard:
    """The writer's end of its guard. Made before the writer has any descriptor that must end with it."""

    def __init__(self) -> None:
        self._limit_s = 0.0
        self._passed_on = 0.0
        reader, self._pipe = os.pipe2(os.O_CLOEXEC)
        writer = os.pidfd_open(os.getpid())
        if os.fork() == 0:
            _keep_watch(reader, writer)
        os.close(reader)
        os.close(writer)

    def arm(self, limit_s: float) -> None:
        """From now on the writer has `limit_s` until it beats or disarms. Raises OSError when the guard is gone."""
        self._limit_s = limit_s
        self._passed_on = time.monotonic()
        os.write(self._pipe, _ARM.pack(limit_s))

    def beat(self) -> None:
        """The writer gets on: it has as long again, if it is armed."""
        if self._limit_s > 0 and time.monotonic() - self._passed_on > self._limit_s / _BEATS_IN_A_LIMIT:
            with suppress(OSError):
                self.arm(self._limit_s)

    def disarm(self) -> None:
        """All memory is released."""
        self._limit_s = 0.0
        with suppress(OSError):
            os.write(self._pipe, _ARM.pack(0.0))


def _keep_watch(pipe: int, writer: int) -> None:
    try:
        os.setsid()
        low, high = sorted((pipe, writer))
        for begin, end in ((3, low), (low + 1, high), (high + 1, os.sysconf("SC_OPEN_MAX"))):
            os.closerange(begin, min(end, 65536))
        _watch(pipe, writer)
    finally:
        os._exit(0)


def _watch(pipe: int, writer: int) -> None:
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    left_s = 0.0
    while True:
        if poll.poll(_BEAT_S * 1000 if left_s > 0 else None):
            data = os.read(pipe, _ARM.size)
            if len(data) < _ARM.size:
                return  # the writer is gone
            (left_s,) = _ARM.unpack(data)
        elif (left_s := left_s - _BEAT_S) <= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(writer, signal.SIGKILL)
            return
