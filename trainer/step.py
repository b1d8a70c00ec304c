"""Slurm's side of the training step: the allocated nodes, their addresses, and srun. Standard library only."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import IO

from trainer.container import in_image
from trainer.verdict import NodeEnd

SCONTROL_LIMIT_S = 5.0

_PER_TASK_WISHES = frozenset(
    {
        "SLURM_CPU_BIND",
        "SLURM_DISTRIBUTION",
        "SLURM_EXACT",
        "SLURM_GPUS_PER_TASK",
        "SLURM_GPU_BIND",
        "SLURM_HINT",
        "SLURM_LABELIO",
        "SLURM_NTASKS_PER_CORE",
        "SLURM_NTASKS_PER_GPU",
        "SLURM_NTASKS_PER_NODE",
        "SLURM_NTASKS_PER_SOCKET",
        "SLURM_STEP_GRES",
        "SLURM_THREADS_PER_CORE",
        "SLURM_TRES_PER_TASK",
        "SRUN_CPUS_PER_TASK",
    }
)
_SRUN_TAIL_LINES = 20
_SRUN_CHATTER = (b"srun: job ", b"srun: Job ", b"srun: launch/", b"srun: debug", b"srun: debug2", b"srun: Try ")
_SRUN_REFUSED = re.compile(
    r"^srun: (?:error: )?(?:unrecognized option|invalid option|option '[^']*' requires|Invalid )"
)
_SRUN_TASK_ENDED = re.compile(r"^srun: error: (\S+): tasks? [\d,-]+: (.+)$")
_SRUN_LAUNCH_FAILED = re.compile(r"^srun: error: .*\bon node (\S+?)[:.]? ")


def expand_nodelist(text: str) -> tuple[str, ...]:
    """Node names of a Slurm host list such as `n[1-3,07],login`, in its order."""
    names: list[str] = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        names += _expand_part(part)
    return tuple(names)


def _expand_part(part: str) -> list[str]:
    found = re.match(r"^(.*?)\[([^\]]*)\](.*)$", part)
    if not found:
        return [part] if part else []
    prefix, ranges, suffix = found.groups()
    numbers: list[str] = []
    for item in ranges.split(","):
        first, _, last = item.partition("-")
        last = last or first
        numbers += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    return [f"{prefix}{number}{rest}" for number in numbers for rest in (_expand_part(suffix) or [""])]


def parse_node_addr(text: str) -> str:
    """NodeAddr in the output of `scontrol -o show node`, or an empty string."""
    found = re.search(r"(?:^|\s)NodeAddr=(\S+)", text)
    return found[1] if found else ""


def srun_command(
    nodes: Sequence[str], agent: Sequence[str], environment: Mapping[str, str], options: Sequence[str] = ()
) -> list[str]:
    """The training step's command: one agent on each node, on everything that the job has there.

    `--overlap`: probes run as steps of their own beside it. `--cpu-bind=none`: one task would otherwise be bound to
    one core. `--gpus-per-node`: a job that asked for GPUs by the task, as `environment` tells, would give our one
    task that share only. `--no-kill`, `--kill-on-bad-exit=0`, `--wait=0`: who ends, and when, is the launcher's
    decision. `options`: further ones, such as a container's, in which the agent then runs.
    """
    count = str(len(nodes))
    has_gpus_per_task = any(name in environment for name in ("SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK"))
    gpus = environment.get("SLURM_GPUS_ON_NODE") if has_gpus_per_task else None
    return [
        "srun",
        f"--nodes={count}",
        f"--ntasks={count}",
        "--ntasks-per-node=1",
        f"--nodelist={','.join(nodes)}",
        "--job-name=training",
        "--overlap",
        "--cpu-bind=none",
        "--mpi=none",
        "--export=ALL",
        "--input=none",
        "--no-kill",
        "--kill-on-bad-exit=0",
        "--wait=0",
        *([f"--gpus-per-node={gpus}"] if gpus else []),
        *options,
        *in_image(options, agent),
    ]


def step_environment(given: Mapping[str, str]) -> dict[str, str]:
    """The batch script's environment without what would make srun give our one task less than the whole node.

    sbatch leaves the job's own wishes there (eight tasks per node, one GPU each), and srun would apply them to ours.
    """
    kept = {name: value for name, value in given.items() if name not in _PER_TASK_WISHES}
    return {**kept, "SLURM_EXPORT_ENV": "ALL"}


def parse_srun_line(line: str) -> list[NodeEnd]:
    """The ends of agents that srun tells of in one line of its error output."""
    found = _SRUN_TASK_ENDED.match(line)
    if found is None:
        return []
    code = _parse_task_end(found[2])
    reason = f"srun: {found[2]}"
    return [NodeEnd(node=node, exit_code=code, reason=reason) for node in expand_nodelist(found[1])]


def _parse_task_end(text: str) -> int:
    found = re.search(r"exit code (\d+)", text)
    if found:
        return int(found[1])
    words = {"Killed": 9, "Terminated": 15, "Segmentation fault": 11, "Aborted": 6, "Out Of Memory": 9}
    return 128 + next((number for word, number in words.items() if word in text), 9)


def find_blamed_node(lines: Sequence[str], nodes: Sequence[str]) -> str | None:
    """The first of our nodes that srun's error lines name."""
    for line in lines:
        found = _SRUN_LAUNCH_FAILED.match(line) or _SRUN_TASK_ENDED.match(line)
        if found:
            return next((node for node in expand_nodelist(found[1]) if node in nodes), None)
    return None


