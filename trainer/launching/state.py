"""Where an attempt is: the current start of the training, or the recovery from it."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.launching.recovering import Recovery
from trainer.launching.training import Training


@dataclass(slots=True)
class State:
    """What the loop and the nodes' messages move on. `recovery`: from `training`, which is over then."""

    training: Training | None = None
    recovery: Recovery | None = None

    @property
    def launch(self) -> int:
        """Number of the current start; 0 also before the first."""
        return 0 if self.training is None else self.training.launch
