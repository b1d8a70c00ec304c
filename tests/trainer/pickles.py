"""Pickles spelled by hand: what no pickler would write, and `.metadata` files of chosen content without torch."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

DCP = "torch.distributed.checkpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class Global:
    """A name in a module."""

    module: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Thing:
    """An object of a class, with the state that it is given (None: none)."""

    of: Global
    state: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What a callable gives for arguments."""

    of: Global | Call
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Raw:
    """Opcodes as they are."""

    code: bytes


def spell(value: Any) -> bytes:
    """A whole pickle of a value, protocol 4."""
    return b"\x80\x04" + code(value) + b"."


def code(value: Any) -> bytes:
    """The opcodes that put a value on the stack."""
    if isinstance(value, Raw):
        return value.code
    if isinstance(value, Global):
        return code(value.module) + code(value.name) + b"\x93"
    if isinstance(value, Thing):
        made = code(value.of) + b")\x81"
        return made if value.state is None else made + code(value.state) + b"b"
    if isinstance(value, Call):
        return code(value.of) + code(value.arguments) + b"R"
    if value is None or isinstance(value, bool):
        return {None: b"N", True: b"\x88", False: b"\x89"}[value]
    if isinstance(value, int):
        data = value.to_bytes((value.bit_length() + 8) // 8, "little", signed=True)
        return b"\x8a" + bytes([len(data)]) + data
    if isinstance(value, str):
        data = value.encode("utf-8", "surrogatepass")
        return b"X" + struct.pack("<I", len(data)) + data
    if isinstance(value, Mapping):
        return b"}(" + b"".join(code(key) + code(inner) for key, inner in value.items()) + b"u"
    if isinstance(value, tuple):
        return b"(" + b"".join(map(code, value)) + b"t"
    return b"](" + b"".join(map(code, value)) + b"e"


# ---------------------------------------------------------------- metadata


def size(*numbers: int) -> Call:
    return Call(of=Global(module="torch", name="Size"), arguments=(numbers,))


def record(name: str, /, **fields: Any) -> Thing:
    return Thing(of=Global(module=f"{DCP}.metadata", name=name), state=fields or None)


def chunk(offsets: Sequence[int], sizes: Sequence[int]) -> Thing:
    return record("ChunkStorageMetadata", offsets=size(*offsets), sizes=size(*sizes))


def tensor(shape: Sequence[int], chunks: Sequence[Thing], dtype: str = "float32") -> Thing:
    properties = Thing(
        of=Global(module=f"{DCP}.metadata", name="TensorProperties"),
        state=(Global(module="torch", name=dtype), None, False, None, False),
    )
    return record("TensorStorageMetadata", properties=properties, size=size(*shape), chunks=list(chunks))


@dataclass(frozen=True, slots=True)
class Place:
    """One entry of storage_data."""

    key: str
    offsets: tuple[int, ...] | None
    path: str
    offset: int
    length: int
    extra: tuple[tuple[str, Any], ...] = ()


def metadata(described: Mapping[str, Any], places: Sequence[Place]) -> bytes:
    """A `.metadata` file."""
    pairs = b"".join(code(_index(place)) + code(_info(place)) for place in places)
    fields = {"state_dict_metadata": described, "storage_data": Raw(b"}(" + pairs + b"u"), "planner_data": None}
    return spell(record("Metadata", **fields))


def _index(place: Place) -> Thing:
    offset = None if place.offsets is None else size(*place.offsets)
    return record("MetadataIndex", fqn=place.key, offset=offset, index=0)


def _info(place: Place) -> Thing:
    fields = {"relative_path": place.path, "offset": place.offset, "length": place.length, **dict(place.extra)}
    return Thing(of=Global(module=f"{DCP}.filesystem", name="_StorageInfo"), state=fields)


def small(path: str = "__0_0.distcp") -> bytes:
    """Of one tensor of 4 numbers in the first 100 bytes of a file."""
    return metadata({"w": tensor([4], [chunk([0], [4])])}, [Place("w", (0,), path, 0, 100)])
