"""Everything that a resumed training needs, as one state dict that can be loaded on another number of ranks.

Model and optimizer go through `get_state_dict`/`set_state_dict`: names that don't depend on wrapping, and sharded
tensors that reshard on load. The position in the data is one global number. Random states differ by rank, and DCP
hands one rank's value of a key to all, so each rank has keys of its own; on another number of ranks they cannot be
carried over, every rank is seeded anew from (base seed, step, rank) and the load says so.
"""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


class DataChanged(ValueError):
    """The checkpoint was made on other data, or for other shapes of it, than this process reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What a load found. `is_reseeded`: random states could not be carried over, the run is no longer bit-identical."""

    step: int
    samples: int
    world_size: int
    is_reseeded: bool


class TrainState:
    """Model, optimizer, scheduler, step, data position and random states of one rank.

    `step` counts finished optimizer steps, `samples` the global samples they consumed.
    """

    def __init__(
        self,
        *,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: torch.optim.lr_scheduler.LRScheduler,
        base_seed: int,
        rank: int,
        world: int,
        data_fingerprint: str = "",
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.base_seed = base_seed
        self.rank = rank
        self.world = world
        self.data_fingerprint = data_fingerprint
        self.step = 0
        self.samples = 0

    def collect(self) -> dict[str, Any]:
        """The state dict to save; its tensors are the live ones, copy them before training goes on."""
        return {**self._shared(), "rng": {f"rank{self.rank}": collect_rng()}}

    def template(self, saved_world: int) -> dict[str, Any]:
        """A state dict with the shapes that DCP loads into, for a checkpoint of `saved_world` ranks."""
        return self.collect() if saved_world == self.world else self._shared()

    def apply(self, state: dict[str, Any]) -> Loaded:
        """Take over a loaded state dict. Raises `DataChanged` when it was made on other data."""
        position = state["position"]
        if position["data"] != self.data_fingerprint:
            raise DataChanged(
                f"the checkpoint was trained on data {position['data']}, this process reads {self.data_fingerprint}"
            )
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.scheduler.load_state_dict(state["scheduler"])
        self.step, self.samples = position["step"], position["samples"]
        is_reseeded = position["world_size"] != self.world
        if is_reseeded:
            seed_rng(self.base_seed, self.step, self.rank)
        else:
            apply_rng(state["rng"][f"rank{self.rank}"])
        return Loaded(
            step=self.step,
            samples=self.samples,
            world_size=position["world_size"],
            is_reseeded=is_reseeded,
        )

    def _shared(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {
            "model": model,
            "optimizer": optimizer,
            "scheduler": self.scheduler.state_dict(),
            "position": {
                "step": self.step,
                "samples": self.samples,
                "world_size": self.world,
                "data": self.data_fingerprint,
            },
        }


# ---------------------------------------------------------------- random states


def collect_rng() -> dict[str, Any]:
    """The random states of this process: torch (CPU and current CUDA device), numpy and Python."""
    version, words, gauss = random.getstate()
    numpy_state = np.random.get_state(legacy=True)  # noqa: NPY002 - the global state is what user code draws from
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": json.dumps([version, list(words), gauss]),
        "numpy": json.dumps([np.asarray(part).tolist() for part in numpy_state]),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def apply_rng(state: dict[str, Any]) -> None:
    """Put random states back that `collect_rng` returned."""
    torch.set_rng_state(state["torch"])
    version, words, gauss = json.loads(state["python"])
    random.setstate((version, tuple(words), gauss))
    name, keys, position, has_gauss, cached = json.loads(state["numpy"])
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))  # noqa: NPY002
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def seed_rng(base_seed: int, step: int, rank: int) -> None:
    """Seed all random states of this process from (base seed, step, rank)."""
    seed = mix_seed(base_seed, step, rank)
    torch.manual_seed(seed)  # CUDA devices, too
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002


def mix_seed(base_seed: int, step: int, rank: int) -> int:
    """A 63-bit seed in which neighbouring steps and ranks share nothing."""
    digest = hashlib.blake2b(f"{base_seed}/{step}/{rank}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
