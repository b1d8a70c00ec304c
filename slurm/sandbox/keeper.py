"""The parent of everything in a sandbox: starts the cluster, does faults on request, and ends it all.

One keeper per sandbox, in a session of its own. It watches the process that owns the sandbox through a pidfd and takes
everything down when that ends, however it ends. Should the keeper itself be killed, the kernel signals its children.

Requests are single JSON lines on a socket that only this user can reach: {"do": "power_cut", "node": "n2"}.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slurm.sandbox.accounting import Accounting
from slurm.sandbox.conf import RESOLV_CONF, render_cgroup_conf, render_gres_conf, render_hosts, render_slurm_conf
from slurm.sandbox.installed import find_tool, read_slurm_shape, search_path
from slurm.sandbox.network import Switch
from slurm.sandbox.processes import (
    adopt_orphans,
    await_true,
    die_with_parent,
    freeze_below,
    kill_below,
    read_descendants,
    send,
    thaw_below,
)
from slurm.sandbox.registry import make_registry, remove_entry, write_entry
from slurm.sandbox.spec import HEAD_HOST, SCRATCH_BYTES, SHM_BYTES, STANDBY_HOST, SandboxError, SandboxSpec, read_spec
from slurm.sandbox.wire import accepts, read_tail

READY_DEADLINE_S = 30.0
_STOP_CONTROLLER_S = 10.0
_REQUEST_TIMEOUT_S = 5.0


def keeper_argv(spec: SandboxSpec) -> list[str]:
    """The command that is the sandbox's keeper."""
    return _python("keeper", spec.directory)


def main() -> None:
    """Start the sandbox whose directory is the first argument, report on standard output, then serve until the end."""
    os.chdir("/")
    adopt_orphans()  # so that they are gone, not only dead, where the machine's first process reaps nobody
    keeper: Keeper | None = None
    try:
        keeper = Keeper(read_spec(Path(sys.argv[1])))
        cold_start_s = keeper.start()
    except Exception as error:  # noqa: BLE001  (whatever it was: nothing may be left running, and the owner is told)
        if keeper is not None:
            keeper.stop()
        _report({"error": str(error) or repr(error)})
        sys.exit(1)
    _report({"cold_start_s": cold_start_s})
    keeper.serve()


def _report(answer: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(1, json.dumps(answer).encode() + b"\n")
    # Nobody reads on: an open pipe would keep a caller waiting that reads to its end.
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)


