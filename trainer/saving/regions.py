"""Which bytes of a saved chunk go where in a tensor of this rank: resharding, as ranges of a file.

Most are read straight into the tensor's memory. What lies otherwise there (sharded over another dimension, other order
of dimensions, another device) is read in blocks and copied.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from trainer.format.metadata import Chunk, Entry
from trainer.saving.itemhead import Head, NotAnItem
from trainer.saving.pickles import MAX_PERMUTED_DIMENSIONS, dense_stride, pickle_tensor

LONG_ROW_BYTES = 64 * 1024  # rows from here on are read one by one where only a part of each is wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The part of a tensor that this rank holds: at `offsets` of the whole one, and its memory."""

    key: str
    offsets: tuple[int, ...]
    local: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """What a saved chunk and a target have in common: from `begin` on in the chunk, and `into` in the target."""

    entry: Entry
    dtype: str
    sizes: tuple[int, ...]
    begin: tuple[int, ...]
    into: torch.Tensor


@dataclass(frozen=True, slots=True)
class Read:
    """A range of an item, and where it goes: into memory as it is, or to `take` as a tensor of bytes in passing."""

    offset: int
    size: int
    memory: memoryview | None
    take: Callable[[torch.Tensor], None] | None = None


def intersect(chunk: Chunk, entry: Entry, dtype: str, target: Target) -> Box | None:
    """What they have in common, None if there is nothing."""
    begin, into = [], target.local
    for dim, (saved_at, saved, at, size) in enumerate(
        zip(chunk.offsets, chunk.sizes, target.offsets, target.local.shape, strict=True)
    ):
        first, last = max(saved_at, at), min(saved_at + saved, at + size)
        if first >= last:
            return None
        begin.append(first - saved_at)
        into = into.narrow(dim, first - at, last - first)
    return Box(entry=entry, dtype=dtype, sizes=chunk.sizes, begin=tuple(begin), into=into)


def plan_reads(box: Box, head: Head, block_bytes: int) -> Iterator[Read]:
    """The ranges to read for a box, in order, as offsets in its item; blocks in passing have at most `block_bytes`.

    Raises `NotAnItem` when the item's head does not describe the chunk of the metadata.
    """
    order = _order_of(box, head)
    sizes, begin = [box.sizes[dim] for dim in order], [box.begin[dim] for dim in order]
    return _plan(box.into.permute(order), sizes, begin, head.data_at, box.into.itemsize, block_bytes)


def _order_of(box: Box, head: Head) -> tuple[int, ...]:
    if head.pickle is None or head.size != math.prod(box.sizes) * box.into.itemsize:
        raise NotAnItem("it does not hold the tensor that the metadata names")
    order = _orders(box.dtype, box.sizes).get(head.pickle)
    if order is None and len(box.sizes) <= MAX_PERMUTED_DIMENSIONS:
        order = _all_orders(box.dtype, box.sizes).get(head.pickle)
    if order is None:
        raise NotAnItem("it holds another kind of tensor than the metadata names")
    return order


@lru_cache(maxsize=4096)
def _orders(dtype: str, sizes: tuple[int, ...]) -> dict[bytes, tuple[int, ...]]:
    order = tuple(range(len(sizes)))
    return {pickle_tensor(dtype, sizes, dense_stride(sizes, order)): order}


@lru_cache(maxsize=64)
def _all_orders(dtype: str, sizes: tuple[int, ...]) -> dict[bytes, tuple[int, ...]]:
    orders = itertools.permutations(range(len(sizes)))
    return {pickle_tensor(dtype, sizes, dense_stride(sizes, order)): order for order in orders}


def _plan(
    into: torch.Tensor, sizes: Sequence[int], begin: Sequence[int], at: int, itemsize: int, block_bytes: int
) -> Iterator[Read]:
    """Reads for a box of a plain array of `sizes` that lies at `at`."""
    if not sizes:
        yield _read_one(into, at, itemsize)
        return
    row_bytes = math.prod(sizes[1:]) * itemsize
    at += begin[0] * row_bytes
    if list(into.shape[1:]) == list(sizes[1:]) and _is_memory(into):
        yield Read(at, into.size(0) * row_bytes, view_bytes(into))
    elif into.size(0) == 1 or row_bytes >= LONG_ROW_BYTES:
        for row in range(into.size(0)):
            yield from _plan(into[row], sizes[1:], begin[1:], at + row * row_bytes, itemsize, block_bytes)
    else:
        rows = block_bytes // row_bytes
        for first in range(0, into.size(0), rows):
            part = into[first : first + rows]
            take = _taker(part, tuple(sizes[1:]), tuple(begin[1:]))
            yield Read(at + first * row_bytes, part.size(0) * row_bytes, None, take)


def _read_one(into: torch.Tensor, at: int, itemsize: int) -> Read:
    if _is_memory(into):
        return Read(at, itemsize, view_bytes(into))
    return Read(at, itemsize, None, lambda raw: _copy(into, raw.view(into.dtype).view(())))


def _taker(part: torch.Tensor, row: tuple[int, ...], begin: tuple[int, ...]) -> Callable[[torch.Tensor], None]:
    def take(raw: torch.Tensor) -> None:
        block = raw.view(part.dtype).view(part.size(0), *row)
        for dim, first in enumerate(begin, start=1):
            block = block.narrow(dim, first, part.size(dim))
        _copy(part, block)

    return take


def _copy(into: torch.Tensor, block: torch.Tensor) -> None:
    with torch.no_grad():
        into.copy_(block)


def _is_memory(into: torch.Tensor) -> bool:
    return into.device.type == "cpu" and into.is_contiguous() and not into.is_conj() and not into.is_neg()


def view_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor; it must be kept alive meanwhile."""
    size = tensor.numel() * tensor.itemsize
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")
