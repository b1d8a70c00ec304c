"""Restores into another number of ranks, with nothing of the files in the page cache; runs in every rank."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from bench.checkpoint_model import SHAPES, Training
from bench.checkpoint_ours import make_checkpointer
from bench.checkpoint_ranks import slowest
from bench.checkpoint_saves import settle
from bench.checkpoint_verify import forget
from bench.checkpoint_ways import Sync, collect
from bench.stage import BenchFailed


def write_checkpoints(folder: Path, size_gb: float) -> None:
    """One checkpoint of each kind, of this number of ranks: `folder/KIND-WORLD`."""
    training, world = Training(SHAPES[size_gb]), dist.get_world_size()
    sync = Sync(training)
    sync.begin(folder / f"dcp-{world}")
    sync.finish()
    checkpointer = make_checkpointer(training, folder / f"ours-{world}")
    checkpointer.step(samples=1)
    checkpointer.close()


class DcpRestore:
    """As a user of DCP restores: nothing is checked."""

    def __init__(self, training: Training, path: Path) -> None:
        self._training = training
        self._path = path

    def restore(self) -> None:
        training = self._training
        state = collect(training)
        state = {key: value for key, value in state.items() if not key.startswith("rng.")}  # of another number of ranks
        dcp_load(state, storage_reader=FileSystemReader(self._path))
        set_state_dict(
            training.model, training.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        training.scheduler.load_state_dict(state["scheduler"])

    def close(self) -> None:
        pass


class OurRestore:
    """Through the public API: every byte is verified."""

    def __init__(self, training: Training, path: Path) -> None:
        self._checkpointer = make_checkpointer(training, path)

    def restore(self) -> None:
        if self._checkpointer.restore() is None:
            raise BenchFailed("there was nothing to restore")

    def close(self) -> None:
        self._checkpointer.close()


def measure_restores(folder: Path, size_gb: float, saved_world: int, repeats: int) -> Any:
    """By kind, the seconds of each restore of what `saved_world` ranks wrote, the slowest rank's; one warms up."""
    training = Training(SHAPES[size_gb])
    paths = {kind: folder / f"{kind}-{saved_world}" for kind in ("dcp", "ours")}
    kinds: dict[str, DcpRestore | OurRestore] = {
        "dcp": DcpRestore(training, paths["dcp"]),
        "ours": OurRestore(training, paths["ours"]),
    }
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(repeats + 1):
        for kind, way in kinds.items():
            settle()
            if dist.get_rank() == 0:
                forget(paths[kind])
            dist.barrier()
            began = time.monotonic()
            way.restore()
            if number:
                times[kind].append(time.monotonic() - began)
    for way in kinds.values():
        way.close()
    return slowest(times)
