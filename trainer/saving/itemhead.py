"""The head of an item as `zipimage` lays it out: where its raw bytes lie, found in one small read. Pure; no torch.

The slot's entry is the last one of the zip, so that everything before it is read with the head; the directory at the
end repeats what is known by then. Other zips, torch's own among them, are refused: their headers name no sizes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

HEAD_BYTES = 2048  # more than all that lies before the slot, but for its padding

_HEADER = struct.Struct("<4sHHHHHIIIHH")
_LOCAL = b"PK\x03\x04"
_FULL_32 = 0xFFFFFFFF
_ZIP_64_FIELD = 1
_PICKLE, _STORAGE = "data.pkl", "data/0"
_CONSTANT = {"byteorder": b"little", "version": b"3\n"}


class NotAnItem(ValueError):
    """These bytes are not the head of an item of ours; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """`pickle`: of a tensor, else None. `data_at`: where the slot begins in the item, `size` and `crc` of its bytes."""

    pickle: bytes | None
    data_at: int
    size: int
    crc: int


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    size: int
    crc: int
    data_at: int


def parse_head(head: bytes, length: int) -> Head:
    """What the first bytes (`HEAD_BYTES`, or all) of an item of `length` bytes say. Raises `NotAnItem`."""
    at, pickled = 0, None
    while True:
        entry = _parse_entry(head, at)
        if entry.data_at + entry.size > length:
            raise NotAnItem(f"{entry.name} lies outside of it")
        is_slot = entry.name == _STORAGE or (entry.name == _PICKLE and at > 0)
        if is_slot:
            return Head(pickle=pickled, data_at=entry.data_at, size=entry.size, crc=entry.crc)
        data = head[entry.data_at : entry.data_at + entry.size]
        if entry.name == _PICKLE:
            pickled = data
        elif _CONSTANT.get(entry.name) != data:
            raise NotAnItem(f"{entry.name!r} is not as it is written here")
        at = entry.data_at + entry.size


def _parse_entry(head: bytes, at: int) -> _Entry:
    if at + _HEADER.size > len(head):
        raise NotAnItem("it is cut, or too long before its data")
    magic, _, flags, method, _, _, crc, packed, size, name_size, extra_size = _HEADER.unpack_from(head, at)
    if magic != _LOCAL or flags or method or packed != size:
        raise NotAnItem("it has no header of a stored entry")
    name_at = at + _HEADER.size
    name = head[name_at : name_at + name_size].decode("utf-8", "replace").partition("/")[2]
    extra_at = name_at + name_size
    if size == _FULL_32:
        size = _parse_wide(head, extra_at)
    return _Entry(name=name[:80], size=size, crc=crc, data_at=extra_at + extra_size)


def _parse_wide(head: bytes, at: int) -> int:
    if at + 20 > len(head):
        raise NotAnItem("it is cut")
    kind, length, size, packed = struct.unpack_from("<HHQQ", head, at)
    if (kind, length) != (_ZIP_64_FIELD, 16) or packed != size:
        raise NotAnItem("it does not say how large it is")
    return int(size)
