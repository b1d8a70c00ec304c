"""What a checkpoint could not bring back rightly is refused before anything is saved, by name, on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.torch

pytest.importorskip("torch")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from tests.trainer.groups import on_ranks  # noqa: E402
from tests.trainer.states import join_alone, load, saved, small_state  # noqa: E402

WIDTH = 8
LARGE = 1100  # a square of it is more than is looked at of a tensor


class Average:
    """A moving average that is this rank's alone."""

    def __init__(self, value: float) -> None:
        self.value = torch.full((3,), value)

    def state_dict(self) -> dict[str, Any]:
        return {"weights": [self.value]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["weights"][0]


def _build(kind: str) -> tuple[nn.Module, torch.optim.Optimizer, dict[str, Any]]:
    rank = dist.get_rank()
    torch.manual_seed(rank if kind in ("experts", "ignored", "large") else 0)
    width = LARGE if kind == "large" else WIDTH
    model: nn.Module = nn.Sequential(nn.Linear(width, width, bias=False), nn.BatchNorm1d(width))
    extra: dict[str, Any] = {}
    if kind == "stages":
        model = nn.ModuleDict({f"stage{rank}": nn.Linear(WIDTH, WIDTH)})
    elif kind in ("ddp", "zero"):
        model = DistributedDataParallel(model)
    elif kind == "ignored":
        model._ddp_params_and_buffers_to_ignore = ["0.weight"]  # type: ignore[assignment]
        model = DistributedDataParallel(model)
    elif kind == "average":
        extra = {"average": Average(float(rank))}
    elif kind == "module":
        extra = {"average": nn.BatchNorm1d(WIDTH)}
        extra["average"].running_mean += rank
    if kind == "zero":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return model, ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=0.1), extra
    rate = 0.1 * (rank + 1) if kind == "rates" else 0.1
    frozen = kind == "state" and rank == 1
    for parameter in model.parameters():
        parameter.requires_grad_(not frozen)
    return model, torch.optim.Adam(model.parameters(), lr=rate), extra


def _first_steps(folder: Path, kinds: list[str]) -> list[str]:
    """What each kind of training hears at its first step; "" when it is saved and read back."""
    return [_first_step(folder / kind, kind) for kind in kinds]


def _first_step(run_dir: Path, kind: str) -> str:
    from trainer.checkpoint import Checkpointer

    model, optimizer, extra = _build(kind)
    try:
        checkpointer = Checkpointer(model=model, optimizer=optimizer, extra=extra, run_dir=run_dir, every_s=0.0)
    except TypeError as error:
        return f"{type(error).__name__}: {error}"
    inputs = torch.ones(4, next(iter(model.parameters())).shape[-1])
    stage: nn.Module = next(iter(model.children())) if kind == "stages" else model
    if (loss := stage(inputs).square().sum()).requires_grad:
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        for buffer in model.buffers():
            buffer.add_(dist.get_rank())  # of several ranks, rank 0's are saved
    try:
        checkpointer.step()
        return _save(checkpointer)
    except TypeError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        checkpointer.close(saves=False)


def _save(checkpointer: Any) -> str:
    checkpointer.save()
    result = checkpointer.wait()
    return "" if result is None or result.is_verified else str(result.error)


def _save_with_a_module_of_this_rank(folder: Path) -> tuple[str, bool, str]:
    from trainer.checkpoint import Checkpointer

    model, optimizer, _ = _build("replicas")
    checkpointer = Checkpointer(model=model, optimizer=optimizer, run_dir=folder, every_s=0.0)
    checkpointer.step()
    before = _save(checkpointer)
    torch.manual_seed(dist.get_rank())
    model.append(nn.Linear(WIDTH, WIDTH))  # type: ignore[operator]
    checkpointer.step()
    heard = _save(checkpointer)
    is_owed = checkpointer.step() or checkpointer.is_busy
    checkpointer.close(saves=False)
    return before, is_owed, heard


def test_what_becomes_apart_later_fails_the_save_once_and_not_the_training(tmp_path: Path) -> None:
    for before, is_owed, heard in on_ranks(2, _save_with_a_module_of_this_rank, tmp_path):
        assert (before, is_owed) == ("", False)
        assert "2.weight" in heard or "2.bias" in heard


def test_what_ranks_hold_apart_from_each_other_is_refused_by_name_on_all_of_them(tmp_path: Path) -> None:
    expected = {
        "stages": ("UnsupportedModel: ", "stage", "ranks 1 have other parameters than rank 0"),
        "experts": ("UnsupportedModel: ", "0.weight of the model on ranks 1 differs from rank 0's"),
        "ignored": ("UnsupportedModel: ", "0.weight of the model on ranks 1 differs from rank 0's"),
        "large": ("UnsupportedModel: ", "0.weight of the model on ranks 1 differs from rank 0's"),
        "state": ("UnsupportedModel: ", "ranks 1 have other optimizer state", "0.weight.exp_avg"),
        "rates": ("UnsupportedModel: ", "the optimizer's settings on ranks 1"),
        "average": ("UnsavableObject: ", "extra['average']", "weights.0", "give it as per_rank"),
        "zero": ("UnsupportedModel: ", "ZeroRedundancyOptimizer", "fully_shard"),
    }
    first, second = on_ranks(2, _first_steps, tmp_path, list(expected))
    for (kind, words), heard, other in zip(expected.items(), first, second, strict=True):
        for word in words:
            assert word in heard, kind
            assert word in other, kind
        assert not list((tmp_path / kind).glob("checkpoints/step-*")), kind


