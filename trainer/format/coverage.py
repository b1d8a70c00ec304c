"""Whether the bytes in the files cover what the metadata describes: no hole, no overlap, nothing outside. Pure."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import product

from trainer.format.entries import Chunk, Entries, group
from trainer.format.metadata import ITEM_BYTES, Metadata, Tensor

MAX_CORNERS = 64_000_000  # of all chunks together: bounds the time that a strange shape may take


class NotCovered(ValueError):
    """Something that the metadata describes does not lie in the files; the message names it."""


def check_coverage(metadata: Metadata, sizes: Mapping[str, int]) -> None:
    """Raise `NotCovered` unless each tensor and each other key is there as a whole.

    `sizes`: bytes of each file by the path that the metadata gives it. Needs time in proportion to what is listed.
    """
    entries = metadata.entries
    _check_files(entries, sizes)
    tiled: set[tuple[tuple[int, ...], bytes]] = set()
    for key, tensor in metadata.tensors.items():
        # Most tensors are cut like others, and equal boxes of one file are mostly one object.
        pattern = tensor.size, array("q", map(id, tensor.chunks)).tobytes()
        if pattern not in tiled:
            check_tiling(key, tensor)
            tiled.add(pattern)
        _check_entries(key, tensor, entries)
    for key in metadata.byte_keys:
        count = len(entries.numbers_of(key))
        if count != 1:
            raise NotCovered(f"{_show(key)} has {count} entries instead of one")


def _check_files(entries: Entries, sizes: Mapping[str, int]) -> None:
    offsets, lengths = entries.offsets, entries.lengths
    for path, numbers in group(entries.paths).items():
        if path not in sizes:
            raise NotCovered(f"{_show(path)} is missing")
        end = 0
        for number in sorted(numbers, key=offsets.__getitem__):
            offset, length = offsets[number], lengths[number]
            if offset < end and length:
                raise NotCovered(f"{_show(path)}: {_show(entries.keys[number])} lies over another item")
            end = max(end, offset + length)
        if end > sizes[path]:
            raise NotCovered(f"{_show(path)} has {sizes[path]} bytes, {end} are needed")


def _check_entries(key: str, tensor: Tensor, entries: Entries) -> None:
    origin = (0,) * len(tensor.size)
    found: dict[tuple[int, ...], int] = {}
    for number in entries.numbers_of(key):
        place = entries.places[number]
        if place is None:
            place = origin
        if place in found:
            raise NotCovered(f"{_show(key)} has two entries for its part at {list(place)}")
        found[place] = number
    item_bytes, lengths, packed = ITEM_BYTES[tensor.dtype], entries.lengths, entries.packed
    for chunk in tensor.chunks:
        wanted = math.prod(chunk.sizes) * item_bytes
        at = found.get(chunk.offsets)
        if at is None:
            if wanted:
                raise NotCovered(f"{_show(key)}: its part at {list(chunk.offsets)} lies in no file")
        elif lengths[at] < wanted and at not in packed:
            raise NotCovered(f"{_show(key)}: its part at {list(chunk.offsets)} has {lengths[at]} bytes of {wanted}")


# ---------------------------------------------------------------- boxes


def check_tiling(key: str, tensor: Tensor) -> None:
    """Raise `NotCovered` unless the chunks fill the tensor exactly, in whatever pattern.

    A box is a signed sum of its corners (each standing for all that lies beyond it), and in only one way. So boxes
    fill another one without hole and overlap exactly when their corners cancel out to its corners.
    """
    for chunk in tensor.chunks:
        _check_inside(key, tensor.size, chunk)
    if not math.prod(tensor.size):
        return
    axes = [axis for axis in range(len(tensor.size)) if _is_split(tensor, axis)]
    if not (_abut(tensor, axes[0]) if len(axes) == 1 else _cancel(key, tensor, axes)):
        raise NotCovered(f"{_show(key)}: its parts leave a hole, or lie over each other")


def _abut(tensor: Tensor, axis: int) -> bool:
    """True when the parts follow each other from end to end of an axis, the only one along which it is cut."""
    end = 0
    for first, count in sorted((chunk.offsets[axis], chunk.sizes[axis]) for chunk in tensor.chunks):
        if not count:
            continue
        if first != end:
            return False
        end = first + count
    return end == tensor.size[axis]


def _cancel(key: str, tensor: Tensor, axes: Sequence[int]) -> bool:
    if len(tensor.chunks) << len(axes) > MAX_CORNERS:
        raise NotCovered(f"{_show(key)} is cut in too many ways to be checked")
    corners: Counter[tuple[int, ...]] = Counter()
    for chunk in tensor.chunks:
        _add_corners(corners, [(chunk.offsets[axis], chunk.offsets[axis] + chunk.sizes[axis]) for axis in axes], 1)
    _add_corners(corners, [(0, tensor.size[axis]) for axis in axes], -1)
    return not any(corners.values())


def _check_inside(key: str, size: tuple[int, ...], chunk: Chunk) -> None:
    is_box = len(chunk.offsets) == len(chunk.sizes) == len(size)
    if not is_box or any(at + count > end for at, count, end in zip(chunk.offsets, chunk.sizes, size, strict=True)):
        raise NotCovered(f"{_show(key)}: its part at {list(chunk.offsets)} is no part of it")


def _is_split(tensor: Tensor, axis: int) -> bool:
    return any(chunk.sizes[axis] != tensor.size[axis] for chunk in tensor.chunks)


def _add_corners(corners: Counter[tuple[int, ...]], box: Sequence[tuple[int, int]], sign: int) -> None:
    for ends in product((0, 1), repeat=len(box)):
        corner = tuple(side[end] for side, end in zip(box, ends, strict=True))
        corners[corner] += sign if sum(ends) % 2 == 0 else -sign


def _show(name: str) -> str:
    """A name of any origin, for a message."""
    return name[:200].encode("utf-8", "replace").decode()
