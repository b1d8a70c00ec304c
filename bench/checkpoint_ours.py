"""Our own way to save and to restore, as bench-checkpoint holds it against DCP's; needs torch."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Literal

import torch.distributed as dist

from bench.checkpoint_model import Training
from bench.stage import BenchFailed
from trainer.checkpoint import Checkpointer, SaveResult

_WITHIN_S = 120.0

Staging = Literal["auto", "copy"]


def make_checkpointer(training: Training, run_dir: Path, staging: Staging = "auto") -> Checkpointer:
    """The public API as a training script uses it; a save is due at each step."""
    return Checkpointer(
        model=training.model,
        optimizer=training.optimizer,
        scheduler=training.scheduler,
        run_dir=run_dir,
        every_steps=1,
        when_busy="wait",  # for the ranks' word that the last save has ended, which they would hear a step later
        staging=staging,
    )


class Ours:
    """The step that a save is due at; finished when the save is verified."""

    def __init__(self, training: Training, staging: Staging = "auto") -> None:
        self._training = training
        self._staging: Staging = staging
        self._checkpointer: Checkpointer | None = None
        self._result: SaveResult | None = None

    def begin(self, path: Path) -> None:
        if self._checkpointer is None:
            run_dir = path.with_name(f"{path.name}-{self._staging}")
            self._checkpointer = make_checkpointer(self._training, run_dir, self._staging)
        self._checkpointer.step(samples=1)

    @property
    def is_protecting(self) -> bool:
        saver = self._checkpointer.saver if self._checkpointer is not None else None
        return saver is not None and saver.is_protecting

    def is_done(self) -> bool:
        return self._checkpointer is None or not self._checkpointer.is_busy

    def finish(self) -> None:
        self._result = self._checkpointer.wait(_WITHIN_S) if self._checkpointer is not None else None
        if self._result is None or not self._result.is_verified:
            raise BenchFailed(f"our save is not verified: {self._result}")

    def remove(self) -> None:
        if dist.get_rank() == 0 and self._result is not None:
            shutil.rmtree(self._result.path)

    def close(self) -> None:
        if self._checkpointer is not None:
            self._checkpointer.close()
