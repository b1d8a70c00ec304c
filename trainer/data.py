"""Which samples each step trains on: a pure function of the seed and the position in the run's data.

Positions count global samples since the beginning of the run. Position p is sample `permuted(p mod n)` of epoch
`p div n`; each epoch has its own permutation, computed element by element, so nothing is stored, and a resumed run
needs one number, whatever its number of ranks. A step takes the next `global_batch` positions and each rank its
contiguous part, so no sample is repeated or skipped when the number of nodes changes.

Positions can be left out (a rollback skips the batches that made the loss go wrong): a batch is then the next
positions that are not. Parts need not be equal: with 12 samples on 5 ranks two ranks take three and three take two,
and `Share.weight` makes the mean gradient over the ranks that of the whole batch again.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import re
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import xxhash

from trainer.contract import SampleRange

Words = Any  # a number below 2**64, or an array (uint64) of them: numpy's annotations lose the sign of such sums

DEFAULT_TEXT_BYTES = 2 * 1024 * 1024
_ROUNDS = 4  # of the Feistel network: three suffice for a pseudo-random permutation, one more costs nothing
_FEW = 64  # up to so many samples the overhead of arrays costs more than they save
_WORD = 2**64 - 1
_SKIPPED = re.compile(r"(0|[1-9][0-9]{0,17})-([1-9][0-9]{0,17})")


class DataChanged(ValueError):
    """The checkpoint was made on other data, or for other shapes of it, than this process reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOrder:
    """The order of all samples of a run. `size`: samples in an epoch; the same seed gives the same order for ever.

    `skip`: positions that are left out, in order and not overlapping (see `merge_ranges`).
    """

    size: int
    seed: int
    skip: tuple[SampleRange, ...] = ()

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError("an order needs at least one sample: the text is shorter than one window")

    def sample_at(self, position: int) -> int:
        """Index of the sample at a global position (0 is the first sample of the run), left out or not."""
        epoch, offset = divmod(position, self.size)
        return permute(offset, self.size, self._key(epoch))

    def batch(self, position: int, global_batch: int) -> list[int]:
        """Indices of the next global batch from a position on."""
        return self._samples(next_ranges(position, global_batch, self.skip))

    def after(self, position: int, global_batch: int) -> int:
        """Where the batch after this one begins; without skipped positions `global_batch` further."""
        runs = next_ranges(position, global_batch, self.skip)
        return runs[-1].end if runs else position

    def part(self, position: int, global_batch: int, rank: int, world: int) -> list[int]:
        """What rank `rank` of `world` takes of the next global batch; the parts in rank order are the batch.

        Parts differ by at most one sample, and are empty on the last ranks where there are more ranks than samples.
        """
        first, end = part_bounds(global_batch, rank, world)
        begins = self.after(position, first)
        return self._samples(next_ranges(begins, end - first, self.skip))

    def share(self, position: int, global_batch: int, rank: int, world: int) -> Share:
        """The part of a rank, with what its loss counts for and what a rank without a sample is fed."""
        if global_batch < 1:
            raise ValueError(f"a global batch of {global_batch}: a step needs at least one sample")
        samples = self.part(position, global_batch, rank, world)
        return Share(
            samples=samples,
            inputs=samples or self.batch(position, 1),
            weight=loss_weight(len(samples), global_batch, world),
        )

    def _samples(self, runs: Iterable[SampleRange]) -> list[int]:
        samples: list[int] = []
        for run in runs:
            position = run.first
            while position < run.end:
                epoch, offset = divmod(position, self.size)
                count = min(run.end - position, self.size - offset)
                samples += _permute_range(offset, offset + count, self.size, self._key(epoch))
                position += count
        return samples

    def _key(self, epoch: int) -> str:
        return f"{self.seed}/{epoch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one rank does in one step.

    `samples`: indices of its part of the global batch. `inputs`: what it computes on, the same except where there are
    more ranks than samples: a rank without one must take part in the collectives all the same, and computes on a
    sample that another rank trains on, with weight 0. `weight`: multiply this rank's mean loss by it before
    `backward()`; the mean over ranks that DDP and FSDP make is then the mean over the global batch. Exactly 1.0 where
    the parts are equal.
    """

    samples: list[int]
    inputs: list[int]
    weight: float


def loss_weight(own: int, total: int, world: int) -> float:
    """What the mean loss of a rank counts for in the mean over `world` ranks, having `own` of `total` samples.

    Where the loss is a mean over tokens and samples differ in length, give tokens instead of samples.
    """
    return own * world / total


def part_bounds(count: int, rank: int, world: int) -> tuple[int, int]:
    """(first, end) of the part that rank `rank` takes of `count` things: as even as can be, larger parts first."""
    if not 0 <= rank < world:
        raise ValueError(f"rank {rank} of {world}: ranks count from 0")
    least, more = divmod(count, world)
    first = rank * least + min(rank, more)
    return first, first + least + (rank < more)


# ---------------------------------------------------------------- positions that are left out


def next_ranges(position: int, count: int, skip: Sequence[SampleRange] = ()) -> list[SampleRange]:
    """The runs of positions that the next `count` samples lie at: from `position` on, without those in `skip`."""
    runs: list[SampleRange] = []
    for gap in skip:
        taken = min(count, max(0, gap.first - position))
        if taken:
            runs.append(SampleRange(first=position, end=position + taken))
        count -= taken
        if not count:
            return runs
        position = max(position + taken, gap.end)
    return [*runs, SampleRange(first=position, end=position + count)] if count else runs


def merge_ranges(*groups: Iterable[SampleRange]) -> tuple[SampleRange, ...]:
    """All ranges of several lists in order, those that touch or overlap made one. Raises ValueError for one of none."""
    merged: list[SampleRange] = []
    for part in sorted((part for group in groups for part in group), key=lambda part: part.first):
        if not 0 <= part.first < part.end:
            raise ValueError(f"positions {part.first}-{part.end} are no range: the first must be less than the end")
        if merged and part.first <= merged[-1].end:
            merged[-1] = SampleRange(first=merged[-1].first, end=max(merged[-1].end, part.end))
        else:
            merged.append(part)
    return tuple(merged)


def parse_skip_samples(text: str) -> tuple[SampleRange, ...]:
    """The ranges in SUPERVISOR_SKIP_SAMPLES, "first-end,first-end", or none in an empty one.

    In order, not overlapping, decimal digits only. Raises ValueError for anything else: what was misread would train
    on the very batches that a rollback was made for.
    """
    parts: list[SampleRange] = []
    for word in text.split(",") if text else ():
        found = _SKIPPED.fullmatch(word)
        part = SampleRange(first=int(found[1]), end=int(found[2])) if found else None
        if part is None or part.first >= part.end or (parts and part.first < parts[-1].end):
            raise ValueError(
                f"skipped samples {text[:200]!r}: {word[:50]!r} is no first-end that follows what is before it"
            )
        parts.append(part)
    return tuple(parts)


# ---------------------------------------------------------------- permutation


def permute(index: int, size: int, key: str) -> int:
    """Where a permutation of range(size), chosen by `key`, sends `index`.

    A balanced Feistel network over the next even number of bits, walked until it falls into the range (at most four
    times the range, so four tries on average at worst).
    """
    half, round_keys = _half_bits(size), _round_keys(key)
    while True:
        index = _shuffle(index, half, round_keys)
        if index < size:
            return index


def _permute_range(first: int, end: int, size: int, key: str) -> list[int]:
    """`permute` of each of range(first, end), on arrays where that is faster."""
    numpy = _find_numpy() if end - first > _FEW else None
    if numpy is None:
        return [permute(index, size, key) for index in range(first, end)]
    half, round_keys = _half_bits(size), _round_keys(key)
    values = _shuffle(numpy.arange(first, end, dtype=numpy.uint64), half, round_keys)
    while (outside := values >= size).any():
        values[outside] = _shuffle(values[outside], half, round_keys)
    samples: list[int] = values.tolist()
    return samples


def _half_bits(size: int) -> int:
    return max(1, (max(size - 1, 1).bit_length() + 1) // 2)


@functools.lru_cache(maxsize=64)
def _round_keys(key: str) -> tuple[int, ...]:
    return tuple(xxhash.xxh3_64_intdigest(key.encode(), seed=round_) for round_ in range(_ROUNDS))


def _shuffle(value: Words, half: int, round_keys: Sequence[int]) -> Words:
    """One walk through the network, of a number or of an array of them."""
    mask = (1 << half) - 1
    left, right = value >> half, value & mask
    for round_key in round_keys:
        left, right = right, left ^ (_mix(right, round_key) & mask)
    return left << half | right


def _mix(value: Words, key: int) -> Words:
    """A hash of 64 bits; arrays wrap by themselves, Python's numbers by the mask."""
    value = (value ^ key) * 0x9E3779B97F4A7C15 & _WORD
    value = (value ^ value >> 32) * 0xD6E8FEB86659FD93 & _WORD
    return value ^ value >> 32


