"""Processes of jobs that are over and still hold GPU memory: data loaders that nobody swept when their job was killed.

Only what came from a job of Slurm counts, by its environment, and only when no slurmstepd of that job is here any more:
daemons of the node hold contexts too. No hardware fault; the next job finds no memory. Nothing is killed here: at the
start of a job of ours the agent ends what earlier attempts of the same run left (trainer.agent.leftovers).
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.contract import CheckResult

CHECK = "leftover_process"
PROC = Path("/proc")

_STEP = re.compile(rb"^slurmstepd: \[(\d+)[.+_]")
_JOB = re.compile(rb"(?:^|\0)SLURM_JOB_ID=(\d+)(?:\0|$)")
_MAX_BYTES = 1024 * 1024
_MAX_SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A process that holds memory of a GPU. `job`: the Slurm job that it came from; empty: of none, or not told."""

    gpu: int
    pid: int
    memory_bytes: int | None = None
    name: str = ""
    job: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Who holds GPU memory, and the jobs that are on the node. `error`: why nobody could be asked."""

    holders: tuple[Holder, ...] = ()
    jobs: frozenset[str] = frozenset()
    error: str = ""


def measure() -> Reading:
    """Ask NVML for the processes on each GPU; never raises for what NVML or the kernel says."""
    try:
        pynvml: Any = importlib.import_module("pynvml")
    except ImportError as error:
        return Reading(error=f"no NVML binding: {error}")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return Reading(error=str(error))
    try:
        holders = [holder for index in range(int(pynvml.nvmlDeviceGetCount())) for holder in _ask(pynvml, index)]
    except pynvml.NVMLError as error:
        return Reading(error=str(error))
    finally:
        pynvml.nvmlShutdown()
    return Reading(holders=tuple(holders), jobs=find_jobs(PROC))


def _ask(nvml: Any, index: int) -> list[Holder]:
    try:
        found = nvml.nvmlDeviceGetComputeRunningProcesses(nvml.nvmlDeviceGetHandleByIndex(index))
    except nvml.NVMLError:
        return []
    return [describe(PROC, index, int(process.pid), process.usedGpuMemory) for process in found]


def describe(proc: Path, gpu: int, pid: int, memory_bytes: int | None) -> Holder:
    """What the kernel says of a process; an environment that can't be read tells no job."""
    name = _read(proc / str(pid) / "comm").decode(errors="replace").strip()[:64]
    found = _JOB.search(_read(proc / str(pid) / "environ"))
    return Holder(gpu=gpu, pid=pid, memory_bytes=memory_bytes, name=name, job=found[1].decode() if found else "")


def find_jobs(proc: Path) -> frozenset[str]:
    """Ids of the jobs that have a step on this node."""
    found = (_STEP.match(_read(folder / "cmdline")) for folder in proc.glob("[0-9]*"))
    return frozenset(step[1].decode() for step in found if step)


def _read(path: Path) -> bytes:
    with suppress(OSError), path.open("rb") as file:
        return file.read(_MAX_BYTES)
    return b""


def judge(reading: Reading) -> CheckResult:
    """Fails when a process of a job that is not on the node any more holds memory of a GPU; pids are told."""
    if reading.error:
        return CheckResult(check=CHECK, ok=None, detail=reading.error)
    left = [holder for holder in reading.holders if holder.job and holder.job not in reading.jobs]
    if not left:
        return CheckResult(check=CHECK, ok=True, value=0.0)
    more = f" and {len(left) - _MAX_SHOWN} more" if len(left) > _MAX_SHOWN else ""
    detail = f"GPU memory is held by processes of jobs that are over: {', '.join(_tell(left[:_MAX_SHOWN]))}{more}"
    return CheckResult(
        check=CHECK, ok=False, detail=detail, value=float(len({holder.pid for holder in left})), limit=0.0
    )


def _tell(holders: Sequence[Holder]) -> list[str]:
    return [
        f"pid {holder.pid} ({holder.name or '?'}) of job {holder.job} on GPU {holder.gpu}"
        + (f" with {holder.memory_bytes / 2**30:.1f} GiB" if holder.memory_bytes else "")
        for holder in holders
    ]
