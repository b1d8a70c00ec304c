"""What a node's ranks find around them: environment, network interface, a port for their rendezvous."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import importlib.util
import os
import re
import socket
import struct
import sys
from collections.abc import Mapping
from pathlib import Path

from trainer import contract, nccl
from trainer.agent.program import choose_program
from trainer.contract import AttemptSpec, RunPaths

_SIOCGIFADDR = 0x8915


def training_environment(
    spec: AttemptSpec, run_dir: Path, given: Mapping[str, str], *, launch: int, socket: Path
) -> dict[str, str]:
    """The environment of the training program: what is given, ours where nothing is given, the run file's last.

    `launch`: which start of the training it is for; `socket`: where its ranks reach the agent of their node.
    """
    wanted = wanted_environment(spec, given)
    ours = {
        "OMP_NUM_THREADS": str(threads_per_process(given, spec.procs_per_node)),
        "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[rank${rank}]: ",
        "PYTHONUNBUFFERED": "1",  # the last words of a killed worker must be in its log
        **choose_nccl_settings(spec, run_dir, wanted, launch=launch, socket=socket),
    }
    told = {contract.ENV_LAUNCH: str(launch), contract.ENV_NODE_SOCKET: str(socket)}
    return {**ours, **wanted, **contract.attempt_environment(spec, run_dir), **told}


def wanted_environment(spec: AttemptSpec, given: Mapping[str, str]) -> dict[str, str]:
    """What the user gives: the job's environment without what is the agent's alone, and the run file's."""
    hidden = (contract.ENV_LAUNCHER, contract.ENV_LAUNCHER_SECRET)
    return {**{name: value for name, value in given.items() if name not in hidden}, **spec.environment}


def choose_nccl_settings(
    spec: AttemptSpec, run_dir: Path, wanted: Mapping[str, str], *, launch: int, socket: Path
) -> dict[str, str]:
    """What we set for NCCL and torch's process groups where the user has set nothing."""
    return nccl.nccl_environment(
        str(RunPaths(run_dir).evidence(spec.attempt, launch)),
        wanted,
        torch_version=_torch_version() if _runs_our_python(spec) else "",
        pipe_dir=str(socket.parent),
        has_timing=spec.straggler_ratio > 0,
    )


def _runs_our_python(spec: AttemptSpec) -> bool:
    """False where another Python trains, a container's or the user's own: its PyTorch is not known."""
    program = choose_program(spec.command, sys.executable)
    return not spec.command_prefix and program.python == sys.executable and "--no-python" not in program.arguments[:1]


@functools.cache  # of each start
def _torch_version() -> str:
    """Of the PyTorch beside this program, without loading it; empty: there is none."""
    with contextlib.suppress(OSError, ImportError, ValueError):
        spec = importlib.util.find_spec("torch")
        if spec is not None and spec.origin is not None:
            text = (Path(spec.origin).parent / "version.py").read_text()
            found = re.search(r"""^__version__ = ['"]([^'"]+)""", text, re.MULTILINE)
            return found[1] if found else ""
    return ""


def threads_per_process(environment: Mapping[str, str], procs_per_node: int) -> int:
    """CPU threads for each process of a node: an equal share of the CPUs that Slurm gave us."""
    given = environment.get("SLURM_CPUS_ON_NODE", "")
    cpus = int(given) if given.isdecimal() else len(os.sched_getaffinity(0))
    return max(1, cpus // max(1, procs_per_node))


def find_interface(address: str) -> str:
    """The network interface that has this IPv4 address, or an empty string."""
    if address.startswith("127."):
        return "lo"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # an interface without an IPv4 address
                reply = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, request)
                if socket.inet_ntoa(reply[20:24]) == address:
                    return name
    return ""


def hold_port() -> socket.socket:
    """A socket bound to a free TCP port, so that nobody else is given it before torchrun listens there."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # torchrun may bind it too, as it does the same
    sock.bind(("", 0))
    return sock


def is_listening(address: str, port: int) -> bool:
    """True when something of this host accepts connections there."""
    try:
        with socket.create_connection((address, port), timeout=1.0):
            return True
    except OSError:
        return False


def find_node_name(environment: Mapping[str, str]) -> str:
    """This node's name in Slurm's words (several may share one host)."""
    return environment.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]
