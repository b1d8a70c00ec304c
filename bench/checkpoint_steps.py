"""How much slower a training steps while a save is made behind it; runs in every rank.

A period goes from the call of the save until it is durable (ours: and verified), the call and what the save costs the
steps after it included; its time by the step is held against steps that nothing disturbs, taken just before.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.checkpoint_model import SHAPES, Training
from bench.checkpoint_saves import MAKERS, settle
from bench.checkpoint_ways import Way

ROWS = 2  # so that a step is mostly computing, and the collectives of FSDP the smaller part
_MAX_STEPS = 200  # of one save


@dataclass(frozen=True, slots=True, kw_only=True)
class Period:
    """Seconds of each step: undisturbed ones, then those of one save, the first with the call of the save in it."""

    quiet_s: list[float]
    saving_s: list[float]

    @property
    def slowdown(self) -> float:
        return statistics.mean(self.saving_s) / statistics.mean(self.quiet_s)

    @property
    def worst(self) -> float:
        return max(self.saving_s) / statistics.mean(self.quiet_s)


def measure_steps(folder: Path, size_gb: float, names: tuple[str, ...], rounds: int, quiet_steps: int) -> Any:
    """By way, for each round: `slowdown` and `worst` as ratios to the undisturbed step, and the steps of a save."""
    training = Training(SHAPES[size_gb])
    ways = {name: MAKERS[name](training) for name in names}
    found: dict[str, list[Period]] = {name: [] for name in names}
    for number in range(rounds + 1):
        for name, way in ways.items():
            period = _take_period(training, way, folder / f"{name}-{number}", quiet_steps)
            if number:
                found[name].append(period)
    for way in ways.values():
        way.close()
    return {
        name: {
            "slowdown": [period.slowdown for period in periods],
            "worst": [period.worst for period in periods],
            "steps": [len(period.saving_s) for period in periods],
            "quiet_step_s": statistics.median(s for period in periods for s in period.quiet_s),
        }
        for name, periods in found.items()
    }


def _take_period(training: Training, way: Way, path: Path, quiet_steps: int) -> Period:
    settle()
    quiet_s: list[float] = []
    for _ in range(quiet_steps):
        began = time.monotonic()
        training.step(ROWS)
        _all(way.is_done())  # costs as much as it does during a save
        quiet_s.append(time.monotonic() - began)
    saving_s: list[float] = []
    began = time.monotonic()
    way.begin(path)
    is_done = False
    while not is_done and len(saving_s) < _MAX_STEPS:
        training.step(ROWS)
        is_done = _all(way.is_done())
        saving_s.append(time.monotonic() - began)
        began = time.monotonic()
    way.finish()
    dist.barrier()
    way.remove()
    return Period(quiet_s=quiet_s, saving_s=saving_s)


def _all(value: bool) -> bool:
    """True when it is so on every rank."""
    least = torch.tensor(float(value))
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return bool(least.item())
