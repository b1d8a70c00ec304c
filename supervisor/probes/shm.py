"""Shared memory (/dev/shm): NCCL and data loaders fail when it is full or too small."""

from __future__ import annotations

import os
from dataclasses import dataclass

from trainer.contract import CheckResult

PATH = "/dev/shm"  # noqa: S108 - looked at, not written to


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedMemory:
    """Size and free space."""

    total_bytes: int
    free_bytes: int


def measure(path: str = PATH) -> SharedMemory:
    """What statvfs says; raises OSError when there is none."""
    found = os.statvfs(path)
    return SharedMemory(total_bytes=found.f_blocks * found.f_frsize, free_bytes=found.f_bavail * found.f_frsize)


def judge(shm: SharedMemory, *, min_free_fraction: float, min_total_bytes: int) -> CheckResult:
    """Fails when it is smaller than a job needs, or when leftovers fill it."""
    if shm.total_bytes < min_total_bytes:
        detail = f"{PATH} has {shm.total_bytes} bytes, less than {min_total_bytes}"
        return CheckResult(
            check="shm", ok=False, detail=detail, value=float(shm.total_bytes), limit=float(min_total_bytes)
        )
    fraction = shm.free_bytes / shm.total_bytes if shm.total_bytes else 0.0
    ok = fraction >= min_free_fraction
    detail = "" if ok else f"{PATH} has {fraction:.1%} free"
    return CheckResult(check="shm", ok=ok, detail=detail, value=fraction, limit=min_free_fraction)
