"""Any chain of sizes trains on the same global batches: nothing is repeated, nothing is skipped but what was told."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.contract import SampleRange
from trainer.data import DataChanged, SampleOrder, merge_ranges
from trainer.loaders import GlobalBatches

WORLDS = st.integers(min_value=1, max_value=8)
CHAINS = st.lists(st.tuples(WORLDS, st.integers(min_value=0, max_value=9)), min_size=1, max_size=6)
SIZES = st.integers(min_value=1, max_value=60)
BATCHES = st.sampled_from([1, 3, 5, 7, 10, 12, 20, 33])


class Attempts:
    """Attempts of one run in a row, each at a size of its own and from the state that the one before left."""

    def __init__(self, size: int, global_batch: int) -> None:
        self.size, self.global_batch = size, global_batch
        self.state: dict[str, Any] | None = None
        self.batches: list[list[int]] = []

    def train(self, world: int, steps: int, *, skip: tuple[SampleRange, ...] = ()) -> None:
        ranks = [
            GlobalBatches(self.size, seed=5, global_batch=self.global_batch, rank=rank, world=world)
            for rank in range(world)
        ]
        for data in ranks:
            data.skip(skip)
            if self.state is not None:
                data.load_state_dict(json.loads(json.dumps(self.state)))
        for _ in range(steps):
            self.batches.append([index for data in ranks for index in data.next().samples])
        states = [data.state_dict() for data in ranks]
        assert all(state == states[0] for state in states)
        self.state = states[0]


def _allowed(size: int, skip: tuple[SampleRange, ...], count: int) -> list[int]:
    """What an undisturbed run on one rank trains on, worked out position by position."""
    order = SampleOrder(size=size, seed=5)
    positions = (p for p in range(10**6) if not any(part.first <= p < part.end for part in skip))
    return [order.sample_at(position) for position in islice(positions, count)]


@given(size=SIZES, global_batch=BATCHES, chain=CHAINS)
def test_any_chain_of_sizes_trains_on_the_same_global_batches(
    size: int, global_batch: int, chain: list[tuple[int, int]]
) -> None:
    """CK-11, for data that can be carried over."""
    run, alone = Attempts(size, global_batch), Attempts(size, global_batch)
    for world, steps in chain:
        run.train(world, steps)
    alone.train(1, sum(steps for _, steps in chain))
    assert run.batches == alone.batches
    assert run.state == alone.state


@given(size=SIZES, global_batch=BATCHES, chain=CHAINS)
def test_each_epoch_takes_every_sample_once_whatever_the_sizes(
    size: int, global_batch: int, chain: list[tuple[int, int]]
) -> None:
    run = Attempts(size, global_batch)
    for world, steps in chain:
        run.train(world, steps)
    taken = [index for batch in run.batches for index in batch]
    epochs = len(taken) // size
    assert Counter(taken[: epochs * size]) == Counter(dict.fromkeys(range(size), epochs))
    assert len(set(taken[epochs * size :])) == len(taken) - epochs * size


@given(
    size=SIZES,
    global_batch=BATCHES,
    chain=st.lists(
        st.tuples(WORLDS, st.integers(0, 9), st.lists(st.tuples(st.integers(0, 40), st.integers(1, 50)), max_size=2)),
        min_size=1,
        max_size=6,
    ),
)
def test_what_is_skipped_stays_skipped_at_any_size_and_nothing_else_is(
    size: int, global_batch: int, chain: list[tuple[int, int, list[tuple[int, int]]]]
) -> None:
    """Each attempt may be told, as after a rollback, to leave out positions that are still to come."""
    run = Attempts(size, global_batch)
    skip: tuple[SampleRange, ...] = ()
    for world, steps, gaps in chain:
        here = run.state["position"] if run.state else 0
        told = merge_ranges([SampleRange(first=here + ahead, end=here + ahead + length) for ahead, length in gaps])
        skip = merge_ranges(skip, told)
        run.train(world, steps, skip=told)  # the checkpoint carries what was told before
    taken = [index for batch in run.batches for index in batch]
    assert taken == _allowed(size, skip, len(taken))
    assert all(len(batch) == global_batch for batch in run.batches)


@settings(max_examples=30)
@given(global_batch=BATCHES, worlds=st.lists(WORLDS, min_size=2, max_size=4), back=st.integers(0, 5))
def test_going_back_to_an_older_checkpoint_repeats_its_batches_exactly(
    global_batch: int, worlds: list[int], back: int
) -> None:
    run = Attempts(50, global_batch)
    run.train(worlds[0], 3)
    saved = run.state
    run.train(worlds[0], back)
    lost = run.batches[3:]
    run.state, run.batches = saved, run.batches[:3]
    for world in worlds[1:]:
        run.train(world, back)
    assert run.batches[3 : 3 + back] == lost


def test_the_batch_may_change_size_and_the_order_goes_on() -> None:
    before, after = Attempts(50, 12), Attempts(50, 5)
    before.train(3, 2)
    after.state = before.state
    after.train(2, 3)
    assert [i for batch in before.batches + after.batches for i in batch] == _allowed(50, (), 39)


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (GlobalBatches(41, seed=5, global_batch=4), "size 40, this process 41"),
        (GlobalBatches(40, seed=6, global_batch=4), "seed 5, this process 6"),
        (GlobalBatches(40, seed=5, global_batch=4, fingerprint="b"), "fingerprint '', this process 'b'"),
    ],
)
def test_a_position_in_other_data_is_refused(data: GlobalBatches, what: str) -> None:
    with pytest.raises(DataChanged, match=what):
        data.load_state_dict(GlobalBatches(40, seed=5, global_batch=4).state_dict())


def test_the_epoch_follows_from_the_position() -> None:
    data = GlobalBatches(10, seed=1, global_batch=4)
    epochs = [data.epoch]
    for _ in range(5):
        data.next()
        epochs.append(data.epoch)
    assert epochs == [0, 0, 0, 1, 1, 2]
