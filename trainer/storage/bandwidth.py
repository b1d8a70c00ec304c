"""A bound on bytes per second: a bucket of tokens that fills at that rate and holds one second's worth."""

from __future__ import annotations

import time
from collections.abc import Callable


class ByteBudget:
    """`take` returns once so many bytes may go. A rate of 0 is no bound. For one thread."""

    def __init__(
        self,
        bytes_per_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._rate = bytes_per_s
        self._clock = clock
        self._sleep = sleep
        self._tokens = bytes_per_s
        self._at = clock()

    def take(self, count: int) -> None:
        """Wait until `count` bytes are due; more than a second's worth is paid back by waiting longer."""
        if self._rate <= 0:
            return
        now = self._clock()
        self._tokens = min(self._rate, self._tokens + (now - self._at) * self._rate) - count
        self._at = now
        if self._tokens < 0:
            self._sleep(-self._tokens / self._rate)

    def chunk_bytes(self, most: int) -> int:
        """How much to move at once, so that the waits between stay short: a quarter second's worth, at most `most`."""
        return most if self._rate <= 0 else max(64 * 1024, min(most, int(self._rate / 4)))
