"""Free space, free inodes and write permission of the node's own file systems."""

from __future__ import annotations

import os
from dataclasses import dataclass

from trainer.contract import CheckResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """One file system as the kernel counts it. `total_bytes` 0: the path is not there."""

    path: str
    total_bytes: int = 0
    free_bytes: int = 0  # for users, without the reserve of root
    inodes: int = 0  # 0: the file system does not count them
    free_inodes: int = 0
    is_read_only: bool = False


def measure(path: str) -> Disk:
    """What statvfs says (it blocks for ever on a dead network file system: the caller sets the deadline)."""
    try:
        found = os.statvfs(path)
    except (FileNotFoundError, NotADirectoryError):
        return Disk(path=path)
    return Disk(
        path=path,
        total_bytes=found.f_blocks * found.f_frsize,
        free_bytes=found.f_bavail * found.f_frsize,
        inodes=found.f_files,
        free_inodes=found.f_favail,
        is_read_only=bool(found.f_flag & os.ST_RDONLY),
    )


def judge(disk: Disk, *, min_free_fraction: float, min_free_bytes: int) -> CheckResult:
    """Fails when too little is free, in bytes, as a fraction or in inodes, and when it can't be written to."""
    check = f"disk:{disk.path}"
    if disk.total_bytes == 0:
        return CheckResult(check=check, ok=False, detail=f"{disk.path} is not there")
    if disk.is_read_only:
        return CheckResult(check=check, ok=False, detail=f"{disk.path} is read-only")
    needed = min_free_fraction * disk.total_bytes
    if min_free_bytes <= disk.total_bytes:  # a disk smaller than the limit can never meet it
        needed = max(needed, float(min_free_bytes))
    if disk.free_bytes < needed:
        detail = (
            f"{disk.path} has {_size(disk.free_bytes)} free of {_size(disk.total_bytes)}, less than {_size(needed)}"
        )
        return CheckResult(check=check, ok=False, detail=detail, value=float(disk.free_bytes), limit=needed)
    if disk.inodes and disk.free_inodes < min_free_fraction * disk.inodes:
        detail = f"{disk.path} has {disk.free_inodes} inodes free of {disk.inodes}"
        limit = min_free_fraction * disk.inodes
        return CheckResult(check=check, ok=False, detail=detail, value=float(disk.free_inodes), limit=limit)
    return CheckResult(check=check, ok=True, value=float(disk.free_bytes), limit=needed)


def _size(count: float) -> str:
    if count >= 1024**3:
        return f"{count / 1024**3:.1f} GiB"
    return f"{count / 1024**2:.1f} MiB" if count else "nothing"
