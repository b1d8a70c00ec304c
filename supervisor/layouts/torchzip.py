"""The zip files that torch.save writes: whole by their directory, and read back by the CRC32 of every entry.

A zip may also be a slice of a larger file (one item of a distributed checkpoint). Nothing is unpickled or inflated.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from supervisor.layouts.bulk import OnBytes, read_portions
from supervisor.layouts.tree import Broken, read_at

MAX_DIRECTORY_BYTES = 32 * 1024 * 1024
MAX_ENTRIES = 500_000

_LOCAL, _CENTRAL, _END = b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06"
_LOCATOR_64, _END_64 = b"PK\x06\x07", b"PK\x06\x06"
_END_SIZE, _LOCATOR_SIZE, _END_64_SIZE, _CENTRAL_SIZE, _LOCAL_SIZE = 22, 20, 56, 46, 30
_FULL_32, _FULL_16 = 0xFFFFFFFF, 0xFFFF


@dataclass(frozen=True, slots=True, kw_only=True)
class ZipEntry:
    """One stored entry; `offset` is where its local header starts, within the slice."""

    name: str
    size: int
    crc32: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadResult:
    """What reading a zip back gave: bytes of entries, and how many of them no checksum guards."""

    size: int
    unsealed: int


def is_zip(fd: int, offset: int = 0) -> bool:
    """True when a zip file seems to start there."""
    return read_at(fd, offset, 4) == _LOCAL


def list_entries(fd: int, offset: int, length: int) -> tuple[ZipEntry, ...]:
    """The entries of a zip of exactly `length` bytes; raises Broken when it is cut, damaged or not one of torch's.

    torch.save writes the directory last: it is there, and every entry lies before it, when the file is whole.
    """
    if length < _END_SIZE or not is_zip(fd, offset):
        raise Broken("is not a zip file of torch.save")
    count, size, start = _find_directory(fd, offset, length)
    if count > MAX_ENTRIES or size > MAX_DIRECTORY_BYTES:
        raise Broken(f"its directory is too large ({count} entries, {size} bytes)")
    if start + size > length:
        raise Broken("its directory is cut")
    data = read_at(fd, offset + start, size)
    entries = tuple(_parse_directory(data, count))
    for entry in entries:
        if entry.offset + _LOCAL_SIZE + entry.size > start:
            raise Broken(f"entry {entry.name} lies outside of it")
    return entries


def read_back(fd: int, offset: int, length: int, *, on_bytes: OnBytes = lambda _count: None) -> ReadResult:
    """Every byte of every entry against its CRC32; raises Broken on the first that does not match.

    torch can be told to write no checksums (all are 0 then): such a zip is read, and nothing is proven.
    """
    entries = list_entries(fd, offset, length)
    is_sealed = any(entry.crc32 for entry in entries)
    unsealed = total = 0
    for entry in entries:
        crc = _read_entry(fd, offset, entry, on_bytes)
        total += entry.size
        if not is_sealed:
            unsealed += entry.size
        elif crc != entry.crc32:
            raise Broken(f"entry {entry.name}: CRC32 {crc:08x} instead of {entry.crc32:08x}")
    return ReadResult(size=total, unsealed=unsealed)


def data_start(fd: int, offset: int, entry: ZipEntry) -> int:
    """Where an entry's bytes start in the file; raises Broken without its local header."""
    header = read_at(fd, offset + entry.offset, _LOCAL_SIZE)
    if len(header) < _LOCAL_SIZE or header[:4] != _LOCAL:
        raise Broken(f"entry {entry.name} has no header")
    name_size, extra_size = struct.unpack_from("<HH", header, 26)
    return offset + entry.offset + _LOCAL_SIZE + int(name_size) + int(extra_size)


def _read_entry(fd: int, offset: int, entry: ZipEntry, on_bytes: OnBytes) -> int:
    crc = 0

    def use(portion: memoryview) -> None:
        nonlocal crc
        crc = zlib.crc32(portion, crc)
        on_bytes(len(portion))

    if read_portions(fd, data_start(fd, offset, entry), entry.size, use) < entry.size:
        raise Broken(f"entry {entry.name} is cut")
    return crc


def _find_directory(fd: int, offset: int, length: int) -> tuple[int, int, int]:
    """(entries, bytes, start) of the central directory. torch writes no comment: the end record is the very end."""
    end = read_at(fd, offset + length - _END_SIZE, _END_SIZE)
    if len(end) < _END_SIZE or end[:4] != _END:
        raise Broken("has no end record: it is cut, or still being written")
    count, size, start = struct.unpack_from("<HII", end, 10)
    if count != _FULL_16 and _FULL_32 not in (size, start):
        return count, size, start
    locator_at = length - _END_SIZE - _LOCATOR_SIZE
    locator = read_at(fd, offset + locator_at, _LOCATOR_SIZE) if locator_at >= 0 else b""
    if locator[:4] != _LOCATOR_64:
        raise Broken("has no end record of a large zip")
    (end_64_at,) = struct.unpack_from("<Q", locator, 8)
    if end_64_at + _END_64_SIZE > length:
        raise Broken("its end record lies outside of it")
    end_64 = read_at(fd, offset + end_64_at, _END_64_SIZE)
    if len(end_64) < _END_64_SIZE or end_64[:4] != _END_64:
        raise Broken("has no end record of a large zip")
    count, size, start = struct.unpack_from("<QQQ", end_64, 32)
    return int(count), int(size), int(start)


def _parse_directory(data: bytes, count: int) -> Iterator[ZipEntry]:
    at = 0
    for _ in range(count):
        if data[at : at + 4] != _CENTRAL or at + _CENTRAL_SIZE > len(data):
            raise Broken("its directory is damaged")
        method, crc, packed, size, name_size, extra_size, comment_size = struct.unpack_from("<H4xIIIHHH", data, at + 10)
        (offset,) = struct.unpack_from("<I", data, at + 42)
        name_at = at + _CENTRAL_SIZE
        extra = data[name_at + name_size : name_at + name_size + extra_size]
        name = data[name_at : name_at + name_size].decode("utf-8", "replace")[:200]
        size, packed, offset = _widen(extra, size, packed, offset)
        if method != 0 or packed != size:
            raise Broken(f"entry {name} is compressed: not one of torch.save's")
        yield ZipEntry(name=name, size=size, crc32=crc, offset=offset)
        at = name_at + name_size + extra_size + comment_size


def _widen(extra: bytes, size: int, packed: int, offset: int) -> tuple[int, int, int]:
    """The 64-bit values of an entry of a large zip, which stand in its extra field in a fixed order."""
    if _FULL_32 not in (size, packed, offset):
        return size, packed, offset
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            field = extra[at + 4 : at + 4 + length]
            values = iter(struct.unpack_from(f"<{len(field) // 8}Q", field))
            wide = [next(values, value) if value == _FULL_32 else value for value in (size, packed, offset)]
            return wide[0], wide[1], wide[2]
        at += 4 + length
    return size, packed, offset
