"""A node's real agent, in a process of its own, under a launcher that a test plays."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from trainer.beats import BeatEvent, BeatServer, Message
from trainer.contract import ENV_LAUNCHER, ENV_LAUNCHER_SECRET, AttemptSpec, RunPaths, write_json

ROOT = Path(__file__).parents[2]
DEADLINE_S = 30.0

# Says that it is up, and in which start with which resume point; then waits for its end.
WAITING = """
import os, pathlib, sys, time
name = f"up.{os.environ['SUPERVISOR_LAUNCH']}.{os.environ['RANK']}"
path = pathlib.Path(os.environ["SUPERVISOR_RUN_DIR"], name)
path.with_suffix(".tmp").write_text(f"{os.getpid()} {os.environ['SUPERVISOR_RESUME_STEP']} {' '.join(sys.argv[1:])}")
path.with_suffix(".tmp").rename(path)
time.sleep(99)
"""


class Commander:
    """The launcher's side: what the agent said so far, and orders to it."""

    def __init__(
        self, folder: Path, program: str = WAITING, *, attempt: int = 1, host: str = "127.0.0.1", **spec: Any
    ) -> None:
        self.paths = RunPaths(folder / "run")
        self.attempt = attempt
        script = folder / "train.py"
        script.write_text(program)
        values = {"command": (str(script),), "nodes": 1, "beat_interval_s": 0.1, "stop_grace_s": 1.0, **spec}
        write_json(self.dir / "attempt.json", AttemptSpec(run="r", attempt=attempt, **values))
        self.host = host
        self.server = BeatServer(secret="s3cret", nodes=frozenset({"n1"}), host=host)
        self.heard: list[BeatEvent] = []
        self._has_left = False
        self.agents: list[subprocess.Popen[bytes]] = []

    @property
    def dir(self) -> Path:
        """The attempt's folder."""
        return self.paths.attempt_dir(self.attempt)

    def start_agent(
        self, *, command: tuple[str, ...] = ("-m", "trainer.node"), prefix: tuple[str, ...] = (), **environment: str
    ) -> int:
        """Start an agent; its pid."""
        variables = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "SLURMD_NODENAME": "n1",
            ENV_LAUNCHER: f"{self.host}:{self.server.port}",
            ENV_LAUNCHER_SECRET: "s3cret",
            **environment,
        }
        argv = [*prefix, sys.executable, *command, str(self.dir)]
        agent = subprocess.Popen(argv, env=variables, cwd=self.paths.run_dir)
        self.agents.append(agent)
        return agent.pid

    def order(self, order: str, /, **values: Any) -> None:
        """Send one order."""
        self.server.send("n1", {"type": order, **values})

    def go(self, launch: int, **values: Any) -> None:
        """Tell the node to train."""
        port = self.last("checked", "stopped", "ended")["port"]
        place = {"rank": 0, "nodes": 1, "master_addr": "127.0.0.1", "master_port": port, "rdzv_id": f"7.1.{launch}"}
        self.order("go", **{"launch": launch, **place, "resume_from": "", "resume_step": 0, **values})

    def poll(self, for_s: float = 0.05) -> None:
        """Listen for a moment."""
        self.heard += self.server.poll(for_s)

    def until(self, condition: Callable[[], Any], deadline_s: float = DEADLINE_S) -> Any:
        """What `condition` gives as soon as that is something."""
        stop = time.monotonic() + deadline_s
        while time.monotonic() < stop:
            self.poll()
            if found := condition():
                return found
        raise AssertionError([event.message for event in self.heard if event.message.get("type") != "beat"])

    def listen(self, for_s: float) -> None:
        """Hear everything that is said within so many seconds."""
        stop = time.monotonic() + for_s
        while time.monotonic() < stop:
            self.poll()

    def said(self, kind: str, **values: Any) -> list[Message]:
        """Every message of a kind with these values, in the order of their arrival."""
        messages = [event.message for event in self.heard if event.message.get("type") == kind]
        return [message for message in messages if values.items() <= message.items()]

    def last(self, *kinds: str) -> Message:
        """The newest message of some kinds."""
        return next(e.message for e in reversed(self.heard) if e.message.get("type") in kinds)

    def await_said(self, kind: str, **values: Any) -> Message:
        """The newest message of a kind with these values, once there is one."""
        self.until(lambda: self.said(kind, **values))
        return self.said(kind, **values)[-1]

    def up(self, launch: int, rank: int = 0) -> list[str]:
        """What a rank of WAITING wrote when it was up: its pid, its resume step, its arguments."""
        path = self.paths.run_dir / f"up.{launch}.{rank}"
        self.until(path.exists)
        return path.read_text().split()

    def begin(self, launch: int = 0, **values: Any) -> int:
        """Bring an agent up to a running start; the pid of its rank 0."""
        self.await_said("checked")
        self.go(launch, **values)
        return int(self.up(launch)[0])

    def is_alive(self, pid: int) -> bool:
        """True while a process is there and no zombie."""
        with contextlib.suppress(OSError):
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
        return False

    def leave(self) -> None:
        """Be no launcher any more."""
        if not self._has_left:
            self._has_left = True
            self.server.close()

    def close(self) -> None:
        """End the agents."""
        for agent in self.agents:
            with contextlib.suppress(ProcessLookupError):
                os.kill(agent.pid, signal.SIGCONT)
        stop = time.monotonic() + 3
        while not self._has_left and self.server.is_connected("n1") and time.monotonic() < stop:
            if all(agent.poll() is not None for agent in self.agents):
                break
            self.order("bye")
            self.poll()
        self.leave()
        for agent in self.agents:
            if agent.poll() is None:
                agent.kill()
            agent.wait(10)


@contextlib.contextmanager
def commanding(folder: Path, program: str = WAITING, /, **spec: Any) -> Iterator[Commander]:
    """A launcher to be played, and one agent that has started."""
    commander = Commander(folder, program, **spec)
    try:
        yield commander
    finally:
        commander.close()
