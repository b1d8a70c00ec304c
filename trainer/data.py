"""Which samples each step trains on: a pure function of the seed and the number of samples consumed so far.

Positions count global samples since the beginning of the run. Position p is sample `permuted(p mod n)` of epoch
`p div n`; each epoch has its own permutation, computed one element at a time, so nothing is stored, and a resumed
run needs one number, whatever its number of ranks. A step takes the next `global_batch` positions and each rank its
contiguous part, so no sample is repeated or skipped when the number of nodes changes.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash

DEFAULT_TEXT_BYTES = 2 * 1024 * 1024
_ROUNDS = 4  # of the Feistel network: three suffice for a pseudo-random permutation, one more costs nothing


class BatchNotDivisible(ValueError):
    """The global batch cannot be split evenly over this number of ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOrder:
    """The order of all samples of a run. `size`: samples in an epoch; the same seed gives the same order for ever."""

    size: int
    seed: int

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError("an order needs at least one sample: the text is shorter than one window")

    def sample_at(self, position: int) -> int:
        """Index of the sample at a global position (0 is the first sample of the run)."""
        epoch, offset = divmod(position, self.size)
        return permute(offset, self.size, f"{self.seed}/{epoch}")

    def batch(self, consumed: int, global_batch: int) -> list[int]:
        """Indices of the next global batch after `consumed` samples."""
        return [self.sample_at(position) for position in range(consumed, consumed + global_batch)]

    def part(self, consumed: int, global_batch: int, rank: int, world: int) -> list[int]:
        """What rank `rank` of `world` takes of the next global batch; the parts in rank order are the batch.

        Raises `BatchNotDivisible`: uneven parts would weigh the ranks' mean losses wrongly.
        """
        if global_batch % world:
            raise BatchNotDivisible(f"a global batch of {global_batch} does not split evenly over {world} ranks")
        size = global_batch // world
        return self.batch(consumed + rank * size, size)


def permute(index: int, size: int, key: str) -> int:
    """Where a permutation of range(size), chosen by `key`, sends `index`.

    A balanced Feistel network over the next even number of bits, walked until it falls into the range (at most four
    times the range, so four tries on average at worst).
    """
    half = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    seed = xxhash.xxh3_64_intdigest(key.encode())
    value = index
    while True:
        left, right = value >> half, value & mask
        for round_ in range(_ROUNDS):
            mixed = xxhash.xxh3_64_intdigest(right.to_bytes(8, "little"), seed=(seed + round_) % 2**64)
            left, right = right, left ^ (mixed & mask)
        value = left << half | right
        if value < size:
            return value


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
