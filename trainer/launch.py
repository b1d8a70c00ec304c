"""On the batch host: starts the training on chosen nodes, and again on others when something breaks.

`python -m trainer.launch ATTEMPT_DIR`, exec'ed by the batch script, so that its exit code is the job's. Every node
of the allocation runs its start checks; the first healthy ones train, the others are spares. When a rank dies or hangs,
or a node is lost, the training is started again in the same allocation, on nodes that are sound, from the newest
verified checkpoint; what can't be done here is left to the service, and the exit record says what. Monotonic clock
only; a file system that hangs must not stop the beats, so files are read and written by threads of their own.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import shutil
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from trainer import contract
from trainer.contract import AttemptSpec, ContractError, ExitRecord
from trainer.launching.claim import AlreadyLaunched, own_claim, take_claim
from trainer.launching.launcher import Launcher
from trainer.launching.limits import POLL_S, Limits
from trainer.launching.ports import Address, PortWatch, fetch_addresses
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
    addresses: Callable[[Sequence[str]], Mapping[str, Address]] = fetch_addresses,
) -> int:
    """Run one attempt on this job's nodes.

    In tests `agent` stands for trainer.node, and `addresses` for what Slurm says of its slurmds.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if len(arguments) != 1:
        print("usage: python -m trainer.launch ATTEMPT_DIR", file=sys.stderr)
        return EXIT_MISCONFIGURED
    attempt_dir = Path(arguments[0]).absolute()
    job_id = os.environ.get("SLURM_JOB_ID", "")
    try:
        _claim(attempt_dir, _job_number(job_id))
        nodes = _find_step_nodes(_read_spec(attempt_dir), os.environ)
        spec = _await_promotion(attempt_dir, promotion_limit_s)
        if spec is None:
            return _give_nodes_back(attempt_dir, _job_number(job_id), promotion_limit_s)
    except AlreadyLaunched as error:  # the files are the other one's: nothing is written
        print(f"trainer.launch: {error}", file=sys.stderr, flush=True)
        return contract.EXIT_ALREADY_LAUNCHED
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
        ports=PortWatch(nodes, limit_s=min(1.0, spec.suspect_after_s / 4), fetch=addresses),
        agent_log=_find_log(attempt_dir),
    )
    return launcher.run()


def _claim(attempt_dir: Path, job_id: int) -> None:
    spec = _read_spec(attempt_dir)
    host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    restarts = _job_number(os.environ.get("SLURM_RESTART_COUNT", ""))
    take_claim(attempt_dir, own_claim(spec.attempt, host, job_id, restarts))


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


def _find_log(attempt_dir: Path) -> str:
    """The job's log, where every node can append to it: in the attempt's folder. Empty: it is somewhere else."""
    log = attempt_dir / "job.log"
    with contextlib.suppress(OSError):
        if os.path.samestat(log.stat(), os.fstat(sys.stderr.fileno())):
            for stream in (sys.stdout, sys.stderr):  # else our words would be written over theirs
                flags = fcntl.fcntl(stream.fileno(), fcntl.F_GETFL)
                fcntl.fcntl(stream.fileno(), fcntl.F_SETFL, flags | os.O_APPEND)
            return str(log)
    return ""


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
