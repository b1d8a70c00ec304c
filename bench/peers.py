"""The same training without the supervisor: sbatch, bare srun, torchrun alone, submitit. Each resumes by itself.

Jobs have their nodes to themselves: one whose node is dead would otherwise share it with the next job.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.stage import BenchFailed, Stage

NODES = 3
ROOT = Path(__file__).parents[1]
_PORT = 29400
_MAX_RESTARTS = 100

_REQUEUED_SCRIPT = """#!/bin/bash
#SBATCH --job-name=plain
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={output}
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
exec srun --cpu-bind=none {torchrun} --nnodes={nodes} --nproc-per-node=1 \\
    --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$head:{port}" {training}
"""

_ONE_NODE_SCRIPT = """#!/bin/bash
#SBATCH --job-name=torchrun
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --no-requeue
#SBATCH --output={output}
# Its best: workers that are started again would otherwise find the addresses of those before them in torchrun's own
# store, and fail to meet, again and again.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
exec {torchrun} --standalone --nproc-per-node={procs} --max-restarts={restarts} {training}
"""

_BARE_SCRIPT = """#!/bin/bash
#SBATCH --job-name=bare
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --no-requeue
#SBATCH --output={output}
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) MASTER_PORT={port}
export WORLD_SIZE={nodes} LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 OMP_NUM_THREADS=1
exec srun --cpu-bind=none bash -c 'export RANK=$SLURM_PROCID; exec {python} {training}'
"""

_TORCHRUN = f"{sys.executable} -m torch.distributed.run"


def submit_plain(stage: Stage, run_dir: Path, training: Sequence[str]) -> int:
    """Submit the training with `sbatch --requeue`; returns the job's id."""
    return _submit(stage, run_dir, training, _REQUEUED_SCRIPT, nodes=NODES, port=_PORT)


def submit_torchrun(stage: Stage, run_dir: Path, training: Sequence[str], procs: int) -> int:
    """Submit the training under torchrun on one node, which restarts its workers itself; returns the job's id."""
    return _submit(stage, run_dir, training, _ONE_NODE_SCRIPT, procs=procs, restarts=_MAX_RESTARTS)


def submit_bare(stage: Stage, run_dir: Path, training: Sequence[str], nodes: int) -> int:
    """Submit the training with nothing around its ranks, one a node; returns the job's id."""
    return _submit(stage, run_dir, training, _BARE_SCRIPT, nodes=nodes, port=_PORT, python=sys.executable)


def _submit(stage: Stage, run_dir: Path, training: Sequence[str], script: str, **values: object) -> int:
    run_dir.mkdir(parents=True)
    path = run_dir / "batch.sh"
    words = " ".join([*training, "--run-dir", str(run_dir)])
    path.write_text(script.format(output=run_dir / "job.log", torchrun=_TORCHRUN, training=words, **values))
    return int(stage.slurm("sbatch", "--parsable", f"--chdir={ROOT}", str(path)).strip())


def start_bare(stage: Stage, run_dir: Path, training: Sequence[str], nodes: Sequence[str]) -> subprocess.Popen[bytes]:
    """`srun torchrun` on these nodes, as one types it; whoever calls ends it."""
    run_dir.mkdir(parents=True)
    count = len(nodes)
    with (run_dir / "job.log").open("wb") as log:
        return subprocess.Popen(
            [
                *("srun", f"--nodes={count}", f"--ntasks={count}", f"--nodelist={','.join(nodes)}"),
                *("--job-name=bare", "--cpu-bind=none", f"--chdir={ROOT}"),
                *_TORCHRUN.split(),
                *(f"--nnodes={count}", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=bare"),
                f"--rdzv-endpoint={nodes[0]}:{_PORT}",
                *training,
                *("--run-dir", str(run_dir)),
            ],
            env=stage.env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


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
            slurm_setup=[f"export PYTHONPATH={ROOT}"],
            slurm_additional_parameters={"requeue": True, "exclusive": True},
        )
        job = executor.submit(SubmititTraining([*training[2:], "--run-dir", str(run_dir)]))
    finally:
        os.environ.clear()
        os.environ.update(before)
    if not job.job_id.isdecimal():
        raise BenchFailed(f"submitit gave the job id {job.job_id!r}")
    return int(job.job_id)
