"""Starts the ranks of bench-checkpoint and brings home what they found; torch is imported in one fork server only."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.stage import BenchFailed

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict", "torch._dynamo"])

Work = Callable[..., Any]


def run_ranks(world: int, folder: Path, work: Work, *arguments: Any, within_s: float = 600) -> Any:
    """What rank 0's `work(folder, *arguments)` returned; all ranks call it, joined in a gloo group.

    Raises BenchFailed when a rank fails or they are not done in time; no rank outlives the call.
    """
    answer, port = folder / "answer.json", _free_port()
    answer.unlink(missing_ok=True)
    ranks = [
        _CONTEXT.Process(target=_run_rank, args=(rank, world, port, answer, work, (folder, *arguments)))
        for rank in range(world)
    ]
    deadline = time.monotonic() + within_s
    try:
        for rank in ranks:
            rank.start()
        for rank in ranks:
            while rank.is_alive() and time.monotonic() < deadline and not any(r.exitcode for r in ranks):
                rank.join(0.2)
    finally:
        for rank in ranks:
            if rank.is_alive():
                rank.kill()
            rank.join()
    codes = [rank.exitcode for rank in ranks]
    if any(codes):
        raise BenchFailed(f"{work.__name__} on {world} ranks ended with {codes}")
    return json.loads(answer.read_text())


def _run_rank(rank: int, world: int, port: int, answer: Path, work: Work, arguments: tuple[Any, ...]) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = work(*arguments)
    if rank == 0:
        answer.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def slowest(mine: Any) -> Any:
    """Of each number (in a dict of lists of numbers) the largest of any rank: training waits for the slowest."""
    import torch.distributed as dist

    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return {key: [max(values) for values in zip(*(one[key] for one in everyone), strict=True)] for key in mine}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
