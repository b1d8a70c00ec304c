"""A private, real Slurm cluster on one machine, with faults by name.

    with Sandbox.start(nodes=4) as sandbox:
        subprocess.run(["sbatch", "job.sh"], env={**os.environ, **sandbox.env}, check=True, timeout=30)
        sandbox.power_cut("n2")

Isolated nodes (root) have a network, processes, host name, local disk and shared memory of their own; loopback nodes
are slurmd processes side by side. Slurm's authentication is switched off inside: whoever can reach the controller's
address on this machine can run commands in the sandbox as anybody. It is for tests and demonstrations.
"""

from __future__ import annotations

import getpass
import ipaddress
import json
import os
import random
import secrets
import select
import shutil
import signal
import socket
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Literal, Self

from slurm.sandbox.installed import find_tool, read_slurm_shape, require_accounting, search_path, why_not_isolated
from slurm.sandbox.keeper import READY_DEADLINE_S, keeper_argv
from slurm.sandbox.network import choose_subnet
from slurm.sandbox.processes import await_true, is_alive
from slurm.sandbox.registry import read_keeper, sweep_leftovers
from slurm.sandbox.spec import (
    HEAD_HOST,
    STATE_NAME,
    Mode,
    NodeSpec,
    SandboxError,
    SandboxSpec,
    SandboxUnavailable,
    read_spec,
    render_spec,
)

_ANSWER_TIMEOUT_S = 60.0
_TAIL_CHARS = 1500
_MAX_NODES = 200
_FIRST_NODE_HOST = 11  # the last byte of n1's address
_PORTS = range(20000, 32000)  # below the range the kernel hands out to clients


