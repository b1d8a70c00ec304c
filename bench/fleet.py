"""One launcher with many agents: a real `trainer.launch`, and agents that are connections of this process.

Each agent says hello, passes its checks, and beats once a second with the states of eight ranks that step, as the real
ones do. srun and scontrol are stand-ins: no node is started. What counts is the launcher's own CPU time.
"""

from __future__ import annotations

import os
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from bench.stage import BenchFailed, wait_for
from trainer import contract
from trainer.beats import MAX_LINE_BYTES, ChannelError, LineBuffer, Message, render_line
from trainer.contract import AttemptSpec

RANKS = 8  # of each node
BEAT_S = 1.0
STEP_S = 0.5  # of the ranks

_START_S, _SETTLE_S, _MEASURE_S = 60.0, 5.0, 20.0
_ADDRESS = "address"

# Says where the launcher listens, and stays until it is ended, as srun does.
_SRUN = f"""#!/bin/sh
echo "${contract.ENV_LAUNCHER} ${contract.ENV_LAUNCHER_SECRET}" > "$BENCH_FOLDER/{_ADDRESS}.new"
mv "$BENCH_FOLDER/{_ADDRESS}.new" "$BENCH_FOLDER/{_ADDRESS}"
exec sleep 600
"""
_SCONTROL = "#!/bin/sh\nexit 0\n"


def measure_fleet(agents: int, measure_s: float = _MEASURE_S) -> dict[str, Any]:
    """Percent of a core that a launcher takes for so many agents. Raises BenchFailed."""
    with tempfile.TemporaryDirectory(prefix="bench-fleet-") as folder, _launcher(Path(folder), agents) as process:
        address = wait_for("the launcher", lambda: _read_address(Path(folder)), _START_S)
        fleet = _Fleet(*address, agents)
        try:
            fleet.beat(until=lambda: fleet.training == agents, limit_s=_START_S)
            fleet.beat(limit_s=_SETTLE_S)
            began_s, began = _cpu_s(process.pid), time.monotonic()
            fleet.beat(limit_s=measure_s)
            spent_s, wall_s = _cpu_s(process.pid) - began_s, time.monotonic() - began
            if process.poll() is not None or fleet.training != agents:
                raise BenchFailed(f"{fleet.training} of {agents} agents train; the launcher: {process.poll()}")
        finally:
            fleet.close()
    return {"fleet_percent": round(spent_s / wall_s * 100, 2), "fleet_agents": agents, "fleet_ranks": agents * RANKS}


@contextmanager
def _launcher(folder: Path, agents: int) -> Iterator[subprocess.Popen[bytes]]:
    for name, text in (("srun", _SRUN), ("scontrol", _SCONTROL)):
        path = folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    attempt_dir = folder / "runs" / "fleet" / "attempts" / "1"
    attempt_dir.mkdir(parents=True)
    spec = AttemptSpec(
        run="fleet", attempt=1, command=("true",), nodes=agents, procs_per_node=RANKS, beat_interval_s=BEAT_S
    )
    contract.write_json(attempt_dir / "attempt.json", spec)
    env = {
        **os.environ,
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "BENCH_FOLDER": str(folder),
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_NODELIST": f"n[1-{agents}]",
        "SLURMD_NODENAME": "n1",
    }
    with (folder / "launcher.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "trainer.launch", str(attempt_dir)],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield process
    except BenchFailed as error:
        raise BenchFailed(f"{error}; its log ends: {(folder / 'launcher.log').read_text()[-600:]}") from error
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()


def _read_address(folder: Path) -> tuple[str, int, str] | None:
    path = folder / _ADDRESS
    if not path.exists():
        return None
    address, secret = path.read_text().split()
    host, _, port = address.rpartition(":")
    return host, int(port), secret


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(int(field) for field in fields[11:13]) / os.sysconf("SC_CLK_TCK")


class _Fleet:
    """All agents, in one loop."""

    def __init__(self, host: str, port: int, secret: str, agents: int) -> None:
        self._selector = selectors.DefaultSelector()
        self._agents: list[_Agent] = []
        for number in range(agents):
            sock = socket.create_connection((host, port), timeout=10)
            agent = _Agent(sock, number)
            agent.say_hello(secret, beat_at=time.monotonic() + BEAT_S * number / agents)
            self._agents.append(agent)
            self._selector.register(sock, selectors.EVENT_READ, agent)

    @property
    def training(self) -> int:
        """How many were told to train."""
        return sum(agent.is_training for agent in self._agents)

    def beat(self, *, limit_s: float, until: Any = None) -> None:
        """Beat and take orders for so long, or until something is so. Raises BenchFailed when that does not come."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            if until is not None and until():
                return
            for key, _ in self._selector.select(0.02):
                key.data.take()
            now = time.monotonic()
            for agent in self._agents:
                agent.beat_if_due(now)
        if until is not None:
            raise BenchFailed(f"{self.training} of {len(self._agents)} agents were told to train")

    def close(self) -> None:
        for agent in self._agents:
            agent.sock.close()
        self._selector.close()


class _Agent:
    def __init__(self, sock: socket.socket, number: int) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.is_training = False
        self._number = number
        self._beat_at = 0.0
        self._ping: tuple[object, float] | None = None
        self._launch = 0
        self._lines = LineBuffer(MAX_LINE_BYTES)
        self._began = time.monotonic()

    def say_hello(self, secret: str, *, beat_at: float) -> None:
        name, launch = f"n{self._number + 1}", {"launch": 0}
        hello = {"secret": secret, "node": name, "host": name, "pid": 1, "boot_id": name, "agent": name, "cut_s": 0.0}
        self._send({"type": "hello", **hello, "state": "checking", **launch})
        self._send({"type": "checked", "checks": [], "port": 29500, **launch})
        self._beat_at = beat_at

    def take(self) -> None:
        data = self.sock.recv(65536)
        if not data:
            raise BenchFailed(f"the launcher closed the connection of agent {self._number}")
        try:
            messages = self._lines.feed(data)
        except ChannelError as error:
            raise BenchFailed(str(error)) from error
        for message in messages:
            if message["type"] == "ping":
                self._ping = (message.get("at"), time.monotonic())
            elif message["type"] == "go":
                self.is_training, self._launch, self._began = True, message["launch"], time.monotonic()
            elif message["type"] in ("stop", "kill", "bye"):
                self.is_training = False

    def beat_if_due(self, now: float) -> None:
        if now < self._beat_at:
            return
        self._beat_at = now + BEAT_S
        state = "running" if self.is_training else "checked"
        beat: Message = {"type": "beat", "state": state, "launch": self._launch, "ranks": self._ranks(now)}
        if self._ping is not None:
            at, taken_at = self._ping
            beat |= {"ping": at, "held_s": round(now - taken_at, 6), "time": time.time()}
            self._ping = None
        self._send(beat)

    def _ranks(self, now: float) -> list[Message]:
        if not self.is_training:
            return []
        step, age_s = divmod(now - self._began, STEP_S)
        times = {"timed_step": int(step), "timed": int(step), "step_s": step * STEP_S, "own_s": step * STEP_S * 0.9}
        return [
            {
                "rank": self._number * RANKS + local,
                "local_rank": local,
                "pid": 1000 + local,
                "step": int(step),
                "phase": "step",
                "limit_s": 60.0,
                "age_s": round(age_s, 3),
                **times,
            }
            for local in range(RANKS)
        ]

    def _send(self, message: Message) -> None:
        self.sock.sendall(render_line(message))
