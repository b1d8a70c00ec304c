"""Reads many bytes once: in portions that stay in the processor's cache, several files at a time.

The portions are small and the files many, so reading and hashing overlap between files; within one file a second
thread would only carry the bytes from one core's cache to the other's.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

PORTION_BYTES = 512 * 1024
READERS = 2  # that a person's command uses; the daemon's children use one

T = TypeVar("T")
R = TypeVar("R")
OnBytes = Callable[[int], None]


def read_portions(fd: int, offset: int, length: int | None, use: Callable[[memoryview], object]) -> int:
    """Hand the bytes of a file from `offset` on to `use`, one portion at a time; how many there were.

    `length` None: to the end. A file that ends before gives fewer.
    """
    buffer = memoryview(bytearray(PORTION_BYTES if length is None else min(PORTION_BYTES, max(1, length))))
    done = 0
    while length is None or done < length:
        wanted = buffer if length is None else buffer[: length - done]
        count = os.preadv(fd, [wanted], offset + done)
        if not count:
            break
        use(buffer[:count])
        done += count
    return done


def drop_cached_pages(fd: int) -> None:
    """What is in memory may be right while the storage is wrong. Dirty pages stay: they were not written here."""
    with suppress(OSError):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def run_readers(work: Sequence[T], read: Callable[[T], R], readers: int) -> list[R]:
    """What `read` gives for each piece of work, in order; with several readers it is called from several threads.

    Raises what `read` raises first. The threads end with the process, also while they wait for a file system.
    """
    if readers <= 1 or len(work) <= 1:
        return [read(piece) for piece in work]
    found: dict[int, R] = {}
    errors: list[BaseException] = []
    todo = iter(list(enumerate(work)))

    def go() -> None:
        for place, piece in todo:  # shared: each piece is taken by one of them
            if errors:
                return
            try:
                found[place] = read(piece)
            except BaseException as error:  # noqa: BLE001 - raised by the caller's thread
                errors.append(error)

    threads = [threading.Thread(target=go, name=f"reader-{n}", daemon=True) for n in range(min(readers, len(work)))]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException as error:
        errors.append(error)  # an interrupted caller: they stop at the next piece
        raise
    if errors:
        raise errors[0]
    return [found[place] for place in range(len(work))]
