"""nvidia-resiliency-ext's `ft_launcher`, in an environment of its own: made on first use, torch is this project's.

Its heartbeats are as short as ours, those of its nodes as short as its code allows (bench.nvrx_launcher); everything
else has its default, as a user would get it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path

from bench.report import say
from bench.stage import LIVENESS_S, BenchFailed, Stage

VERSION = "0.4.1"
LOOK_S = 0.25  # at the heartbeats of the ranks
FIRST_HEARTBEAT_S = 60.0  # from its start; a slow machine must not look like a failure

_ROOT = Path(__file__).parents[1]
_HOME = _ROOT / ".peers" / "nvrx"
_WANTED = Path(__file__).with_name("nvrx-requirements.txt")
_PIP_LIMIT_S = 300.0
_PORT = 29410

_BATCH_SCRIPT = """#!/bin/bash
#SBATCH --job-name=nvrx
#SBATCH --nodes={allocated}
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --no-kill
#SBATCH --no-requeue
#SBATCH --output={output}
export TMPDIR={scratch}
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
exec srun --cpu-bind=none --no-kill --kill-on-bad-exit=0 --wait=0 {python} -m bench.nvrx_launcher \\
    --nnodes={nodes} --nproc-per-node=1 --max-restarts=3 \\
    --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$head:{port}" {rendezvous} \\
    --ft-workload-check-interval={look_s:g} --ft-initial-rank-heartbeat-timeout={first_s:g} \\
    --ft-rank-heartbeat-timeout={heartbeat_s:g} --ft-enable-nic-monitor=False \\
    {training}
"""


def prepare() -> None:
    """Make the environment unless it is there as the requirements say. Raises BenchFailed when that can't be done."""
    mark = _HOME / "made-from"
    if mark.exists() and mark.read_text() == _WANTED.read_text():
        return
    say(f"an environment for nvidia-resiliency-ext {VERSION} is made in {_HOME.relative_to(_ROOT)}")
    shutil.rmtree(_HOME, ignore_errors=True)
    venv.create(_HOME, with_pip=False)
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "pip", "--python", str(_python()), "install", "--no-deps", "-r", str(_WANTED)],
            capture_output=True,
            text=True,
            timeout=_PIP_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise BenchFailed(f"pip did not end within {_PIP_LIMIT_S:g} s") from error
    if ended.returncode != 0:
        raise BenchFailed(f"pip: exit {ended.returncode}: {ended.stderr[-600:].strip()}")
    # torch and everything else that both need is the project's own: no second copy, and the same code on both sides.
    folders = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (_packages() / "project.pth").write_text("".join(f"{folder}\n" for folder in sorted(folders)))
    mark.write_text(_WANTED.read_text())


def submit_nvrx(
    stage: Stage, run_dir: Path, training: Sequence[str], *, allocated: int, nodes: str, rendezvous: str = ""
) -> int:
    """Submit the training under `ft_launcher` on `allocated` nodes; returns the job's id.

    `nodes`: how many train, such as "2:3". `rendezvous`: further settings of the meeting, as key=value,...
    """
    run_dir.mkdir(parents=True)
    script = run_dir / "batch.sh"
    script.write_text(
        _BATCH_SCRIPT.format(
            allocated=allocated,
            output=run_dir / "job.log",
            # Its sockets are named after process ids, which the sandbox's nodes share, and so they do /tmp.
            scratch=stage.sandbox.scratch,
            python=_python(),
            nodes=nodes,
            port=_PORT,
            rendezvous=f"--rdzv-conf={rendezvous}" if rendezvous else "",
            look_s=LOOK_S,
            first_s=FIRST_HEARTBEAT_S,
            heartbeat_s=LIVENESS_S,
            training=" ".join(["-m", "bench.nvrx_training", *training[2:], "--run-dir", str(run_dir)]),
        )
    )
    return int(stage.slurm("sbatch", "--parsable", f"--chdir={_ROOT}", str(script)).strip())


def _python() -> Path:
    return _HOME / "bin" / "python"


def _packages() -> Path:
    return _HOME / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
