"""Ranks of a small training on gloo, for slowing some of them down: `-m tests.trainer.slow_ranks DIR RANKS`.

torch is imported once, then each rank is forked. A step goes through a model with DistributedDataParallel and one with
FSDP, with some work of the processor and some sleep in each. Each rank keeps what it would tell the agent of its node
in DIR/rank<r>.json, and its pid; all end when the standard input does.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

WORK_S = 0.004  # of processor time
SLEEP_S = 0.015


def main() -> None:
    folder, ranks = Path(sys.argv[1]), int(sys.argv[2])
    import torch  # noqa: F401 - paid for once

    pids = []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            try:
                train(folder, rank, ranks)
            finally:
                os._exit(1)
        pids.append(pid)
    sys.stdin.read()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def train(folder: Path, rank: int, ranks: int) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    from trainer.contract import ENV_NODE_SOCKET
    from trainer.session.waits import watch_waits
    from trainer.steptime import TIMES

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    layers = [torch.nn.Linear(32, 32) for _ in range(3)]
    whole = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers[:2]))
    sharded = layers[2]
    fully_shard(sharded)
    models = torch.nn.ModuleList([whole, sharded])
    assert watch_waits(models, TIMES, {ENV_NODE_SOCKET: "somewhere"})
    threading.Thread(target=tell, args=(folder, rank), daemon=True).start()
    optimizer = torch.optim.SGD(models.parameters(), lr=1e-3)
    step = 0
    while True:
        step += 1
        optimizer.zero_grad()
        for model in (whole, sharded):
            loss = model(torch.ones(2, 32)).sum()
            work()
            loss.backward()
        optimizer.step()
        TIMES.step_done(step)


def work() -> None:
    until = time.thread_time() + WORK_S
    while time.thread_time() < until:
        pass
    time.sleep(SLEEP_S)


def tell(folder: Path, rank: int) -> None:
    from trainer.steptime import TIMES

    path = folder / f"rank{rank}.json"
    while True:
        path.with_suffix(".new").write_text(json.dumps({"rank": rank, "pid": os.getpid(), **TIMES.told()}))
        path.with_suffix(".new").rename(path)
        time.sleep(0.2)


if __name__ == "__main__":
    main()
