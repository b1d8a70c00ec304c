"""What one sandbox is: names, addresses, ports and limits, fixed before anything is started.

The record is written to `<directory>/sandbox.json` first, so that any later process can find, use and end the sandbox.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Mode = Literal["isolated", "loopback"]

STATE_NAME = "sandbox.json"
SCRATCH_BYTES = 64 * 1024 * 1024
SHM_BYTES = 1024 * 1024 * 1024
CPUS_PER_NODE = 4
MEMORY_MB_PER_NODE = 4000
CLUSTER_NAME = "sandbox"
DEFAULT_PARTITION = "main"
HEAD_HOST = "head"  # of an isolated sandbox
STANDBY_HOST = "standby"
TAKEOVER_AFTER_S = 4  # of the first controller's silence, where there is a second one


class SandboxError(Exception):
    """The sandbox could not do what was asked; the message says why, with the end of the log that tells."""


class SandboxUnavailable(SandboxError):
    """This machine lacks what a sandbox needs; the message names the packages or rights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpec:
    """One node: its Slurm name and where its slurmd listens."""

    name: str
    address: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """Everything about a sandbox that does not change while it runs."""

    sandbox_id: str
    directory: str
    is_temporary: bool  # the directory was made for this sandbox and goes with it
    mode: Mode
    mode_reason: str
    machine_host: str  # this machine's own name: where Slurm's commands come from
    head_host: str
    head_address: str
    is_local_only: bool  # nothing listens on an address that other machines can reach
    controller_port: int
    nodes: tuple[NodeSpec, ...]
    gpus_per_node: int
    slurmd_timeout_s: int
    kill_wait_s: int
    user: str
    owner_pid: int | None  # the sandbox ends with this process; None: it stays until it is stopped
    extra_conf: str = ""
    accounting: bool = False
    dbd_port: int = 0
    database_port: int = 0
    min_job_age_s: int = 300  # for how long the controller remembers an ended job; it looks every 10 s at most
    standby_address: str = ""  # of a second controller; empty: there is none
    slurm: str = ""  # the folder that holds sbin/slurmctld and bin/sbatch; empty: by PATH

    @property
    def root(self) -> Path:
        return Path(self.directory)

    @property
    def conf(self) -> Path:
        return self.root / "slurm.conf"

    @property
    def scratch(self) -> Path:
        """The nodes' local disk: a small file system of its own on each isolated node, under one path."""
        return self.root / "scratch"

    @property
    def database(self) -> Path:
        """The database's files; not in the directory, which the account that runs it may not be able to enter."""
        return Path(tempfile.gettempdir()) / f"slurm-sandbox-database-{self.sandbox_id}"

    @property
    def socket(self) -> Path:
        """Where the keeper listens; not in the directory, whose path may be longer than a socket's name can be."""
        return registry_dir() / f"{self.sandbox_id}.sock"

    @property
    def has_standby(self) -> bool:
        return bool(self.standby_address)

    @property
    def head_link(self) -> str:
        return f"sbx-{self.sandbox_id}"

    def log(self, name: str) -> Path:
        return self.root / "log" / f"{name}.log"

    def node(self, name: str) -> NodeSpec:
        for node in self.nodes:
            if node.name == name:
                return node
        known = ", ".join(node.name for node in self.nodes)
        raise SandboxError(f"no node {name!r} in this sandbox; it has {known}")


def registry_dir() -> Path:
    """The folder, private to this user, in which every running sandbox has an entry."""
    if os.geteuid() == 0 and os.access("/run", os.W_OK):
        return Path("/run/slurm-sandbox")
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return Path(base) / f"slurm-sandbox-{os.geteuid()}"


def render_spec(spec: SandboxSpec) -> str:
    """The record as JSON text."""
    return json.dumps(dataclasses.asdict(spec), indent=1)


def parse_spec(text: str) -> SandboxSpec:
    """The record from JSON text; SandboxError when it is none."""
    try:
        raw = json.loads(text)
        raw["nodes"] = tuple(NodeSpec(**node) for node in raw["nodes"])
        return SandboxSpec(**raw)
    except (ValueError, KeyError, TypeError) as error:
        raise SandboxError(f"{STATE_NAME} is not the record of a sandbox: {error}") from None


def read_spec(directory: Path) -> SandboxSpec:
    """The record of the sandbox in `directory`; SandboxError when there is none."""
    path = directory / STATE_NAME
    try:
        return parse_spec(path.read_text())
    except FileNotFoundError:
        raise SandboxError(f"no sandbox in {directory}: {path} is missing") from None