class Sandbox:
    """A running sandbox; a context manager that ends it."""

    def __init__(self, spec: SandboxSpec, *, cold_start_s: float, keeper_pid: int | None = None) -> None:
        self._spec = spec
        self._keeper_pid = keeper_pid  # only where it is a child of this process
        self.cold_start_s = cold_start_s
        self.directory = spec.root
        self.mode: Mode = spec.mode
        self.mode_reason = spec.mode_reason
        self.node_names = tuple(node.name for node in spec.nodes)
        self.scratch = spec.scratch
        self.head_address = spec.head_address
        self.sandbox_id = spec.sandbox_id

    @classmethod
    def start(
        cls,
        *,
        nodes: int = 4,
        mode: Literal["auto", "isolated", "loopback"] = "auto",
        gpus_per_node: int = 0,
        accounting: bool = False,
        directory: Path | None = None,
        slurmd_timeout_s: int = 10,
        kill_wait_s: int = 5,
        min_job_age_s: int = 300,
        standby: bool = False,
        extra_conf: str = "",
        keep: bool = False,
        slurm: Path | None = None,
    ) -> Self:
        """A cluster with every node idle.

        It ends with `stop`, or when this process ends; with `keep` only with `stop`. A directory that is given stays
        behind with its logs, otherwise one is made and removed. `standby`: with a second slurmctld that takes over when
        the first is silent, on an isolated sandbox. `extra_conf`: lines for the end of slurm.conf. `slurm`:
        the folder above the sbin and bin of another Slurm than the one on PATH.

        Raises:
            SandboxUnavailable: what is missing on this machine, by package or right.
            SandboxError: it did not come up; the message ends with the log that tells.
        """
        if not 1 <= nodes <= _MAX_NODES:
            raise SandboxError(f"a sandbox has 1 to {_MAX_NODES} nodes, not {nodes}")
        prefix = "" if slurm is None else str(slurm.resolve())
        read_slurm_shape(prefix=prefix)
        if accounting:
            require_accounting(prefix=prefix)
        chosen, reason = _choose_mode(mode)
        if standby and chosen != "isolated":
            raise SandboxUnavailable(f"a second controller needs an isolated sandbox: {reason}")
        sweep_leftovers()
        root = _make_directory(directory)
        head_address, node_specs = _lay_out(chosen, nodes)
        ports = _free_ports(3)
        spec = SandboxSpec(
            sandbox_id=secrets.token_hex(4),
            directory=str(root),
            is_temporary=directory is None,
            mode=chosen,
            mode_reason=reason,
            machine_host=socket.gethostname(),
            head_host=HEAD_HOST if chosen == "isolated" else socket.gethostname().split(".")[0],
            head_address=head_address,
            is_local_only=chosen == "isolated" or _own_loopback_address() is not None,
            controller_port=ports[0],
            nodes=node_specs,
            gpus_per_node=gpus_per_node,
            slurmd_timeout_s=slurmd_timeout_s,
            kill_wait_s=kill_wait_s,
            user=getpass.getuser(),
            owner_pid=None if keep else os.getpid(),
            extra_conf=extra_conf,
            accounting=accounting,
            dbd_port=ports[1],
            database_port=ports[2],
            slurm=prefix,
            min_job_age_s=min_job_age_s,
            standby_address=str(ipaddress.IPv4Address(head_address) + 1) if standby else "",
        )
        (root / STATE_NAME).write_text(render_spec(spec))
        keeper_pid, cold_start_s = _launch_keeper(spec)
        return cls(spec, cold_start_s=cold_start_s, keeper_pid=keeper_pid)

    @classmethod
    def attach(cls, directory: Path) -> Self:
        """The sandbox that runs in `directory`, started by any process of this user; SandboxError when none does."""
        spec = read_spec(directory.resolve())
        if read_keeper(spec) is None:
            raise SandboxError(f"the sandbox in {directory} is not running")
        return cls(spec, cold_start_s=float(_ask(spec, "facts")["cold_start_s"]))

    @staticmethod
    def sweep_leftovers() -> tuple[str, ...]:
        """Remove what sandboxes with a dead keeper left on this machine; their directories. `start` does it too."""
        return sweep_leftovers()

    @property
    def env(self) -> dict[str, str]:
        """The variables that make Slurm's commands talk to this cluster."""
        return {"SLURM_CONF": str(self._spec.conf), "PATH": search_path(prefix=self._spec.slurm)}

    @property
    def is_running(self) -> bool:
        """True until it was stopped, by whomever."""
        return read_keeper(self._spec) is not None

    def run(self, *argv: str, timeout_s: float = 30) -> subprocess.CompletedProcess[str]:
        """One command on the head, with its output; the caller reads the exit code."""
        return subprocess.run(
            argv,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
            env={**os.environ, **self.env, "LC_ALL": "C.UTF-8"},
        )

    def run_on(self, node: str, *argv: str, timeout_s: float = 30) -> subprocess.CompletedProcess[str]:
        """One command inside an isolated node, past Slurm: for looking and for doing damage."""
        if self.mode != "isolated":
            raise SandboxError("loopback nodes have no inside of their own: this needs an isolated sandbox")
        pids = self.node_pids(node)
        if not pids:
            raise SandboxError(f"node {node} has no power")
        enter = [find_tool("nsenter") or "nsenter", f"--target={pids[0]}", "--all", "--root", "--"]
        return self.run(*enter, *argv, timeout_s=timeout_s)

    def log(self, name: str) -> Path:
        """Log of a node's slurmd by node name, or of "slurmctld" or "keeper"."""
        return self._spec.log(name)

    def node_pids(self, node: str) -> tuple[int, ...]:
        """Every process of the node, its first one first; empty without power."""
        return tuple(_ask(self._spec, "pids", node)["pids"])

    def power_cut(self, node: str) -> None:
        """The node is gone at once: no process of it lives on, and it answers nobody."""
        _ask(self._spec, "power_cut", node)

    def cable_cut(self, node: str) -> None:
        """An isolated node can reach nobody; its processes run on."""
        _ask(self._spec, "cable_cut", node)

    def freeze(self, node: str) -> None:
        """Every process of the node stops where it is."""
        _ask(self._spec, "freeze", node)

    def revive(self, node: str) -> None:
        """Undo whatever was done to the node; it registers with the controller again within a few seconds."""
        _ask(self._spec, "revive", node)

    def freeze_controller(self) -> None:
        """The controller takes connections and answers nothing."""
        _ask(self._spec, "freeze_controller")

    def thaw_controller(self) -> None:
        """A frozen slurmctld goes on."""
        _ask(self._spec, "thaw_controller")

    def stop_controller(self) -> None:
        """The controller saves its state and ends."""
        _ask(self._spec, "stop_controller")

    def start_controller(self, *, without_state: bool = False) -> None:
        """The stopped controller runs again, from its saved state or without it: then it knows no job."""
        if without_state:
            empty_folder(self._spec.root / "state")
        _ask(self._spec, "start_controller")

    def freeze_accounting(self) -> None:
        """The accounting daemon takes connections and answers nothing; the controller queues what it has to tell."""
        _ask(self._spec, "freeze_accounting")

    def thaw_accounting(self) -> None:
        """A frozen slurmdbd goes on."""
        _ask(self._spec, "thaw_accounting")

    def stop_accounting(self) -> None:
        """The accounting daemon ends at once; the database stays."""
        _ask(self._spec, "stop_accounting")

    def start_accounting(self) -> None:
        """The accounting daemon runs again on its database."""
        _ask(self._spec, "start_accounting")

    def fill_scratch(self, node: str) -> None:
        """Leave no free byte on the node's local disk."""
        wrote = self.run_on(node, "dd", "if=/dev/zero", f"of={self.scratch}/filled", "bs=64k")
        if "No space left" not in wrote.stderr:
            raise SandboxError(f"{self.scratch} on {node} did not fill up: {wrote.stderr.strip()}")

    def empty_scratch(self, node: str) -> None:
        """Take back what `fill_scratch` wrote."""
        self.run_on(node, "rm", "-f", f"{self.scratch}/filled")

    def stop(self) -> None:
        """End every process, namespace, cable and mount of the sandbox; a second call does nothing."""
        keeper = read_keeper(self._spec)
        if keeper is not None:
            _ask(self._spec, "stop")
            await_true(lambda: not is_alive(*keeper), deadline_s=_ANSWER_TIMEOUT_S)
        if self._keeper_pid is not None:
            _reap(self._keeper_pid)
            self._keeper_pid = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def empty_folder(folder: Path) -> None:
    """Remove what is in a folder, and not the folder."""
    for entry in folder.iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def _choose_mode(wanted: Literal["auto", "isolated", "loopback"]) -> tuple[Mode, str]:
    if wanted == "loopback":
        return "loopback", "asked for"
    obstacle = why_not_isolated()
    if obstacle is None:
        return "isolated", "asked for" if wanted == "isolated" else "root, and namespaces are permitted"
    if wanted == "isolated":
        raise SandboxUnavailable(obstacle)
    return "loopback", obstacle


