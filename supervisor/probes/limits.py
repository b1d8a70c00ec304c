"""What the host probes hold a node to. Given as JSON by the service; unknown names are refused."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

GIB = 1024**3


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of all probes. A limit of 0 turns that part of a check off."""

    disk_paths: tuple[str, ...] = ("/tmp",)  # noqa: S108 - looked at, not written to
    disk_min_free_fraction: float = 0.05
    disk_min_free_bytes: int = 1 * GIB
    memory_min_available_fraction: float = 0.05
    shm_min_free_fraction: float = 0.2
    shm_min_total_bytes: int = 0
    clock_max_skew_s: float = 5.0
    shared_paths: tuple[str, ...] = ()
    gpu_count: int = 0  # GPUs that the node must have; 0: GPUs are not looked at
    kernel_log_window_s: float = 0.0  # how far back the kernel log is read; 0: not at all

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if isinstance(value, int | float) and value < 0:
                raise ValueError(f"{item.name} = {value} is negative")


def parse_limits(raw: object) -> Limits:
    """Limits from decoded JSON; raises ValueError with the reason."""
    if not isinstance(raw, dict):
        raise ValueError("limits: an object is expected")  # noqa: TRY004 - one error for bad input
    known = {item.name: item for item in dataclasses.fields(Limits)}
    values: dict[str, object] = {}
    for name, value in raw.items():
        if name not in known:
            raise ValueError(f"limits: {name!r} is none of {', '.join(sorted(known))}")
        values[name] = _convert(name, value, known[name].default)
    return Limits(**values)  # type: ignore[arg-type]


def _convert(name: str, value: object, default: object) -> object:
    if isinstance(default, tuple):
        if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
            return tuple(value)
        raise ValueError(f"limits: {name} must be a list of strings")
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**63:  # no NaN either
        return int(value) if isinstance(default, int) else float(value)
    raise ValueError(f"limits: {name} must be a number")
