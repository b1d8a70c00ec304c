"""A process that stands for a node's agent and does with `Workers` what a test says, line by line.

A process of its own: what it stops is everything below it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.agent.place import Place
from trainer.agent.program import choose_program
from trainer.agent.worker_start import create_workers
from trainer.agent.workers import Workers, WorkersEnd
from trainer.contract import AttemptSpec
from trainer.descendants import set_process_ties

ROOT = Path(__file__).parents[2]
_LIMIT_S = 30.0


@dataclass(slots=True)
class Agent:
    """The test's side. `folder`: working directory of the ranks; their logs are in it, too."""

    folder: Path
    process: subprocess.Popen[str]
    starts: int = field(default=0)

    def start(
        self,
        *command: str,
        environment: Mapping[str, str] | None = None,
        port: int = 0,
        nodes: int = 1,
        node_rank: int = 0,
    ) -> None:
        """Start every rank of the node."""
        place = {"launch": self.starts, "rank": node_rank, "nodes": nodes, "master_addr": "127.0.0.1"}
        place |= {"master_port": port or find_free_port(), "rdzv_id": f"7.1.{self.starts}"}
        self.starts += 1
        self.ask(do="start", command=command, environment={**os.environ, **(environment or {})}, place=place)

    def wait(self) -> WorkersEnd:
        """How they ended."""
        return WorkersEnd(**self.ask(do="wait"))

    def run(self, *command: str, environment: Mapping[str, str] | None = None) -> WorkersEnd:
        """Start every rank, wait for the end, and stop what is left."""
        self.start(*command, environment=environment)
        end = self.wait()
        self.stop()
        return end

    def stop(self, grace_s: float = 5.0) -> list[int]:
        """Stop them; what survives."""
        return list(self.ask(do="stop", grace_s=grace_s))

    def pids(self) -> dict[int, int]:
        """The processes of the ranks, once all are there."""
        return {int(rank): pid for rank, pid in self.ask(do="pids").items()}

    def settle(self) -> None:
        """Tell that the ranks are past their start."""
        self.ask(do="settle")

    def kept(self) -> set[int]:
        """What is prepared for the next start."""
        return set(self.ask(do="kept"))

    def out(self, local_rank: int = 0) -> str:
        """Standard output of a rank of the newest start."""
        return self.log("stdout.log", local_rank)

    def err(self, local_rank: int = 0) -> str:
        """Error output of a rank of the newest start."""
        return self.log("stderr.log", local_rank)

    def log(self, name: str, local_rank: int = 0) -> str:
        """A log file of a rank of the newest start."""
        number = self.starts - 1
        found = list((self.folder / "logs").glob(f"7.1.{number}_*/attempt_{number}/{local_rank}/{name}"))
        return found[0].read_text() if found else ""

    def console(self) -> str:
        """What the agent has said in the job's log."""
        return (self.folder / "console").read_text()

    def ask(self, **order: Any) -> Any:
        """Have an order carried out."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, self.console()
        return json.loads(answer)

    def close(self) -> None:
        """End the agent, and all that it started."""
        if self.process.poll() is None:
            self.ask(do="close")
        self.process.kill()
        self.process.communicate()


def find_free_port() -> int:
    """A TCP port that nobody uses now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def open_agent(
    folder: Path,
    worker_start: str,
    *,
    procs: int = 1,
    command: Sequence[str] = ("train.py",),
    environment: Mapping[str, str] | None = None,
    prefix: Sequence[str] = (),
) -> Agent:
    """An agent whose ranks are started in this way; `command` and `environment` are what it knows ahead."""
    folder.mkdir(exist_ok=True)
    with (folder / "console").open("w") as console:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.trainer.workers_rig"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=console,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            text=True,
        )
    agent = Agent(folder, process)
    quick = {"WARM_IMPORTS": "numpy"} if worker_start == "warm" else {}
    environment = {**os.environ, **quick, **(environment or {})}
    agent.ask(
        do="create", kind=worker_start, procs=procs, command=command, environment=environment, prefix=tuple(prefix)
    )
    return agent


# ---------------------------------------------------------------- the agent's side


def main() -> None:
    """Carry out one order after another."""
    set_process_ties()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what is meant for the job's log
    workers: Workers | None = None
    for line in sys.stdin:
        order = json.loads(line)
        if order["do"] == "create":
            workers = _create(order)
            answers.write("null\n")
        else:
            assert workers is not None
            answers.write(json.dumps(_do(workers, order)) + "\n")


def _create(order: Mapping[str, Any]) -> Workers:
    spec = AttemptSpec(
        run="r",
        attempt=1,
        command=tuple(order["command"]),
        nodes=1,
        procs_per_node=order["procs"],
        worker_start=order["kind"],
        command_prefix=tuple(order["prefix"]),
    )
    program = choose_program(spec.command, sys.executable)
    workers = create_workers(
        spec, program, order["environment"], log_dir=Path("logs").absolute(), local_addr=lambda: "127.0.0.1"
    )
    workers.prepare()
    return workers


def _do(workers: Workers, order: Mapping[str, Any]) -> Any:
    deadline = time.monotonic() + _LIMIT_S
    if order["do"] == "start":
        program = choose_program(order["command"], sys.executable)
        workers.start(Place(**order["place"]), program, order["environment"])
        return None
    if order["do"] == "wait":
        while (end := workers.poll()) is None and time.monotonic() < deadline:
            time.sleep(0.002)
        return dataclasses.asdict(end) if end is not None else None
    if order["do"] == "settle":
        workers.settle()
        return None
    if order["do"] == "pids":
        while not workers.pids() and workers.poll() is None and time.monotonic() < deadline:
            time.sleep(0.002)
        return dict(workers.pids())
    if order["do"] == "kept":
        workers.poll()
        return sorted(workers.kept())
    if order["do"] == "stop":
        return workers.stop(order["grace_s"])
    workers.close()
    return None


if __name__ == "__main__":
    main()
