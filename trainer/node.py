"""On each node of the training step: start checks, torchrun around the workers, beats, evidence when it ends.

`python -m trainer.node ATTEMPT_DIR`, started by trainer.launch through srun. It trains only while the launcher
answers: a node that is cut off kills its ranks before somebody else writes in their place. Nothing that it started
survives it. Standard library only, and nothing heavy: seconds here are seconds of every recovery.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import json
import os
import queue
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from trainer import contract, nccl
from trainer.beats import BeatClient, ChannelError, LineBuffer, Message
from trainer.contract import AttemptSpec, CheckResult, ContractError, NodeReport, RunPaths
from trainer.descendants import has_children, kill_descendants, set_process_ties, signal_workers
from trainer.verdict import EXIT_MISCONFIGURED

LAUNCHER_LOST_S = 10.0  # without a word from the launcher for this long a node stops its ranks
LOG_TAIL_BYTES = 64 * 1024
NCCL_TAIL_BYTES = 4096  # of each process
CONSOLE_TAIL_BYTES = 4096  # of a failing worker's error output, repeated in the job's log
LOG_READ_LIMIT_S = 2.0  # a file system that hangs must not hold the exit code back
FAREWELL_LIMIT_S = 10.0
EXIT_TERMINATED = 128 + signal.SIGTERM

_TICK_S = 0.5
_START_TICK_S = 0.02  # while seconds count
_SIOCGIFADDR = 0x8915
# What a worker says when its peer is gone: it fails because of another one.
_VICTIM = re.compile(
    r"Connection (?:closed|reset) by (?:remote )?peer|remote process exited or there was a network error"
    r"|failed to recv, got 0 bytes|Broken pipe"
)
_PYTHONS = ("python", "python3")
_RUNNER = Path(__file__).with_name("torchrun.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """How torchrun is to start a training command: under which Python, and its arguments from the program on."""

    python: str
    arguments: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where this node stands among those that train, as the launcher's go says."""

    rank: int
    nodes: int
    master_addr: str
    master_port: int
    rdzv_id: str


# ---------------------------------------------------------------- pure


def choose_program(command: Sequence[str], python: str) -> Program:
    """The Python and torchrun arguments for a command of the run file.

    `x.py …` and `-m module …` run under `python`; a leading `python`/`python3` means the same; a leading path of a
    Python selects that one. Everything else is a program of its own (torchrun's --no-python).
    """
    first, rest = command[0], tuple(command[1:])
    is_python = Path(first).name.startswith("python") and not first.endswith(".py")
    if is_python and rest and (rest[0] == "-m" or rest[0].endswith(".py")):
        return Program(python=python if first in _PYTHONS else first, arguments=rest)
    if first == "-m" or first.endswith(".py"):
        return Program(python=python, arguments=tuple(command))
    return Program(python=python, arguments=("--no-python", *command))


def torchrun_arguments(
    spec: AttemptSpec, program: Program, place: Place, *, log_dir: str, local_addr: str
) -> list[str]:
    """Torchrun's arguments on one node.

    The static rendezvous: node ranks are the launcher's, and it starts 0.8 s faster than c10d. Worker restarts are
    the launcher's too (every node at once): torchrun's own restart each node by itself and fail to meet again.
    """
    tee = ["--tee=0:3"] if place.rank == 0 else []
    return [
        f"--nnodes={place.nodes}",
        f"--nproc-per-node={spec.procs_per_node}",
        f"--node-rank={place.rank}",
        f"--master-addr={place.master_addr}",
        f"--master-port={place.master_port}",
        f"--rdzv-id={place.rdzv_id}",
        f"--local-addr={local_addr}",
        "--max-restarts=0",
        f"--log-dir={log_dir}",
        "--redirects=3",
        *tee,
        *program.arguments,
    ]


