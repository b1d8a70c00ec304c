"""Memory that a job could still have."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.contract import CheckResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """As the kernel gives it; available: without swapping."""

    total_bytes: int
    available_bytes: int


def measure() -> Memory:
    """Total and available memory of the node; raises OSError."""
    import psutil  # the runner's start must not wait for it

    found = psutil.virtual_memory()
    return Memory(total_bytes=found.total, available_bytes=found.available)


def judge(memory: Memory, *, min_available_fraction: float) -> CheckResult:
    """Fails when less than the given fraction is available."""
    fraction = memory.available_bytes / memory.total_bytes if memory.total_bytes else 0.0
    ok = fraction >= min_available_fraction
    detail = "" if ok else f"{fraction:.1%} of {memory.total_bytes / 1024**3:.1f} GiB memory available"
    return CheckResult(check="memory", ok=ok, detail=detail, value=fraction, limit=min_available_fraction)