@functools.cache
def _find_numpy() -> ModuleType | None:
    # Not at the top: who audits a run or reads text needs no arrays, and the import takes longer than all of that.
    try:
        return importlib.import_module("numpy")
    except ImportError:
        return None


# ---------------------------------------------------------------- text


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteWindows:
    """Text cut into windows of `length` + 1 bytes (inputs and their successors) that start every `length` bytes."""

    text: bytes
    length: int

    def __len__(self) -> int:
        return max(0, (len(self.text) - 1) // self.length)

    def __getitem__(self, index: int) -> bytes:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.text[index * self.length : (index + 1) * self.length + 1]

    @property
    def fingerprint(self) -> str:
        """32 hex digits that tell this text and cut from any other: resuming on other data must not go unseen."""
        return hashlib.blake2b(self.text, digest_size=16, salt=self.length.to_bytes(8, "little")).hexdigest()


def read_text(folder: Path | None = None, *, max_bytes: int = DEFAULT_TEXT_BYTES) -> bytes:
    """The text to train on: files of `folder` in sorted order, or the standard library's own sources.

    At most `max_bytes`; the same folder gives the same bytes everywhere. Raises ValueError when there is none.
    """
    root = folder if folder is not None else Path(sysconfig.get_path("stdlib"))
    parts: list[bytes] = []
    left = max_bytes
    for path in _text_files(root, only_python=folder is None):
        part = path.read_bytes()[:left]
        parts.append(part)
        left -= len(part)
        if left <= 0:
            break
    if not any(parts):
        raise ValueError(f"no text in {root}")
    return b"".join(parts)


def _text_files(root: Path, *, only_python: bool) -> Iterator[Path]:
    if only_python:  # the modules of the top folder only: no site-packages, no tests, no caches
        yield from sorted(path for path in root.glob("*.py") if path.is_file())
        return
    yield from sorted(path for path in root.rglob("*") if path.is_file() and not path.name.startswith("."))