def parse_place(message: Message) -> Place:
    """The place in a go message. Raises ChannelError when it has none."""
    try:
        return Place(
            rank=int(message["rank"]),
            nodes=int(message["nodes"]),
            master_addr=str(message["master_addr"]),
            master_port=int(message["master_port"]),
            rdzv_id=str(message["rdzv_id"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ChannelError(f"go without {error}") from None


def training_environment(spec: AttemptSpec, run_dir: Path, node: str, given: Mapping[str, str]) -> dict[str, str]:
    """The environment of the training program: what is given, ours where nothing is given, the run file's last."""
    kept = {k: v for k, v in given.items() if k not in (contract.ENV_LAUNCHER, contract.ENV_LAUNCHER_SECRET)}
    wanted = {**kept, **spec.environment}
    evidence_dir = str(RunPaths(run_dir).logs(spec.attempt) / node)
    ours = {
        "OMP_NUM_THREADS": str(threads_per_process(given, spec.procs_per_node)),
        "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[rank${rank}]: ",
        "PYTHONUNBUFFERED": "1",  # the last words of a killed worker must be in its log
        **nccl.nccl_environment(evidence_dir, wanted, torch_version=_torch_version()),
    }
    return {**ours, **wanted, **contract.attempt_environment(spec, run_dir)}


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


def parse_checks(data: bytes) -> tuple[CheckResult, ...]:
    """The results printed by a node's probes, a JSON list. Raises ContractError for anything else."""
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError):
        raise ContractError("the checks printed no JSON") from None
    if not isinstance(raw, list):
        raise ContractError("the checks printed no list")
    return tuple(contract.parse(CheckResult, json.dumps(item).encode()) for item in raw)


def plain_checks(checks: Sequence[CheckResult]) -> list[Message]:
    """Check results as a message carries them; long details are cut."""
    return [
        {"check": c.check, "ok": c.ok, "detail": c.detail[:500], "value": c.value, "limit": c.limit} for c in checks
    ]


# ---------------------------------------------------------------- the machine


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


def read_tail(path: Path, limit_bytes: int) -> str:
    """The end of a file as text; empty when it cannot be read."""
    try:
        with path.open("rb") as stream:
            stream.seek(0, os.SEEK_END)
            stream.seek(max(0, stream.tell() - limit_bytes))
            return stream.read(limit_bytes).decode(errors="replace")
    except OSError:
        return ""


def find_worker_log(log_dir: Path, local_rank: int) -> Path | None:
    """The newest error log that torchrun keeps for a local rank."""
    logs = list(log_dir.glob(f"*/attempt_*/{local_rank}/stderr.log"))
    with contextlib.suppress(OSError):
        return max(logs, key=lambda path: path.stat().st_mtime, default=None)
    return None


def is_victim(last_words: str) -> bool:
    """True when a worker's last words say that it failed because a peer did."""
    return bool(_VICTIM.search(last_words[-CONSOLE_TAIL_BYTES:]))


def read_nccl_warnings(log_dir: Path) -> str:
    """The ends of the logs that NCCL kept for the processes of this node; usually nothing."""
    return "".join(read_tail(path, NCCL_TAIL_BYTES) for path in sorted(log_dir.glob("nccl.*.log")))


class ProbeRun:
    """The node probes, run under a deadline. A probe that does not answer is unknown, never a failure."""

    def __init__(self, argv: Sequence[str], *, limit_s: float, environment: Mapping[str, str]) -> None:
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the probe
        self._limit_s = limit_s
        self._deadline = time.monotonic() + limit_s
        self._process: subprocess.Popen[bytes] | None = None
        self._refusal = ""
        command = [sys.executable if argv[0] in _PYTHONS else argv[0], *argv[1:]]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                env=dict(environment),
                start_new_session=True,
            )
        except OSError as error:
            self._refusal = f"the checks could not be started: {error}"

    def poll(self) -> tuple[CheckResult, ...] | None:
        """The results, or None while there are none yet; not to be asked again afterwards."""
        process = self._process
        if process is not None and process.poll() is None and time.monotonic() < self._deadline:
            return None
        with self._output:
            return self._judge(process)

    def _judge(self, process: subprocess.Popen[bytes] | None) -> tuple[CheckResult, ...]:
        if process is None:
            return _unknown(self._refusal)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs in the kernel
                process.wait(0.5)
            return _unknown(f"no answer within {self._limit_s:g} s")
        self._output.seek(0)
        try:
            return parse_checks(self._output.read(1024 * 1024))
        except ContractError as error:
            return _unknown(f"exit code {process.returncode}: {error}")


def _unknown(detail: str) -> tuple[CheckResult, ...]:
    return (CheckResult(check="start_checks", ok=None, detail=detail),)


class Runner:
    """One torchrun: imported ahead, started when its arguments are known."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._lines = LineBuffer(1024 * 1024)
        self._report, write_end = os.pipe()
        os.set_blocking(self._report, False)
        try:
            self.process = subprocess.Popen(
                [*command, str(write_end)],
                stdin=subprocess.PIPE,
                env=dict(environment),
                pass_fds=(write_end,),
            )
        finally:
            os.close(write_end)

    def train(self, argv: Sequence[str], environment: Mapping[str, str]) -> None:
        """Hand over the arguments; what is wrong with them shows in the exit code."""
        stdin = self.process.stdin
        assert stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is dead already: its exit code says why
            stdin.write(json.dumps({"argv": list(argv), "environment": dict(environment)}).encode() + b"\n")
            stdin.close()

    def read_reports(self) -> list[Message]:
        """What it has said since the last call."""
        with contextlib.suppress(OSError, ChannelError):
            return self._lines.feed(os.read(self._report, 65536))
        return []

    def exit_code(self) -> int | None:
        """As a shell gives it, or None while it runs."""
        code = self.process.poll()
        return 128 - code if code is not None and code < 0 else code


# ---------------------------------------------------------------- the node


class NodeAgent:
    """One node of the training step, from its hello to its end."""

    def __init__(
        self,
        *,
        spec: AttemptSpec,
        attempt_dir: Path,
        node: str,
        launcher: tuple[str, int],
        secret: str,
        environment: Mapping[str, str],
        runner_command: Callable[[Program], Sequence[str]] | None = None,
        lost_after_s: float = LAUNCHER_LOST_S,
    ) -> None:
        self._spec = spec
        self._attempt_dir = attempt_dir
        self._node = node
        self._log_dir = RunPaths(attempt_dir.parent.parent).logs(spec.attempt) / node
        self._environment = training_environment(spec, attempt_dir.parent.parent, node, environment)
        self._program = choose_program(spec.command, sys.executable)
        self._runner_command = runner_command or (lambda program: (program.python, str(_RUNNER)))
        self._lost_after_s = lost_after_s
        self._runner: Runner | None = None
        self._probe: ProbeRun | None = None
        self._state = "starting"
        self._checks: tuple[CheckResult, ...] = ()
        self._checked: Message | None = None
        self._ended: Message | None = None
        self._failure: Message = {}
        self._held_port = hold_port()
        self._place: Place | None = None
        self._listening: Message | None = None
        self._is_training = False
        self._saw_workers = False
        self._requests: dict[int, int] = {}  # signals that the training is to get, by the launcher's count
        self._told: dict[int, set[int]] = {}  # who has had each of them
        self._untold: set[int] = set()
        self._is_terminated = False  # SIGTERM came to this node
        self._own_requests = 0  # sent to this node alone: counted downwards
        self._events: list[Message] = []
        self._client = BeatClient(
            address=launcher,
            hello={
                "type": "hello",
                "secret": secret,
                "node": node,
                "host": socket.gethostname(),
                "pid": os.getpid(),
            },
            interval_s=spec.beat_interval_s,
            state=lambda: {"state": self._state},
            connected=self._list_news,
            lost_after_s=lost_after_s,
        )

    def run(self) -> int:
        """Check, train when told so, and return the exit code of this node."""
        self._note("node.started")
        self._install_signals()
        self._client.start()
        try:
            self._make_log_dir()
            self._prepare_runner()
            self._begin_checks()
            return self._serve()
        finally:
            kill_descendants()
            self._client.stop(2.0)

    def _serve(self) -> int:
        farewell_at: float | None = None
        while True:
            order = self._next_order()
            kind = order["type"]
            if kind == "go":
                self._begin_training(parse_place(order))
                farewell_at = None
            elif kind == "spare" and self._ended is None:
                self._state = "spare"
            elif kind == "signal":
                self._take_request(order)
            elif kind == "kill":
                self._end(int(order.get("exit_code", EXIT_TERMINATED)), str(order.get("reason", "told to stop")))
            elif kind == "bye":
                return self._finish()
            self._look_at_checks()
            self._look_at_training()
            self._pass_requests_on()
            if self._client.is_lost():
                self._end(EXIT_TERMINATED, f"no word from the launcher for {self._lost_after_s:g} s: ranks stopped")
                return self._finish()
            if self._ended is not None:
                farewell_at = farewell_at or time.monotonic() + FAREWELL_LIMIT_S
                if self._spec.worker_restarts == 0 and time.monotonic() > farewell_at:
                    return self._finish()

    def _list_news(self) -> list[Message]:
        news = (*self._events, self._checked, self._listening, self._ended)
        return [message for message in news if message is not None]

    def _next_order(self) -> Message:
        is_starting = self._is_training and not self._saw_workers
        try:
            return self._client.inbox.get(timeout=_START_TICK_S if is_starting else _TICK_S)
        except queue.Empty:
            return {"type": "tick"}

    # ---- checks

    def _begin_checks(self) -> None:
        if self._ended is not None:
            return
        self._state = "checking"
        if self._spec.start_checks:
            self._probe = ProbeRun(
                self._spec.start_checks,
                limit_s=self._spec.start_checks_timeout_s,
                environment=self._environment,
            )
        else:
            self._report_checks(())

    def _look_at_checks(self) -> None:
        if self._probe is None or self._checked is not None:
            return
        results = self._probe.poll()
        if results is not None:
            self._report_checks(results)

    def _report_checks(self, results: tuple[CheckResult, ...]) -> None:
        self._checks = results
        self._checked = {"type": "checked", "checks": plain_checks(results), "port": self._port()}
        self._client.send(self._checked)
        failed = [check.check for check in results if check.ok is False]
        if failed:
            self._end(contract.EXIT_NODE_CHECK_FAILED, f"start checks failed: {', '.join(failed)}")
        elif results:
            self._write_report(None, "")

    def _port(self) -> int:
        return int(self._held_port.getsockname()[1])

    # ---- training

    def _make_log_dir(self) -> None:
        try:
            self._log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:  # torchrun will fail over it, and say so in its exit code
            print(f"{self._node}: {error}", file=sys.stderr, flush=True)

    def _prepare_runner(self) -> None:
        """Let torchrun be imported now, for when it is needed."""
        try:
            self._runner = Runner(self._runner_command(self._program), self._environment)
        except OSError as error:
            self._end(EXIT_MISCONFIGURED, f"{self._program.python} could not be started: {error}")

    def _begin_training(self, place: Place) -> None:
        if place == self._place:
            return  # told again after a reconnection
        self._place = place
        self._untold, self._told = set(self._requests), {count: set() for count in self._requests}  # new processes
        self._listening, self._ended, self._failure, self._saw_workers = None, None, {}, False
        if self._runner is None:
            self._prepare_runner()
        if self._runner is None:
            return
        local = self._client.local_address
        interface = find_interface(local)
        names = {"GLOO_SOCKET_IFNAME": interface, "TP_SOCKET_IFNAME": interface} if interface else {}
        self._runner.train(
            torchrun_arguments(self._spec, self._program, place, log_dir=str(self._log_dir), local_addr=local),
            {k: v for k, v in names.items() if k not in self._environment},
        )
        self._state, self._is_training = "running", True
        self._note("torchrun.started")

    def _look_at_training(self) -> None:
        runner = self._runner
        if runner is None:
            return
        for report in runner.read_reports():
            if report["type"] == "ready":
                self._note("torchrun.imported", report.get("time"))
            elif report["type"] == "failed":
                self._failure = report
        if not self._is_training:
            return
        self._look_at_rendezvous()
        if not self._saw_workers and has_children(runner.process.pid):
            self._saw_workers = True
            self._note("workers.started")
        code = runner.exit_code()
        if code is not None:
            for report in runner.read_reports():
                self._failure = report if report["type"] == "failed" else self._failure
            self._end(code, self._describe_end(code))

    # ---- requests to save

    def _take_request(self, order: Message) -> None:
        """Remember a signal for the training, which may not run yet."""
        count, number = int(order.get("count", 0)), int(order["number"])
        if count not in self._requests:
            self._requests[count] = number
            self._told[count] = set()
            self._untold.add(count)

    def _pass_requests_on(self) -> None:
        if self._runner is None or not self._is_training:
            return
        for count in sorted(self._untold):
            pid, workers = self._runner.process.pid, self._spec.procs_per_node
            if signal_workers(self._requests[count], pid, workers=workers, told=self._told[count]):
                self._untold.discard(count)

    def _look_at_rendezvous(self) -> None:
        """Say when the others may come: who knocks before torchrun listens waits half a second in vain."""
        place = self._place
        if place is None or place.rank != 0 or self._listening is not None:
            return
        if is_listening(self._client.local_address, place.master_port):
            self._listening = {"type": "listening", "rdzv_id": place.rdzv_id}
            self._client.send(self._listening)
            self._note("rendezvous.opened")

    def _describe_end(self, code: int) -> str:
        if code == 0:
            return "finished"
        if not self._failure:
            return f"torchrun ended with exit code {code}"
        return f"rank {self._failure.get('rank')} ended with exit code {self._failure.get('exit_code')}"

    def _end(self, code: int, reason: str) -> None:
        """Stop everything on this node and say so, once for each start of the training."""
        if self._ended is not None:
            self._client.send(self._ended)
            return
        left = kill_descendants()
        self._is_training, self._runner = False, None
        self._state = "ended"
        self._held_port.close()
        self._held_port = hold_port()  # for the next start: the old one may stay busy for a minute
        if left:
            reason += f"; processes {left} survive SIGKILL"
        tail = self._read_log_tail(code)
        self._ended = {
            "type": "ended",
            "exit_code": code,
            "reason": reason,
            "victim": is_victim(tail),
            "terminated": self._is_terminated,
            "rank": self._failure.get("rank"),
            "port": self._port(),
        }
        self._client.send(self._ended)
        self._write_report(code, tail)
        if self._spec.worker_restarts > 0 and code not in (0, EXIT_MISCONFIGURED):
            self._prepare_runner()

    def _read_log_tail(self, code: int) -> str:
        """The failing worker's last words; empty when the file system does not give them soon."""
        if code == 0:
            return ""
        found: list[str] = []
        reader = threading.Thread(target=lambda: found.append(self._find_last_words()), daemon=True)
        reader.start()
        reader.join(LOG_READ_LIMIT_S)
        tail = found[0] if found else ""
        if self._failure and tail:
            print(f"{self._node}: last words:\n{tail[-CONSOLE_TAIL_BYTES:]}", file=sys.stderr, flush=True)
        return tail

    def _find_last_words(self) -> str:
        local_rank = self._failure.get("local_rank")
        log = find_worker_log(self._log_dir, local_rank if isinstance(local_rank, int) else 0)
        tail = read_tail(log, LOG_TAIL_BYTES) if log else ""
        return (read_nccl_warnings(self._log_dir) + tail)[-LOG_TAIL_BYTES:]

    def _finish(self) -> int:
        code = self._ended["exit_code"] if self._ended else 0
        return int(code)

    # ---- surroundings

    def _write_report(self, code: int | None, log_tail: str) -> None:
        report = NodeReport(
            attempt=self._spec.attempt,
            node=self._node,
            host=socket.gethostname(),
            time=time.time(),
            checks=self._checks,
            exit_code=code,
            log_tail=log_tail,
        )
        try:
            contract.write_json(self._attempt_dir / "nodes" / f"{self._node}.json", report)
        except OSError as error:  # a full disk must not hide the exit code
            print(f"{self._node}: node report not written: {error}", file=sys.stderr, flush=True)

    def _note(self, event: str, at: float | None = None) -> None:
        message: Message = {"type": "event", "event": event, "time": time.time() if at is None else at}
        self._events.append(message)
        self._client.send(message)

    def _install_signals(self) -> None:
        def stop(number: int, _frame: object) -> None:
            reason = f"signal {signal.Signals(number).name}"
            self._is_terminated = number == signal.SIGTERM
            self._client.inbox.put({"type": "kill", "exit_code": 128 + number, "reason": reason})

        def forward(number: int, _frame: object) -> None:
            self._own_requests -= 1
            self._client.inbox.put({"type": "signal", "number": number, "count": self._own_requests})

        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGINT, stop)
        signal.signal(signal.SIGUSR1, forward)
        signal.signal(signal.SIGUSR2, forward)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: self._client.inbox.put({"type": "tick"}))


