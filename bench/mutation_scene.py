"""The checkpoints that `make mutate` damages: saved by the trainer's own engine on two ranks, a few hundred KB each."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.stage import BenchFailed

RUN = "gpt"
OTHER_RUN = "other"
WORLD = 2
# (run, step, attempt), all whole and verified. The newest of RUN is the one that is damaged.
SAVED = (
    *((RUN, 10, 1), (RUN, 20, 1), (RUN, 30, 1), (RUN, 20, 2), (RUN, 30, 2)),
    *((OTHER_RUN, 30, 2),),
)
TARGET = "step-30.a2"
BEFORE = "step-20.a1"  # what is left to resume from when the target is not believed
KEPT = (BEFORE, "step-10.a1")  # what lies beside the target; the others only lend their files
ATTEMPTS = (1, 2)
SAVING_LIMIT_S = 180


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """Where the whole ones lie."""

    folder: Path

    def checkpoint(self, name: str, run: str = RUN) -> Path:
        return self.folder / run / "checkpoints" / name


def make_library(folder: Path) -> Library:
    """Save them all: two ranks with gloo between them, in processes of their own. This one needs no torch.

    Raises BenchFailed when they are not saved in time.
    """
    argv = [sys.executable, "-m", "bench.mutation_scene", str(folder)]
    with tempfile.TemporaryFile("w+") as said:
        saving = subprocess.Popen(argv, stdout=said, stderr=said, start_new_session=True)
        try:
            code = saving.wait(SAVING_LIMIT_S)
        except subprocess.TimeoutExpired:
            raise BenchFailed(f"the checkpoints to damage were not saved within {SAVING_LIMIT_S} s") from None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(saving.pid, signal.SIGKILL)  # its ranks and their writers
        if code != 0:
            said.seek(0)
            raise BenchFailed(f"the checkpoints to damage could not be saved:\n{said.read()[-3000:]}")
    return Library(folder=folder)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _rank(rank: int, folder: str, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(WORLD))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for run, attempt in dict.fromkeys((run, attempt) for run, _, attempt in SAVED):
        steps = [step for of, step, number in SAVED if (of, number) == (run, attempt)]
        _save(Path(folder) / run / "checkpoints", run, attempt, steps, rank)
    dist.barrier()
    dist.destroy_process_group()


def _save(checkpoints: Path, run: str, attempt: int, steps: list[int], rank: int) -> None:
    import torch.distributed as dist

    from trainer.saving.planning import plan_state
    from trainer.saving.saver import Saver

    def gather(value: Any) -> list[Any]:
        everyone: list[Any] = [None] * WORLD
        dist.all_gather_object(everyone, value)
        return everyone

    if rank == 0:
        checkpoints.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    saver = Saver(checkpoints, run=run, attempt=attempt, rank=rank, world=WORLD, node_size=1, gather=gather)
    try:
        for step in steps:
            state = _state(run, step, attempt, rank)
            plan = plan_state(state, dist.group.WORLD)
            saver.begin(plan, plan.sources(state), step=step, samples=step * 8)
            result = saver.wait(60)
            if result is None or not result.is_verified:
                raise RuntimeError(f"step {step} was not saved: {result}")
            dist.barrier()
    finally:
        saver.close(5.0)


def _state(run: str, step: int, attempt: int, rank: int) -> dict[str, Any]:
    """Sharded and replicated tensors of several types, large and small, and texts; no two saves are alike."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.manual_seed(sum(run.encode()) * 1_000_003 + step * 101 + attempt)
    mesh = init_device_mesh("cpu", (WORLD,))
    return {
        "model": {
            "w": distribute_tensor(torch.randn(192, 256), mesh, [Shard(0)]),
            "b": torch.randn(37).to(torch.bfloat16),
        },
        "optimizer": {"m": distribute_tensor(torch.randn(31, 64), mesh, [Shard(0)]), "step": torch.tensor(float(step))},
        "shared": f"{run} {step} {attempt}".encode() * 20,
        "rank": {str(rank): os.urandom(300)},
    }


if __name__ == "__main__":
    from torch.multiprocessing.spawn import spawn

    spawn(_rank, args=(sys.argv[1], _free_port()), nprocs=WORLD)  # type: ignore[no-untyped-call]
