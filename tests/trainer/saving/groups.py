"""Runs a function in several real processes that form a gloo group; they come from a fork server that has torch."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

DEADLINE_S = 120.0

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["trainer.example.loop", "trainer.saving.reading", "torch._dynamo"])


def run_ranks(world: int, function: Callable[..., None], *arguments: Any) -> None:
    """Call `function(rank, *arguments)` on each rank; fails with the output of a rank that raised."""
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            _CONTEXT.Process(target=_run, args=(Path(folder), rank, world, function, arguments), daemon=True)
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + DEADLINE_S
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        codes = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
            process.join()
        texts = [path.read_text() for path in sorted(Path(folder).glob("error*"))]
    assert codes == [0] * world, f"exit codes {codes}\n" + "\n".join(texts)


def _run(folder: Path, rank: int, world: int, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
        function(rank, *arguments)
        dist.destroy_process_group()
    except Exception:  # noqa: BLE001 - the test fails by the exit code and this text
        (folder / f"error{rank}").write_text(f"rank {rank}: {traceback.format_exc()}")
        sys.exit(1)
