"""The reference training script: `torchrun --nproc-per-node=2 -m trainer.example.train --steps 200`.

It uses every part of the contract with the supervisor and needs none of it. Exit codes: 0 finished; 75 saved on
request, wants to be resubmitted; 78 the checkpoint to resume from was rejected; 79 the loss went wrong; 93 a restart
can't cure it.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Sequence

from trainer.contract import RunPaths
from trainer.example.options import parse_options
from trainer.progress import LimitPolicy, ProgressWriter
from trainer.signals import SaveRequests


def main(argv: Sequence[str] | None = None) -> int:
    """Train as the command line says; returns the exit code."""
    options, place = parse_options(sys.argv[1:] if argv is None else argv, os.environ)
    logging.basicConfig(
        level=logging.INFO if place.rank == 0 else logging.WARNING,
        format=f"%(asctime)s rank {place.rank} %(levelname)s %(message)s",
    )
    publishes = place.rank == 0 and place.run_dir is not None and place.is_supervised
    policy = LimitPolicy(first_s={"start": options.first_step_limit_s})
    with (
        SaveRequests() as requests,
        ProgressWriter(
            RunPaths(place.run_dir).progress(place.attempt) if publishes and place.run_dir else None,
            place.attempt,
            final_step=options.steps,
            policy=policy,
        ) as progress,
    ):
        # Importing torch makes some 10^6 objects that live for ever; collecting among them is wasted start time.
        gc.disable()
        from trainer.example.loop import run

        gc.freeze()
        gc.enable()
        return run(options, place, requests, progress)


if __name__ == "__main__":
    sys.exit(main())
