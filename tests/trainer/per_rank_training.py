"""A training of a few steps whose loader keeps a position on each rank, in real processes."""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path

from tests.trainer.ranks import DEADLINE_S, Ranks  # sets what the fork server imports beforehand

SAMPLES = 20  # of each rank's own part


def train(run_dir: Path, attempt: int, world: int, steps: int) -> tuple[list[int | None], list[list[int]]]:
    """(exit codes, samples that each rank took) of an attempt on `world` ranks, from the newest checkpoint."""
    context = multiprocessing.get_context("forkserver")
    told = [run_dir / f"a{attempt}.{rank}.json" for rank in range(world)]
    processes = []
    for rank in range(world):
        environment = {
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(world),
            "SUPERVISOR_RUN": "gpt",
            "SUPERVISOR_ATTEMPT": str(attempt),
            "SUPERVISOR_RUN_DIR": str(run_dir),
            "SUPERVISOR_CHECKPOINT_EVERY_S": "0",
        }
        newest = max((run_dir / "checkpoints").glob("step-*"), key=lambda p: p.stat().st_mtime, default=None)
        environment["SUPERVISOR_RESUME_FROM"] = str(newest or "")
        met = f"file://{run_dir}/a{attempt}.met"
        process = context.Process(target=_run, args=(environment, met, steps, str(told[rank])), daemon=True)
        process.start()
        processes.append(process)
    codes = Ranks(processes=tuple(processes), output=()).wait(DEADLINE_S)
    return codes, [json.loads(path.read_text()) if path.exists() else [] for path in told]


def _run(environment: dict[str, str], met: str, steps: int, told: str) -> None:
    os.environ.update(environment)
    import torch
    import torch.distributed as dist

    from tests.trainer.test_loaders import Shards
    from trainer.checkpoint import Checkpointer, DataNotElastic
    from trainer.loaders import PerRankData

    rank, world = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=met, rank=rank, world_size=world)
    data = PerRankData(Shards([rank * 100 + i for i in range(SAMPLES)]), rank=rank, world=world, samples_per_item=world)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    taken = []
    try:
        with Checkpointer(model=model, optimizer=optimizer, data=data, final_step=steps) as checkpointer:
            checkpointer.restore()
            while checkpointer.steps_done < steps:
                taken.append(next(data))
                optimizer.zero_grad()
                loss = model(torch.full((1, 2), 1.0)).sum()
                loss.backward()
                optimizer.step()
                checkpointer.step(loss=loss.detach())
    except DataNotElastic:
        os._exit(93)
    Path(told).write_text(json.dumps(taken))
    dist.destroy_process_group()
