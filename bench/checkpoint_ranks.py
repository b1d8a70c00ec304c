"""Starts the ranks of bench-checkpoint and brings home what they found; torch is imported in one fork server only."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import socket
import time
from pathlib import Path
from typing import Any

from bench.stage import BenchFailed

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict", "torch._dynamo"])
_SHOWN_CHARS = 3000


def run_ranks(world: int, folder: Path, work: str, *arguments: Any, within_s: float = 300) -> Any:
    """What rank 0's `work(folder, *arguments)` returned; all ranks call it, joined in a gloo group.

    `work` is "PART:FUNCTION" of the module bench.checkpoint_PART: this process needs no torch to name it.
    Raises BenchFailed when a rank fails or they are not done in time; no rank outlives the call.
    """
    answer, errors, port = folder / "answer.json", folder / "errors.txt", _free_port()
    answer.unlink(missing_ok=True)
    errors.write_text("")
    ranks = [
        _CONTEXT.Process(target=_run_rank, args=(rank, world, port, answer, errors, work, (folder, *arguments)))
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
        said = errors.read_text(errors="replace")[-_SHOWN_CHARS:]
        raise BenchFailed(f"{work} on {world} ranks ended with {codes}; the end of what they said:\n{said}")
    return json.loads(answer.read_text())


def _run_rank(
    rank: int, world: int, port: int, answer: Path, errors: Path, work: str, arguments: tuple[Any, ...]
) -> None:
    # DCP's process tells each of its saves in several lines; they are shown when something fails.
    os.dup2(os.open(errors, os.O_WRONLY | os.O_APPEND), 2)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    part, _, function = work.partition(":")
    found = getattr(importlib.import_module(f"bench.checkpoint_{part}"), function)(*arguments)
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
