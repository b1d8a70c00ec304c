"""Ranks of a small training on gloo, for slowing some of them down: `-m tests.trainer.slow_ranks DIR RANKS KIND`.

torch is imported once, then each rank is forked. KIND is "ddp" or "fsdp". A step is some work of the processor and
some sleep. Each rank keeps what it would tell the agent of its node in DIR/rank<r>.json, and its pid; all end when
the standard input does.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

WORK_S = 0.008  # of processor time
SLEEP_S = 0.03


def main() -> None:
    folder, ranks, kind = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    import torch  # noqa: F401 - paid for once

    pids = []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            try:
                train(folder, rank, ranks, kind)
            finally:
                os._exit(1)
        pids.append(pid)
    sys.stdin.read()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def train(folder: Path, rank: int, ranks: int, kind: str) -> None:
    import torch
    import torch.distributed as dist

    from trainer.contract import ENV_NODE_SOCKET
    from trainer.session.waits import watch_waits
    from trainer.steptime import TIMES

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    model = make_model(kind)
    assert watch_waits(model, TIMES, {ENV_NODE_SOCKET: "somewhere"})
    threading.Thread(target=tell, args=(folder, rank), daemon=True).start()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    step = 0
    while True:
        step += 1
        loss = model(torch.ones(2, 32)).sum()
        work()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        TIMES.step_done(step)


def make_model(kind: str):  # type: ignore[no-untyped-def]  # noqa: ANN201 - torch is imported late
    import torch
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32))
    if kind == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return model


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
