"""When the next checkpoint is due."""

from __future__ import annotations

import time
from collections.abc import Callable


class SaveSchedule:
    """Every so many steps, or every so many seconds, or both; 0 for both intervals: never.

    By time, the first save after a start comes after half the interval: failures gather just after a restart, and
    a run that dies before its first save makes no progress at all.
    """

    def __init__(
        self,
        *,
        every_s: float = 0.0,
        every_steps: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._every_s = every_s
        self._every_steps = every_steps
        self._clock = clock
        self._counts_from = clock() - every_s / 2

    @property
    def every_s(self) -> float:
        """Seconds between two saves; 0: not by time."""
        return self._every_s

    def is_due(self, step: int) -> bool:
        """True if a save should follow step `step` (counted from 1)."""
        return self.is_due_by_step(step) or self.is_due_by_time()

    def is_due_by_step(self, step: int) -> bool:
        """True if the number of steps asks for a save: the same on every rank."""
        return self._every_steps > 0 and step % self._every_steps == 0

    def is_due_by_time(self) -> bool:
        """True if the interval is over, by this process's clock."""
        return self._every_s > 0 and self._clock() >= self._counts_from + self._every_s

    def saved(self) -> None:
        """Say that a save was begun now."""
        self._counts_from = self._clock()

    def retime(self, every_s: float) -> None:
        """Take another interval, counted from the last save."""
        if self._every_s <= 0 < every_s:
            self._counts_from = self._clock() - every_s / 2
        self._every_s = every_s
