"""Renders `.metadata`: the keys of the state, and in which file and where each piece of it lies.

The types are torch's own, since any reader of distributed checkpoints unpickles them. The bytes are the same for equal
plans: the pickle remembers objects by identity, so equal ones are made one first.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from trainer.saving.structure import Held

METADATA_NAME = ".metadata"
_FORMAT_VERSION = "1.0.0"  # of the DCP format
_PROTOCOL = 4


@dataclass(frozen=True, slots=True)
class Place:
    """Where one held piece lies."""

    held: Held
    file: str
    offset: int
    length: int


def render_metadata(held: Iterable[Held], places: Iterable[Place]) -> bytes:
    """The bytes of `.metadata` for the pieces at `places`; keys come in the order of `held`, which may repeat them."""
    one = _Canon()
    keys: dict[str, Any] = {}
    paths: dict[str, tuple[str, ...]] = {}
    for item in held:
        if item.key not in keys:
            key = one.text(item.key)
            keys[key] = _storage_type(item)
            paths[key] = tuple(map(one.text, item.path))
    stored: dict[MetadataIndex, _StorageInfo] = {}
    for place in places:
        key = one.text(place.held.key)
        index = MetadataIndex(key)
        if place.held.offsets is not None:
            chunks = keys[key].chunks
            index = MetadataIndex(key, torch.Size(place.held.offsets), len(chunks))
            chunks.append(
                ChunkStorageMetadata(offsets=torch.Size(place.held.offsets), sizes=torch.Size(place.held.sizes))
            )
        stored[index] = _StorageInfo(one.text(place.file), place.offset, place.length)
    metadata = Metadata(keys, planner_data=paths, storage_data=stored)
    if "version" in {field.name for field in fields(metadata)}:  # not in older versions of torch
        metadata.version = _FORMAT_VERSION
    return pickle.dumps(metadata, protocol=_PROTOCOL)


def _storage_type(item: Held) -> BytesStorageMetadata | TensorStorageMetadata:
    if item.offsets is None:
        return BytesStorageMetadata()
    properties = TensorProperties(dtype=getattr(torch, item.dtype), requires_grad=item.requires_grad)
    return TensorStorageMetadata(properties=properties, size=torch.Size(item.shape), chunks=[])


class _Canon:
    """Makes equal strings the same object."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}

    def text(self, value: str) -> str:
        return self._known.setdefault(value, value)
