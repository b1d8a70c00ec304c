"""Small training states for tests in one process. Imports torch: import it inside tests that are marked so."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from trainer.contents.randomness import seed_rng
from trainer.state import Loaded, TrainState


def join_alone() -> None:
    """Make this process the only rank, once."""
    if not dist.is_initialized():
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)


def small_state(*, seed: int = 1, width: int = 16, world: int = 1, **parts: Any) -> TrainState:
    """A state with everything in it, as a process of `world` ranks would have it."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Dropout(0.1), torch.nn.Linear(width, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    seed_rng(seed, 0, 0)
    given: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler, **parts}
    return TrainState(seed=seed, rank=0, world=world, **given)


def advance(state: TrainState, steps: int) -> list[float]:
    """Train for some steps on random numbers; returns the losses."""
    losses = []
    for _ in range(steps):
        state.optimizer.zero_grad()
        loss = state.model(torch.randn(4, 8)).pow(2).mean()
        loss.backward()
        state.optimizer.step()
        if isinstance(state.scheduler, torch.optim.lr_scheduler.LRScheduler):
            state.scheduler.step()
        state.step += 1
        state.samples += 4
        losses.append(float(loss.detach()))
    return losses


def weights(state: TrainState) -> list[float]:
    """All weights, as numbers to compare."""
    return torch.cat([p.detach().flatten() for p in state.model.parameters()]).tolist()


def saved(state: TrainState) -> tuple[dict[str, bytes], dict[str, torch.Tensor]]:
    """What a checkpoint would hold of a state: its opaque items and its tensors, by key."""
    items: dict[str, bytes] = {}
    tensors: dict[str, torch.Tensor] = {}
    for key, value in flatten(state.collect()):
        if isinstance(value, bytes):
            items[key] = value
        else:
            tensors[key] = value.detach().clone()
    return items, tensors


def load(state: TrainState, checkpoint: tuple[dict[str, bytes], dict[str, torch.Tensor]]) -> Loaded:
    """Load what `saved` gave, as a checkpoint is loaded."""
    items, tensors = checkpoint
    template = state.template(items)
    with torch.no_grad():
        for key, value in flatten(template):
            assert isinstance(value, torch.Tensor)
            value.copy_(tensors[key])
    return state.apply(items, template)


def flatten(state: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of a nested state with their keys."""
    for name, value in state.items():
        key = f"{path}.{name}" if path else str(name)
        if isinstance(value, Mapping):
            yield from flatten(value, key)
        else:
            yield key, value


def read_model(path: Path) -> dict[str, list[float]]:
    """The model of a checkpoint of any number of ranks, whole."""
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "whole.pt"
        dcp_to_torch_save(path, whole)
        state = torch.load(whole, weights_only=False)
    return {name: tensor.flatten().tolist() for name, tensor in state["model"].items()}
