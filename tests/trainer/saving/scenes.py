"""States of every kind of distribution, whose values are known: what ranks save and load in the tests."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.trainer.saving.files import describe_folder, write_files
from trainer.saving.planning import UnsupportedState, plan_state
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


def load_kinds_with_torch(_rank: int, folder: Path, kinds: Sequence[str]) -> None:
    """Load each saved kind into each of the kinds with torch's own reader, and compare."""
    for saved in sorted(path.name for path in folder.iterdir()):
        for kind in kinds:
            state, expected = make_state(kind, is_filled=False), make_state(kind, is_filled=True)
            dcp_load(state, checkpoint_id=folder / saved)
            for key, tensor in state["model"].items():
                assert _same(tensor, expected["model"][key]), f"{key}: {saved} into {kind}"


def plan_together(rank: int, folder: Path) -> None:
    """Plan states that two ranks hold, each in its own way."""
    _plan_one_tensor(rank, folder)
    refused = []
    for state in ({"w": 3} if rank == 1 else {"w": torch.zeros(3)}, {"w": torch.zeros(3 + rank)}):
        try:
            plan_state(state)
        except UnsupportedState as error:
            refused.append(str(error))
    assert refused == [
        "rank 1: w: int is neither a tensor nor bytes",
        "w is a tensor of [3] float32 on rank 0, and a tensor of [4] float32 on rank 1",
    ]
    _save_and_load_a_module(rank, folder / "module")


def _plan_one_tensor(rank: int, folder: Path) -> None:
    state = {"w": torch.ones(3)}
    plan = plan_state(state)
    assert (plan.metadata is not None) == (rank == 0)
    assert plan_state(state).metadata == plan.metadata
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (plan.signature, plan.image.size))
    assert len({signature for signature, _ in gathered}) == 1
    assert sorted(size > 0 for _, size in gathered) == [False, True]
    (folder / "one").mkdir(exist_ok=True)
    write_files(folder / "one", plan, state)
    dist.barrier()
    loaded = {"w": torch.zeros(3)}
    load_state(folder / "one", loaded, manifest=describe_folder(folder / "one"))
    assert torch.equal(loaded["w"], state["w"])


def _save_and_load_a_module(rank: int, folder: Path) -> None:
    first, second = _train_a_sharded_module(seed=1), _train_a_sharded_module(seed=2)
    folder.mkdir(exist_ok=True)
    write_files(folder, plan_state(first), first)
    dist.barrier()
    load_state(folder, second, manifest=describe_folder(folder))
    for part in ("model", "exp_avg"):
        for key, tensor in first[part].items():
            assert torch.equal(tensor.to_local(), second[part][key].to_local()), f"{key} on rank {rank}"


def _train_a_sharded_module(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Linear(5, 1))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, 7)).sum().backward()
    optimizer.step()
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    return {
        "model": {name: parameter.detach() for parameter, name in names.items()},
        "exp_avg": {names[parameter]: state["exp_avg"] for parameter, state in optimizer.state.items()},
    }


def save_and_load_tensor_parallel(rank: int, folder: Path) -> None:
    """A model cut by columns and rows, sharded unevenly on top: back into the same, and into whole tensors."""
    (first, whole), (second, _) = _make_tensor_parallel(seed=1), _make_tensor_parallel(seed=2)
    write_files(folder, plan_state(first), first)
    dist.barrier()
    manifest = describe_folder(folder)
    loaded = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
    load_state(folder, loaded, manifest=manifest)
    load_state(folder, second, manifest=manifest)
    for name, tensor in whole.items():
        assert torch.equal(loaded[name], tensor), name
        assert _same(second[name], first[name]), f"{name} on rank {rank}"


def _make_tensor_parallel(seed: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(the sharded parameters, the same ones as a whole)."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(16, 10), torch.nn.Linear(10, 7))
    whole = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("shards", "cuts"))
    parallelize_module(model, mesh["cuts"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["shards"])
    return {name: parameter.detach() for name, parameter in model.named_parameters()}, whole
