"""Blocking time of a save of a state on a GPU, against the bandwidth of a copy of the same bytes to pinned memory."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from bench.checkpoint_model import Shape, Training, state_bytes
from bench.checkpoint_saves import MAKERS, take_turn

_SHAPE = Shape(width=1536, layers=21, words=46_000, heads=12)  # 8 GB with Adam's moments


def measure_gpu(folder: Path, repeats: int) -> Any:
    """`block_s` of each save and `copy_s` of each bare copy, in turns, in one rank; one round warms up."""
    training = Training(_SHAPE, device="cuda")
    ours = MAKERS["ours"](training)
    sources = training.local_tensors()
    pinned = [torch.empty_like(source, device="cpu", pin_memory=True) for source in sources]
    block_s, copy_s = [], []
    for number in range(repeats + 1):
        torch.cuda.synchronize()
        blocked_s, _ = take_turn(ours, folder / f"gpu-{number}")
        torch.cuda.synchronize()
        began = time.monotonic()
        for copy, source in zip(pinned, sources, strict=True):
            copy.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        if number:
            block_s.append(blocked_s)
            copy_s.append(time.monotonic() - began)
    ours.close()
    return {
        "bytes": state_bytes(_SHAPE),
        "gpu": torch.cuda.get_device_name(),
        "block_s": block_s,
        "copy_s": copy_s,
    }
