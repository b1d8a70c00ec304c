"""One attempt under the real launcher and agents on this machine, with a script in place of srun."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from trainer.contract import AttemptSpec, ExitRecord, InterruptionRecord, LaunchReport, RunPaths, parse, write_json

RIG = Path(__file__).with_name("launch_rig")
ROOT = Path(__file__).parents[2]
DEADLINE_S = 20.0

SLEEP = """
import os, pathlib, time
pathlib.Path(os.environ['RIG_DIR'], 'up.' + os.environ['RANK']).touch()
time.sleep(99)
"""

# Says where it runs, in which start and from where; a file named after its start and rank holds the code to end with.
STARTS = """
import os, pathlib, time
rig = pathlib.Path(os.environ['RIG_DIR'])
me = f"{os.environ['SUPERVISOR_LAUNCH']}.{os.environ['RANK']}"
said = (os.environ[name] for name in ('SLURMD_NODENAME', 'WORLD_SIZE', 'SUPERVISOR_RESUME_STEP'))
(rig / f'new.{me}').write_text(' '.join((*said, str(os.getpid()))))
(rig / f'new.{me}').rename(rig / f'up.{me}')
until = time.monotonic() + 99
while time.monotonic() < until:
    time.sleep(0.02)
    for name in (f'end.{me}', f"end.{os.environ['SUPERVISOR_LAUNCH']}"):
        if (rig / name).exists():
            os._exit(int((rig / name).read_text()))
"""


def eventually(condition: Callable[[], Any], deadline_s: float = DEADLINE_S) -> bool:
    until = time.monotonic() + deadline_s
    while time.monotonic() < until:
        if condition():
            return True
        time.sleep(0.02)
    return False


class Attempt:
    """One attempt that is launched on nodes n1, n2, ..."""

    def __init__(self, directory: Path) -> None:
        self.rig = directory
        self.paths = RunPaths(directory / "run")
        self.dir = self.paths.attempt_dir(1)
        self.process: subprocess.Popen[bytes] | None = None

    def start(
        self,
        program: str,
        *,
        nodes: int,
        allocated: int | None = None,
        absent: str = "",
        path: str = "",
        launcher: tuple[str, ...] = (str(RIG / "launch.py"),),
        ports: Mapping[str, tuple[str, int]] | None = None,
        **spec: Any,
    ) -> None:
        script = self.rig / "train.py"
        script.write_text(program)
        values = {"command": (str(script),), "beat_interval_s": 0.1, "in_job": False, **spec}
        write_json(self.dir / "attempt.json", AttemptSpec(run="r", attempt=1, nodes=nodes, **values))
        environment: Mapping[str, str] = {
            **os.environ,
            "PATH": path or f"{RIG}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "SLURM_JOB_NODELIST": f"n[1-{allocated or nodes}]",
            "SLURM_JOB_ID": "7",
            "SLURMD_NODENAME": "n1",
            "RIG_DIR": str(self.rig),
            "RIG_ABSENT": absent,
            "RIG_PORTS": json.dumps(ports or {}),
        }
        self.process = subprocess.Popen([sys.executable, *launcher, str(self.dir)], env=environment)

    def end(self) -> ExitRecord:
        assert self.process is not None
        code = self.process.wait(DEADLINE_S)
        record = parse(ExitRecord, self.paths.exit_record(1).read_bytes())
        assert record.exit_code == code
        return record

    def report(self) -> LaunchReport | None:
        try:
            return parse(LaunchReport, self.paths.launch_report(1).read_bytes())
        except FileNotFoundError:
            return None

    def launch(self) -> int:
        """Number of the current start; -1 before there is a report, or while there is no start."""
        report = self.report()
        return report.launch if report and report.phase == "running" else -1

    def interruption(self, launch: int = 0) -> InterruptionRecord:
        return parse(InterruptionRecord, self.paths.interruption(1, launch).read_bytes())

    def silent(self) -> tuple[str, ...]:
        report = self.report()
        return report.silent if report else ()

    def agent_pid(self, node: str) -> int:
        return int((self.rig / f"{node}.pid").read_text())

    def is_up(self, *ranks: int, launch: int | None = None) -> bool:
        """True when these ranks run; with `launch`, of that start (see STARTS)."""
        start = "" if launch is None else f"{launch}."
        return all((self.rig / f"up.{start}{rank}").exists() for rank in ranks)

    def said(self, rank: int, launch: int) -> list[str]:
        """Node, number of ranks, resume step and process of a rank of that start."""
        return (self.rig / f"up.{launch}.{rank}").read_text().split()

    def processes(self) -> list[int]:
        """Everything alive that this attempt's launcher or nodes started."""
        marker = f"RIG_DIR={self.rig}".encode()
        return [pid for pid in _all_pids() if marker in environment_of(pid)]


def _all_pids() -> list[int]:
    return [int(p.name) for p in Path("/proc").iterdir() if p.name.isdecimal()]


def environment_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()  # a zombie's is empty
    except OSError:
        return b""


@pytest.fixture
def attempt(tmp_path: Path) -> Iterator[Attempt]:
    attempt = Attempt(tmp_path)
    yield attempt
    (tmp_path / "end").touch()
    for pid in attempt.processes():
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(pid, signal.SIGKILL)
    if attempt.process is not None:
        attempt.process.wait(DEADLINE_S)