def _make_directory(wanted: Path | None) -> Path:
    if wanted is None:
        root = Path(tempfile.mkdtemp(prefix="slurm-sandbox-")).resolve()
    else:
        root = wanted.resolve()
        root.mkdir(parents=True, exist_ok=True)
        if (root / STATE_NAME).exists():
            if read_keeper(read_spec(root)) is not None:
                raise SandboxError(f"a sandbox is running in {root} already")
            _clear(root)
    root.chmod(0o755)  # jobs of other users read the configuration
    return root


def _clear(root: Path) -> None:
    # The state of an earlier cluster would come back as jobs and nodes of this one.
    for name in ("state", "spool", "run", "run-standby", "log", "scratch", "gpu", "database"):
        shutil.rmtree(root / name, ignore_errors=True)
    for name in ("slurm.conf", "cgroup.conf", "gres.conf", "slurmdbd.conf"):
        (root / name).unlink(missing_ok=True)


def _lay_out(mode: Mode, count: int) -> tuple[str, tuple[NodeSpec, ...]]:
    names = [f"n{number}" for number in range(1, count + 1)]
    if mode == "loopback":
        ports = _free_ports(count)
        address = _own_loopback_address() or "127.0.0.1"
        return address, tuple(
            NodeSpec(name=name, address=address, port=port) for name, port in zip(names, ports, strict=True)
        )
    subnet = choose_subnet()
    port = _free_ports(1)[0]
    return str(subnet[1]), tuple(
        NodeSpec(name=name, address=str(subnet[_FIRST_NODE_HOST + index]), port=port)
        for index, name in enumerate(names)
    )


