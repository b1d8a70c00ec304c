"""What every benchmark says besides its numbers: the machine, the versions, a table, and a result file."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from slurm.sandbox.installed import find_tool

RESULTS = Path(__file__).parent / "results"
_PACKAGES = ("torch", "submitit", "pyslurm", "sqlite-utils", "structlog")
_STARTED = time.monotonic()


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A bound of one number of the result."""

    key: str
    what: str
    at_most: float | None = None
    at_least: float | None = None

    def is_met(self, value: float) -> bool:
        return (self.at_most is None or value <= self.at_most) and (self.at_least is None or value >= self.at_least)

    @property
    def bound(self) -> str:
        return f"at most {self.at_most:g}" if self.at_most is not None else f"at least {self.at_least:g}"


def describe_machine() -> dict[str, Any]:
    """Machine, versions and the load of the last minute, so that a number can be judged later."""
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "cpu": _find_cpu_name(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "slurm": _find_slurm_version(),
        "packages": {name: _find_version(name) for name in _PACKAGES},
        "load_1min_before": round(os.getloadavg()[0], 2),
    }


def render_machine(machine: dict[str, Any]) -> str:
    """The machine in one line."""
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    load = ", ".join(f"{key.removeprefix('load_1min_')} {machine[key]}" for key in machine if key.startswith("load"))
    return (
        f"{machine['cpus']} CPUs ({machine['cpu']}), {machine['system']}, Python {machine['python']}, "
        f"{machine['slurm']}, {packages}; load {load}"
    )


def render_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table in Markdown, columns padded: the same text serves the terminal and the page."""
    cells = [[str(value) for value in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = [
        "| " + " | ".join(value.ljust(width) for value, width in zip(row, widths, strict=True)) + " |" for row in cells
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def finish(name: str, result: dict[str, Any], machine: dict[str, Any]) -> dict[str, Any]:
    """Write the result file, say where it is and on what machine it was made; returns what the file holds."""
    machine = {**machine, "load_1min_after": round(os.getloadavg()[0], 2)}
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    written = {**result, "machine": machine}
    path.write_text(json.dumps(written, indent=2) + "\n")
    print(f"\nmachine: {render_machine(machine)}")
    print(f"written: {path.relative_to(RESULTS.parents[1])}", flush=True)
    return written


def say(text: str) -> None:
    """One line of progress, with the seconds since the start."""
    print(f"[{time.monotonic() - _STARTED:6.1f} s] {text}", flush=True)


def median(values: Sequence[float], digits: int = 2) -> float | None:
    """The median, rounded; None without a value."""
    return round(statistics.median(values), digits) if values else None


def show(value: float | None, digits: int = 1) -> str:
    """A number for a table; a dash where nothing was measured."""
    return "-" if value is None else f"{value:.{digits}f}"


def _find_cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _find_version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _find_slurm_version() -> str:
    try:
        shown = subprocess.run(
            [find_tool("slurmctld") or "slurmctld", "-V"], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return "no Slurm"
    return shown.stdout.strip() or "no Slurm"