def find_refusal(lines: Sequence[str]) -> str:
    """The line in which srun says that it doesn't understand how it was called; empty when none."""
    return next((line for line in lines if _SRUN_REFUSED.match(line)), "")


def run_scontrol(*arguments: str) -> str:
    """Scontrol's output, or an empty string when it is missing, fails or does not answer in time."""
    try:
        done = subprocess.run(
            ["scontrol", *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=SCONTROL_LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode(errors="replace") if done.returncode == 0 else ""


def is_left_alone(text: str) -> bool:
    """True when `scontrol -o show job` says of a job that it runs, and that Slurm does not end it."""
    found = dict(item.split("=", 1) for item in text.split() if "=" in item)
    # no word of a preemption where none is possible
    return found.get("JobState") == "RUNNING" and found.get("PreemptTime", "None") == "None"


def find_nodes(nodelist: str) -> tuple[str, ...]:
    """The allocated nodes, by scontrol or, without it, by our own reading of the list."""
    return tuple(run_scontrol("show", "hostnames", nodelist).split()) or expand_nodelist(nodelist)


def find_own_address(nodes: Sequence[str], own: str) -> str:
    """This host's address on the way to the other nodes.

    Its own name would not do: many distributions map it to 127.0.1.1 in /etc/hosts.
    """
    other = next((node for node in nodes if node != own), None)
    if other is None:
        return "127.0.0.1"
    address = parse_node_addr(run_scontrol("-o", "show", "node", other)) or other
    for target in (address, other, "192.0.2.1"):  # the last one is nobody's: the default route's own address
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
                sock.connect((target, 9))  # sends nothing
                return str(sock.getsockname()[0])
        except OSError:
            continue
    return socket.gethostname()


class Step:
    """The srun process; its error output is passed on and its end remembered."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], *, is_relayed: bool = False) -> None:
        self.lines: list[str] = []  # srun's own, the newest last
        self.is_released = False
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE if is_relayed else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=dict(environment),
        )
        self._thread = threading.Thread(target=self._pump, name="srun-stderr", daemon=True)
        self._thread.start()

    def _pump(self) -> None:
        stream: IO[bytes] | None = self._process.stderr
        assert stream is not None
        for line in iter(lambda: stream.readline(65536), b""):
            sys.stderr.buffer.write(line)
            sys.stderr.buffer.flush()
            if line.startswith(b"srun: ") and not line.startswith(_SRUN_CHATTER):
                self.lines = [*self.lines[1 - _SRUN_TAIL_LINES :], line.decode(errors="replace").rstrip()]

    def release(self) -> None:
        """Leave the agents to themselves, if this srun is a relay's: it ends, they do not."""
        if self._process.stdin is not None and not self.is_released:
            self.is_released = True
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    def exit_code(self) -> int | None:
        """Srun's exit code as a shell gives it, or None while it runs."""
        code = self._process.poll()
        return 128 - code if code is not None and code < 0 else code

    def stop(self) -> None:
        """End srun by force if it is still there, as it is for a node that is gone.

        SIGKILL: on SIGTERM it would first wait for that node once more.
        """
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._thread.join(1.0)  # a task that srun left behind may hold the pipe open
