"""Which samples each step trains on: a pure function of the seed and the number of samples consumed so far.

Positions count global samples since the beginning of the run. Position p is sample `permuted(p mod n)` of epoch
`p div n`; each epoch has its own permutation, computed one element at a time, so nothing is stored, and a resumed
run needs one number, whatever its number of ranks. A step takes the next `global_batch` positions and each rank its
contiguous part, so no sample is repeated or skipped when the number of nodes changes.
"""

from __future__ import annotations

import hashlib
import json
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

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


# ---------------------------------------------------------------- what was consumed


class SampleLog:
    """Appends, for each step, which samples this rank consumed: evidence that none was repeated or skipped.

    One JSON object a line: step, samples, and for reading histories with restarts in them, world (ranks in that
    step) and from (name of the checkpoint that this process resumed from, or empty). A line that can't be written
    (full disk) is lost and counted in `lost`; training goes on.
    """

    def __init__(self, path: Path, *, world: int, resumed_from: str = "") -> None:
        self.lost = 0
        self._tail = {"world": world, "from": resumed_from}
        self._stream = _open_append(path)

    def append(self, step: int, samples: Sequence[int]) -> None:
        """Record one finished step."""
        self._write({"step": step, "samples": list(samples), **self._tail})

    def append_loss(self, step: int, loss: float) -> None:
        """Record the mean loss over the whole global batch of one finished step."""
        self._write({"step": step, "loss": loss, **self._tail})

    def close(self) -> None:
        """Close the file."""
        if self._stream is not None:
            self._stream.close()

    def _write(self, record: dict[str, object]) -> None:
        if self._stream is None:
            self.lost += 1
            return
        try:
            self._stream.write(json.dumps(record, separators=(",", ":")).encode() + b"\n")
        except OSError:
            self.lost += 1


def _open_append(path: Path) -> IO[bytes] | None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        stream = path.open("ab", buffering=0)
        if stream.tell():
            stream.write(b"\n")  # ends a line that was cut off by a crash; readers skip empty lines
    except OSError:
        return None
    return stream


def read_log(path: Path) -> list[dict[str, object]]:
    """The records of a log in the order written; lines cut off by a crash are left out. Missing file: none."""
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    return [record for line in lines if (record := _record(line)) is not None]


def _record(line: bytes) -> dict[str, object] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """How a history of consumed samples differs from the order it should have followed."""

    steps: int
    repeated: int
    skipped: int
    wrong_steps: tuple[int, ...]  # first steps whose samples are not those of the order, at most 20

    @property
    def is_clean(self) -> bool:
        """True if every step took exactly its samples."""
        return not (self.repeated or self.skipped or self.wrong_steps)


def audit_samples(history: Iterable[tuple[int, Sequence[int]]], order: SampleOrder, global_batch: int) -> Audit:
    """Compare the surviving history, (step, samples of all ranks) with steps counted from 1, with the order.

    Repeated and skipped count positions of the order over steps 1 to the last one seen.
    """
    taken = {step: sorted(samples) for step, samples in history}
    last = max(taken, default=0)
    repeated = skipped = 0
    wrong: list[int] = []
    for step in range(1, last + 1):
        wanted = sorted(order.batch((step - 1) * global_batch, global_batch))
        got = taken.get(step, [])
        if got == wanted:
            continue
        wrong.append(step)
        skipped += len(_minus(wanted, got))
        repeated += len(_minus(got, wanted))
    return Audit(steps=last, repeated=repeated, skipped=skipped, wrong_steps=tuple(wrong[:20]))


def _minus(left: Sequence[int], right: Sequence[int]) -> list[int]:
    return list((Counter(left) - Counter(right)).elements())
