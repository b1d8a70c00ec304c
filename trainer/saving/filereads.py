"""Reads ranges of one file to where they belong, and, where asked to, takes the checksum of the whole file meanwhile.

Each byte is read once: what is wanted goes straight to its place and into the checksum from there, while it is still
in the processor's cache; what is not wanted only passes by when the checksum needs it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import xxhash

from trainer.contract import ManifestFile
from trainer.saving.itemhead import HEAD_BYTES, NotAnItem, parse_head
from trainer.saving.regions import Box, Read, plan_reads, view_bytes

BLOCK_BYTES = 2 * 1024 * 1024  # at a time: small enough to stay in the cache between reading and summing
SMALL_BYTES = 128 * 1024  # items up to this are read together
MAX_GAP_BYTES = 16 * 1024  # between two of them
_ALIGNMENT = 64  # of items' data: blocks keep it in memory, so that they can be seen as any type


class Damaged(ValueError):
    """The file is not what the manifest says; the message says how, as in "has 3 bytes"."""


class OpenFile:
    """One open file of a checkpoint. Raises Damaged if its size is not the manifest's, and OSError."""

    def __init__(self, fd: int, expected: ManifestFile, on_bytes: Callable[[int], None]) -> None:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise Damaged("is no file")
        size = status.st_size
        if size != expected.size_bytes:
            raise Damaged(f"has {size} bytes, its manifest says {expected.size_bytes}")
        self._fd = fd
        self._expected = expected
        self._on_bytes = on_bytes

    def read(self, offset: int, size: int) -> bytes:
        """Exactly so many bytes."""
        data = bytearray(size)
        self._fill(memoryview(data), offset)
        return bytes(data)

    def read_boxes(self, boxes: Sequence[Box], scratch: Scratch, *, is_checked: bool) -> None:
        """Read all boxes to where they belong; `is_checked`: compare the checksum of the whole file, too."""
        digest = xxhash.xxh3_128() if is_checked else None
        at = 0
        for read in self._reads(boxes):
            if digest is not None:
                self._pass_by(at, read.offset, scratch, digest)
            self._do(read, scratch, digest)
            at = read.offset + read.size
        if digest is not None:
            self._pass_by(at, self._expected.size_bytes, scratch, digest)
            if digest.hexdigest() != self._expected.xxh3_128:
                raise Damaged("does not match its checksum")

    def _reads(self, boxes: Sequence[Box]) -> Iterator[Read]:
        for run in _runs(sorted(boxes, key=lambda box: box.entry.offset)):
            if len(run) > 1 or run[0].entry.length <= SMALL_BYTES:
                first, last = run[0].entry, run[-1].entry
                yield Read(first.offset, last.offset + last.length - first.offset, None, _taker(run))
            else:
                yield from self._reads_of_one(run[0])

    def _reads_of_one(self, box: Box) -> Iterator[Read]:
        entry = box.entry
        head = parse_head(self.read(entry.offset, min(HEAD_BYTES, entry.length)), entry.length)
        for read in plan_reads(box, head, BLOCK_BYTES):
            yield Read(entry.offset + read.offset, read.size, read.memory, read.take)

    def _do(self, read: Read, scratch: Scratch, digest: xxhash.xxh3_128 | None) -> None:
        if read.memory is not None:
            for at in range(0, read.size, BLOCK_BYTES):
                self._take_in(read.memory[at : at + BLOCK_BYTES], read.offset + at, digest)
            return
        raw = scratch.borrow(read.size, read.offset % _ALIGNMENT)
        self._take_in(view_bytes(raw), read.offset, digest)
        assert read.take is not None
        read.take(raw)

    def _pass_by(self, begin: int, end: int, scratch: Scratch, digest: xxhash.xxh3_128) -> None:
        for at in range(begin, end, BLOCK_BYTES):
            self._take_in(view_bytes(scratch.borrow(min(BLOCK_BYTES, end - at))), at, digest)

    def _take_in(self, memory: memoryview, offset: int, digest: xxhash.xxh3_128 | None) -> None:
        self._fill(memory, offset)
        if digest is not None:
            digest.update(memory)
        self._on_bytes(len(memory))

    def _fill(self, memory: memoryview, offset: int) -> None:
        done = 0
        while done < len(memory):
            count = os.preadv(self._fd, [memory[done:]], offset + done)
            if count == 0:
                raise Damaged(f"ends at byte {offset + done}")
            done += count


@contextmanager
def open_file(path: Path, expected: ManifestFile, on_bytes: Callable[[int], None]) -> Iterator[OpenFile]:
    """A file of a checkpoint, open for reading. Raises Damaged when it is missing, too, and OSError."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # the last one for a FIFO put in its place
    except (FileNotFoundError, NotADirectoryError):
        raise Damaged("is missing") from None
    try:
        yield OpenFile(fd, expected, on_bytes)
    except NotAnItem as error:
        raise Damaged(f"holds an item that can't be read: {error}") from None
    finally:
        os.close(fd)


class Scratch:
    """Memory for what only passes by; grows to the largest block that was asked for."""

    def __init__(self) -> None:
        self._memory = torch.empty(BLOCK_BYTES + _ALIGNMENT, dtype=torch.uint8)

    def borrow(self, size: int, shift: int = 0) -> torch.Tensor:
        """So many bytes, beginning `shift` bytes after a multiple of 64; valid until the next call."""
        if size + shift > self._memory.numel():
            self._memory = torch.empty(size + shift, dtype=torch.uint8)
        return self._memory[shift : shift + size]


def _runs(boxes: Iterable[Box]) -> Iterator[list[Box]]:
    """Neighbouring small items together, each large one alone."""
    run: list[Box] = []
    for box in boxes:
        entry = box.entry
        if run and not _joins(run, box):
            yield run
            run = []
        run.append(box)
        if entry.length > SMALL_BYTES:
            yield run
            run = []
    if run:
        yield run


def _joins(run: Sequence[Box], box: Box) -> bool:
    first, last, entry = run[0].entry, run[-1].entry, box.entry
    end = last.offset + last.length
    is_near = 0 <= entry.offset - end <= MAX_GAP_BYTES
    return entry.length <= SMALL_BYTES and is_near and entry.offset + entry.length - first.offset <= BLOCK_BYTES


def _taker(run: Sequence[Box]) -> Callable[[torch.Tensor], None]:
    start = run[0].entry.offset

    def take(raw: torch.Tensor) -> None:
        for box in run:
            at = box.entry.offset - start
            item = raw[at : at + box.entry.length]
            head = parse_head(bytes(view_bytes(item[:HEAD_BYTES])), box.entry.length)
            for read in plan_reads(box, head, box.entry.length):
                part = item[read.offset : read.offset + read.size]
                if read.take is not None:
                    read.take(part)
                elif read.memory is not None:
                    read.memory[:] = view_bytes(part)

    return take
