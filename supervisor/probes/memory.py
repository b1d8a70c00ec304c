"""Memory that a job could still have."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from trainer.contract import CheckResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """As /proc/meminfo gives it."""

    total_bytes: int
    available_bytes: int


def measure(path: Path = Path("/proc/meminfo")) -> Memory:
    """Total and available memory of the node; raises OSError or ValueError."""
    return parse_meminfo(path.read_text(encoding="ascii"))


def parse_meminfo(text: str) -> Memory:
    """Memory from the text of /proc/meminfo; raises ValueError when a line is missing."""
    found = {name: int(kib) * 1024 for name, kib in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}
    try:
        return Memory(total_bytes=found["MemTotal"], available_bytes=found["MemAvailable"])
    except KeyError as error:
        raise ValueError(f"meminfo has no {error.args[0]}") from None


def judge(memory: Memory, *, min_available_fraction: float) -> CheckResult:
    """Fails when less than the given fraction is available."""
    fraction = memory.available_bytes / memory.total_bytes if memory.total_bytes else 0.0
    ok = fraction >= min_available_fraction
    detail = "" if ok else f"{fraction:.1%} of {memory.total_bytes / 1024**3:.1f} GiB memory available"
    return CheckResult(check="memory", ok=ok, detail=detail, value=fraction, limit=min_available_fraction)
