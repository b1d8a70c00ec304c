"""A training whose steps are alike: a sixth of a second of matrix products on a core that each rank has to itself.

The reference training's steps differ by 15 percent from one to the next on two cores, by the many collectives of its
shards: what agents and launcher take could not be seen beside that. These differ by three.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from trainer.checkpoint import Checkpointer
from trainer.contract import EXIT_RESUBMIT
from trainer.history import StepLog, loss_path

WIDTH, ROWS, LAYERS = 512, 1600, 6
NO_SAVES_S = 36_000


def main() -> int:
    """Train until asked to end."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--run-dir", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.manual_seed(rank)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(ROWS, WIDTH)
    with Checkpointer(model=model, optimizer=optimizer, run_dir=options.run_dir, every_s=NO_SAVES_S) as checkpointer:
        checkpointer.restore()
        place = checkpointer.place
        assert place.run_dir is not None
        log = StepLog(loss_path(place.run_dir, place.attempt), world=place.world) if rank == 0 else None
        while True:
            optimizer.zero_grad()
            loss = (model(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            if checkpointer.step(loss=loss):
                return EXIT_RESUBMIT
            if log is not None:
                log.append_loss(checkpointer.steps_done, 0.0)  # for the time in it


if __name__ == "__main__":
    sys.exit(main())
