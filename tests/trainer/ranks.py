"""Runs the reference training in several real processes, without torchrun and without importing torch in each.

The processes come from a fork server that has imported torch once, so that a start costs half a second, not three.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path

DEADLINE_S = 60.0

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["trainer.example.loop", "torch._dynamo"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The processes of one start of the training, in rank order; `output` has a file for each."""

    processes: tuple[ForkServerProcess, ...]
    output: tuple[Path, ...]

    def signal(self, rank: int, number: signal.Signals) -> None:
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, number)

    def limit_file_size(self, rank: int, size_bytes: int) -> None:
        """Let writes of a rank's writer beyond so many bytes of a file fail, as on a full disk or over a quota."""
        for pid in self.children(rank):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (size_bytes, resource.RLIM_INFINITY))

    def children(self, rank: int) -> list[int]:
        """The processes that a rank has started."""
        pid = self.processes[rank].pid
        tasks = Path(f"/proc/{pid}/task").iterdir()
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    def wait(self, within_s: float = DEADLINE_S) -> list[int | None]:
        """Exit codes in rank order; whatever still runs at the deadline is killed and counts as None."""
        deadline = time.monotonic() + within_s
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        codes = [process.exitcode for process in self.processes]
        self.kill()
        return codes

    def text(self) -> str:
        return "\n".join(path.read_text() for path in self.output)


def start(
    folder: Path,
    world: int,
    arguments: Sequence[str],
    environment: Mapping[str, str] | None = None,
    *,
    node_size: int | None = None,
) -> Ranks:
    """Start `world` ranks of the reference training, by default all on one node; their output goes to `folder`."""
    return _start_each(folder, [arguments] * world, environment or {}, node_size)


def _start_each(
    folder: Path, arguments: Sequence[Sequence[str]], environment: Mapping[str, str], node_size: int | None = None
) -> Ranks:
    world = len(arguments)
    folder.mkdir(parents=True, exist_ok=True)
    port = _free_port()
    processes = []
    output = []
    for rank in range(world):
        path = folder / f"rank{rank}.{port}.txt"
        place = {
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_RANK": str(rank % (node_size or world)),
            "LOCAL_WORLD_SIZE": str(node_size or world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        process = _CONTEXT.Process(
            target=_run, args=(list(arguments[rank]), {**environment, **place}, str(path)), daemon=True
        )
        process.start()
        processes.append(process)
        output.append(path)
    return Ranks(processes=tuple(processes), output=tuple(output))


def train(
    folder: Path, world: int, arguments: Sequence[str], environment: Mapping[str, str] | None = None
) -> list[int | None]:
    """Run the training to its end and return the exit codes in rank order."""
    return start(folder, world, arguments, environment).wait()


def train_each(folder: Path, arguments: Sequence[Sequence[str]], environment: Mapping[str, str]) -> list[int | None]:
    """Like `train`, with arguments of its own for each rank."""
    return _start_each(folder, arguments, environment).wait()


def await_true(condition: Callable[[], bool], within_s: float = DEADLINE_S) -> None:
    """Poll until a condition holds; fails after the deadline."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it never became true"
        time.sleep(0.002)


def _run(arguments: list[str], environment: dict[str, str], output: str) -> None:
    os.environ.update(environment)
    stream = Path(output).open("w", buffering=1)  # noqa: SIM115 - for the life of the process
    os.dup2(stream.fileno(), 1)
    os.dup2(stream.fileno(), 2)
    sys.stdout = sys.stderr = stream
    from trainer.example.train import main

    sys.exit(main(arguments))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
