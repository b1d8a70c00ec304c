"""From the staging memory to a durable file, and back from the device: checksums on the way, direct I/O where it goes.

Writing is a line of threads: one takes the checksums (CRC32 of each slot into the image, xxh3-128 of the file), others
follow with the writes. Whoever reads the file back follows the writes in turn.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import xxhash

from trainer.contract import ManifestFile
from trainer.saving.image import Slot
from trainer.saving.memory import Buffer, Buffers, StagingMemory
from trainer.saving.zipimage import patch_checksum

SEGMENT_BYTES = 8 * 1024 * 1024
WRITES_IN_FLIGHT = 2
READS_IN_FLIGHT = 2
_SUM_BYTES = 4 * 1024 * 1024
_NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)
_NO_RESERVE = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENODEV, errno.EPERM)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)

_buffers = Buffers(SEGMENT_BYTES)


class Cancelled(Exception):
    """The save has ended in another way meanwhile."""


class Frontier:
    """How far bytes from the beginning are done; whoever follows waits for it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._done = 0
        self._is_cancelled = False

    def advance(self, done: int) -> None:
        """Bytes up to `done` are done."""
        with self._changed:
            self._done = max(self._done, done)
            self._changed.notify_all()

    def cancel(self) -> None:
        """Nobody needs to wait any more: `await_done` raises `Cancelled` from now on."""
        with self._changed:
            self._is_cancelled = True
            self._changed.notify_all()

    def await_done(self, wanted: int) -> None:
        """Wait until bytes up to `wanted` are done."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_cancelled or self._done >= wanted)
            if self._is_cancelled:
                raise Cancelled


# ---------------------------------------------------------------- writing


def write_image(
    memory: StagingMemory,
    slots: Sequence[Slot],
    path: Path,
    *,
    prepare_thread: Callable[[], None] = lambda: None,
    on_written: Callable[[int], None] = lambda _: None,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> ManifestFile:
    """Write the staged image to `path`, durably, and return its entry for the manifest.

    `on_written` hears how many bytes from the beginning another host may read already. Raises OSError and `Cancelled`.
    """
    summed = Frontier()
    with open_for_writing(path, memory.capacity) as (fd, is_direct), _pool(prepare_thread) as pool:
        digest = pool.submit(_sum, memory, slots, summed, is_cancelled)
        writes = _Writes(memory, fd, summed, on_written if is_direct else lambda _: None)
        followers = [pool.submit(writes.follow) for _ in range(WRITES_IN_FLIGHT)]
        _await_all([digest, *followers], summed)
        os.ftruncate(fd, memory.size)
        os.fsync(fd)
    return ManifestFile(path=path.name, size_bytes=memory.size, xxh3_128=digest.result())


@contextmanager
def open_for_writing(path: Path, size: int) -> Iterator[tuple[int, bool]]:
    """(descriptor, whether its writes are direct) of a new file with room for `size` bytes."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    is_direct = True
    try:
        fd = os.open(path, flags | os.O_DIRECT, 0o666)
    except OSError as error:
        if error.errno not in _NO_DIRECT:
            raise
        path.unlink(missing_ok=True)  # some file systems refuse after they have made it
        fd, is_direct = os.open(path, flags, 0o666), False
    try:
        _reserve(fd, size)
        yield fd, is_direct
    finally:
        os.close(fd)


def _reserve(fd: int, size: int) -> None:
    """Room for a file, so that a full disk says so now; where the file system can't do that, nothing."""
    # Not posix_fallocate: where there is no such call it writes a byte to each block, a million times for 4 GB.
    if _libc.fallocate(fd, 0, 0, size) != 0 and ctypes.get_errno() not in _NO_RESERVE:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _pool(prepare_thread: Callable[[], None]) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(WRITES_IN_FLIGHT + 1, "write", initializer=prepare_thread)


def _await_all(futures: Sequence[Future[str] | Future[None]], frontier: Frontier) -> None:
    """Wait for all; the first error among them is raised when all have ended."""
    first: BaseException | None = None
    for future in futures:
        error = future.exception()
        if error is not None:
            frontier.cancel()
            if first is None or isinstance(first, Cancelled):
                first = error
    if first is not None:
        raise first


def _sum(memory: StagingMemory, slots: Sequence[Slot], summed: Frontier, is_cancelled: Callable[[], bool]) -> str:
    view, size = memory.view, memory.size
    digest = xxhash.xxh3_128()
    done = 0
    try:
        for slot, ready in zip(slots, _ready_after(slots, size), strict=True):
            if slot.crc_at:
                patch_checksum(view, slot, _crc(view[slot.offset : slot.offset + slot.size], is_cancelled))
            if ready - done >= SEGMENT_BYTES:
                digest.update(view[done:ready])
                done = ready
                summed.advance(done)
        digest.update(view[done:size])
        summed.advance(memory.capacity)
    except BaseException:
        summed.cancel()
        raise
    return digest.hexdigest()


def _ready_after(slots: Sequence[Slot], size: int) -> list[int]:
    """For each slot, up to where the image is final once its checksum and those before it are in place."""
    ready = [size] * len(slots)
    for at in range(len(slots) - 1, 0, -1):
        ready[at - 1] = min(ready[at], *slots[at].crc_at) if slots[at].crc_at else ready[at]
    return ready


