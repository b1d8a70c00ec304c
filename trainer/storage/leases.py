"""Leases: a checkpoint that is being read, or copied to object storage, is not removed meanwhile.

Whoever reads writes the lease before the first byte is read and removes it afterwards. A lease counts while its attempt
lives: what a killed reader left behind holds nothing once its attempt is over. One that is there and can't be read
says nothing about which checkpoints it names, so nothing is removed then.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trainer.contract import ContractError, ReadLease, RunPaths, parse, write_json


class LeaseUnreadable(Exception):
    """A lease is there and does not tell which checkpoints it names."""


@contextmanager
def hold_lease(
    path: Path, *, attempt: int, names: Iterable[str], wall: Callable[[], float] = time.time
) -> Iterator[None]:
    """Keep a lease at `path` (RunPaths.read_lease or upload_lease) for the time of the block.

    A run directory that takes no new file (full, read-only) must not stop a restart: then there is no lease.
    """
    with suppress(OSError):
        write_json(path, ReadLease(attempt=attempt, checkpoints=tuple(names), time=wall()))
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def read_leases(run_dir: Path, *, since_attempt: int) -> frozenset[str]:
    """Names of the checkpoints that attempts from `since_attempt` on hold; raises `LeaseUnreadable`."""
    held: set[str] = set()
    paths = RunPaths(run_dir)
    for attempt in _attempts(run_dir):
        if attempt >= since_attempt:
            for path in (paths.read_lease(attempt), paths.upload_lease(attempt)):
                held |= _names(path)
    return frozenset(held)


def _attempts(run_dir: Path) -> list[int]:
    try:
        return [int(entry.name) for entry in os.scandir(run_dir / "attempts") if entry.name.isdecimal()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise LeaseUnreadable(f"{run_dir / 'attempts'}: {error.strerror}") from error


def _names(path: Path) -> set[str]:
    try:
        return set(parse(ReadLease, path.read_bytes()).checkpoints)
    except FileNotFoundError:
        return set()
    except (OSError, ContractError) as error:
        raise LeaseUnreadable(f"{path}: {error}") from error
