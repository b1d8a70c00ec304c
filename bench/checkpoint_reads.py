"""Restores into another number of ranks, with nothing of the files in the page cache; runs in every rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from bench.checkpoint_model import SHAPES, Training
from bench.checkpoint_ranks import slowest
from bench.checkpoint_saves import MAKERS, settle
from bench.checkpoint_verify import forget
from bench.checkpoint_ways import collect

Restore = Callable[[Training, Path], None]


def write_checkpoints(folder: Path, size_gb: float) -> None:
    """One checkpoint of each kind, of this number of ranks: `folder/KIND-WORLD`."""
    training = Training(SHAPES[size_gb])
    for kind, way in (("dcp", "sync"), ("ours", "ours")):
        saver = MAKERS[way](training)
        saver.begin(folder / f"{kind}-{dist.get_world_size()}")
        saver.finish()
        saver.close()


def restore_by_dcp(training: Training, path: Path) -> None:
    """As a user of DCP restores: nothing is checked."""
    state = collect(training)
    state = {key: value for key, value in state.items() if not key.startswith("rng.")}  # of another number of ranks
    dcp_load(state, storage_reader=FileSystemReader(path))
    set_state_dict(
        training.model, training.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    training.scheduler.load_state_dict(state["scheduler"])


RESTORES: Mapping[str, Restore] = {"dcp": restore_by_dcp}


def measure_restores(folder: Path, size_gb: float, saved_world: int, repeats: int) -> Any:
    """By kind, the seconds of each restore of what `saved_world` ranks wrote, the slowest rank's; one warms up."""
    training = Training(SHAPES[size_gb])
    times: dict[str, list[float]] = {kind: [] for kind in RESTORES}
    for number in range(repeats + 1):
        for kind, restore in RESTORES.items():
            path = folder / f"{kind}-{saved_world}"
            settle()
            if dist.get_rank() == 0:
                forget(path)
            dist.barrier()
            began = time.monotonic()
            restore(training, path)
            if number:
                times[kind].append(time.monotonic() - began)
    return slowest(times)
