"""A small sharded training that tells what it does, step by step, in a file of events for each rank. Needs torch.

It saves when SIGUSR2 says so, and steps until SIGUSR1 tells it to leave or a file `finish` says that it is done.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
import xxhash
from torch.distributed.fsdp import fully_shard

from trainer.checkpoint import Checkpointer
from trainer.contract import EXIT_FINISHED, EXIT_RESUBMIT
from trainer.progress import ProgressWriter

_WIDTH, _LAYERS = 768, 3  # 7 MB of weights and 14 MB of moments: large enough to be protected rather than copied
_STEP_S = 0.005


def train(rank: int, world: int, port: int, run_dir: str, events: str, options: dict[str, Any]) -> None:
    """One rank; its output and events go to `events`/rank<r>.*."""
    _redirect(Path(events) / f"rank{rank}.txt")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")  # a node for each
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s", force=True)
    model, optimizer = _build()
    with (Path(events) / f"rank{rank}.jsonl").open("a", buffering=1) as stream:
        code = _train(stream, model, optimizer, Path(run_dir), Path(events) / "finish", options)
    sys.exit(code)


def _train(
    stream: IO[str],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    run_dir: Path,
    finish: Path,
    options: dict[str, Any],
) -> int:
    progress = ProgressWriter(run_dir / "progress" / "a1.json" if dist.get_rank() == 0 else None, 1)
    checkpointer = Checkpointer(
        model=model, optimizer=optimizer, run_dir=run_dir, every_s=0, progress=progress, **options
    )
    restored = checkpointer.restore()
    _tell(stream, kind="restored", step=restored.step if restored else 0, digest=_digest(model, optimizer))
    is_over, saving, was_busy = False, 0, False
    while not is_over and not _is_finished(finish):
        time.sleep(_STEP_S)
        batch = torch.randn(4, _WIDTH)
        model(batch).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        digest = _digest(model, optimizer)
        began = time.monotonic()
        is_over = checkpointer.step(samples=8)
        took_s = time.monotonic() - began
        saver = checkpointer.saver
        assert saver is not None
        is_busy = checkpointer.is_busy
        saving = checkpointer.steps_done if is_busy and not was_busy else saving
        was_busy = is_busy
        _tell(
            stream,
            kind="step",
            step=checkpointer.steps_done,
            digest=digest,
            took_s=took_s,
            is_busy=is_busy,
            saving=saving,  # the step of the save that was begun last
            phase=saver.phase,
            writer=saver.writer_pid,
            failures=progress.record.save_failures,
            error=progress.record.save_error,
            saved=progress.record.saved_step,
        )
    began = time.monotonic()
    try:
        checkpointer.close()
        progress.close()
    finally:
        _tell(stream, kind="closed", took_s=time.monotonic() - began)
    return EXIT_RESUBMIT if is_over else EXIT_FINISHED


def _is_finished(finish: Path) -> bool:
    told = torch.tensor(float(finish.exists()) if dist.get_rank() == 0 else 0.0)
    dist.all_reduce(told)
    return bool(told.item())


def _build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)))
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def _digest(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of this rank's weights and moments: what a checkpoint of this moment must bring back."""
    hashed = xxhash.xxh3_128()
    moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    for tensor in [*model.parameters(), *moments]:
        hashed.update(tensor.detach().to_local().numpy())
    return str(hashed.hexdigest())


def _tell(stream: IO[str], **event: Any) -> None:
    stream.write(json.dumps(event) + "\n")


def _redirect(path: Path) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
