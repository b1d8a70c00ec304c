"""Blocking and total times of each way to save one size of state, in turns; runs in every rank."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from bench.checkpoint_model import SHAPES, Training, state_bytes
from bench.checkpoint_ours import Ours
from bench.checkpoint_ranks import slowest
from bench.checkpoint_ways import Async, Memcpy, Sync, Way

Make = Callable[[Training], Way]

MAKERS: Mapping[str, Make] = {
    "sync": Sync,
    "memcpy": Memcpy,
    "thread": lambda training: Async(training, AsyncCheckpointerType.THREAD),
    "process": lambda training: Async(training, AsyncCheckpointerType.PROCESS),
    "ours": Ours,
    "copy": lambda training: Ours(training, staging="copy"),
}
# What is measured in turns with what. Not all at once: each keeps a copy of the state in memory.
GROUPS = (("sync", "memcpy", "ours"), ("thread", "ours"), ("process", "ours"), ("sync", "memcpy", "copy"))


def measure_saves(folder: Path, size_gb: float, repeats: int) -> dict[str, Any]:
    """By group, by way: `block_s` and `total_s` of each repeat, the slowest rank's; a first round warms up."""
    training = Training(SHAPES[size_gb])
    groups = [_measure_group(folder, training, names, repeats) for names in GROUPS]
    return {"bytes": state_bytes(SHAPES[size_gb]), "tensors": len(training.local_tensors()), "groups": groups}


def _measure_group(folder: Path, training: Training, names: tuple[str, ...], repeats: int) -> dict[str, Any]:
    ways = {name: MAKERS[name](training) for name in names}
    times: dict[str, list[float]] = {f"{name}.{what}": [] for name in names for what in ("block_s", "total_s")}
    for number in range(repeats + 1):
        for name, way in ways.items():
            block_s, total_s = take_turn(way, folder / f"{name}-{number}")
            if number:
                times[f"{name}.block_s"].append(block_s)
                times[f"{name}.total_s"].append(total_s)
    for way in ways.values():
        way.close()
    gc.collect()
    found = slowest(times)
    return {name: {what: found[f"{name}.{what}"] for what in ("block_s", "total_s")} for name in names}


def take_turn(way: Way, path: Path) -> tuple[float, float]:
    """Seconds that a save stood in the way, and until it was durable; its files are removed afterwards."""
    settle()
    began = time.monotonic()
    way.begin(path)
    begun = time.monotonic()
    way.finish()
    ended = time.monotonic()
    dist.barrier()
    way.remove()
    return begun - began, ended - began


def settle() -> None:
    """All ranks here, no garbage to collect and nothing of the last turn left to write."""
    gc.collect()
    if dist.get_rank() == 0:
        os.sync()
    dist.barrier()