def test_replicas_and_buffers_that_differ_by_rank_are_saved(tmp_path: Path) -> None:
    """Buffers of a model, and of modules given as extra, are rank 0's."""
    assert on_ranks(2, _first_steps, tmp_path, ["ddp", "replicas", "module"]) == [["", "", ""]] * 2


# ---------------------------------------------------------------- optimizers


class Wrapper(torch.optim.Optimizer):
    """Trains by an optimizer of its own."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


class Averaging(torch.optim.SGD):
    """Keeps a number beside what it keeps of each parameter."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "rounds": 3}


class Global(torch.optim.SGD):
    """Keeps a tensor that is of no parameter."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr)
        self.state["all"] = {"scale": torch.ones(1)}  # type: ignore[index]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: Wrapper(torch.optim.Adam(p)), r"Wrapper .* in its inner"),
        (lambda p: Averaging(p, lr=0.1), r"Averaging .*rounds"),
        (lambda p: Global(p, lr=0.1), r"Global .*'all'"),
    ],
)
def test_an_optimizer_that_keeps_state_where_it_is_not_found_is_refused(make: Any, words: str) -> None:
    from trainer.contents.leaves import UnsupportedModel

    model = nn.Linear(WIDTH, 1)
    with pytest.raises(UnsupportedModel, match=words):
        small_state(model=model, optimizer=make(model.parameters()), scheduler=None)


def test_what_is_no_optimizer_of_torch_is_refused() -> None:
    from trainer.contents.leaves import UnsupportedModel

    with pytest.raises(UnsupportedModel, match="Average"):
        small_state(optimizer=Average(0.0), scheduler=None)


def test_lbfgs_goes_on_where_it_was() -> None:
    join_alone()

    def build(seed: int) -> Any:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, 1))
        return small_state(
            model=model, optimizer=torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3), scheduler=None
        )

    def train(state: Any, steps: int) -> list[float]:
        inputs = torch.linspace(0, 1, 5 * WIDTH).reshape(5, WIDTH)

        def closure() -> Any:
            state.optimizer.zero_grad()
            loss = (state.model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
            loss.backward()
            return loss

        return [float(state.optimizer.step(closure).detach()) for _ in range(steps)]

    state, resumed = build(1), build(2)
    train(state, 4)
    checkpoint = saved(state)
    undisturbed = train(state, 5)
    train(resumed, 1)
    load(resumed, checkpoint)
    assert train(resumed, 5) == undisturbed


@pytest.mark.parametrize("make", [torch.optim.Adagrad, torch.optim.SGD])
def test_the_state_of_another_optimizer_does_not_fit(make: Any) -> None:
    from trainer.state import StateMismatch

    checkpoint = saved(small_state())
    state = small_state()
    other = small_state(model=state.model, optimizer=make(state.model.parameters(), lr=0.1), scheduler=None)
    with pytest.raises(StateMismatch, match=f"of the optimizer AdamW, and this training has {make.__name__}"):
        load(other, checkpoint)


# ---------------------------------------------------------------- objects


@pytest.mark.parametrize("name", ["data", "scheduler", "scaler", "extra", "per_rank"])
def test_an_object_without_a_state_is_refused_when_it_is_given(tmp_path: Path, name: str) -> None:
    from trainer.checkpoint import Checkpointer

    model = nn.Linear(WIDTH, 1)
    given: Any = {"it": [1, 2]} if name in ("extra", "per_rank") else [1, 2]
    with pytest.raises(TypeError, match=f"{name}.* is a list, which has no state_dict") as caught:
        Checkpointer(model=model, optimizer=torch.optim.SGD(model.parameters()), run_dir=tmp_path, **{name: given})
    assert ("GlobalBatches" in str(caught.value) and "PerRankData" in str(caught.value)) == (name == "data")


@pytest.mark.parametrize("has_data", [True, False])
def test_a_training_without_data_is_told_once_that_nobody_keeps_the_place_in_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, has_data: bool
) -> None:
    from trainer.checkpoint import Checkpointer
    from trainer.loaders import GlobalBatches

    model = nn.Linear(WIDTH, 1)
    data = GlobalBatches(16, seed=1, global_batch=4, rank=0, world=1) if has_data else None
    checkpointer = Checkpointer(model=model, optimizer=torch.optim.SGD(model.parameters()), run_dir=tmp_path, data=data)
    checkpointer.close(saves=False)
    assert len([record for record in caplog.records if "data=" in record.message]) == (0 if has_data else 1)
