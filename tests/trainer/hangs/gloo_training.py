"""A real training (gloo, DDP) in which a rank locks itself out: `WORLD RANK` are the arguments.

The ranks are forked from one process that has imported torch, and end with it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from trainer.progress import LimitPolicy, ProgressWriter

HANGS_AT = 5


def main() -> None:
    world, hangs = int(sys.argv[1]), int(sys.argv[2])
    for rank in range(world):
        if os.fork() == 0:
            ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))  # PR_SET_PDEATHSIG
            os.environ["RANK"] = str(rank)
            train(hangs)
    for _ in range(world):
        os.wait()


def train(hangs: int) -> None:
    progress = ProgressWriter(None, 1, policy=LimitPolicy(min_s=1.0))
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    for step in range(1, 1000):
        if dist.get_rank() == hangs and step == HANGS_AT:
            deadlock()
        model(torch.ones(2, 8)).sum().backward()
        dist.all_reduce(torch.ones(1))
        time.sleep(0.2)
        progress.step_done(step)


def deadlock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


if __name__ == "__main__":
    main()