class Keeper:
    """A running sandbox."""

    def __init__(self, spec: SandboxSpec) -> None:
        self._spec = spec
        self._env = {"PATH": search_path(), "SLURM_CONF": str(spec.conf), "LC_ALL": "C.UTF-8", "HOME": "/"}
        self._switch: Switch | None = None
        self._controller: subprocess.Popen[bytes] | None = None
        self._standby: subprocess.Popen[bytes] | None = None
        self._accounting: Accounting | None = None
        self._nodes: dict[str, subprocess.Popen[str]] = {}
        self._stopping = False
        self._cold_start_s = 0.0
        self._owner = -1 if spec.owner_pid is None else os.pidfd_open(spec.owner_pid)
        self._listener = _listen(spec.socket)
        signal.signal(signal.SIGTERM, self._on_term)
        write_entry(spec)

    # ------------------------------------------------------------ start

    def start(self) -> float:
        """Bring the cluster up; seconds until every node was idle. SandboxError says what did not come up."""
        began = time.monotonic()
        names = [node.name for node in self._spec.nodes]
        _furnish(self._spec)
        for name in names:
            self._start_holder(name)
        if self._spec.mode == "isolated":
            self._switch = Switch(self._spec)
            self._switch.connect_head()
        if self._spec.accounting:
            self._accounting = Accounting(self._spec, env=self._env, on_head=self._on_head)
            self._accounting.start()
        self._start_controller()
        self._await_holders(names)
        self._await_controller()
        if self._spec.has_standby:
            self._standby = self._launch_controller(STANDBY_HOST)
        for name in names:
            self._tell(name, "slurmd")
        self._await_idle(set(names))
        self._cold_start_s = round(time.monotonic() - began, 3)
        return self._cold_start_s

    def _start_holder(self, name: str) -> None:
        spec = self._spec
        plan = {
            "isolated": spec.mode == "isolated",
            "node": name,
            "address": spec.node(name).address,
            "hosts": str(spec.root / "hosts"),
            "resolv": str(spec.root / "resolv.conf"),
            "scratch": str(spec.scratch),
            "scratch_bytes": SCRATCH_BYTES,
            "shm_bytes": SHM_BYTES,
            "slurmd": [find_tool("slurmd") or "slurmd", "-D", "-N", name],
            "log": str(spec.log(f"{name}-console")),
        }
        self._nodes[name] = subprocess.Popen(
            [*(_own_namespaces() if spec.mode == "isolated" else ()), *_python("holder", json.dumps(plan))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=spec.log(f"{name}-holder").open("ab"),
            text=True,
            env=self._env,
            start_new_session=True,
            # A loopback holder must end its node's processes first: it notices by the end of its input.
            preexec_fn=die_with_parent if spec.mode == "isolated" else None,  # noqa: PLW1509  (one thread)
        )

    def _await_holders(self, names: list[str]) -> None:
        for name in names:
            stdout = self._nodes[name].stdout
            readable = stdout is not None and select.select([stdout], [], [], READY_DEADLINE_S)[0]
            if not readable or stdout is None or stdout.readline() != "up\n":
                raise SandboxError(f"node {name} did not come up: {read_tail(self._spec.log(f'{name}-holder'))}")
        if self._switch is not None:
            self._switch.connect({name: self._nodes[name].pid for name in names})

    def _tell(self, name: str, word: str) -> None:
        stdin = self._nodes[name].stdin
        if stdin is not None:
            stdin.write(f"{word}\n")
            stdin.flush()

    def _start_controller(self) -> None:
        self._controller = self._launch_controller(HEAD_HOST)

    def _launch_controller(self, host: str) -> subprocess.Popen[bytes]:
        with self._spec.log("slurmctld-console").open("ab") as log:
            own_log = ["-L", str(self._spec.log(STANDBY_HOST))] if host == STANDBY_HOST else []
            return subprocess.Popen(
                self._on_head([find_tool("slurmctld") or "slurmctld", "-D", *own_log], host=host),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._env,
                cwd="/",
                start_new_session=True,
                preexec_fn=die_with_parent,  # noqa: PLW1509  (one thread)
            )

    def _on_head(self, argv: list[str], *, host: str = HEAD_HOST) -> list[str]:
        if self._spec.mode == "loopback":
            return argv
        # A host name of its own, which resolves to its own address: daemons listen there and nowhere else.
        mounts = [(self._spec.root / "hosts", "/etc/hosts")]
        if host == STANDBY_HOST:  # slurmctld ends another one whose pid file it finds
            mounts.append((self._spec.root / "run-standby", str(self._spec.root / "run")))
        binds = [f"mount --bind {shlex.quote(str(source))} {shlex.quote(place)}" for source, place in mounts]
        script = " && ".join([f"hostname {host}", *binds, 'exec "$@"'])
        unshare = find_tool("unshare") or "unshare"
        return [unshare, "--uts", "--mount", "--propagation", "private", "sh", "-c", script, "sh", *argv]

    def _await_controller(self) -> None:
        address = (self._spec.head_address, self._spec.controller_port)
        self._await(lambda: accepts(address), "slurmctld does not answer")

    def _await_idle(self, names: set[str]) -> None:
        try:
            self._await(lambda: self._read_idle() >= names, "slurmctld ended")
        except SandboxError:
            if self._controller is None or self._controller.poll() is not None:
                raise
            late = sorted(names - self._read_idle()) or sorted(names)
            log = read_tail(self._spec.log(f"{late[0]}-console"))
            raise SandboxError(f"{', '.join(late)} not idle within {READY_DEADLINE_S:g} s: {log}") from None

    def _await(self, condition: Callable[[], bool], what: str) -> None:
        def settled() -> bool:
            controller = self._controller
            return self._is_over() or (controller is not None and controller.poll() is not None) or condition()

        if not await_true(settled, deadline_s=READY_DEADLINE_S, every_s=0.05) or not condition():
            # What slurmctld says before it has opened its log is only on its console.
            raise SandboxError(f"{what}: {read_tail(self._spec.log('slurmctld-console'))}")

    def _read_idle(self) -> set[str]:
        with contextlib.suppress(subprocess.TimeoutExpired):
            shown = self._command("sinfo", "-h", "-N", "-o", "%N %T")
            rows = [line.split() for line in shown.stdout.splitlines()]
            return {row[0] for row in rows if row[1:] == ["idle"]}
        return set()

    def _command(self, *argv: str, timeout_s: float = READY_DEADLINE_S) -> subprocess.CompletedProcess[str]:
        tool = find_tool(argv[0]) or argv[0]
        return subprocess.run(
            [tool, *argv[1:]], capture_output=True, text=True, check=False, timeout=timeout_s, env=self._env
        )

    # ------------------------------------------------------------ faults

    def power_cut(self, name: str) -> None:
        """The node is gone at once: no process of it lives on, nothing is flushed or said."""
        holder = self._nodes[self._spec.node(name).name]
        if holder.poll() is not None:
            return
        if self._switch is not None:
            self._switch.disconnect(name)  # first: dying processes would say goodbye to their peers
        self._kill_node(name)
        holder.wait(timeout=READY_DEADLINE_S)
        _close_pipes(holder)

    def _kill_node(self, name: str) -> None:
        holder = self._nodes[name]
        if self._spec.mode == "isolated":
            # The kernel ends every process of the namespace together with its first.
            send([p.pid for p in read_descendants(holder.pid)[:1]], signal.SIGKILL)
        else:
            kill_below(holder.pid)
            holder.kill()

    def cable_cut(self, name: str) -> None:
        """The node can reach nobody; its processes run on."""
        if self._switch is None:
            raise SandboxError("a loopback node has no cable to cut: use power_cut or freeze, or an isolated sandbox")
        self._switch.cut(self._spec.node(name).name)

    def freeze(self, name: str) -> None:
        """Every process of the node stops where it is; the kernel still takes its connections."""
        freeze_below(self._nodes[self._spec.node(name).name].pid)

    def revive(self, name: str) -> None:
        """Whatever was done to the node is over: power, cable and processes; slurmd registers again."""
        node = self._spec.node(name)
        holder = self._nodes[node.name]
        if holder.poll() is not None:
            self._start_holder(name)
            self._await_holders([name])
        else:
            if self._switch is not None:
                self._switch.mend(name)
            thaw_below(holder.pid)
            self._resume(name)
        self._tell(name, "slurmd")

    def _resume(self, name: str) -> None:
        # A slurmd that was merely out of reach registers again only when asked, which can take a minute. A node that
        # somebody drained or set down stays so.
        with contextlib.suppress(subprocess.TimeoutExpired):  # a frozen controller learns of the node later
            shown = self._command("sinfo", "-h", "-N", "-n", name, "-o", "%T|%E", timeout_s=_REQUEST_TIMEOUT_S)
            state, _, reason = shown.stdout.strip().partition("|")
            if state.startswith("down") and reason.startswith("Not responding"):
                self._command("scontrol", "update", f"NodeName={name}", "State=RESUME", timeout_s=_REQUEST_TIMEOUT_S)

    def freeze_controller(self) -> None:
        """The controller takes connections and answers nothing."""
        self._signal_controller(signal.SIGSTOP)

    def thaw_controller(self) -> None:
        """A frozen slurmctld goes on."""
        self._signal_controller(signal.SIGCONT)

    def stop_controller(self) -> None:
        """The controller saves its state and ends."""
        controller = self._controller
        if controller is None:
            return
        self._signal_controller(signal.SIGTERM)
        self._signal_controller(signal.SIGCONT)
        try:
            controller.wait(timeout=_STOP_CONTROLLER_S)
        except subprocess.TimeoutExpired:
            controller.kill()
            controller.wait(timeout=READY_DEADLINE_S)
        self._controller = None

    def start_controller(self) -> None:
        """The controller runs again, from its saved state."""
        if self._controller is not None and self._controller.poll() is None:
            return
        self._start_controller()
        self._await_controller()

    def _on_accounting(self, verb: str) -> None:
        if self._accounting is None:
            raise SandboxError("this sandbox was started without accounting")
        getattr(self._accounting, verb)()

    def _signal_controller(self, number: signal.Signals) -> None:
        if self._controller is not None and self._controller.poll() is None:
            self._controller.send_signal(number)

    # ------------------------------------------------------------ requests

    def serve(self) -> None:
        """Answer requests until asked to stop, told to by SIGTERM, or the owner is gone."""
        try:
            while not self._is_over():
                request = self._listener.fileno()
                watched = [request, *([self._owner] if self._owner >= 0 else [])]
                if request in select.select(watched, [], [], 1.0)[0]:
                    self._answer()
        finally:
            self.stop()

    def _answer(self) -> None:
        connection, _ = self._listener.accept()
        with connection:
            connection.settimeout(_REQUEST_TIMEOUT_S)
            try:
                answer = self._obey(json.loads(connection.makefile().readline()))
            except (OSError, ValueError, KeyError, TypeError, SandboxError, subprocess.SubprocessError) as error:
                answer = {"error": str(error)}
            with contextlib.suppress(OSError):
                connection.sendall(json.dumps(answer).encode() + b"\n")

    def _obey(self, request: dict[str, str]) -> dict[str, Any]:
        on_node = {
            "power_cut": self.power_cut,
            "cable_cut": self.cable_cut,
            "freeze": self.freeze,
            "revive": self.revive,
        }
        on_cluster = {
            "freeze_controller": self.freeze_controller,
            "thaw_controller": self.thaw_controller,
            "stop_controller": self.stop_controller,
            "start_controller": self.start_controller,
            "freeze_accounting": lambda: self._on_accounting("freeze_daemon"),
            "thaw_accounting": lambda: self._on_accounting("thaw_daemon"),
            "stop_accounting": lambda: self._on_accounting("stop_daemon"),
            "start_accounting": lambda: self._on_accounting("start_daemon"),
            "stop": self.stop,
        }
        verb = request["do"]
        if verb in on_node:
            on_node[verb](request["node"])
        elif verb in on_cluster:
            on_cluster[verb]()
        elif verb == "facts":
            return {"cold_start_s": self._cold_start_s}
        elif verb == "pids":
            return {"pids": self._read_pids(request["node"])}
        else:
            raise SandboxError(f"no such request: {verb}")
        return {}

    def _read_pids(self, name: str) -> list[int]:
        # A loopback holder is not of the node: it stays awake in a frozen one, to end it when the keeper is killed.
        return [p.pid for p in read_descendants(self._nodes[self._spec.node(name).name].pid)]

    # ------------------------------------------------------------ end

    def stop(self) -> None:
        """End every process, namespace, cable and mount of the sandbox."""
        if self._listener.fileno() < 0:
            return
        self._stopping = True
        for name in self._nodes:
            self._kill_node(name)
        for holder in self._nodes.values():
            holder.wait(timeout=READY_DEADLINE_S)
            _close_pipes(holder)
        for controller in (self._standby, self._controller):
            if controller is not None:
                kill_below(controller.pid)  # slurmctld has a helper process
                controller.kill()
                controller.wait(timeout=READY_DEADLINE_S)
        if self._accounting is not None:
            self._accounting.stop()
        if self._switch is not None:
            self._switch.remove()
        _reap_orphans()
        self._listener.close()
        remove_entry(self._spec)

    def _is_over(self) -> bool:
        return self._stopping or (self._owner >= 0 and bool(select.select([self._owner], [], [], 0)[0]))

    def _on_term(self, *_: object) -> None:
        self._stopping = True


def _reap_orphans() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0] > 0:
            pass


