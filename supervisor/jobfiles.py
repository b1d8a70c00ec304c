"""Opening files that jobs wrote: regular files only, no symbolic link, bounded, no waiting on a FIFO."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class NotAFile(Exception):
    """Something else stands where a regular file belongs, or it is larger than it may be; the message says what."""


@contextmanager
def open_regular(path: str | Path, *, dir_fd: int | None = None) -> Iterator[int]:
    """A descriptor of a regular file; raises NotAFile for links, FIFOs, devices and folders, OSError otherwise."""
    try:
        fd = os.open(path, _FLAGS, dir_fd=dir_fd)
    except OSError as error:
        if error.errno in _NOT_OPENED:
            raise NotAFile(f"not a regular file: {_FOUND[error.errno]}") from None
        raise
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise NotAFile("not a regular file")
        yield fd
    finally:
        os.close(fd)


@contextmanager
def open_folder(path: str | Path, *, dir_fd: int | None = None) -> Iterator[int]:
    """A descriptor of a folder that is no symbolic link; raises NotAFile or OSError."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)
    except OSError as error:
        if error.errno in _NOT_OPENED:
            raise NotAFile("not a folder, or a symbolic link to one") from None
        raise
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def open_own_folder(path: str | Path, *, dir_fd: int | None = None) -> Iterator[int]:
    """A descriptor of a folder of this account's, by its own name or by a link that this account has made.

    Raises NotAFile for what somebody else has put there: their links and folders would have this account's rights read
    or write what they choose. OSError otherwise.
    """
    try:
        found = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)
    except OSError as error:
        if error.errno in _NOT_OPENED:
            raise NotAFile(f"{path}: not a folder, or a symbolic link that is not followed") from None
        raise
    try:
        here = os.fstat(found)
        _require_own(path, here)
        if not stat.S_ISLNK(here.st_mode):
            fd = os.open(f"/proc/self/fd/{found}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        else:  # read from the link that was looked at, whatever has its name by now
            target = os.path.join(os.path.dirname(path), os.readlink("", dir_fd=found))  # noqa: PTH118, PTH120
            fd = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)
    except OSError as error:
        if error.errno in _NOT_OPENED:
            raise NotAFile(f"{path}: not a folder, or a symbolic link that is not followed") from None
        raise
    finally:
        os.close(found)
    try:
        _require_own(path, os.fstat(fd))
        yield fd
    finally:
        os.close(fd)


def _require_own(path: str | Path, found: os.stat_result) -> None:
    # Root's is as good; nobody's is what everything belongs to on a share that knows no accounts.
    if found.st_uid not in {os.geteuid(), 0, _NOBODY}:
        raise NotAFile(f"{path}: belongs to uid {found.st_uid}, not to uid {os.geteuid()}")


@contextmanager
def open_parent(dir_fd: int, relative: str) -> Iterator[tuple[int, str]]:
    """(descriptor of the folder that holds `relative`, last name); no component may be a symbolic link."""
    *folders, name = PurePosixPath(relative).parts
    fd = os.dup(dir_fd)
    try:
        for folder in folders:
            with open_folder(folder, dir_fd=fd) as inner:
                os.dup2(inner, fd, inheritable=False)
        yield fd, name
    finally:
        os.close(fd)


def read_bounded(path: str | Path, max_bytes: int, *, dir_fd: int | None = None) -> bytes:
    """The whole content of a small file; raises NotAFile when it is larger than `max_bytes`, OSError otherwise."""
    with open_regular(path, dir_fd=dir_fd) as fd:
        size = os.fstat(fd).st_size
        if size > max_bytes:
            raise NotAFile(f"{size} bytes, more than {max_bytes}")
        return _read(fd, max_bytes)


def read_end(path: str | Path, max_bytes: int, *, since: int = 0) -> bytes:
    """The last bytes of a file that may be growing, none before offset `since` (unless it has become shorter)."""
    with open_regular(path) as fd:
        size = os.fstat(fd).st_size
        start = max(since if since <= size else 0, size - max_bytes)
        os.lseek(fd, start, os.SEEK_SET)
        return _read(fd, max_bytes)


def read_from(path: str | Path, offset: int, max_bytes: int) -> tuple[bytes, int]:
    """(newest bytes after an offset, where they start): what lies further back than `max_bytes` is passed over.

    A file that has become shorter than the offset was begun again, and is read from its beginning.
    """
    with open_regular(path) as fd:
        size = os.fstat(fd).st_size
        start = max(offset if offset <= size else 0, size - max_bytes)
        os.lseek(fd, start, os.SEEK_SET)
        return _read(fd, max_bytes), start


def list_folder(path: str | Path, max_names: int) -> tuple[list[str], bool]:
    """Names in a folder, at most `max_names`, and whether there are more; raises OSError."""
    names: list[str] = []
    with os.scandir(path) as entries:
        for entry in entries:
            if len(names) >= max_names:
                return names, True
            names.append(entry.name)
    return names, False


def _read(fd: int, max_bytes: int) -> bytes:
    parts = bytearray()
    while len(parts) < max_bytes:
        data = os.read(fd, min(1 << 20, max_bytes - len(parts)))
        if not data:
            break
        parts += data
    return bytes(parts)


_NOBODY = 65534

_FOUND = {
    errno.ELOOP: "a symbolic link",
    errno.ENXIO: "a socket, or a FIFO without a reader",
    errno.ENOTDIR: "a part of its path is no folder",
}
_NOT_OPENED = frozenset(_FOUND)
