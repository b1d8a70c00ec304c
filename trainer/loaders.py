"""The position in the data that a checkpoint carries: in the global order, or a loader's own state of each rank.

Three ways to have one, and each is what `Checkpointer` takes as `data`:

* `GlobalBatches`, for data that can be indexed. Any number of ranks goes on exactly where another number stopped. Use
  it directly (`share = data.next()`), or as `batch_sampler` of a plain `DataLoader` that is read through `follow`.
* `PerRankData`, around torchdata's `StatefulDataLoader`, or an iterable data set with `state_dict()` in the manner of
  Hugging Face's `datasets`. Such states hold a position for each rank (and each worker process), which no other number
  of ranks can take over: the checkpoint says so, and the service keeps the number of nodes.
* anything else with the few methods of `DataState`.

No torch is imported here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Generic, Protocol, Self, TypeVar

import xxhash

from trainer.contract import SampleRange
from trainer.data import DataChanged, SampleOrder, Share, merge_ranges

Item = TypeVar("Item")
Item_co = TypeVar("Item_co", covariant=True)


class DataNotElastic(ValueError):
    """The position in the data was saved by another number of ranks, and can't be carried over."""

    def __init__(self, saved_world: int, world: int) -> None:
        super().__init__(
            f"the position in the data is that of {saved_world} ranks, each with its own, and this job has {world}: "
            f"start it with {saved_world} ranks again, or, to resume at any size, read the data through "
            "trainer.loaders.GlobalBatches (a position saved per rank can't be converted)"
        )
        self.saved_world = saved_world
        self.world = world


class DataState(Protocol):
    """What `Checkpointer` wants of `data`.

    Where `is_elastic`, the state is the same on every rank and fits any number of them; else each rank has its own,
    and `load_state_dict` raises `DataNotElastic` for a state of another number of ranks. `position`: global samples
    from the beginning of the run up to what the training has been handed, those left out included.
    """

    @property
    def is_elastic(self) -> bool: ...

    @property
    def position(self) -> int: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any], /) -> None: ...

    def skip(self, ranges: Sequence[SampleRange], /) -> None:
        """Leave these global positions out; before or after `load_state_dict`, and for ever: they are saved, too."""


# ---------------------------------------------------------------- elastic