def _own_loopback_address() -> str | None:
    # Slurm's daemons can be told to listen only where their host name points: safe when that is the loopback.
    with suppress(OSError):
        address = socket.gethostbyname(socket.gethostname())
        return address if address.startswith("127.") else None
    return None


def _free_ports(count: int) -> list[int]:
    held: list[socket.socket] = []
    try:
        for port in random.sample(_PORTS, k=len(_PORTS)):
            if len(held) == count:
                break
            candidate = socket.socket()
            try:
                candidate.bind(("", port))
                held.append(candidate)
            except OSError:
                candidate.close()
        return [candidate.getsockname()[1] for candidate in held]
    finally:
        for candidate in held:
            candidate.close()


def _launch_keeper(spec: SandboxSpec) -> tuple[int, float]:
    log = spec.log("keeper")
    log.parent.mkdir(exist_ok=True)
    argv = keeper_argv(spec)
    report, report_end = os.pipe()
    with log.open("ab") as errors, open(os.devnull, "rb") as null:  # noqa: PTH123
        streams = [
            (os.POSIX_SPAWN_DUP2, null.fileno(), 0),
            (os.POSIX_SPAWN_DUP2, report_end, 1),
            (os.POSIX_SPAWN_DUP2, errors.fileno(), 2),
        ]
        # Not subprocess: its object would have to live as long as the keeper, which may outlive this one.
        env = {**os.environ, "PATH": search_path(prefix=spec.slurm)}
        pid = os.posix_spawn(argv[0], argv, env, file_actions=streams, setsid=True)
    os.close(report_end)
    with open(report, "rb") as stream:  # noqa: PTH123
        answer = _read_report(stream)
    if "cold_start_s" in answer:
        return pid, float(answer["cold_start_s"])
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    _reap(pid)
    raise SandboxError(f"the sandbox did not start: {answer.get('error') or log.read_text()[-_TAIL_CHARS:]}")


def _read_report(stream: BinaryIO) -> dict[str, Any]:
    if not select.select([stream], [], [], 4 * READY_DEADLINE_S)[0]:
        return {"error": "no answer in time"}
    with suppress(ValueError):
        report: dict[str, Any] = json.loads(stream.readline())
        return report
    return {}


def _reap(pid: int) -> None:
    def is_reaped() -> bool:
        try:
            return os.waitpid(pid, os.WNOHANG)[0] == pid
        except ChildProcessError:  # another process' child, or reaped already
            return True

    await_true(is_reaped, deadline_s=_ANSWER_TIMEOUT_S)


def _ask(spec: SandboxSpec, verb: str, node: str = "") -> dict[str, Any]:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_ANSWER_TIMEOUT_S)
        try:
            connection.connect(str(spec.socket))
            connection.sendall(json.dumps({"do": verb, "node": node}).encode() + b"\n")
            answer: dict[str, Any] = json.loads(connection.makefile().readline() or "{}")
        except (OSError, ValueError) as error:
            raise SandboxError(f"the sandbox in {spec.directory} does not answer: {error}") from None
    if "error" in answer:
        raise SandboxError(answer["error"])
    return answer
