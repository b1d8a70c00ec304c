"""Small training states for tests in one process. Imports torch: import it inside tests that are marked so."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from trainer.state import TrainState, seed_rng


def join_alone() -> None:
    """Make this process the only rank, once."""
    if not dist.is_initialized():
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)


def small_state(*, seed: int = 1, width: int = 16, data: str = "text", world: int = 1) -> TrainState:
    """A state with everything in it, as a process of `world` ranks would have it."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Dropout(0.1), torch.nn.Linear(width, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    seed_rng(seed, 0, 0)
    return TrainState(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        base_seed=seed,
        rank=0,
        world=world,
        data_fingerprint=data,
    )


def advance(state: TrainState, steps: int) -> list[float]:
    """Train for some steps on random numbers; returns the losses."""
    losses = []
    for _ in range(steps):
        state.optimizer.zero_grad()
        loss = state.model(torch.randn(4, 8)).pow(2).mean()
        loss.backward()
        state.optimizer.step()
        state.scheduler.step()
        state.step += 1
        state.samples += 4
        losses.append(float(loss.detach()))
    return losses


def weights(state: TrainState) -> list[float]:
    """All weights, as numbers to compare."""
    return torch.cat([p.detach().flatten() for p in state.model.parameters()]).tolist()


def read_model(path: Path) -> dict[str, list[float]]:
    """The model of a checkpoint of any number of ranks, whole."""
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "whole.pt"
        dcp_to_torch_save(path, whole)
        state = torch.load(whole, weights_only=False)
    return {name: tensor.flatten().tolist() for name, tensor in state["model"].items()}
