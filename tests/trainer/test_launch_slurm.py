"""The launcher as a real job: what Slurm sees of its end, and what is left on the nodes."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slurm.sandbox import Sandbox
from trainer.contract import AttemptSpec, ExitRecord, LaunchReport, RunPaths, parse, write_json

pytestmark = pytest.mark.slurm

RIG = Path(__file__).with_name("launch_rig")
ROOT = Path(__file__).parents[2]

SLEEP = """
import os, pathlib, time
pathlib.Path(os.environ['RIG_DIR'], 'up.' + os.environ['RANK']).touch()
time.sleep(999)
"""


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox.start(nodes=3, gpus_per_node=2) as sandbox:
        yield sandbox


def eventually(condition: Callable[[], Any], deadline_s: float = 30.0) -> float:
    """Seconds until the condition held."""
    begun = time.monotonic()
    while time.monotonic() - begun < deadline_s:
        if condition():
            return time.monotonic() - begun
        time.sleep(0.02)
    raise AssertionError(f"not within {deadline_s:g} s")


class Job:
    """One attempt as a job of the sandbox. `is_real`: with torchrun instead of the rig's runner."""

    def __init__(
        self,
        sandbox: Sandbox,
        directory: Path,
        program: str,
        *,
        is_real: bool = False,
        options: tuple[str, ...] = (),
        **spec: Any,
    ) -> None:
        self.sandbox = sandbox
        self.rig = directory
        self.paths = RunPaths(directory / "run")
        script = directory / "train.py"
        script.write_text(program)
        write_json(self.paths.attempt_spec(1), AttemptSpec(run="r", attempt=1, command=(str(script),), **spec))
        launcher = "-m trainer.launch" if is_real else str(RIG / "launch.py")
        attempt_dir = self.paths.attempt_dir(1)
        batch = attempt_dir / "batch.sh"
        exports = f"export PYTHONPATH={ROOT} RIG_DIR={directory} OMP_NUM_THREADS=1"
        batch.write_text(f"#!/bin/sh\n{exports}\nexec {sys.executable} {launcher} {attempt_dir}\n")
        usual = ("--parsable", "--no-requeue", "--no-kill", "-N2-3", f"-o{attempt_dir}/job.log")
        sent = sandbox.run("sbatch", *usual, *options, str(batch))
        self.job_id = sent.stdout.strip()
        assert self.job_id.isdigit(), sent.stderr

    def is_up(self) -> bool:
        return (self.rig / "up.0").exists() and (self.rig / "up.1").exists()

    def report(self) -> LaunchReport:
        return parse(LaunchReport, self.paths.launch_report(1).read_bytes())

    def end(self) -> ExitRecord:
        eventually(self.paths.exit_record(1).exists)
        return parse(ExitRecord, self.paths.exit_record(1).read_bytes())

    def exit_code(self) -> str:
        """Slurm's ExitCode, once the job is over."""
        pattern = r"JobState=(?!RUNNING|PENDING|COMPLETING)\S+ .*\bExitCode=(\S+)"
        shown: list[str] = []

        def is_over() -> bool:
            text = self.sandbox.run("scontrol", "-o", "show", "job", self.job_id).stdout
            shown[:] = re.findall(pattern, text)
            return bool(shown)

        eventually(is_over)
        return shown[0]

    def processes(self) -> list[int]:
        marker = f"RIG_DIR={self.rig}".encode()
        pids = [int(p.name) for p in Path("/proc").iterdir() if p.name.isdecimal()]
        return [pid for pid in pids if marker in _read_environment(pid)]


def _read_environment(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def test_a_power_cut_is_reported_within_four_seconds(tmp_path: Path) -> None:
    with Sandbox.start(nodes=2) as sandbox:
        job = Job(sandbox, tmp_path, SLEEP, nodes=2)
        eventually(job.is_up)
        sandbox.power_cut("n2")
        assert eventually(lambda: job.report().silent == ("n2",)) <= 4
        record = job.end()
        assert (record.exit_code, record.node) == (77, "n2")
        eventually(lambda: not job.processes())


def test_cancelling_leaves_no_process_after_five_seconds(sandbox: Sandbox, tmp_path: Path) -> None:
    hidden = "import subprocess; subprocess.Popen(['setsid', 'sh', '-c', 'trap \"\" TERM; sleep 998'])\n"
    job = Job(sandbox, tmp_path, hidden + SLEEP, nodes=2)
    eventually(job.is_up)
    assert job.processes()
    sandbox.run("scancel", job.job_id)
    assert eventually(lambda: not job.processes()) <= 5
    assert job.end().exit_code == 143


def test_a_node_that_fails_its_checks_is_replaced_by_the_spare(sandbox: Sandbox, tmp_path: Path) -> None:
    checks = 'test $SLURMD_NODENAME != n2 && echo \'[]\' || echo \'[{"check":"disk","ok":false}]\''
    job = Job(sandbox, tmp_path, "", nodes=2, start_checks=("/bin/sh", "-c", checks))
    assert job.exit_code() == "0:0"
    assert job.end().nodes == {"n1": 0, "n2": 76, "n3": 0}


def test_a_node_has_all_its_gpus_also_when_they_were_asked_for_by_the_task(sandbox: Sandbox, tmp_path: Path) -> None:
    program = """
import os, pathlib
pathlib.Path(os.environ['RIG_DIR'], 'gpus').write_text(os.environ['CUDA_VISIBLE_DEVICES'])
"""
    job = Job(sandbox, tmp_path, program, options=("-N2", "--gpus-per-task=1", "--ntasks-per-node=2"), nodes=1)
    assert job.end().exit_code == 0
    assert (tmp_path / "gpus").read_text() == "0,1"


@pytest.mark.parametrize("code", [0, 75])
def test_the_exit_code_of_the_training_is_the_jobs(sandbox: Sandbox, tmp_path: Path, code: int) -> None:
    job = Job(sandbox, tmp_path, f"raise SystemExit({code})", nodes=2)
    assert job.exit_code() == f"{code}:0"
    assert job.end().exit_code == code


@pytest.mark.torch
def test_torchrun_trains_on_the_nodes_and_speaks_into_the_jobs_log(sandbox: Sandbox, tmp_path: Path) -> None:
    program = """
import os, sys
from torch import distributed
distributed.init_process_group("gloo")
distributed.barrier()
print("rank", distributed.get_rank(), "of", distributed.get_world_size(), flush=True)
distributed.destroy_process_group()
sys.exit(93)
"""
    job = Job(sandbox, tmp_path, program, is_real=True, nodes=2)
    assert job.exit_code() == "93:0"
    assert job.end().exit_code == 93  # torchrun itself would have made it 1
    assert "rank 0 of 2" in (job.paths.attempt_dir(1) / "job.log").read_text()
