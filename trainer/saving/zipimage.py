"""Lays out a rank's file of a distributed checkpoint: one zip per item, as torch.save would write it. Pure; no torch.

Each item is a zip of stored entries with its directory at the end. All that can be known before a save is known here:
headers, directories and the pickle that says how a tensor's bytes are to be seen. What a save adds are the bytes in
the slots and their CRC32, which stands twice: in the local header and in the directory.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from trainer.saving.image import ALIGNMENT, Image, Slot

LARGE_BYTES = 64 * 1024  # from here on a slot begins at a multiple of ALIGNMENT
SMALL_ALIGNMENT = 64

_ARCHIVE = "archive"
_LOCAL, _CENTRAL, _END = b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06"
_END_64, _LOCATOR_64 = b"PK\x06\x06", b"PK\x06\x07"
_VERSION_PLAIN, _VERSION_64 = 20, 45
_DOS_DATE = 0x21  # 1980-01-01: the same bytes for every save
_FULL_32 = 0xFFFFFFFF
_ZIP_64_FIELD = 1
_PADDING_FIELD = 0x4246  # "FB": what torch itself pads with
_LOCAL_CRC_AT, _CENTRAL_CRC_AT = 14, 16

# A pickle of bytes with their count in eight bytes; what follows its end is never looked at.
_BYTES_HEAD = b"\x80\x04\x8e"
_BYTES_END = b"."
_BYTES_OVERHEAD = len(_BYTES_HEAD) + 8 + len(_BYTES_END)
_MIN_SLACK_BYTES = 1024


class NotBytes(ValueError):
    """The pickle of a byte item is not of the one form that is written here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One item to lay out.

    `pickle`: of a tensor, what its `data.pkl` holds, and `size` counts its raw bytes. None for a byte item, whose
    `size` is the capacity of its pickle (see `choose_capacity`).
    """

    pickle: bytes | None
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """Where one item lies in the file; `slot` is None when it has no bytes (an empty tensor)."""

    offset: int
    length: int
    slot: Slot | None


@dataclass(frozen=True, slots=True)
class _Entry:
    """One entry of a zip; `data` is None for the slot."""

    name: str
    size: int
    data: bytes | None


def lay_out(name: str, pieces: Iterable[Piece]) -> tuple[Image, tuple[Extent, ...]]:
    """The image of a file that holds the pieces one after the other, and the extent of each. No pieces: size 0."""
    frame: list[tuple[int, bytes]] = []
    extents: list[Extent] = []
    pending, pending_at = bytearray(), 0
    at = 0
    for piece in pieces:
        begin = at
        head, slot_at, tail, crc_at = _lay_out_item(piece, begin)
        pending += head
        slot = None
        if piece.size:
            slot = Slot(offset=slot_at, size=piece.size, crc_at=crc_at)
            frame.append((pending_at, bytes(pending)))
            pending, pending_at = bytearray(), slot_at + piece.size
        pending += tail
        at = slot_at + piece.size + len(tail)
        extents.append(Extent(offset=begin, length=at - begin, slot=slot))
    if pending:
        frame.append((pending_at, bytes(pending)))
    slots = tuple(extent.slot for extent in extents if extent.slot is not None)
    signature = _sign(name, at, slots, frame)
    return Image(name=name, size=at, slots=slots, frame=tuple(frame), signature=signature), tuple(extents)


def _sign(name: str, size: int, slots: Sequence[Slot], frame: Sequence[tuple[int, bytes]]) -> str:
    digest = hashlib.blake2b(f"{name} {size}".encode(), digest_size=16)
    for slot in slots:
        digest.update(f" {slot.offset} {slot.size} {slot.crc_at}".encode())
    for at, data in frame:
        digest.update(f" {at} {len(data)} ".encode())
        digest.update(data)
    return digest.hexdigest()


# ---------------------------------------------------------------- checksums


def fill_checksums(buffer: memoryview, image: Image) -> None:
    """Write the CRC32 of each slot of a whole image in memory to where it belongs."""
    for slot in image.slots:
        patch_checksum(buffer, slot, zlib.crc32(buffer[slot.offset : slot.offset + slot.size]))


def patch_checksum(buffer: memoryview, slot: Slot, crc: int) -> None:
    """Write one slot's CRC32 to where it belongs in a whole image in memory."""
    for at in slot.crc_at:
        struct.pack_into("<I", buffer, at, crc)


# ---------------------------------------------------------------- byte items


