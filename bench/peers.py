"""The same training without the supervisor: plain sbatch with torchrun, and submitit. Each resumes by itself."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.stage import BenchFailed, Stage

NODES = 3
_PORT = 29400
_ROOT = Path(__file__).parents[1]

_BATCH_SCRIPT = """#!/bin/bash
#SBATCH --job-name=plain
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={output}
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
exec srun --cpu-bind=none {python} -m torch.distributed.run --nnodes={nodes} --nproc-per-node=1 \\
    --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$head:{port}" {training}
"""


def submit_plain(stage: Stage, run_dir: Path, training: Sequence[str]) -> int:
    """Submit the training with `sbatch --requeue`; returns the job's id."""
    run_dir.mkdir(parents=True)
    script = run_dir / "batch.sh"
    script.write_text(
        _BATCH_SCRIPT.format(
            nodes=NODES,
            output=run_dir / "job.log",
            python=sys.executable,
            port=_PORT,
            training=" ".join([*training, "--run-dir", str(run_dir)]),
        )
    )
    return int(stage.slurm("sbatch", "--parsable", f"--chdir={_ROOT}", str(script)).strip())


def submit_submitit(stage: Stage, run_dir: Path, training: Sequence[str]) -> int:
    """Submit the training through submitit's own executor; returns the job's id."""
    import submitit

    from bench.submitit_training import SubmititTraining

    run_dir.mkdir(parents=True)
    before = dict(os.environ)
    os.environ.update(stage.sandbox.env)  # submitit runs sbatch with what it finds there
    try:
        executor = submitit.AutoExecutor(folder=run_dir / "submitit", cluster="slurm")
        executor.update_parameters(
            nodes=NODES,
            tasks_per_node=1,
            timeout_min=60,
            slurm_job_name="submitit",
            slurm_setup=[f"export PYTHONPATH={_ROOT}"],
            slurm_additional_parameters={"requeue": True},
        )
        job = executor.submit(SubmititTraining([*training[2:], "--run-dir", str(run_dir)]))
    finally:
        os.environ.clear()
        os.environ.update(before)
    if not job.job_id.isdecimal():
        raise BenchFailed(f"submitit gave the job id {job.job_id!r}")
    return int(job.job_id)