def _furnish(spec: SandboxSpec) -> None:
    shape = read_slurm_shape()
    for name in ("log", "run", "run-standby", "spool", "state", "scratch", "gpu"):
        (spec.root / name).mkdir(parents=True, exist_ok=True)
    spec.scratch.chmod(0o1777)
    for number in range(spec.gpus_per_node):
        device = spec.root / "gpu" / f"gpu{number}"
        device.unlink(missing_ok=True)
        device.symlink_to(os.devnull)  # Slurm wants a device, any device
    texts = {
        "slurm.conf": render_slurm_conf(spec, shape),
        "cgroup.conf": render_cgroup_conf(shape),
        "gres.conf": render_gres_conf(spec),
        "hosts": render_hosts(spec),
        "resolv.conf": RESOLV_CONF,
    }
    for name, text in texts.items():
        if text:
            (spec.root / name).write_text(text)


def _own_namespaces() -> tuple[str, ...]:
    return (
        find_tool("unshare") or "unshare",
        *("--net", "--pid", "--fork", "--kill-child", "--mount", "--propagation", "private", "--mount-proc"),
        *("--uts", "--ipc"),
    )


def _python(module: str, argument: str) -> list[str]:
    # Isolated from the caller's environment, yet with the package this file belongs to.
    source = str(Path(__file__).resolve().parents[2])
    code = f"import sys; sys.path.insert(0, {source!r}); from slurm.sandbox.{module} import main; main()"
    return [sys.executable, "-I", "-S", "-c", code, argument]


def _listen(path: Path) -> socket.socket:
    make_registry()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    path.chmod(0o600)
    listener.listen()
    return listener


def _close_pipes(process: subprocess.Popen[str]) -> None:
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()


if __name__ == "__main__":
    main()
