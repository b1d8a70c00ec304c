"""What is planned for a state: files that any reader of distributed checkpoints takes for its own."""

from __future__ import annotations

import io
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from tests.trainer.saving import scenes
from tests.trainer.saving.files import write_files
from tests.trainer.saving.groups import run_ranks
from trainer.format.metadata import read_metadata
from trainer.saving.planning import PlanChanged, UnsupportedState, plan_state

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]

TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "large": lambda: torch.randn(300, 400),
    "bfloat16": lambda: torch.randn(7).bfloat16(),
    "scalar": lambda: torch.tensor(3.5),
    "empty": lambda: torch.zeros(0, 4),
    "float8": lambda: torch.randn(5).to(torch.float8_e4m3fn),
    "complex and conjugated": lambda: torch.randn(4, dtype=torch.complex64).conj(),
    "uint16": lambda: torch.arange(9).to(torch.uint16),
    "bool": lambda: torch.tensor([True, False, True]),
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "transposed": lambda: torch.randn(4, 6).t(),
    "with gaps": lambda: torch.randn(6, 6)[:, ::2],
    "expanded": lambda: torch.randn(3, 1).expand(3, 5),
    "a view": lambda: torch.arange(1000)[10:20],
    "parameter": lambda: torch.nn.Parameter(torch.randn(3)),
}


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8)


def save(folder: Path, state: dict[str, Any]) -> None:
    write_files(folder, plan_state(state), state)


@pytest.mark.parametrize("kind", TENSORS)
def test_torch_loads_a_planned_tensor_of_any_kind(kind: str, tmp_path: Path) -> None:
    tensor = TENSORS[kind]()
    save(tmp_path, {"model": {"it": tensor}})
    loaded = {"model": {"it": torch.zeros(tensor.shape, dtype=tensor.dtype)}}
    dcp_load(loaded, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(as_bytes(loaded["model"]["it"]), as_bytes(tensor))


def test_torch_loads_planned_bytes(tmp_path: Path) -> None:
    save(tmp_path, {"extra": {"it": b"any\0bytes" * 100, "none": b""}})
    loaded = {"extra": {"it": b"", "none": b"x"}}
    dcp_load(loaded, checkpoint_id=tmp_path, no_dist=True)
    assert loaded == {"extra": {"it": b"any\0bytes" * 100, "none": b""}}


def test_every_item_is_a_whole_zip_with_right_checksums(tmp_path: Path) -> None:
    save(tmp_path, {"tensors": {key: make() for key, make in TENSORS.items()}, "bytes": b"opaque"})
    data = (tmp_path / "__0_0.distcp").read_bytes()
    items = read_metadata((tmp_path / ".metadata").read_bytes()).entries
    assert len(items) == len(TENSORS) + 1
    for item in items:
        with zipfile.ZipFile(io.BytesIO(data[item.offset : item.offset + item.length])) as item_zip:
            assert item_zip.testzip() is None


def test_equal_states_have_equal_plans() -> None:
    first, second = ({"model": {"w": torch.randn(30, 40)}, "extra": b"x" * n} for n in (4, 5))
    one, other = plan_state(first), plan_state(second)
    assert (one.signature, one.image, one.metadata) == (other.signature, other.image, other.metadata)


@pytest.mark.parametrize(
    "changed",
    [
        {"w": torch.zeros(4, 3), "b": b""},
        {"w": torch.zeros(3, 4, dtype=torch.float64), "b": b""},
        {"w": torch.zeros(4, 3).t(), "b": b""},
        {"w": torch.zeros(3, 4)},
        {"w": torch.zeros(3, 4), "b": b"", "more": b""},
        {"w": torch.zeros(3, 4), "b": torch.zeros(1)},
        {"w": torch.zeros(3, 4), "b": b"x" * 10_000},
    ],
)
def test_another_structure_is_noticed(changed: dict[str, Any]) -> None:
    plan = plan_state({"w": torch.zeros(3, 4), "b": b""})
    with pytest.raises(PlanChanged):
        plan.sources(changed)


@pytest.mark.parametrize(
    "leaf", [1, "text", None, [torch.zeros(1)], torch.zeros(2).to_sparse(), torch.zeros(2, device="meta")]
)
def test_what_cannot_be_saved_is_refused_by_its_key(leaf: object) -> None:
    with pytest.raises(UnsupportedState, match=r"model\.odd"):
        plan_state({"model": {"odd": leaf}})


def test_ranks_plan_together_what_none_of_them_holds_alone(tmp_path: Path) -> None:
    run_ranks(2, scenes.plan_together, tmp_path)


def test_a_replaced_tensor_is_the_one_that_is_saved() -> None:
    state = {"w": torch.zeros(3)}
    plan = plan_state(state)
    plan.sources(state)
    state["w"] = torch.ones(3)
    (source,) = plan.sources(state)
    assert isinstance(source, torch.Tensor)
    assert source.is_set_to(state["w"])


def test_a_tensor_whose_memory_was_exchanged_is_noticed_when_it_looks_otherwise() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    plan = plan_state({"w": parameter})
    plan.sources({"w": parameter})
    parameter.data = torch.zeros(3, dtype=torch.float64)
    with pytest.raises(PlanChanged):
        plan.sources({"w": parameter})


def test_keys_that_are_the_same_once_joined_are_refused() -> None:
    with pytest.raises(UnsupportedState, match="the same"):
        plan_state({"a": {"b": torch.zeros(1)}, "a.b": torch.zeros(1)})


def test_the_sources_of_a_thousand_tensors_are_found_within_a_few_milliseconds() -> None:
    state = {"model": {f"layer.{n}": torch.zeros(3) for n in range(1000)}}
    plan = plan_state(state)
    plan.sources(state)
    times = []
    for _ in range(20):
        began = time.perf_counter()
        plan.sources(state)
        times.append(time.perf_counter() - began)
    assert min(times) < 0.003  # 0.4 ms on a quiet machine
