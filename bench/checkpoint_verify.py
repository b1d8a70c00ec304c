"""Bandwidth of `supervisor verify --full` over that of reading the same files, with none of them in the page cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench.stage import BenchFailed

_CHUNK_BYTES = 4 * 1024 * 1024
_WITHIN_S = 120


def measure_verify(path: Path, repeats: int) -> dict[str, Any]:
    """GB/s of each way, in turns; one round warms up. `command_s`: the whole command, with the start of Python."""
    read_gb_s, verify_gb_s, command_s = [], [], []
    for number in range(repeats + 1):
        read = _time_reading(path)
        verified, took_s = _time_verifying(path)
        if number:
            read_gb_s.append(read)
            verify_gb_s.append(verified)
            command_s.append(took_s)
    return {"read_gb_s": read_gb_s, "verify_gb_s": verify_gb_s, "command_s": command_s}


def _time_reading(path: Path) -> float:
    forget(path)
    began = time.monotonic()
    count = read_plainly(path)
    return count / 1e9 / (time.monotonic() - began)


def _time_verifying(path: Path) -> tuple[float, float]:
    forget(path)
    began = time.monotonic()
    ran = subprocess.run(
        [sys.executable, "-m", "supervisor", "verify", str(path), "--full", "--json"],
        capture_output=True,
        text=True,
        timeout=_WITHIN_S,
        check=False,
    )
    took_s = time.monotonic() - began
    if ran.returncode:
        raise BenchFailed(f"verify ended with {ran.returncode}: {ran.stdout}{ran.stderr}")
    said = json.loads(ran.stdout)
    return said["bytes"] / 1e9 / said["seconds"], took_s


def forget(folder: Path) -> None:
    """Drop every file below a folder from the page cache."""
    for path in find_files(folder):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)  # what is not written yet can't be dropped
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def read_plainly(folder: Path) -> int:
    """Read every file below a folder from start to end; returns the bytes."""
    buffer, total = bytearray(_CHUNK_BYTES), 0
    for path in find_files(folder):
        with path.open("rb", buffering=0) as stream:
            while count := stream.readinto(buffer):
                total += count
    return total


def find_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())