def choose_capacity(size: int) -> int:
    """Bytes to reserve for the pickle of `size` bytes that may be more or fewer in later saves."""
    needed = size + _BYTES_OVERHEAD + max(size // 2, _MIN_SLACK_BYTES)
    return -(-needed // SMALL_ALIGNMENT) * SMALL_ALIGNMENT


def fits(data: bytes, capacity: int) -> bool:
    """True when `render_bytes` has room for these."""
    return len(data) + _BYTES_OVERHEAD <= capacity


def render_bytes(data: bytes, capacity: int) -> bytes:
    """The slot of a byte item: the pickle of `data`, filled up with zeros. Raises ValueError when there is no room."""
    if not fits(data, capacity):
        raise ValueError(f"{len(data)} bytes do not fit into {capacity}")
    return b"".join((_BYTES_HEAD, len(data).to_bytes(8, "little"), data, _BYTES_END)).ljust(capacity, b"\0")


def parse_bytes(pickled: bytes) -> bytes:
    """What `render_bytes` was given; raises NotBytes for any other pickle."""
    begin = len(_BYTES_HEAD) + 8
    end = begin + int.from_bytes(pickled[len(_BYTES_HEAD) : begin], "little")
    if not pickled.startswith(_BYTES_HEAD) or pickled[end : end + 1] != _BYTES_END:
        raise NotBytes("not the pickle of bytes")
    return pickled[begin:end]


# ---------------------------------------------------------------- one zip


def _lay_out_item(piece: Piece, begin: int) -> tuple[bytes, int, bytes, tuple[int, ...]]:
    """(bytes before the slot, the slot's offset in the file, bytes after it, where the CRC32 of the slot goes).

    The slot's entry is the last one: all headers lie below 4 GiB then, however large the tensor is.
    """
    entries = [_Entry(f"{_ARCHIVE}/byteorder", 6, b"little"), _Entry(f"{_ARCHIVE}/version", 2, b"3\n")]
    if piece.pickle is None:
        entries.append(_Entry(f"{_ARCHIVE}/data.pkl", piece.size, None))
    else:
        entries.insert(0, _Entry(f"{_ARCHIVE}/data.pkl", len(piece.pickle), piece.pickle))
        entries.append(_Entry(f"{_ARCHIVE}/data/0", piece.size, None))
    head = bytearray()
    offsets = []
    for entry in entries:
        offsets.append(len(head))
        head += _render_local(entry, begin + len(head))
        head += entry.data or b""
    directory, crc_in_directory = _render_directory(entries, offsets)
    slot_at = begin + len(head)
    directory_at = len(head) + piece.size
    tail = directory + _render_end(len(entries), len(directory), directory_at)
    crc_at = (begin + offsets[-1] + _LOCAL_CRC_AT, begin + directory_at + crc_in_directory)
    return bytes(head), slot_at, tail, crc_at


def _render_local(entry: _Entry, at: int) -> bytes:
    name = entry.name.encode()
    extra = b""
    stored = entry.size
    if entry.size >= _FULL_32:
        extra, stored = struct.pack("<HHQQ", _ZIP_64_FIELD, 16, entry.size, entry.size), _FULL_32
    if entry.data is None:
        extra += _padding(at + 30 + len(name) + len(extra), entry.size)
    crc = zlib.crc32(entry.data or b"")
    version = _VERSION_64 if stored == _FULL_32 else _VERSION_PLAIN
    header = struct.pack(
        "<4sHHHHHIIIHH", _LOCAL, version, 0, 0, 0, _DOS_DATE, crc, stored, stored, len(name), len(extra)
    )
    return header + name + extra


def _padding(data_at: int, size: int) -> bytes:
    alignment = ALIGNMENT if size >= LARGE_BYTES else SMALL_ALIGNMENT
    missing = -data_at % alignment
    if missing == 0:
        return b""
    if missing < 4:
        missing += alignment
    return struct.pack("<HH", _PADDING_FIELD, missing - 4).ljust(missing, b"\0")


def _render_directory(entries: Sequence[_Entry], offsets: Sequence[int]) -> tuple[bytes, int]:
    """The central directory, and where in it the CRC32 of the last entry stands."""
    records = list(_directory_records(entries, offsets))
    return b"".join(records), sum(map(len, records[:-1])) + _CENTRAL_CRC_AT


def _directory_records(entries: Sequence[_Entry], offsets: Sequence[int]) -> Iterator[bytes]:
    for entry, offset in zip(entries, offsets, strict=True):
        name = entry.name.encode()
        extra, stored, version = b"", entry.size, _VERSION_PLAIN
        if entry.size >= _FULL_32:
            extra = struct.pack("<HHQQ", _ZIP_64_FIELD, 16, entry.size, entry.size)
            stored, version = _FULL_32, _VERSION_64
        crc = zlib.crc32(entry.data or b"")
        fields = (version, version, 0, 0, 0, _DOS_DATE, crc, stored, stored, len(name), len(extra), 0, 0, 0, 0, offset)
        yield struct.pack("<4sHHHHHHIIIHHHHHII", _CENTRAL, *fields) + name + extra


def _render_end(count: int, size: int, start: int) -> bytes:
    if start < _FULL_32:
        return struct.pack("<4sHHHHIIH", _END, 0, 0, count, count, size, start, 0)
    end_64 = struct.pack("<4sQHHIIQQQQ", _END_64, 44, _VERSION_64, _VERSION_64, 0, 0, count, count, size, start)
    locator = struct.pack("<4sIQI", _LOCATOR_64, 0, start + size, 1)
    return end_64 + locator + struct.pack("<4sHHHHIIH", _END, 0, 0, count, count, size, _FULL_32, 0)
