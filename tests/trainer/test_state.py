"""What a resumed training needs, and what cannot be carried over to another number of ranks."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def _kept_random_states() -> Iterator[None]:
    from trainer.state import apply_rng, collect_rng

    kept = collect_rng()
    yield
    apply_rng(kept)


def _draw() -> tuple[float, float, float]:
    import numpy as np
    import torch

    return random.random(), float(np.random.random()), float(torch.rand(()))  # noqa: NPY002


def test_random_states_go_on_where_they_were_collected() -> None:
    from trainer.state import apply_rng, collect_rng

    kept = collect_rng()
    first = _draw()
    assert _draw() != first
    apply_rng(kept)
    assert _draw() == first


def test_seeds_of_neighbouring_steps_and_ranks_differ() -> None:
    from trainer.state import mix_seed

    seeds = {mix_seed(base, step, rank) for base in range(4) for step in range(10) for rank in range(10)}
    assert len(seeds) == 400
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_resumed_state_goes_on_like_the_one_that_was_never_interrupted() -> None:
    from tests.trainer.states import advance, small_state

    state = small_state()
    advance(state, 3)
    saved = _copy(state.collect())
    undisturbed = advance(state, 4)
    resumed = small_state(seed=99)
    loaded = resumed.apply(saved)
    assert (loaded.step, loaded.samples, loaded.is_reseeded) == (3, 12, False)
    assert advance(resumed, 4) == undisturbed
    assert resumed.scheduler.get_last_lr() == state.scheduler.get_last_lr()


def test_another_number_of_ranks_is_seeded_anew_and_says_so() -> None:
    from tests.trainer.states import small_state

    saved = _copy(small_state(world=4).collect())
    state = small_state(world=2)
    assert state.apply(saved).is_reseeded
    first = _draw()
    state.apply(saved)
    assert _draw() == first


def test_only_the_same_number_of_ranks_asks_for_random_states() -> None:
    from tests.trainer.states import small_state

    state = small_state(world=2)
    assert set(state.template(2)["rng"]) == {"rank0"}
    assert "rng" not in state.template(3)


def test_a_checkpoint_of_other_data_is_refused() -> None:
    from tests.trainer.states import small_state
    from trainer.state import DataChanged

    saved = _copy(small_state(data="old text").collect())
    with pytest.raises(DataChanged, match="old text"):
        small_state(data="new text").apply(saved)


def _copy(state: dict[str, object]) -> dict[str, object]:
    from copy import deepcopy

    return deepcopy(state)
