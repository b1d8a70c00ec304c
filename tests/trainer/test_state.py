"""What a resumed training needs, what it is called, and what cannot be carried over to another number of ranks."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import torch

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def _kept_random_states() -> Iterator[None]:
    from trainer.contents.randomness import apply_rng, collect_rng

    kept = collect_rng()
    yield
    apply_rng(kept)


def _draw() -> tuple[float, float, float]:
    import numpy as np
    import torch

    return random.random(), float(np.random.random()), float(torch.rand(()))  # noqa: NPY002


class Counting:
    """An object with a state; `gives` replaces it."""

    def __init__(self, gives: Any = None) -> None:
        self.loaded: Any = None
        self._gives = {"count": 3} if gives is None else gives

    def state_dict(self) -> Any:
        return self._gives

    def load_state_dict(self, state: Any) -> None:
        self.loaded = state


class Loader(Counting):
    def __init__(self, *, is_elastic: bool) -> None:
        super().__init__({"position": 12})
        self.is_elastic = is_elastic


# ---------------------------------------------------------------- random states


def test_random_states_go_on_where_they_were_collected() -> None:
    from trainer.contents.randomness import apply_rng, collect_rng

    random.gauss()  # leaves a second one behind for the next call
    kept = collect_rng()
    first = (random.gauss(), *_draw())
    assert _draw() != first[1:]
    apply_rng(kept)
    assert (random.gauss(), *_draw()) == first


def test_collected_random_states_keep_their_size() -> None:
    import json

    from trainer.contents.randomness import collect_rng

    sizes = set()
    for _ in range(50):
        _draw()
        sizes.add(len(json.dumps(collect_rng())))
    assert max(sizes) - min(sizes) < 16


def test_seeds_of_neighbouring_steps_and_ranks_differ() -> None:
    from trainer.contents.randomness import mix_seed

    seeds = {mix_seed(base, step, rank) for base in range(4) for step in range(10) for rank in range(10)}
    assert len(seeds) == 400
    assert all(0 <= seed < 2**63 for seed in seeds)


# ---------------------------------------------------------------- names


def test_names_are_those_that_torch_gives_however_the_model_is_wrapped() -> None:
    import torch
    from torch.distributed.checkpoint.state_dict import get_state_dict

    from tests.trainer.states import advance, flatten, join_alone, small_state

    join_alone()
    state = small_state()
    advance(state, 1)
    plain = dict(flatten({k: v for k, v in state.collect().items() if k in ("model", "optimizer")}))
    model, optimizer = get_state_dict(state.model, state.optimizer)
    expected = dict(flatten({"model": model, "optimizer": {"state": optimizer["state"]}}))
    assert set(plain) == set(expected)
    for wrapped in (
        torch.compile(state.model, backend="eager"),
        torch.nn.parallel.DistributedDataParallel(state.model),
    ):
        other = small_state(model=wrapped, optimizer=state.optimizer).collect()
        assert set(dict(flatten({k: other[k] for k in ("model", "optimizer")}))) == set(plain)


def test_the_state_is_live_and_detached() -> None:
    from tests.trainer.states import advance, small_state

    state = small_state()
    first = state.collect()["model"]["0.weight"]
    assert not first.requires_grad
    advance(state, 1)
    assert first.data_ptr() == state.model.get_parameter("0.weight").data_ptr()


# ---------------------------------------------------------------- finding it once


def _renew_optimizer_state(state: Any) -> None:
    state.optimizer.load_state_dict(state.optimizer.state_dict())


def _replace_parameter_data(state: Any) -> None:
    state.model[0].weight.data = state.model[0].weight.data.clone()


def _replace_parameter(state: Any) -> None:
    import torch

    state.model[0].bias = torch.nn.Parameter(state.model[0].bias.detach().clone())
    state.optimizer.param_groups[0]["params"] = list(state.model.parameters())


def _add_module(state: Any) -> None:
    import torch

    state.model.append(torch.nn.Linear(1, 1))


def test_what_was_found_is_kept_while_the_training_only_trains() -> None:
    from tests.trainer.states import advance, small_state

    state = small_state()
    advance(state, 1)
    first = state.collect()
    advance(state, 2)
    second = state.collect()
    assert second["model"] is first["model"]
    assert second["optimizer"] is first["optimizer"]
    assert second["shared"] != first["shared"]


@pytest.mark.parametrize("change", [_renew_optimizer_state, _replace_parameter_data, _replace_parameter, _add_module])
def test_what_was_found_is_found_anew_when_a_tensor_is_another_one(change: Any) -> None:
    from tests.trainer.states import advance, flatten, small_state

    state = small_state()
    advance(state, 1)
    state.collect()
    change(state)
    found = {key: value.data_ptr() for key, value in flatten(state.collect()) if key.startswith(("model.", "opti"))}
    fresh = small_state(model=state.model, optimizer=state.optimizer, scheduler=state.scheduler).collect()
    assert found == {k: v.data_ptr() for k, v in flatten(fresh) if k.startswith(("model.", "opti"))}


def test_state_that_a_module_makes_on_asking_is_asked_for_each_time() -> None:
    import torch

    from tests.trainer.states import load, saved, small_state

    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = torch.nn.Linear(8, 1)
            self.history = [1]

        def get_extra_state(self) -> Any:
            return {"history": self.history}

        def set_extra_state(self, state: Any) -> None:
            self.history = state["history"]

    def build(model: Scaled) -> Any:
        return small_state(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), scheduler=None)

    model, other = Scaled(), Scaled()
    state = build(model)
    state.collect()
    model.history.append(2)
    load(build(other), saved(state))
    assert other.history == [1, 2]


# ---------------------------------------------------------------- loading


def test_a_resumed_state_goes_on_like_the_one_that_was_never_interrupted() -> None:
    from tests.trainer.states import advance, load, saved, small_state

    state = small_state()
    advance(state, 3)
    checkpoint = saved(state)
    undisturbed = advance(state, 4)
    resumed = small_state(seed=99)
    loaded = load(resumed, checkpoint)
    assert (loaded.step, loaded.samples, loaded.is_reseeded, loaded.notes) == (3, 12, False, ())
    assert advance(resumed, 4) == undisturbed
    assert resumed.scheduler.get_last_lr() == state.scheduler.get_last_lr()  # type: ignore[union-attr]


def test_a_state_saved_before_the_first_step_has_an_optimizer_without_state_again() -> None:
    from tests.trainer.states import advance, load, saved, small_state

    state = small_state()
    checkpoint = saved(state)
    undisturbed = advance(state, 3)
    other = small_state(seed=99)
    advance(other, 2)
    load(other, checkpoint)
    assert len(other.optimizer.state) == 0
    assert advance(other, 3) == undisturbed


def test_a_parameter_that_never_had_a_gradient_has_no_state_again() -> None:
    import torch

    from tests.trainer.states import load, saved, small_state

    def build() -> Any:
        model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 1), torch.nn.Linear(1, 1))
        return small_state(model=model, optimizer=torch.optim.Adam(model.parameters()), scheduler=None)

    state = build()
    model: Any = state.model
    model[:2](torch.randn(4, 8)).sum().backward()
    state.optimizer.step()
    resumed = build()
    load(resumed, saved(state))
    assert [len(resumed.optimizer.state.get(p, {})) for p in resumed.model.parameters()] == [3, 3, 3, 3, 0, 0]


def test_loading_leaves_gradients_and_the_way_to_compute_as_they_are() -> None:
    import torch

    from tests.trainer.states import advance, load, saved, small_state

    state = small_state()
    advance(state, 1)
    other = small_state()
    other.optimizer = torch.optim.AdamW(other.model.parameters(), lr=0.5, foreach=True)
    other = small_state(model=other.model, optimizer=other.optimizer, scheduler=None)
    other.model(torch.randn(2, 8)).sum().backward()
    gradients = [p.grad.clone() for p in other.model.parameters() if p.grad is not None]
    load(other, saved(state))
    assert all(
        torch.equal(p.grad, g) for p, g in zip(other.model.parameters(), gradients, strict=True) if p.grad is not None
    )
    group = other.optimizer.param_groups[0]
    assert (group["foreach"], group["lr"]) == (True, state.optimizer.param_groups[0]["lr"])


def test_a_learning_rate_in_a_tensor_stays_the_tensor_that_it_is() -> None:
    import torch

    from tests.trainer.states import load, saved, small_state

    def build(lr: float) -> Any:
        model = torch.nn.Linear(8, 1)
        return small_state(
            model=model, optimizer=torch.optim.Adam(model.parameters(), lr=torch.tensor(lr)), scheduler=None
        )

    resumed = build(0.25)
    rate = resumed.optimizer.param_groups[0]["lr"]
    load(resumed, saved(build(0.125)))
    assert resumed.optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == 0.125


def test_schedulers_of_every_kind_come_back() -> None:
    import torch
    from torch.optim import lr_scheduler as kinds

    from tests.trainer.states import load, saved, small_state

    makers: list[Any] = [
        lambda o: kinds.MultiStepLR(o, [1, 2, 2]),
        lambda o: kinds.OneCycleLR(o, max_lr=0.1, total_steps=20),
        lambda o: kinds.ReduceLROnPlateau(o, patience=1),
        lambda o: kinds.CosineAnnealingWarmRestarts(o, T_0=3),
        lambda o: kinds.SequentialLR(o, [kinds.ConstantLR(o), kinds.ExponentialLR(o, 0.9)], milestones=[2]),
    ]
    for make in makers:
        states = []
        for steps in (5, 0):
            model = torch.nn.Linear(8, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
            scheduler = make(optimizer)
            for _ in range(steps):
                optimizer.step()
                if isinstance(scheduler, kinds.ReduceLROnPlateau):
                    scheduler.step(1.0)
                else:
                    scheduler.step()
            states.append(small_state(model=model, optimizer=optimizer, scheduler=scheduler))
        load(states[1], saved(states[0]))
        assert repr(states[1].scheduler.state_dict()) == repr(states[0].scheduler.state_dict())  # type: ignore[union-attr]


def test_tensors_in_the_state_of_other_objects_are_items_of_their_own() -> None:
    import torch

    from tests.trainer.states import load, saved, small_state

    held = Counting({"step": 4, "shadow": [torch.arange(3), torch.ones(2, dtype=torch.bfloat16)]})
    items, tensors = saved(small_state(extra={"ema": held}))
    assert {"extra.ema.shadow.0", "extra.ema.shadow.1"} <= set(tensors)
    other = Counting({})
    load(small_state(extra={"ema": other}), (items, tensors))
    assert other.loaded["step"] == 4
    assert torch.equal(other.loaded["shadow"][0], torch.arange(3))
    assert other.loaded["shadow"][1].dtype == torch.bfloat16


# ---------------------------------------------------------------- another number of ranks


def test_another_number_of_ranks_is_seeded_anew_and_says_so() -> None:
    from tests.trainer.states import load, saved, small_state

    checkpoint = saved(small_state(world=4))
    state = small_state(world=2)
    assert load(state, checkpoint).is_reseeded
    first = _draw()
    load(state, checkpoint)
    assert _draw() == first


def test_a_position_that_each_rank_has_is_not_dropped_on_another_number_of_ranks() -> None:
    """CK-11: a data loader with a position for each rank; 4 ranks saved, 2 and 8 resume."""
    from tests.trainer.states import load, saved, small_state
    from trainer.state import DataNotElastic

    checkpoint = saved(small_state(world=4, data=Loader(is_elastic=False)))
    for world in (2, 8):
        with pytest.raises(DataNotElastic, match="4 ranks"):
            load(small_state(world=world, data=Loader(is_elastic=False)), checkpoint)
    same = Loader(is_elastic=False)
    load(small_state(world=4, data=same), checkpoint)
    assert same.loaded == {"position": 12}


def test_a_position_for_all_ranks_is_carried_to_any_number_of_them() -> None:
    from tests.trainer.states import load, saved, small_state

    data = Loader(is_elastic=True)
    load(small_state(world=3, data=data), saved(small_state(world=4, data=Loader(is_elastic=True))))
    assert data.loaded == {"position": 12}


def test_what_is_not_taken_over_is_said() -> None:
    """CK-11: never dropped without a word."""
    from tests.trainer.states import load, saved, small_state

    checkpoint = saved(small_state(world=4, extra={"ema": Counting()}, per_rank={"buffer": Counting()}))
    loaded = load(small_state(world=2, extra={"tokens": Counting()}, per_rank={"buffer": Counting()}), checkpoint)
    assert len(loaded.notes) == 3
    for note, word in zip(sorted(loaded.notes), ("buffer", "ema", "tokens"), strict=True):
        assert word in note


# ---------------------------------------------------------------- what does not fit


def test_a_checkpoint_of_another_model_does_not_fit() -> None:
    import torch

    from tests.trainer.states import load, saved, small_state
    from trainer.state import StateMismatch

    other = torch.nn.Sequential(torch.nn.Linear(8, 16))
    state = small_state(model=other, optimizer=torch.optim.AdamW(other.parameters()), scheduler=None)
    with pytest.raises(StateMismatch, match=r"the checkpoint has 2 tensors that the model lacks, 2\.bias for one"):
        load(state, saved(small_state()))


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b'{"now": {"version": 99, "world_size": 1}, "structure": {}}'])
def test_items_of_any_origin_are_refused_not_believed(data: bytes) -> None:
    from tests.trainer.states import small_state
    from trainer.state import StateMismatch

    with pytest.raises(StateMismatch):
        small_state().template({"shared": data, "rank.0": b"{}"})


def test_an_optimizer_with_a_parameter_of_another_model_is_refused() -> None:
    import torch

    from tests.trainer.states import small_state
    from trainer.contents.leaves import UnsupportedModel

    stranger: torch.Tensor = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(UnsupportedModel, match="not one of the model's"):
        small_state(optimizer=torch.optim.SGD([stranger], lr=0.1), scheduler=None).collect()
