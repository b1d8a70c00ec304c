"""Whatever a training does to its model and optimizer between two saves: the later one has what is there then."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.torch

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from tests.trainer.saving.groups import run_ranks  # noqa: E402
from tests.trainer.states import join_alone  # noqa: E402
from tests.trainer.storing import Training, entries_of, tensors_of  # noqa: E402

WIDTH = 6
CHANGES: dict[str, Callable[[Any, Any], None]] = {}


@pytest.fixture(autouse=True)
def _kept_random_states() -> Iterator[None]:
    from trainer.contents.randomness import apply_rng, collect_rng

    kept = collect_rng()
    yield
    apply_rng(kept)


class Net(nn.Module):
    """A model with all kinds of things that are saved."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])
        self.norm = nn.BatchNorm1d(WIDTH)
        self.wave = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64))
        self.register_buffer("table", torch.randn(WIDTH, WIDTH))
        self.register_buffer("scratch", torch.randn(WIDTH), persistent=False)


def train(model: Any, optimizer: Any) -> None:
    """A step that changes every weight and every entry of the optimizer's state."""
    optimizer.zero_grad()
    sum(p.abs().pow(3).sum() for p in model.parameters() if p.requires_grad).backward()
    optimizer.step()
    with torch.no_grad():
        for buffer in model.buffers():
            buffer.add_(1)


