"""Loaders around the position: torch's DataLoader at any size, torchdata's and iterable data sets at the same size."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest

from trainer.contract import SampleRange
from trainer.data import DataChanged
from trainer.loaders import DataNotElastic, DataState, GlobalBatches, PerRankData

# ---------------------------------------------------------------- torch's DataLoader


def _loader(data: GlobalBatches, workers: int, **options: Any) -> Any:
    from torch.utils.data import DataLoader

    samples: Any = list(range(40))
    return DataLoader(samples, batch_sampler=data, num_workers=workers, collate_fn=list, **options)


def _batches(rank: int = 0, world: int = 1) -> GlobalBatches:
    return GlobalBatches(40, seed=3, global_batch=7, rank=rank, world=world)


@pytest.mark.torch
@pytest.mark.parametrize(("workers", "options"), [(0, {}), (2, {"prefetch_factor": 4})])
def test_the_position_counts_what_was_handed_out_and_not_what_was_fetched(
    workers: int, options: dict[str, Any]
) -> None:
    data, alone = _batches(), _batches()
    with_loader = list(islice(data.follow(_loader(data, workers, **options)), 5))
    assert with_loader == [alone.next().samples for _ in range(5)]
    assert data.position == alone.position == 35
    resumed = _batches()
    resumed.load_state_dict(data.state_dict())
    assert next(resumed.follow(_loader(resumed, workers, **options))) == alone.next().samples


@pytest.mark.torch
def test_a_checkpoint_loaded_under_a_running_loader_moves_it() -> None:
    data, other = _batches(), _batches()
    items = data.follow(_loader(data, 2, persistent_workers=True))
    next(items)
    for _ in range(4):
        other.next()
    data.load_state_dict(other.state_dict())
    assert next(items) == other.next().samples
    data.skip([SampleRange(first=other.position, end=other.position + 7)])
    other.next()
    assert next(items) == other.next().samples


@pytest.mark.torch
def test_more_ranks_than_samples_are_fed_and_count_for_nothing() -> None:
    data = GlobalBatches(40, seed=3, global_batch=2, rank=3, world=4)
    assert len(next(data.follow(_loader(data, 0)))) == 1
    assert (data.share.samples, data.weight) == ([], 0.0)


@pytest.mark.torch
@pytest.mark.parametrize("options", [{"batch_sampler": _batches()}, {"in_order": False}])
def test_a_loader_that_would_hand_out_other_batches_is_refused(options: dict[str, Any]) -> None:
    from torch.utils.data import DataLoader

    data = _batches()
    samples: Any = list(range(40))
    loader: Any = DataLoader(samples, **{"batch_sampler": data, "num_workers": 0, **options})
    with pytest.raises(ValueError, match="batch_sampler=these batches"):
        data.follow(loader)


# ---------------------------------------------------------------- loaders with a state of their own


class Shards:
    """An iterable data set with the protocol of Hugging Face's: each iteration begins where a loaded state says.

    A state counts for the epoch that it was made in, and for every iteration until the epoch's number changes.
    """

    def __init__(self, samples: list[int]) -> None:
        self.samples = samples
        self.epoch = self.taken = 0
        self.loaded: dict[str, Any] | None = None

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        is_loaded = self.loaded is not None and self.loaded["epoch"] == self.epoch
        self.taken = self.loaded["taken"] if self.loaded is not None and is_loaded else 0
        turned = self.epoch % max(1, len(self.samples))
        order = self.samples[turned:] + self.samples[:turned]
        for sample in order[self.taken :]:
            self.taken += 1
            yield sample

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "taken": self.taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state


class Buffered(Shards):
    """One whose state lacks what is in its shuffle buffer, as Hugging Face's: half of a pair is lost on a resume."""

    def __iter__(self) -> Iterator[int]:
        pair: list[int] = []
        for sample in super().__iter__():
            pair.append(sample)
            if len(pair) == 2:
                yield from reversed(pair)
                pair.clear()


def _iterable(rank: int = 1, world: int = 2) -> PerRankData[int]:
    return PerRankData(Shards(list(range(10))), rank=rank, world=world, samples_per_item=world)


def _replayed() -> PerRankData[int]:
    return PerRankData(Buffered(list(range(10))), rank=1, world=2, samples_per_item=2, replay=True)


def _stateful(workers: int, *, generator: Any) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    samples: Any = list(range(10))
    return StatefulDataLoader(
        samples, batch_size=3, shuffle=True, num_workers=workers, collate_fn=list, generator=generator
    )


def _torchdata(workers: int) -> PerRankData[list[int]]:
    import torch

    source = _stateful(workers, generator=torch.Generator().manual_seed(4))
    return PerRankData(source, rank=1, world=2, samples_per_item=6)


def _torchdata_over_iterable() -> PerRankData[list[int]]:
    from torchdata.stateful_dataloader import StatefulDataLoader

    source: Any = StatefulDataLoader(_AsTorch(list(range(10))), batch_size=3, collate_fn=list)
    return PerRankData(source, rank=1, world=2, samples_per_item=6)


def _AsTorch(samples: list[int]) -> Any:  # noqa: N802 - stands for a class: torch is imported where it is needed
    from torch.utils.data import IterableDataset

    return type("ShardsOfTorch", (Shards, IterableDataset), {})(samples)


# torchdata 0.11, its last release, calls what torch has deprecated since.
_torchdata_marks = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:'set_vital'")]

