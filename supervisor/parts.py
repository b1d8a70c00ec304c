"""The parts that the loop is built from, as the few verbs that it needs of each: tests build it from others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Protocol

from slurm.types import ClusterFacts
from supervisor.model import UNFINISHED_MARKERS, LogFile, NodeChecks, PortProbe, Run, RunView, Verification
from supervisor.slurmwatch import Answers


class SlurmAnswers(Protocol):
    """Slurm's newest answers (supervisor.slurmwatch.SlurmWatch)."""

    @property
    def answers(self) -> Answers: ...
    @property
    def facts(self) -> ClusterFacts | None: ...
    @property
    def age_s(self) -> float: ...
    def ask(self, *, ended_since: datetime | None = None) -> None: ...
    def wait(self, timeout_s: float) -> bool: ...
    def close(self) -> None: ...


class Readbacks(Protocol):
    """Reads checkpoints back beside the loop (supervisor.verify.Verifier)."""

    def start(
        self,
        run: str,
        run_dir: Path,
        step: int,
        attempt: int,
        uid: int | None = None,
        gid: int | None = None,
        *,
        path: str = "",
        layout: str = "",
        stamp: str = "",
    ) -> None: ...
    def is_busy(self, run: str, step: int, attempt: int) -> bool: ...
    def collect(self) -> tuple[Verification, ...]: ...
    def close(self) -> None: ...


class Ports(Protocol):
    """Watches slurmd ports (supervisor.ports.PortWatch)."""

    def watch(self, targets: Mapping[str, tuple[str, int]]) -> None: ...
    def results(self) -> Mapping[str, PortProbe]: ...
    def close(self) -> None: ...


class Sweeps(Protocol):
    """Checks nodes beside the loop (supervisor.sweep.Sweeper)."""

    @property
    def is_running(self) -> bool: ...
    def start(self, nodes: Sequence[str], now: datetime, *, job_id: int | None = None) -> bool: ...
    def collect(self) -> tuple[NodeChecks, ...]: ...
    def close(self) -> None: ...


class RunDirs(Protocol):
    """Run directories of one owner (supervisor.rundir.RunDirReader); raises RunDirUnreadable."""

    def read(
        self,
        run: str,
        run_dir: Path,
        attempt: int,
        *,
        is_final: bool,
        deadline_s: float,
        log_path: Path | None = None,
        log_offset: int = 0,
        pattern: str = "",
        checkpoint_directory: Path | None = None,
        unfinished_markers: tuple[str, ...] = UNFINISHED_MARKERS,
        layout: str = "supervisor",
        interruptions_from: int = 0,
    ) -> RunView: ...
    def write_attempt(self, run_dir: Path, attempt: int, files: Mapping[str, bytes]) -> None: ...
    def link_resume(self, run_dir: Path, attempt: int, target: str) -> None: ...
    def find_logs(self, folder: Path, pattern: str) -> tuple[LogFile, ...]: ...
    def prune(self, run_dir: Path, step: int, attempt: int) -> None: ...


class RunOwners(Protocol):
    """Who a run's files belong to (supervisor.owners.Owners)."""

    def identity(self, run: Run) -> tuple[int | None, int | None]: ...
    def reader(self, run: Run) -> RunDirs: ...
    def close(self) -> None: ...
