"""Writes checkpoints as the writer would, but from memory in one go: for tests of what is planned and read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from trainer.contract import Manifest
from trainer.saving.planning import SavePlan
from trainer.saving.zipimage import fill_checksums
from trainer.storage.stored import describe_file


def fill_image(plan: SavePlan, sources: Sequence[torch.Tensor | bytes]) -> bytes:
    """A rank's whole file."""
    buffer = memoryview(bytearray(plan.image.size))
    for at, data in plan.image.frame:
        buffer[at : at + len(data)] = data
    for slot, source in zip(plan.image.slots, sources, strict=True):
        data = source if isinstance(source, bytes) else raw_bytes(source)
        assert len(data) == slot.size
        buffer[slot.offset : slot.offset + slot.size] = data
    fill_checksums(buffer, plan.image)
    return bytes(buffer)


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """The bytes of a contiguous tensor."""
    assert tensor.is_contiguous()
    return bytes(tensor.detach().clone().reshape(-1).view(torch.uint8).numpy())  # numpy() fixes the storage's size


def write_files(folder: Path, plan: SavePlan, state: Mapping[str, Any]) -> None:
    """Write a rank's file, and on rank 0 the metadata."""
    write_sources(folder, plan, plan.sources(state))


def write_sources(folder: Path, plan: SavePlan, sources: Sequence[torch.Tensor | bytes]) -> None:
    """The same for sources that a plan has given."""
    if plan.image.size:
        (folder / plan.image.name).write_bytes(fill_image(plan, sources))
    if plan.metadata is not None:
        (folder / ".metadata").write_bytes(plan.metadata)


def describe_folder(folder: Path) -> Manifest:
    """The manifest of the files that lie there."""
    return Manifest(
        run="run",
        attempt=1,
        step=1,
        samples=1,
        world_size=1,
        time=0.0,
        files=tuple(describe_file(folder, path.name) for path in sorted(folder.iterdir())),
    )
