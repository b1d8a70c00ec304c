"""The launcher's own clock: monotonic, and it stands still while the launcher does."""

from __future__ import annotations

import time

from trainer.launching.limits import OWN_SILENCE_S

JUST_S = 10.0


class OwnClock:
    """Seconds that the launcher was awake. What it did not hear while it was stopped is nobody's silence."""

    def __init__(self) -> None:
        self._asleep_s = 0.0
        self._turned_at = time.monotonic()
        self._woke_at = float("-inf")

    def turn(self) -> float:
        """To be called in each cycle: the seconds now; a gap since the last call does not count."""
        now = time.monotonic()
        gap_s = now - self._turned_at
        self._turned_at = now
        if gap_s > OWN_SILENCE_S:
            self._asleep_s += gap_s
            self._woke_at = now
        return now - self._asleep_s

    def has_just_woken(self) -> bool:
        """True shortly after a stop: who was stopped with us has to find us again first."""
        return time.monotonic() - self._woke_at < JUST_S

    def now(self) -> float:
        """The seconds now. A gap that has just ended counts as long as `turn` has not seen it."""
        return time.monotonic() - self._asleep_s