SOURCES = [
    pytest.param(_iterable, id="iterable"),
    pytest.param(_replayed, id="replayed"),
    pytest.param(lambda: _torchdata(0), marks=_torchdata_marks, id="torchdata"),
    pytest.param(lambda: _torchdata(2), marks=_torchdata_marks, id="torchdata-workers"),
    pytest.param(_torchdata_over_iterable, marks=_torchdata_marks, id="torchdata-iterable"),
]


@pytest.mark.parametrize("make", SOURCES)
@pytest.mark.parametrize("taken", [0, 1, 4, 9, 10, 11, 13])
def test_a_loader_of_the_same_size_goes_on_where_it_was_over_epochs(
    make: Callable[[], PerRankData[Any]], taken: int
) -> None:
    data, resumed = make(), make()
    list(islice(data, taken))
    resumed.load_state_dict(copy.deepcopy(data.state_dict()))
    assert (resumed.position, resumed.epoch) == (data.position, data.epoch)
    assert list(islice(resumed, 25)) == list(islice(data, 25))
    assert (resumed.position, resumed.epoch) == (data.position, data.epoch)


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:'set_vital'")
@pytest.mark.parametrize("taken", [1, 3, 4, 6])
def test_a_resumed_loader_leaves_the_random_numbers_of_the_training_alone(taken: int) -> None:
    """Without a generator of its own torchdata's loader shuffles by the numbers that dropout is drawn from."""
    import torch

    def make() -> PerRankData[list[int]]:
        return PerRankData(_stateful(0, generator=None), rank=0, world=1, samples_per_item=3)

    data, resumed = make(), make()
    list(islice(data, taken))
    saved, random = copy.deepcopy(data.state_dict()), torch.get_rng_state()
    rest = list(islice(data, 20))
    torch.manual_seed(99)
    resumed.load_state_dict(saved)
    torch.set_rng_state(random)
    assert list(islice(resumed, 20)) == rest
    assert torch.equal(torch.get_rng_state(), random)
    list(islice(plain := _batches(), 1))
    next(plain.follow(_loader(plain, 0)))
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:'set_vital'")
def test_every_epoch_is_shuffled_anew() -> None:
    data = PerRankData(_stateful(0, generator=None), rank=0, world=1, samples_per_item=3)
    first, second = ([sample for batch in islice(data, 4) for sample in batch] for _ in range(2))
    assert first != second
    assert sorted(first) == sorted(second) == list(range(10))


@pytest.mark.parametrize("make", SOURCES)
def test_a_position_of_each_rank_is_refused_at_another_size(make: Callable[[], PerRankData[Any]]) -> None:
    """CK-11: growing has no state for the new ranks, shrinking would drop positions without a word."""
    saved = make().state_dict()
    for world in (1, 4):
        data = _iterable(rank=0, world=world)
        with pytest.raises(DataNotElastic, match=f"that of 2 ranks.*this job has {world}: start it with 2 ranks again"):
            data.load_state_dict(saved)
        assert data.position == 0


def test_the_position_of_another_rank_or_way_to_resume_is_refused() -> None:
    with pytest.raises(DataChanged, match="rank 1, this process 0"):
        _iterable(rank=0).load_state_dict(_iterable(rank=1).state_dict())
    with pytest.raises(DataChanged, match="replay False, this process True"):
        _replayed().load_state_dict(_iterable().state_dict())
    with pytest.raises(DataChanged, match="kind 'global batches', this process 'per rank'"):
        _iterable().load_state_dict(_batches().state_dict())


def test_items_that_a_skipped_range_touches_are_left_out_whole() -> None:
    data = PerRankData(Shards(list(range(10))), rank=0, world=2, samples_per_item=2)
    assert next(data) == 0
    data.skip([SampleRange(first=4, end=8)])
    resumed = PerRankData(Shards(list(range(10))), rank=0, world=2, samples_per_item=2)
    resumed.skip([SampleRange(first=13, end=14)])
    resumed.load_state_dict(data.state_dict())
    assert list(islice(resumed, 6)) == [1, 4, 5, 7, 8, 9]
    assert resumed.position == 20


def test_a_loader_without_data_is_refused_instead_of_asked_for_ever() -> None:
    with pytest.raises(ValueError, match="rank 1 has no data in epoch 0"):
        next(PerRankData(Shards([]), rank=1, world=2, samples_per_item=2))


def test_a_replay_over_fewer_samples_than_before_is_refused() -> None:
    data = _replayed()
    list(islice(data, 5))
    fewer = PerRankData(Buffered([1, 2]), rank=1, world=2, samples_per_item=2, replay=True)
    with pytest.raises(DataChanged, match="fewer than the 5 items"):
        fewer.load_state_dict(data.state_dict())


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:'set_vital'")
def test_the_state_of_a_loader_needs_no_code_to_be_read_again() -> None:
    import torch

    data = _torchdata(2)
    next(data)
    stream = io.BytesIO()
    torch.save(data.state_dict(), stream)
    stream.seek(0)
    resumed = _torchdata(2)
    resumed.load_state_dict(torch.load(stream, weights_only=True))
    assert next(resumed) == next(data)


def test_both_kinds_are_what_a_checkpointer_takes() -> None:
    states: list[DataState] = [_batches(), _iterable()]
    assert [state.is_elastic for state in states] == [True, False]
