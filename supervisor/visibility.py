"""Whether a folder on this machine is also seen, and may be written to, on the compute nodes: asked through srun.

The job that asks is over in a fraction of a second, is never queued (--immediate) and bounded in every direction. When
it cannot be asked now, the answer is "not checked": the start checks of the first attempt ask again.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from slurm.client import CliClient
from slurm.commands import reading_environment
from slurm.errors import SlurmError
from slurm.run_tool import run_tool
from slurm.types import NodeAvailability, NodeBase, NodeRecord
from supervisor.model import RunSpec

IMMEDIATE_S = 5
TIMEOUT_S = 20.0
_IDLE_AGAIN_S = 5.0

# $0 is the folder, $1 the name of the file in it, whose content is a secret that only a reader of it can print.
_LOOK = (
    'echo "node=${SLURMD_NODENAME:-?}"; '
    'if [ ! -f "$0/$1" ]; then echo absent; exit 0; fi; '
    'cat "$0/$1"; '
    'if [ -w "$0" ]; then echo writable; fi'
)
_CARRIED = re.compile(r"^(--reservation=|--constraint=|-C)")  # options without which the user may get no node


@dataclass(frozen=True, slots=True, kw_only=True)
class Visibility:
    """What a node said. `is_seen` None: not checked, `why` says why."""

    is_seen: bool | None
    node: str = ""
    why: str = ""


def check_visibility(folder: Path, spec: RunSpec, client: CliClient, env: Mapping[str, str]) -> Visibility:
    """Ask a node of the run's partition that has room whether it sees `folder` and may write there."""
    try:
        candidates = [r for r in client.fetch_nodes().nodes if is_candidate(r, spec.slurm.partition)]
    except SlurmError as error:
        return Visibility(is_seen=None, why=f"Slurm does not answer: {error}")
    if not candidates:
        return Visibility(is_seen=None, why="no node has room now; the start checks of the first attempt will")
    seen = _ask(folder, spec, env)
    if any(r.is_idle for r in candidates if r.name == seen.node):
        # A node that still cleans up after our question would be missing from the first attempt.
        _wait_until(lambda: _is_idle(client, seen.node), _IDLE_AGAIN_S)
    return seen


def is_candidate(record: NodeRecord, partition: str | None) -> bool:
    """True when a job of that partition (or partitions, by comma) might start on the node now.

    A node that is busy in part counts: whether there is room for the question is Slurm's to say.
    """
    wanted = set(partition.split(",")) if partition else set(record.partitions)
    is_partly_free = record.base is NodeBase.MIXED and record.availability is NodeAvailability.USABLE
    return (record.is_idle or is_partly_free) and bool(wanted & set(record.partitions))


def srun_argv(folder: Path, name: str, spec: RunSpec) -> tuple[str, ...]:
    """The question as a command line."""
    slurm = spec.slurm
    chosen = {"--partition": slurm.partition, "--account": slurm.account, "--qos": slurm.qos}
    return (
        "srun",
        *(f"{option}={value}" for option, value in chosen.items() if value),
        *(option for option in slurm.options if _CARRIED.match(option)),
        "--nodes=1",
        "--ntasks=1",
        "--overcommit",
        f"--immediate={IMMEDIATE_S}",
        "--time=1",
        "--quiet",
        "--input=none",
        "--chdir=/",
        "--job-name=supervisor-visibility",
        "/bin/sh",
        "-c",
        _LOOK,
        str(folder),
        name,
    )


def judge_answer(output: str, secret: str, folder: Path) -> Visibility | None:
    """What the node's words mean; None when they are no answer."""
    lines = [line.strip() for line in output.splitlines()]
    node = next((line.removeprefix("node=") for line in lines if line.startswith("node=")), "")
    if "absent" in lines:
        return Visibility(is_seen=False, node=node, why=f"{folder} is not visible from node {node}")
    if secret not in lines:
        return None
    if "writable" not in lines:
        return Visibility(is_seen=False, node=node, why=f"{folder} is read-only for you on node {node}")
    return Visibility(is_seen=True, node=node)


def _ask(folder: Path, spec: RunSpec, env: Mapping[str, str]) -> Visibility:
    secret = secrets.token_hex(16)
    probe = folder / f".visibility-{secret[:8]}"
    probe.write_text(f"{secret}\n")
    try:
        done = run_tool(srun_argv(folder, probe.name, spec), TIMEOUT_S, reading_environment(env), path=env.get("PATH"))
    except OSError as error:
        return Visibility(is_seen=None, why=f"srun can't be started: {error}")
    finally:
        probe.unlink(missing_ok=True)
    answer = judge_answer(done.stdout, secret, folder)
    if answer is not None:
        return answer
    if done.returncode is None:
        return Visibility(is_seen=None, why=f"srun gave no answer within {TIMEOUT_S:g} s")
    said = " ".join(done.stderr.split())[:200] or f"srun ended with {done.returncode}"
    return Visibility(is_seen=None, why=said)


def _is_idle(client: CliClient, node: str) -> bool:
    try:
        return any(record.is_idle for record in client.fetch_nodes().nodes if record.name == node)
    except SlurmError:
        return True  # nobody to ask: don't wait


def _wait_until(is_so: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.1)
