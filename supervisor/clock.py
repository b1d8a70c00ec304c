"""The service's clock: wall time at the start, carried on by the monotonic clock: no clock step ages anything."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Protocol


class Clock(Protocol):
    """What the daemon asks for the time."""

    def now(self) -> datetime:
        """An aware UTC instant that never runs backwards within one process."""
        ...


class SystemClock:
    """Wall time as it was when the process started, plus the monotonic time since."""

    def __init__(self) -> None:
        self._wall = datetime.now(UTC)
        self._monotonic = time.monotonic()

    def now(self) -> datetime:
        """An aware UTC instant; a step of the wall clock does not show in it."""
        return self._wall + timedelta(seconds=time.monotonic() - self._monotonic)

    def step_s(self) -> float:
        """How far the wall clock has moved away from this one, in seconds: for a log line, never for an age."""
        return (datetime.now(UTC) - self.now()).total_seconds()
