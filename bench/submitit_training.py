"""What submitit pickles and runs on every node: the reference training, one rank per task."""

from __future__ import annotations

from collections.abc import Sequence

import submitit


class SubmititTraining:
    """A callable in submitit's way: `checkpoint` says what to submit again; the training finds its own newest save."""

    def __init__(self, argv: Sequence[str]) -> None:
        self._argv = list(argv)

    def __call__(self) -> int:
        submitit.helpers.TorchDistributedEnvironment().export(set_cuda_visible_devices=False, overwrite=True)
        from trainer.example.train import main

        return main(self._argv)

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        return submitit.helpers.DelayedSubmission(SubmititTraining(self._argv))
