"""One daemon per ledger: a lock file beside it, held from start to end of the process.

The kernel drops the lock when its holder dies, so a stale file is taken over by itself. Children never keep it: the
descriptor is closed on exec and after a fork. Across machines (a shared file system) the owner row in the ledger
decides (Store.claim).
"""

from __future__ import annotations

import fcntl
import json
import os
import weakref
from datetime import UTC, datetime
from pathlib import Path
from socket import gethostname
from typing import Self

_MAX_BYTES = 4096


class AlreadyRunning(Exception):
    """Another daemon holds the lock; the message says which, since when, and what to do."""


class RunLock:
    """The held lock. Release it, or use it as a context manager."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd: int | None = fd
        _held.add(self)

    def release(self) -> None:
        """Lets another daemon start. The file stays: removing it would let two daemons lock two files of one name."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def lock_path(ledger: Path) -> Path:
    """The lock file that stands for this ledger (whatever link it is reached by)."""
    resolved = ledger.resolve()
    return resolved.with_name(resolved.name + ".lock")


def acquire(ledger: Path, now: datetime) -> RunLock:
    """The lock of this ledger, held until released or the process ends. Raises AlreadyRunning at once."""
    path = lock_path(ledger)
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_still_there(path, fd):
                _write_holder(fd, now)
                return RunLock(path, fd)
        except BlockingIOError:
            message = _describe_holder(ledger, os.pread(fd, _MAX_BYTES, 0))
            os.close(fd)
            raise AlreadyRunning(message) from None
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # somebody replaced the file between our open and our lock: lock the new one


def _is_still_there(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(fd))
    except FileNotFoundError:
        return False


def _write_holder(fd: int, now: datetime) -> None:
    holder = {
        "pid": os.getpid(),
        "host": gethostname(),
        "started_at": now.astimezone(UTC).isoformat(timespec="seconds"),
    }
    os.ftruncate(fd, 0)
    os.pwrite(fd, json.dumps(holder).encode() + b"\n", 0)
    os.fsync(fd)


def _describe_holder(ledger: Path, content: bytes) -> str:
    try:
        holder = json.loads(content)
        who = f"pid {holder['pid']} on {holder['host']}, since {holder['started_at']}"
    except (ValueError, KeyError, TypeError):
        who = "its process has not written its number yet"
    return f"another daemon already runs on {ledger} ({who}): stop it first, or give this one another ledger.path"


_held: weakref.WeakSet[RunLock] = weakref.WeakSet()


def _forget_in_child() -> None:
    """A forked child shares the open file: while it lived, a dead daemon's lock would live on."""
    for lock in tuple(_held):
        lock.release()


os.register_at_fork(after_in_child=_forget_in_child)
