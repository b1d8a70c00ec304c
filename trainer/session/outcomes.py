"""What is made of the saves that have ended: a line of log for each kind of failure, a count, the progress file."""

from __future__ import annotations

import logging
import re

from trainer.progress import ProgressWriter
from trainer.saving.saver import SaveResult

log = logging.getLogger("trainer.checkpoint")

_DIGITS = re.compile(r"[0-9]+(\.[0-9]+)?")


class SaveOutcomes:
    """Every rank has one; rank 0 speaks for all.

    `failures`: failed saves in a row. `error`: why the newest of them failed. `saved_step`: the newest verified one.
    """

    def __init__(self, progress: ProgressWriter, *, is_speaker: bool) -> None:
        self.failures = 0
        self.error = ""
        self.saved_step: int | None = None
        self._progress = progress
        self._is_speaker = is_speaker
        self._total_s: float | None = None
        self._warned = ""

    def take(self, result: SaveResult | None) -> SaveResult | None:
        """Record a result; returns it."""
        if result is None:
            return None
        if result.is_verified:
            self.failures, self.error, self._warned = 0, "", ""
            self.saved_step, self._total_s = result.step, result.total_s
            self._say_saved(result)
        else:
            self.fail(result.path.name, result.error)
            return result
        self._publish()
        return result

    def fail(self, name: str, error: str) -> None:
        """Record that a save failed; an error like the one before is not said again."""
        self.failures += 1
        self.error = error
        kind = _DIGITS.sub("#", error)  # steps, sizes and free space differ from one to the next
        if self._is_speaker and kind != self._warned:
            log.error("checkpoint %s failed, training goes on and the next one is tried: %s", name, error)
        self._warned = kind
        self._publish()

    def _say_saved(self, result: SaveResult) -> None:
        if self._is_speaker:
            log.info(
                "checkpoint %s is verified: %.3f s blocking, %.3f s in all",
                result.path.name,
                result.blocking_s,
                result.total_s,
            )

    def _publish(self) -> None:
        self._progress.save_ended(
            saved_step=self.saved_step, total_s=self._total_s, failures=self.failures, error=self.error
        )