class GlobalBatches:
    """The global batches of a run, and this rank's share of each; the order follows from the seed alone.

    `size`: samples in the data set. `global_batch`: samples a step, over all ranks; it need not divide by them, see
    `Share`. `fingerprint`: anything that tells this data from other (a hash, a version): a checkpoint that was made on
    other data, or with another seed, is refused with `DataChanged`. `rank` and `world` are those of the data-parallel
    dimension, where a model is split over ranks as well.

    Steps go on over the ends of epochs without an end. Not for use by several threads.
    """

    is_elastic = True

    def __init__(
        self, size: int, *, seed: int, global_batch: int, rank: int = 0, world: int = 1, fingerprint: str = ""
    ) -> None:
        self._order = SampleOrder(size=size, seed=seed)
        self._global_batch, self._rank, self._world = global_batch, rank, world
        self._fingerprint = fingerprint
        self._position = 0
        self._changes = 0  # of the position, other than by a step: what was fetched ahead is of no use then
        self._share = self._order.share(0, global_batch, rank, world)

    @property
    def position(self) -> int:
        """Global position of the next batch: what was handed out, not what was fetched ahead."""
        return self._position

    @property
    def epoch(self) -> int:
        """Number of the epoch that the next batch begins in, from 0."""
        return self._position // self._order.size

    @property
    def order(self) -> SampleOrder:
        """The order of all samples, with what is left out."""
        return self._order

    @property
    def share(self) -> Share:
        """This rank's share of the batch that was handed out last; before the first one, of that."""
        return self._share

    @property
    def weight(self) -> float:
        """What this rank's mean loss of the batch handed out last is multiplied by, see `Share`."""
        return self._share.weight

    def next(self) -> Share:
        """This rank's share of the next batch; the position moves behind it."""
        self._share = self._share_at(self._position)
        self._position = self._order.after(self._position, self._global_batch)
        return self._share

    def __iter__(self) -> Iterator[list[int]]:
        """Indices of this rank's batches from the position on, without moving it: for `DataLoader(batch_sampler=)`."""
        position = self._position
        while True:
            yield self._share_at(position).inputs
            position = self._order.after(position, self._global_batch)

    def follow(self, loader: Iterable[Item]) -> Iterator[Item]:
        """The items of a `DataLoader` that has these batches as its `batch_sampler`; each moves the position.

        Worker processes may fetch ahead as they like. Raises ValueError for a loader with other batches, or one that
        hands them out in another order.
        """
        if getattr(loader, "batch_sampler", self) is not self or not getattr(loader, "in_order", True):
            raise ValueError("the loader must be made with batch_sampler=these batches, and hand them out in order")
        return self._follow(loader)

    def _follow(self, loader: Iterable[Item]) -> Iterator[Item]:
        while True:
            changes = self._changes
            with _random_apart(f"{self._order.seed}/{self._position}"):
                items = iter(loader)
            for item in items:
                if changes != self._changes:  # another checkpoint was loaded meanwhile: fetched from the old position
                    break
                self.next()
                yield item

    def state_dict(self) -> dict[str, Any]:
        """The position and what it counts on; JSON can hold it, and it is the same on every rank."""
        return {
            "kind": "global batches",
            "position": self._position,
            "size": self._order.size,
            "seed": self._order.seed,
            "fingerprint": self._fingerprint,
            "skipped": [[part.first, part.end] for part in self._order.skip],
        }

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Go on from a saved position. Raises `DataChanged` where it counts on other data or another order."""
        mine = self.state_dict()
        _refuse_other(state, mine, ("kind", "size", "seed", "fingerprint"))
        self._position = int(state["position"])
        self.skip(_to_ranges(state["skipped"]))

    def skip(self, ranges: Sequence[SampleRange], /) -> None:
        """Leave these global positions out of the batches to come, beside those that are left out already."""
        merged = merge_ranges(self._order.skip, ranges)
        self._order = SampleOrder(size=self._order.size, seed=self._order.seed, skip=merged)
        self._changes += 1

    def _share_at(self, position: int) -> Share:
        return self._order.share(position, self._global_batch, self._rank, self._world)


def _refuse_other(state: Mapping[str, Any], mine: Mapping[str, Any], keys: Iterable[str]) -> None:
    for key in keys:
        if state.get(key) != mine[key]:
            raise DataChanged(f"the checkpoint's data has {key} {state.get(key)!r}, this process {mine[key]!r}")


def _to_ranges(pairs: Iterable[Sequence[int]]) -> tuple[SampleRange, ...]:
    return tuple(SampleRange(first=int(first), end=int(end)) for first, end in pairs)


# ---------------------------------------------------------------- a position for each rank


class StatefulIterable(Protocol[Item_co]):
    """An iterable that can say where it is, and begin its next iteration there."""

    def __iter__(self) -> Iterator[Item_co]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> Any: ...


class PerRankData(Generic[Item]):
    """Items of a loader that keeps its own position on each rank, epoch after epoch, without an end.

    Iterate over this instead of the loader: it counts what was handed out, goes on with the next epoch (`set_epoch` of
    the loader, its sampler and its data set is called where there is one) and resumes in the middle of one.

    `samples_per_item`: what one item of every rank together is: the global batch for a `StatefulDataLoader`; the
    number of ranks for an iterable of single samples. `seed`: of what the loader draws at the beginning of an epoch
    (shuffling, the seeds of its worker processes), which thereby depends on the epoch alone.

    `replay`: resume by drawing again, from the beginning of the epoch, what was drawn of it, instead of by the loader's
    state: slow, and exact also where the state is not, as with the shuffle buffers of Hugging Face's `datasets`, whose
    content is lost on a resume. The loader's order must depend on the epoch alone then.
    """

    is_elastic = False

    def __init__(
        self,
        source: StatefulIterable[Item],
        *,
        rank: int,
        world: int,
        samples_per_item: int,
        seed: int = 0,
        replay: bool = False,
    ) -> None:
        if samples_per_item < 1:
            raise ValueError(f"an item of {samples_per_item} samples")
        self._source, self._rank, self._world = source, rank, world
        self._per_item = samples_per_item
        self._seed, self._replay = seed, replay
        self._skipped: tuple[SampleRange, ...] = ()
        self._position = self._epoch = self._drawn = 0
        self._items: Iterator[Item] | None = None

    @property
    def position(self) -> int:
        """Global samples handed out or left out, whole items counted."""
        return self._position

    @property
    def epoch(self) -> int:
        """Number of the epoch that the last item was of, from 0."""
        return self._epoch

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Item:
        """The next item that is not left out. Raises ValueError where the loader has none at all."""
        while True:
            item = self._draw()
            self._position += self._per_item
            if not self._is_skipped(self._position - self._per_item, self._position):
                return item

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: the loader's own, as it is, and what it counts for."""
        return {**self._counts(), "source": {} if self._replay else self._source.state_dict()}

    def _counts(self) -> dict[str, Any]:
        return {
            "kind": "per rank",
            "rank": self._rank,
            "world": self._world,
            "position": self._position,
            "epoch": self._epoch,
            "drawn": self._drawn,
            "samples_per_item": self._per_item,
            "skipped": [[part.first, part.end] for part in self._skipped],
            "replay": self._replay,
        }

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Go on where this rank was. Raises `DataNotElastic` for a state of another number of ranks.

        Raises `DataChanged` for the state of another rank, of other data, or of another way to resume.
        """
        mine = self._counts()  # asking torchdata's loader for its state begins an epoch
        if state.get("kind") == mine["kind"] and state.get("world") != self._world:
            raise DataNotElastic(int(state["world"]), self._world)
        _refuse_other(state, mine, ("kind", "rank", "samples_per_item", "replay"))
        self._position, self._epoch = int(state["position"]), int(state["epoch"])
        self.skip(_to_ranges(state["skipped"]))
        self._items, self._drawn = None, 0
        if self._replay:
            self._draw_again(int(state["drawn"]))
        else:
            self._tell_epoch()
            self._source.load_state_dict(state["source"])
            self._drawn = int(state["drawn"])

    def skip(self, ranges: Sequence[SampleRange], /) -> None:
        """Leave these global positions out; an item that a range touches is left out whole."""
        self._skipped = merge_ranges(self._skipped, ranges)

    def _is_skipped(self, first: int, end: int) -> bool:
        return any(part.first < end and first < part.end for part in self._skipped)

    def _draw(self) -> Item:
        if self._items is None:
            self._items = self._begin()
        for item in self._items:
            self._drawn += 1
            return item
        if not self._drawn:
            raise ValueError(f"the loader of rank {self._rank} has no data in epoch {self._epoch}")
        self._items, self._drawn, self._epoch = None, 0, self._epoch + 1
        return self._draw()

    def _draw_again(self, count: int) -> None:
        self._items = self._begin()
        for _ in range(count):
            if next(self._items, self) is self:
                raise DataChanged(f"epoch {self._epoch} has fewer than the {count} items that were drawn of it before")
            self._drawn += 1

    def _begin(self) -> Iterator[Item]:
        """An iteration over the loader: a whole epoch, or what is left of one after `load_state_dict`."""
        self._tell_epoch()
        with _random_apart(f"{self._seed}/{self._epoch}"):
            return iter(self._source)

    def _tell_epoch(self) -> None:
        """Tell the epoch to whatever shuffles by it.

        Hugging Face's data sets also go by it to know that a loaded state is used up: without a new number every epoch
        after a resume would begin in the middle. A generator is seeded anew, because torchdata (0.11) does not bring
        it back to where it was without worker processes, and the epochs after a resume would be other ones.
        """
        for part in (self._source, *(getattr(self._source, name, None) for name in ("sampler", "dataset"))):
            set_epoch = getattr(part, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(self._epoch)
        generator = getattr(self._source, "generator", None)
        if generator is not None:
            generator.manual_seed(_to_seed(f"{self._seed}/{self._epoch}"))


@contextmanager
def _random_apart(key: str) -> Iterator[None]:
    """Let torch's loaders draw their seeds from a generator of their own in here.

    They draw from the one that dropout draws from, once an iteration: a resumed run begins one more than the run that
    was not interrupted, and would draw other numbers from there on.
    """
    torch = sys.modules.get("torch")
    if torch is None:  # then nothing of it draws
        yield
        return
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(_to_seed(key))
    try:
        yield
    finally:
        torch.set_rng_state(before)


def _to_seed(key: str) -> int:
    return xxhash.xxh3_64_intdigest(key.encode()) >> 1
