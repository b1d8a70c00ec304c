"""Trainings of a small model, wrapped in every way, that leave a record of all they did. Imports torch."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from trainer.checkpoint import Checkpointer
from trainer.contents.randomness import seed_rng
from trainer.loaders import GlobalBatches

WIDTH = 12
SAMPLES = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(3))


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = torch.nn.Linear(WIDTH, WIDTH)
        self.drop = torch.nn.Dropout(0.2)
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen: torch.Tensor
        self.seen.add_(len(x))
        out: torch.Tensor = x + self.drop(torch.tanh(self.lin(self.norm(x))))
        return out


class Average:
    """A moving average of the weights: an object with tensors, sharded as the model is."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._weights = [p.detach().clone() for p in model.parameters()]
        self.updates = 0

    def update(self) -> None:
        self.updates += 1
        for kept, new in zip(self._weights, self._model.parameters(), strict=True):
            kept.lerp_(new.detach(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates, "weights": list(self._weights)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.updates = state["updates"]
        for kept, saved in zip(self._weights, state["weights"], strict=True):
            kept.copy_(saved)


class Drawer:
    """An object that is different on each rank."""

    def __init__(self, rank: int) -> None:
        self.draws = [rank]

    def draw(self) -> float:
        self.draws.append(len(self.draws) * 7 + self.draws[0])
        return (self.draws[-1] % 5) / 50

    def state_dict(self) -> dict[str, Any]:
        return {"draws": list(self.draws), "last": torch.tensor(self.draws[-1])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert int(state["last"]) == state["draws"][-1]
        self.draws = state["draws"]


Wrap = Callable[[torch.nn.Module], torch.nn.Module]
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


def plain(model: torch.nn.Module) -> torch.nn.Module:
    return model


def ddp(model: torch.nn.Module) -> torch.nn.Module:
    return DistributedDataParallel(model)


def fsdp(model: torch.nn.Module) -> torch.nn.Module:
    return _shard(model, None)


def hsdp(model: torch.nn.Module) -> torch.nn.Module:
    return _shard(model, init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("copy", "shard")))


def _shard(model: torch.nn.Module, mesh: Any) -> torch.nn.Module:
    for block in model.children():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01, foreach=True)


def stateless(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2, amsgrad=True, foreach=True)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


@dataclass(kw_only=True)
class Record:
    """What a training did, in full precision."""

    losses: list[float] = field(default_factory=list)
    samples: list[list[int]] = field(default_factory=list)
    means: list[tuple[int, float]] = field(default_factory=list)
    end: dict[str, str] = field(default_factory=dict)


class Training:
    """One process of a training; all that it is made of is random, and different for another `seed`."""

    def __init__(
        self, run_dir: Path, *, seed: int, wrap: Wrap = plain, make: MakeOptimizer = adamw, **options: Any
    ) -> None:
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        torch.manual_seed(seed)
        self.model = wrap(torch.nn.Sequential(*(Block() for _ in range(3))))
        self.optimizer = make(self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [5, 9, 20])
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=4)
        self.data = GlobalBatches(len(SAMPLES), seed=1, global_batch=8, rank=self.rank, world=self.world)
        self.average = Average(self.model)
        self.drawer = Drawer(self.rank)
        self.record = Record()
        seed_rng(seed, 0, self.rank)
        self.checkpointer = Checkpointer(
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            scaler=self.scaler,
            data=self.data,
            extra={"average": self.average},
            per_rank={"drawer": self.drawer},
            run_dir=run_dir,
            on_loss=lambda step, mean: self.record.means.append((step, mean)),
            **{"every_s": 0.0, "seed": seed, **options},
        )

    def step(self, *, factor: float = 1.0) -> bool:
        share = self.data.next()
        x = SAMPLES[share.inputs]
        noise = random.random() + float(np.random.random()) + self.drawer.draw()  # noqa: NPY002
        self.optimizer.zero_grad()
        with torch.autocast("cpu", enabled=False):
            loss = ((self.model(x) - x.roll(1, 1)) ** 2).mean() * (1 + noise / 10) * share.weight * factor
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.average.update()
        self.record.losses.append(float(loss.detach()))
        self.record.samples.append(share.samples)
        return self.checkpointer.step(loss=loss)

    def steps(self, count: int) -> Record:
        """Train on; what was done since, and what was reached."""
        self.record = Record()
        for _ in range(count):
            self.step()
        self.checkpointer._hear()  # the mean of the last step
        self.record.end = self.digest()
        return self.record

    def evaluate(self) -> None:
        """A forward pass alone: FSDP2 leaves the root's parameters gathered after it."""
        with torch.no_grad():
            self.model(SAMPLES[:4])

    def digest(self) -> dict[str, str]:
        """A fingerprint of every tensor and number that the training is made of."""
        model = {name: _digest(value) for name, value in self.model.state_dict().items()}
        optimizer = {
            f"{number}.{name}": _digest(value)
            for number, parameter in enumerate(self.model.parameters())
            for name, value in sorted(self.optimizer.state[parameter].items())
        }
        others = {
            "groups": repr([{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]),
            "scheduler": repr(sorted(self.scheduler.state_dict().items())),
            "scaler": repr(self.scaler.state_dict()),
            "data": repr(self.data.state_dict()),
            "average": repr([_digest(w) for w in self.average.state_dict()["weights"]]) + repr(self.average.updates),
            "drawer": repr(self.drawer.draws),
            "random": repr((random.random(), float(np.random.random()), float(torch.rand(())))),  # noqa: NPY002
            "steps": repr(self.checkpointer.steps_done),
        }
        return {**model, **optimizer, **others}


def _digest(value: Any) -> str:
    local = value.to_local() if isinstance(value, DTensor) else value
    data = local.detach().cpu().contiguous().numpy().tobytes()
    return hashlib.blake2b(data, digest_size=8).hexdigest()
