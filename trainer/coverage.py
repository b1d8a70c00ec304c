"""Whether the bytes in the files cover what the metadata describes: no hole, no overlap, nothing outside. Pure."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import product

from trainer.metadata import ITEM_BYTES, Chunk, Entry, Metadata, Tensor

MAX_CORNERS = 64_000_000  # of all chunks together: bounds the time that a strange shape may take


class NotCovered(ValueError):
    """Something that the metadata describes does not lie in the files; the message names it."""


def check_coverage(metadata: Metadata, sizes: Mapping[str, int]) -> None:
    """Raise `NotCovered` unless each tensor and each other key is there as a whole.

    `sizes`: bytes of each file by the path that the metadata gives it. Needs time in proportion to what is listed.
    """
    _check_files(metadata.entries, sizes)
    by_key: dict[str, list[Entry]] = defaultdict(list)
    for entry in metadata.entries:
        by_key[entry.key].append(entry)
    for key, tensor in metadata.tensors.items():
        check_tiling(key, tensor)
        _check_entries(key, tensor, by_key.get(key, ()))
    for key in metadata.byte_keys:
        count = len(by_key.get(key, ()))
        if count != 1:
            raise NotCovered(f"{_show(key)} has {count} entries instead of one")


def _check_files(entries: Iterable[Entry], sizes: Mapping[str, int]) -> None:
    by_path: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        by_path[entry.path].append(entry)
    for path, inside in by_path.items():
        if path not in sizes:
            raise NotCovered(f"{_show(path)} is missing")
        inside.sort(key=lambda entry: entry.offset)
        end = 0
        for entry in inside:
            if entry.offset < end and entry.length:
                raise NotCovered(f"{_show(path)}: {_show(entry.key)} lies over another item")
            end = max(end, entry.offset + entry.length)
        if end > sizes[path]:
            raise NotCovered(f"{_show(path)} has {sizes[path]} bytes, {end} are needed")


def _check_entries(key: str, tensor: Tensor, entries: Sequence[Entry]) -> None:
    origin = (0,) * len(tensor.size)
    lengths: dict[tuple[int, ...], Entry] = {}
    for entry in entries:
        place = origin if entry.offsets is None else entry.offsets
        if place in lengths:
            raise NotCovered(f"{_show(key)} has two entries for its part at {list(place)}")
        lengths[place] = entry
    for chunk in tensor.chunks:
        wanted = math.prod(chunk.sizes) * ITEM_BYTES[tensor.dtype]
        found = lengths.get(chunk.offsets)
        if found is None and wanted:
            raise NotCovered(f"{_show(key)}: its part at {list(chunk.offsets)} lies in no file")
        if found is not None and found.is_plain and found.length < wanted:
            raise NotCovered(f"{_show(key)}: its part at {list(chunk.offsets)} has {found.length} bytes of {wanted}")


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
    if len(tensor.chunks) << len(axes) > MAX_CORNERS:
        raise NotCovered(f"{_show(key)} is cut in too many ways to be checked")
    corners: Counter[tuple[int, ...]] = Counter()
    for chunk in tensor.chunks:
        _add_corners(corners, [(chunk.offsets[axis], chunk.offsets[axis] + chunk.sizes[axis]) for axis in axes], 1)
    _add_corners(corners, [(0, tensor.size[axis]) for axis in axes], -1)
    if any(corners.values()):
        raise NotCovered(f"{_show(key)}: its parts leave a hole, or lie over each other")


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
