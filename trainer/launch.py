"""On the batch host: starts the training step on chosen nodes, notices a silent node, says how the step ended.

`python -m trainer.launch ATTEMPT_DIR`, exec'ed by the batch script, so that its exit code is the job's. Every node
of the allocation runs its start checks; the first healthy ones train, the others are spares. The launcher reports
what it sees; a silent node is the service's to act upon, and only if nobody does so does the launcher end the step.
Standard library only, monotonic clock only; a file system that hangs must not stop the beats, so files are written
by a thread of their own.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainer import contract
from trainer.contract import AttemptSpec, ContractError, ExitRecord
from trainer.launching.launcher import Launcher
from trainer.launching.limits import POLL_S, Limits
from trainer.step import find_nodes, find_own_address
from trainer.verdict import EXIT_MISCONFIGURED

__all__ = ["PROMOTION_LIMIT_S", "Limits", "main"]

PROMOTION_LIMIT_S = 600.0  # a job that was queued ahead holds its nodes for so long until it is told to begin

# -P as we were started: without it a user's own trainer/ in the working directory would be run instead of ours
_AGENT = (sys.executable, *(["-P"] if sys.flags.safe_path else []), "-m", "trainer.node")


def main(
    argv: Sequence[str] | None = None,
    *,
    agent: Sequence[str] = _AGENT,
    limits: Limits | None = None,
    promotion_limit_s: float = PROMOTION_LIMIT_S,
) -> int:
    """Run one attempt on this job's nodes. `agent`: what stands for trainer.node, in tests."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if len(arguments) != 1:
        print("usage: python -m trainer.launch ATTEMPT_DIR", file=sys.stderr)
        return EXIT_MISCONFIGURED
    attempt_dir = Path(arguments[0]).absolute()
    job_id = os.environ.get("SLURM_JOB_ID", "")
    try:
        nodes = _find_step_nodes(_read_spec(attempt_dir), os.environ)
        spec = _await_promotion(attempt_dir, promotion_limit_s)
        if spec is None:
            return _give_nodes_back(attempt_dir, _job_number(job_id), promotion_limit_s)
    except (OSError, ContractError) as error:
        return _refuse(attempt_dir, _job_number(job_id), str(error))
    own_node = os.environ.get("SLURMD_NODENAME") or nodes[0]
    _allow_connections(len(nodes))
    launcher = Launcher(
        spec=spec,
        attempt_dir=attempt_dir,
        nodes=nodes,
        own_node=own_node,
        own_address=find_own_address(nodes, own_node),
        job_id=_job_number(job_id),
        environment=os.environ,
        agent=agent,
        limits=limits or Limits(),
    )
    return launcher.run()


def _read_spec(attempt_dir: Path) -> AttemptSpec:
    return contract.parse(AttemptSpec, (attempt_dir / "attempt.json").read_bytes())


def _await_promotion(attempt_dir: Path, limit_s: float) -> AttemptSpec | None:
    """What to do, once it is this attempt's turn; None: nobody said so in time.

    One that was queued ahead begins when the service has seen the end of the one before it and chosen the checkpoint:
    its file then says so.
    """
    deadline = time.monotonic() + limit_s
    spec = _read_spec(attempt_dir)
    if spec.is_ahead:
        print("trainer.launch: queued ahead: waits to be told to begin", file=sys.stderr, flush=True)
    while spec.is_ahead:
        if time.monotonic() > deadline:
            return None
        time.sleep(POLL_S)
        with contextlib.suppress(OSError):  # a file system that wavers
            spec = _read_spec(attempt_dir)
    return spec


def _give_nodes_back(attempt_dir: Path, job_id: int, limit_s: float) -> int:
    reason = f"queued ahead, and not told to begin within {limit_s:g} s"
    return _end_early(attempt_dir, job_id, reason, contract.EXIT_RESUBMIT)


def _job_number(text: str) -> int:
    return int(text) if text.isdecimal() else 0


def _allow_connections(count: int) -> None:
    """Room for one connection per node; most systems start a process with 1,024 open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + 256
    if soft != resource.RLIM_INFINITY and soft < wanted:
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def _find_step_nodes(spec: AttemptSpec, environment: Mapping[str, str]) -> tuple[str, ...]:
    if shutil.which("srun") is None:
        raise ContractError("srun is not on PATH of the batch script: the training step cannot be started")
    nodes = find_nodes(environment.get("SLURM_JOB_NODELIST", ""))
    if not nodes:
        raise ContractError("SLURM_JOB_NODELIST names no node: trainer.launch runs inside a Slurm job")
    if len(nodes) < spec.nodes:
        raise ContractError(f"the job has {len(nodes)} nodes, the attempt asks for {spec.nodes}")
    return nodes


def _refuse(attempt_dir: Path, job_id: int, reason: str) -> int:
    return _end_early(attempt_dir, job_id, reason, EXIT_MISCONFIGURED)


def _end_early(attempt_dir: Path, job_id: int, reason: str, code: int) -> int:
    print(f"trainer.launch: {reason}", file=sys.stderr, flush=True)
    attempt = int(attempt_dir.name) if attempt_dir.name.isdecimal() else 0
    record = ExitRecord(attempt=attempt, job_id=job_id, exit_code=code, reason=reason, time=time.time())
    try:
        if attempt_dir.is_dir():
            contract.write_json(attempt_dir / "exit.json", record)
    except OSError as error:
        print(f"trainer.launch: exit.json not written: {error}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