def _crc(data: memoryview, is_cancelled: Callable[[], bool]) -> int:
    crc = 0
    for begin in range(0, len(data), _SUM_BYTES):
        if is_cancelled():
            raise Cancelled
        crc = zlib.crc32(data[begin : begin + _SUM_BYTES], crc)
    return crc


class _Writes:
    """Segments of the memory on their way into the file; several threads follow the checksums at once."""

    def __init__(self, memory: StagingMemory, fd: int, summed: Frontier, on_written: Callable[[int], None]) -> None:
        self._memory = memory
        self._fd = fd
        self._summed = summed
        self._on_written = on_written
        self._lock = threading.Lock()
        self._next = 0
        self._written: set[int] = set()
        self._told = 0

    def follow(self) -> None:
        try:
            # The staging memory is of small pages, of which a device takes few at a time: a copy is the faster way.
            with _buffers.borrow() as buffer:
                while (begin := self._take()) < self._memory.capacity:
                    end = min(begin + SEGMENT_BYTES, self._memory.capacity)
                    self._summed.await_done(end)
                    _write(self._fd, buffer.fill(self._memory.address + begin, end - begin), begin)
                    self._tell(begin)
        except BaseException:
            self._summed.cancel()
            raise

    def _take(self) -> int:
        with self._lock:
            begin, self._next = self._next, self._next + SEGMENT_BYTES
        return begin

    def _tell(self, begin: int) -> None:
        with self._lock:
            self._written.add(begin)
            told = self._told
            while self._told in self._written:
                self._written.remove(self._told)
                self._told += SEGMENT_BYTES
            if self._told != told:
                self._on_written(min(self._told, self._memory.size))


def _write(fd: int, data: memoryview, offset: int) -> None:
    while data:
        try:
            done = os.pwrite(fd, data, offset)
        except OSError as error:
            if error.errno not in _NO_DIRECT or not _stop_direct(fd):
                raise
            continue
        data, offset = data[done:], offset + done
        if data and done % mmap.PAGESIZE:
            _stop_direct(fd)  # a direct write cut short, as at a quota: the rest is no longer aligned


def _stop_direct(fd: int) -> bool:
    """Go on with buffered writes; False when they are already."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    if not flags & os.O_DIRECT:
        return False
    fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
    return True


def write_small(path: Path, data: bytes) -> ManifestFile:
    """Write a small file, durably, and return its entry for the manifest. Raises OSError."""
    with path.open("xb", buffering=0) as stream:
        view = memoryview(data)
        while view:
            view = view[stream.write(view) :]
        os.fsync(stream.fileno())
    return sum_small(path.name, data)


def sum_image(
    memory: StagingMemory, slots: Sequence[Slot], name: str, is_cancelled: Callable[[], bool]
) -> ManifestFile:
    """The entry for the manifest of the staged image if it were written. Raises `Cancelled`."""
    digest = _sum(memory, slots, Frontier(), is_cancelled)
    return ManifestFile(path=name, size_bytes=memory.size, xxh3_128=digest)


def sum_small(name: str, data: bytes) -> ManifestFile:
    """The entry for the manifest of a small file."""
    return ManifestFile(path=name, size_bytes=len(data), xxh3_128=str(xxhash.xxh3_128_hexdigest(data)))


# ---------------------------------------------------------------- reading back


def read_back(
    path: Path, size: int, written: Frontier, *, prepare_thread: Callable[[], None] = lambda: None
) -> str | None:
    """xxh3-128 of a file that is still being written, read from the device behind its writer.

    None when it can't be read past the cache. Raises OSError and `Cancelled`.
    """
    written.await_done(min(SEGMENT_BYTES, size))
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in _NO_DIRECT:
            return None
        raise
    try:
        with ExitStack() as stack:
            buffers = [stack.enter_context(_buffers.borrow()) for _ in range(READS_IN_FLIGHT)]
            pool = stack.enter_context(ThreadPoolExecutor(READS_IN_FLIGHT, "read", initializer=prepare_thread))
            return _hash_behind(fd, size, written, pool, buffers)
    finally:
        os.close(fd)


def _hash_behind(
    fd: int, size: int, written: Frontier, pool: ThreadPoolExecutor, buffers: Sequence[Buffer]
) -> str | None:
    digest = xxhash.xxh3_128()
    begins = list(range(0, size, SEGMENT_BYTES))
    reads: list[Future[int]] = []

    def read(at: int) -> int:
        begin = begins[at]
        written.await_done(min(begin + SEGMENT_BYTES, size))
        return os.preadv(fd, [buffers[at % READS_IN_FLIGHT].view], begin)

    reads = [pool.submit(read, at) for at in range(min(READS_IN_FLIGHT, len(begins)))]
    for at, begin in enumerate(begins):
        wanted = min(SEGMENT_BYTES, size - begin)
        if reads[at].result() < wanted:
            return None
        digest.update(buffers[at % READS_IN_FLIGHT].view[:wanted])
        if at + READS_IN_FLIGHT < len(begins):
            reads.append(pool.submit(read, at + READS_IN_FLIGHT))
    return digest.hexdigest()
