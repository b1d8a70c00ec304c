"""What a rank's file looks like, byte for byte, before anything is copied into it. Pure; no torch.

An image is planned once and used for every save until the state changes its structure: only the bytes in the slots,
and the checksums of them, differ from save to save.
"""

from __future__ import annotations

from dataclasses import dataclass

ALIGNMENT = 4096  # of large slots: what direct I/O and page protection work in


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """Where the raw bytes of one item lie in the file.

    `crc_at`: offsets in the file where the CRC32 (little-endian) of these bytes stands; empty when the bytes are an
    item of their own with its checksums in it.
    """

    offset: int
    size: int
    crc_at: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """One file: its slots in order of offset, and the constant bytes around them as (offset, bytes).

    `signature` is equal for equal layouts: whoever has this image needs nothing new.
    """

    name: str
    size: int
    slots: tuple[Slot, ...]
    frame: tuple[tuple[int, bytes], ...]
    signature: str
