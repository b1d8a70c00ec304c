"""What a training leaves behind for the service before it ends: why, in its own words."""

from __future__ import annotations

import logging
import math
import threading
import time
from pathlib import Path

from trainer.contract import Divergence, Outcome, RunPaths, write_json
from trainer.losswatch import Finding
from trainer.session.place import Place

log = logging.getLogger("trainer.checkpoint")

WITHIN_S = 20.0


class LastWord:
    """Writes on rank 0, where there is a run directory; what can't be written is logged, and the end comes anyway."""

    def __init__(self, place: Place) -> None:
        self._place = place

    def leave(self, exit_code: int, message: str, *, checkpoint: Path | None = None) -> None:
        """Say which exit code follows, and why: torchrun hides it. `checkpoint`: the one that was rejected."""
        if self._place.rank == 0:
            log.warning("exit %d: %s", exit_code, message)
        outcome = Outcome(
            attempt=self._place.attempt,
            exit_code=exit_code,
            message=message,
            checkpoint=str(checkpoint) if checkpoint is not None else "",
        )
        if self._place.run_dir is not None:
            self._write(RunPaths(self._place.run_dir).outcome(self._place.attempt), outcome)

    def diverged(self, finding: Finding, *, first_sample: int, end_sample: int) -> None:
        """Say since when the loss was wrong, and which samples were trained on since."""
        record = Divergence(
            attempt=self._place.attempt,
            kind=finding.kind,
            onset_step=finding.onset_step,
            step=finding.step,
            loss=finding.loss if math.isfinite(finding.loss) else None,
            score=finding.score,
            first_sample=first_sample,
            end_sample=end_sample,
            time=time.time(),
        )
        if self._place.run_dir is not None:
            self._write(RunPaths(self._place.run_dir).divergence(self._place.attempt), record)

    def _write(self, path: Path, record: object) -> None:
        if self._place.rank != 0:
            return
        writer = threading.Thread(target=_write, args=(path, record), name="last-word", daemon=True)
        writer.start()
        writer.join(WITHIN_S)  # the file system may be what ends the training
        if writer.is_alive():
            log.error("%s is not written within %g s", path.name, WITHIN_S)


def _write(path: Path, record: object) -> None:
    try:
        write_json(path, record)
    except OSError as error:
        log.error("%s is not written: %s", path.name, error)  # noqa: TRY400 - one line says it all
