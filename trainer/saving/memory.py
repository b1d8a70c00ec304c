"""The memory that an image is staged in: a memfd, mapped by the rank and by its writer. No torch.

It is no file of /dev/shm, so its size is bound by the job's memory alone, and it goes with the last process that has
it. Its pages are made and touched once; afterwards a save finds them warm.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import queue
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from trainer.saving.image import ALIGNMENT

_MADV_POPULATE_WRITE = 23
_HUGE = 2 * 1024 * 1024


class Buffers:
    """Buffers of one size that are used again and again; for any thread."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._free: queue.SimpleQueue[Buffer] = queue.SimpleQueue()

    @contextmanager
    def borrow(self) -> Iterator[Buffer]:
        """One of them, for the time of the block."""
        try:
            buffer = self._free.get_nowait()
        except queue.Empty:
            buffer = Buffer(self._size)
        try:
            yield buffer
        finally:
            self._free.put(buffer)


class Buffer:
    """Memory on huge pages, where the kernel has them: a device takes these in far fewer and larger pieces."""

    def __init__(self, size: int) -> None:
        mapping = mmap.mmap(-1, size + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError, ValueError):
            mapping.madvise(mmap.MADV_HUGEPAGE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        skipped = -address % _HUGE
        self.address = address + skipped
        self.view = memoryview(mapping)[skipped : skipped + size]

    def fill(self, address: int, size: int) -> memoryview:
        """Copy so many bytes from an address here; other threads go on meanwhile."""
        ctypes.memmove(self.address, address, size)
        return self.view[:size]


class StagingMemory:
    """A mapping of the staging memory. `size` is the image's, `capacity` that of whole pages.

    Raises OSError (ENOMEM) when there is not so much memory.
    """

    def __init__(self, fd: int, size: int) -> None:
        self.fd = fd
        self.size = size
        self.capacity = os.fstat(fd).st_size
        self._mapping = mmap.mmap(fd, max(self.capacity, 1))
        self._view = memoryview(self._mapping)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))

    @classmethod
    def allocate(cls, size: int) -> StagingMemory:
        """New memory for an image of `size` bytes, all of it there before this returns."""
        fd = os.memfd_create("checkpoint-staging", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, max(-(-size // ALIGNMENT) * ALIGNMENT, ALIGNMENT))
            return cls(fd, size)
        except BaseException:
            os.close(fd)
            raise

    @property
    def view(self) -> memoryview:
        """The bytes themselves, up to `capacity`."""
        return self._view

    def touch(self) -> None:
        """Map every page in this process, so that the first write to each costs nothing."""
        # Older kernels don't know this advice; their first save is slower, nothing else.
        try:
            self._mapping.madvise(_MADV_POPULATE_WRITE)
        except (OSError, ValueError):
            return

    def fill(self, frame: Iterable[tuple[int, bytes]]) -> None:
        """Write the constant bytes of an image."""
        for offset, data in frame:
            self._view[offset : offset + len(data)] = data

    def close(self) -> None:
        """Give up this process's hold on the memory."""
        # The mapping itself goes with the last view of it.
        os.close(self.fd)
