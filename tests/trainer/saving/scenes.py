"""States of every kind of distribution, whose values are known: what ranks save and load in the tests."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from tests.trainer.saving.files import describe_folder, write_files
from trainer.saving.planning import plan_state
from trainer.saving.reading import load_state

SHAPES: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
    "large": (torch.float32, (300, 400)),
    "wide": (torch.bfloat16, (5, 60_000)),
    "uneven": (torch.float64, (13, 7)),
    "fewer rows than ranks": (torch.float32, (1, 9)),
    "three dimensions": (torch.float16, (6, 5, 4)),
    "numbers": (torch.int64, (17,)),
    "bool": (torch.bool, (10, 3)),
    "complex": (torch.complex64, (6, 8)),
    "empty": (torch.float32, (0, 4)),
    "channels last": (torch.float32, (8, 6, 3, 5)),
}

KINDS = ("plain", "sharded", "sharded by columns", "hybrid")


def value(key: str) -> torch.Tensor:
    """The whole tensor of a key; no two elements of it are alike where its type allows it."""
    dtype, shape = SHAPES[key]
    count = torch.Size(shape).numel()
    flat = torch.arange(count) % 2 if dtype is torch.bool else torch.arange(1, count + 1)
    whole = flat.to(dtype).reshape(shape)
    return whole.to(memory_format=torch.channels_last) if key == "channels last" else whole


def make_state(kind: str, *, is_filled: bool) -> dict[str, Any]:
    """The state of this rank, with the values or with zeros."""
    model = {key: _distribute(kind, value(key) if is_filled else torch.zeros_like(value(key))) for key in SHAPES}
    step = torch.tensor(12.0 if is_filled else 0.0)
    return {"model": model, "optimizer": {"step": step}}


def _distribute(kind: str, whole: torch.Tensor) -> torch.Tensor:
    if kind == "plain" or (kind == "sharded by columns" and whole.dim() < 2):
        return whole
    mesh, placements = _mesh(kind)
    spread = distribute_tensor(whole, mesh, placements, src_data_rank=None)
    if whole.dim() == 4:  # it is made contiguous by the scattering
        local = spread.to_local().contiguous(memory_format=torch.channels_last)
        spread = DTensor.from_local(local, mesh, placements, shape=whole.shape, stride=whole.stride())
    return spread


@cache
def _mesh(kind: str) -> tuple[DeviceMesh, Sequence[Placement]]:
    world = dist.get_world_size()
    if kind == "hybrid":
        return init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicas", "shards")), (Replicate(), Shard(0))
    return init_device_mesh("cpu", (world,)), (Shard(1 if kind == "sharded by columns" else 0),)


def save_kinds(rank: int, folder: Path, kinds: Sequence[str]) -> None:
    """Save the state in each of the kinds, to a folder each."""
    for kind in kinds:
        state = make_state(kind, is_filled=True)
        state["extra"] = {"shared": b"known to all", "of": {f"rank{rank}": f"own of {rank}".encode()}}
        (folder / kind).mkdir(exist_ok=True)
        write_files(folder / kind, plan_state(state), state)
    dist.barrier()


def load_kinds(_rank: int, folder: Path, kinds: Sequence[str]) -> None:
    """Load each saved kind into each of the kinds, and compare."""
    for saved in sorted(path.name for path in folder.iterdir()):
        for kind in kinds:
            load_and_compare(folder / saved, kind)
    if dist.is_initialized():
        dist.barrier()


def load_and_compare(path: Path, kind: str) -> None:
    """Load a checkpoint into a state of a kind and compare all of it."""
    state, expected = make_state(kind, is_filled=False), make_state(kind, is_filled=True)
    items = load_state(path, state, manifest=describe_folder(path))
    for key, tensor in state["model"].items():
        assert _same(tensor, expected["model"][key]), f"{key}: {path.name} into {kind}"
    assert state["optimizer"]["step"] == 12.0
    assert items["extra.shared"] == b"known to all"
    assert items["extra.of.rank1"] == b"own of 1"


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if isinstance(one, DTensor) and isinstance(other, DTensor):
        one, other = one.to_local(), other.to_local()
    return torch.equal(one, other)
