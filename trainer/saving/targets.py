"""What a checkpoint is loaded into: the tensors of this rank's state, held against what the metadata describes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from trainer.format.metadata import Chunk, Entries, Metadata, Tensor
from trainer.saving.regions import Box, Target, intersect
from trainer.saving.structure import flatten, join_paths, local_tensor, name_oddity

Boxes = Mapping[str, list[Box]]


class Mismatch(ValueError):
    """The checkpoint holds another state than the one it is to be loaded into; `problems` name the keys."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(problems))


def find_boxes(metadata: Metadata, state: Mapping[str, Any]) -> Boxes:
    """What this rank has to read, by file. Raises `Mismatch`."""
    boxes: dict[str, list[Box]] = defaultdict(list)
    problems = []
    _, leaves = flatten(state)
    for key, leaf in zip(join_paths(state), leaves, strict=True):
        problem = _compare(metadata, key, leaf)
        if problem:
            problems.append(f"{key}: {problem}")
        elif isinstance(leaf, torch.Tensor):
            for box in _boxes_of(metadata.tensors[key], metadata.entries, _target(key, leaf)):
                boxes[box.entry.path].append(box)
    if problems:
        raise Mismatch(problems)
    return boxes


def _compare(metadata: Metadata, key: str, leaf: Any) -> str:
    if isinstance(leaf, bytes):
        return "" if key in metadata.byte_keys else "it holds no such bytes"
    if not isinstance(leaf, torch.Tensor):
        return f"a {type(leaf).__name__} can't be loaded"
    if name_oddity(local_tensor(leaf)):
        return f"a {name_oddity(local_tensor(leaf))} tensor can't be loaded"
    saved = metadata.tensors.get(key)
    if saved is None:
        return "it holds no such tensor"
    if saved.size != tuple(leaf.shape):
        return f"its shape is {list(saved.size)}, here it is {list(leaf.shape)}"
    dtype = str(leaf.dtype).removeprefix("torch.")
    return "" if saved.dtype == dtype else f"its type is {saved.dtype}, here it is {dtype}"


def _target(key: str, leaf: torch.Tensor) -> Target | None:
    local = local_tensor(leaf).detach()
    if not isinstance(leaf, DTensor):
        return Target(key=key, offsets=(0,) * leaf.dim(), local=local)
    if leaf.device_mesh.get_coordinate() is None:
        return None  # of a mesh that this rank is not part of
    (chunk,) = leaf.__create_chunk_list__()  # type: ignore[no-untyped-call]
    return Target(key=key, offsets=tuple(chunk.offsets), local=local)


def _boxes_of(saved: Tensor, entries: Entries, target: Target | None) -> list[Box]:
    if target is None:
        return []
    found = []
    numbers = {entries.places[number]: number for number in entries.numbers_of(target.key)}
    for chunk in _near(saved, target):
        number = numbers.get(chunk.offsets)  # an empty chunk need not lie anywhere
        box = None if number is None else intersect(chunk, entries[number], saved.dtype, target)
        if box is not None:
            found.append(box)
    return found


def _near(saved: Tensor, target: Target) -> Iterable[Chunk]:
    """Those that may have something in common with the target: of thousands most lie in other rows."""
    if not saved.size:
        return saved.chunks
    begin = target.offsets[0]
    end = begin + target.local.shape[0]
    return (chunk for chunk in saved.chunks if chunk.offsets[0] < end and chunk.offsets[0] + chunk.sizes[0] > begin)