def change(named: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    CHANGES[named.__name__.strip("_").replace("_", " ")] = named
    return named


def hand_over_parameters(model: Any, optimizer: Any) -> None:
    """The optimizer trains the parameters that the model has now, and forgets those that it hasn't."""
    optimizer.param_groups[0]["params"] = list(model.parameters())
    for known in set(optimizer.state) - set(model.parameters()):
        del optimizer.state[known]


# ---------------------------------------------------------------- modules


@change
def a_module_is_replaced(model: Any, optimizer: Any) -> None:
    model.first = nn.Linear(WIDTH, WIDTH)
    hand_over_parameters(model, optimizer)


@change
def a_module_of_a_list_is_replaced(model: Any, optimizer: Any) -> None:
    model.blocks[1] = nn.Linear(WIDTH, WIDTH)
    hand_over_parameters(model, optimizer)


@change
def two_modules_change_places(model: Any, optimizer: Any) -> None:
    model.blocks[0], model.blocks[1] = model.blocks[1], model.blocks[0]


@change
def a_module_is_added(model: Any, optimizer: Any) -> None:
    model.blocks.append(nn.Linear(WIDTH, WIDTH))
    optimizer.add_param_group({"params": list(model.blocks[2].parameters())})


@change
def a_module_is_named_otherwise(model: Any, optimizer: Any) -> None:
    model.second = model.first
    del model.first


@change
def the_dict_of_a_module_s_parameters_is_replaced(model: Any, optimizer: Any) -> None:
    model.first._parameters = {name: nn.Parameter(value + 3) for name, value in model.first._parameters.items()}
    hand_over_parameters(model, optimizer)


@change
def a_module_gets_another_way_to_save_itself(model: Any, optimizer: Any) -> None:
    def state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        state = type(self).state_dict(self, *args, **kwargs)
        del state["table"]
        return state

    model.state_dict = types.MethodType(state_dict, model)


@change
def a_hook_changes_what_is_saved(model: Any, optimizer: Any) -> None:
    def hook(_: Any, state: dict[str, Any], prefix: str, __: Any) -> None:
        state[f"{prefix}table"] = state[f"{prefix}table"][:2].clone()

    model._register_state_dict_hook(hook)


@change
def a_weight_is_parametrized(model: Any, optimizer: Any) -> None:
    torch.nn.utils.parametrizations.weight_norm(model.first)
    hand_over_parameters(model, optimizer)


# ---------------------------------------------------------------- parameters and buffers


@change
def two_parameters_change_places(model: Any, optimizer: Any) -> None:
    one, other = model.blocks
    one.weight, other.weight = other.weight, one.weight


@change
def weights_are_tied(model: Any, optimizer: Any) -> None:
    model.blocks[1].weight = model.blocks[0].weight
    hand_over_parameters(model, optimizer)


@change
def a_parameter_s_memory_is_other_memory(model: Any, optimizer: Any) -> None:
    model.first.weight.data = model.first.weight.data.clone()


@change
def a_parameter_is_transposed_in_its_memory(model: Any, optimizer: Any) -> None:
    model.first.weight.data = model.first.weight.data.t()


@change
def a_parameter_gets_shorter_in_its_memory(model: Any, optimizer: Any) -> None:
    model.first.weight.data = model.first.weight.data[:4]
    optimizer.state.pop(model.first.weight)


@change
def a_parameter_has_another_shape_in_its_memory(model: Any, optimizer: Any) -> None:
    model.first.weight.data = model.first.weight.data.view(4, 9)
    optimizer.state.pop(model.first.weight)


@change
def a_parameter_is_read_as_another_dtype(model: Any, optimizer: Any) -> None:
    model.norm.weight.data = model.norm.weight.data.view(torch.bfloat16)[::2].view(torch.float16)
    optimizer.state.pop(model.norm.weight)


@change
def a_parameter_moves_within_its_storage(model: Any, optimizer: Any) -> None:
    whole = torch.cat([model.first.weight.data, torch.full((1, WIDTH), 9.0)])
    model.first.weight.data = whole[1:]


@change
def a_parameter_is_conjugated_in_its_memory(model: Any, optimizer: Any) -> None:
    model.wave.data = model.wave.data.conj()


@change
def a_parameter_is_set_to_another_storage(model: Any, optimizer: Any) -> None:
    with torch.no_grad():
        model.first.weight.set_(model.first.weight.clone())


@change
def a_storage_is_given_back_and_got_anew(model: Any, optimizer: Any) -> None:
    storage, kept = model.first.weight.untyped_storage(), model.first.weight.detach().clone()
    size = storage.nbytes()
    storage.resize_(0)
    model.between = [torch.empty(64) for _ in range(64)]
    storage.resize_(size)
    model.first.weight.data.copy_(kept)


@change
def two_tensors_are_swapped(model: Any, optimizer: Any) -> None:
    one, other = model.blocks
    for holder in (model.blocks[0], model.blocks[1]):
        optimizer.state.pop(holder.weight)
    one.weight.grad = other.weight.grad = None
    torch.utils.swap_tensors(one.weight, other.weight)


@change
def the_model_is_cast(model: Any, optimizer: Any) -> None:
    model.first.double()
    for parameter in model.first.parameters():
        for key, value in optimizer.state[parameter].items():
            optimizer.state[parameter][key] = value.double() if value.dim() else value


@change
def a_state_dict_is_assigned(model: Any, optimizer: Any) -> None:
    state = {name: value.detach().clone() + 1 for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    hand_over_parameters(model, optimizer)


@change
def a_buffer_is_replaced(model: Any, optimizer: Any) -> None:
    model.table = model.table.clone()


@change
def a_buffer_is_no_longer_saved(model: Any, optimizer: Any) -> None:
    model._non_persistent_buffers_set.add("table")


@change
def a_buffer_is_saved_from_now_on(model: Any, optimizer: Any) -> None:
    model._non_persistent_buffers_set.discard("scratch")


@change
def a_buffer_becomes_a_parameter(model: Any, optimizer: Any) -> None:
    table = model.table
    del model.table
    model.table = nn.Parameter(table)
    optimizer.add_param_group({"params": [model.table]})


@change
def a_parameter_is_frozen(model: Any, optimizer: Any) -> None:
    model.first.weight.requires_grad_(requires_grad=False)


# ---------------------------------------------------------------- optimizer


def _entries(model: Any, optimizer: Any) -> dict[str, Any]:
    entries: dict[str, Any] = optimizer.state[model.first.weight]
    return entries


@change
def an_entry_is_replaced(model: Any, optimizer: Any) -> None:
    _entries(model, optimizer)["exp_avg"] = torch.randn(WIDTH, WIDTH)


@change
def an_entry_s_memory_is_other_memory(model: Any, optimizer: Any) -> None:
    entry = _entries(model, optimizer)["exp_avg"]
    entry.data = entry.data.clone()


@change
def an_entry_is_transposed_in_its_memory(model: Any, optimizer: Any) -> None:
    entry = _entries(model, optimizer)["exp_avg"]
    entry.data = entry.data.t()


@change
def two_entries_change_places(model: Any, optimizer: Any) -> None:
    entries = _entries(model, optimizer)
    entries["exp_avg"], entries["exp_avg_sq"] = entries["exp_avg_sq"], entries["exp_avg"]


@change
def an_entry_is_added(model: Any, optimizer: Any) -> None:
    _entries(model, optimizer)["ema"] = torch.randn(WIDTH, WIDTH)


@change
def an_entry_is_named_otherwise(model: Any, optimizer: Any) -> None:
    entries = _entries(model, optimizer)
    entries["ema"] = entries.pop("exp_avg")
    entries["exp_avg"] = torch.randn(WIDTH, WIDTH)


@change
def a_parameter_s_entries_are_forgotten(model: Any, optimizer: Any) -> None:
    del optimizer.state[model.first.weight]


@change
def two_parameters_exchange_their_entries(model: Any, optimizer: Any) -> None:
    one, other = model.blocks[0].weight, model.blocks[1].weight
    optimizer.state[one], optimizer.state[other] = optimizer.state[other], optimizer.state[one]


@change
def all_state_is_replaced(model: Any, optimizer: Any) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


@change
def a_list_of_parameters_changes_in_place(model: Any, optimizer: Any) -> None:
    parameters = optimizer.param_groups[0]["params"]
    parameters[0], parameters[1] = parameters[1], parameters[0]


@change
def a_parameter_is_replaced_in_the_list(model: Any, optimizer: Any) -> None:
    model.first.weight = nn.Parameter(model.first.weight.detach() + 1)
    parameters = optimizer.param_groups[0]["params"]
    parameters[:] = list(model.parameters())


@change
def a_parameter_moves_to_another_group(model: Any, optimizer: Any) -> None:
    moved = optimizer.param_groups[0]["params"].pop()
    optimizer.add_param_group({"params": [moved], "lr": 0.5})


def _start(tmp_path: Path) -> Training:
    join_alone()
    torch.manual_seed(3)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    training = Training(tmp_path, model, optimizer)
    for _ in range(2):  # the second save takes what the first one found
        train(model, optimizer)
        training.save()
    return training


@pytest.mark.parametrize("named", CHANGES)
def test_a_save_has_what_is_there_after_any_change(named: str, tmp_path: Path) -> None:
    training = _start(tmp_path)
    CHANGES[named](training.model, training.optimizer)
    with torch.no_grad():
        for tensor in [*tensors_of(training.model).values(), *entries_of(training.optimizer).values()]:
            tensor.add_(1)
    training.save()
    assert training.differences() == []


def test_changes_one_after_the_other_are_all_saved(tmp_path: Path) -> None:
    training = _start(tmp_path)
    for at in range(4):
        for named in (
            "a parameter s memory is other memory",
            "an entry s memory is other memory",
            "all state is replaced",
        ):
            CHANGES[named](training.model, training.optimizer)
            train(training.model, training.optimizer)
            training.save()
            assert training.differences() == [], (at, named)


def _swap_memory_on_each_rank(rank: int, root: Path) -> None:
    torch.manual_seed(3)
    model = nn.parallel.DistributedDataParallel(nn.Linear(1100, 1100))  # large enough to be cut into parts of rows
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    root.mkdir(exist_ok=True)
    training = Training(root, model, optimizer)
    for _ in range(2):
        train(model, optimizer)
        training.save()
    for parameter in model.parameters():
        buffer = optimizer.state[parameter]["momentum_buffer"]
        buffer.data = buffer.data.clone()
    train(model, optimizer)
    training.save()
    assert training.differences() == []


def test_rows_that_a_rank_saves_of_a_tensor_are_those_of_its_memory_of_now(tmp_path: Path) -> None:
    run_ranks(2, _swap_memory_on_each_rank, tmp_path / "run")


def test_what_is_copied_behind_a_training_outlives_its_tensors(tmp_path: Path) -> None:
    training = _start(tmp_path)
    sources = training.sources()
    tensors = [*tensors_of(training.model).values(), *training.model.parameters()]
    tensors += entries_of(training.optimizer).values()
    before = [source.clone() for source in sources]
    for tensor in tensors:
        tensor.data = torch.full_like(tensor, 9)
    assert all(torch.equal(source, kept) for source, kept in zip(sources, before, strict=True))


def test_other_tensors_of_a_state_outlive_a_change_of_their_memory_too() -> None:
    from trainer.saving.planning import plan_state

    shadow = torch.arange(5.0)
    state = {"extra": {"shadow": shadow}}
    (source,) = plan_state(state).sources(state)
    shadow.data = torch.zeros(5)
    assert isinstance(source, torch.Tensor)
    assert source.tolist() == [0, 1, 2, 3, 4]


def test_nothing_is_found_anew_while_the_training_only_trains(tmp_path: Path) -> None:
    """Else each save would wait for torch to walk all modules."""
    training = _start(tmp_path)
    first = training.state.collect()
    train(training.model, training.optimizer)
    second = training.state.collect()
    assert first["model"] is second["model"]
    assert first["optimizer"] is second["optimizer"]


# ---------------------------------------------------------------- what can't be saved whole


def _plan_a_stage_of_a_pipeline(rank: int, root: Path) -> None:
    from trainer.contents.leaves import UnsupportedModel

    model = nn.ModuleDict({f"stage{rank}": nn.Linear(4, 4)})
    with pytest.raises(UnsupportedModel, match=r"ranks 1 .*other.* than rank 0"):
        Training(root, model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_ranks_with_models_of_different_names_are_refused_before_they_train(tmp_path: Path) -> None:
    """Rank 0's description is the checkpoint's: no rank could load its own part."""
    run_ranks(2, _plan_a_stage_of_a_pipeline, tmp_path)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, when this is imported
def test_an_optimizer_that_keeps_its_state_elsewhere_is_refused() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    from trainer.contents.leaves import OptimizerLeaves, UnsupportedModel

    join_alone()
    optimizer = ZeroRedundancyOptimizer(nn.Linear(2, 2).parameters(), optimizer_class=torch.optim.Adam)
    with pytest.raises(UnsupportedModel, match="ZeroRedundancyOptimizer"):
        OptimizerLeaves(optimizer)