def find_node_name(environment: Mapping[str, str]) -> str:
    """This node's name in Slurm's words (several may share one host)."""
    return environment.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]


def main(
    argv: Sequence[str] | None = None,
    runner_command: Callable[[Program], Sequence[str]] | None = None,
    lost_after_s: float = LAUNCHER_LOST_S,
) -> int:
    """Run one node of an attempt. `runner_command`: what stands for torchrun.py, in tests."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    secret = os.environ.pop(contract.ENV_LAUNCHER_SECRET, "")
    host, _, port = os.environ.pop(contract.ENV_LAUNCHER, "").rpartition(":")
    if len(arguments) != 1 or not secret or not host or not port.isdecimal():
        print("trainer.node is started by trainer.launch, with an attempt's folder", file=sys.stderr)
        return EXIT_MISCONFIGURED
    attempt_dir = Path(arguments[0])
    try:
        spec = contract.parse(AttemptSpec, (attempt_dir / "attempt.json").read_bytes())
    except (OSError, ContractError) as error:
        print(f"{find_node_name(os.environ)}: attempt.json: {error}", file=sys.stderr)
        return EXIT_MISCONFIGURED
    set_process_ties()
    agent = NodeAgent(
        spec=spec,
        attempt_dir=attempt_dir,
        node=find_node_name(os.environ),
        launcher=(host, int(port)),
        secret=secret,
        environment=os.environ,
        runner_command=runner_command,
        lost_after_s=lost_after_s,
    )
    return agent.run()


if __name__ == "__main__":
    sys.exit(main())
