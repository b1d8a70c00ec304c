"""Starts the small training of faults.training, hears what it tells, and kills or freezes parts of it."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from tests.trainer.ranks import _CONTEXT as CONTEXT
from trainer.contract import RunPaths
from trainer.storage.stored import Condition, Found, check_file, find_checkpoints, read_manifest

WITHIN_S = 60.0
WORLD = 2

Event = dict[str, Any]


@dataclass(slots=True)
class Rig:
    """The ranks of one start, each a node of its own; their events are read as they come."""

    run_dir: Path
    events_dir: Path
    ranks: list[ForkServerProcess] = field(default_factory=list)
    writers: set[int] = field(default_factory=set)
    events: list[list[Event]] = field(default_factory=list)
    _read: list[int] = field(default_factory=list)

    # ------------------------------------------------------------ what it does

    def save(self) -> None:
        """Ask for a save now."""
        self._signal_rank(0, signal.SIGUSR2)

    def save_and_wait(self) -> int:
        """Save and return the step once it is verified."""
        before = self.last(0).get("saved") or 0
        self.save()
        self.await_true(lambda: (self.last(0).get("saved") or 0) > before, "a save is verified")
        return int(self.last(0)["saved"])

    def leave(self) -> None:
        """Ask for a save and an exit."""
        self._signal_rank(0, signal.SIGUSR1)

    def finish(self) -> None:
        """Say that it has trained enough."""
        (self.events_dir / "finish").touch()

    def writer(self, rank: int) -> int:
        """The process that writes for a rank."""
        return int(self.last(rank)["writer"])

    def kill(self, rank: int, parts: Sequence[str]) -> None:
        """kill -9 of a rank's "rank" process, its "writer", or both, as a node that loses its power."""
        writer = self.writer(rank)
        if "rank" in parts:
            self._signal_rank(rank, signal.SIGKILL)
        if "writer" in parts:
            os.kill(writer, signal.SIGKILL)

    def _signal_rank(self, rank: int, number: signal.Signals) -> None:
        pid = self.ranks[rank].pid
        assert pid is not None
        os.kill(pid, number)

    def end(self) -> None:
        """kill -9 of all that is left, and wait until nothing of it runs."""
        self.hear()
        for process in self.ranks:
            process.kill()
        for process in self.ranks:
            process.join(WITHIN_S)
        for writer in self.writers:
            with suppress(ProcessLookupError):
                os.kill(writer, signal.SIGKILL)
        await_true(lambda: not any(is_running(writer) for writer in self.writers), "the writers are gone")

    # ------------------------------------------------------------ what it tells

    def hear(self) -> None:
        """Read new events of all ranks."""
        for rank in range(len(self.ranks)):
            path = self.events_dir / f"rank{rank}.jsonl"
            data = path.read_bytes()[self._read[rank] :] if path.exists() else b""
            data = data[: data.rfind(b"\n") + 1]
            self._read[rank] += len(data)
            told = [json.loads(line) for line in data.splitlines()]
            self.events[rank] += told
            self.writers |= {int(event["writer"]) for event in told if event.get("writer")}

    def last(self, rank: int, kind: str = "step") -> Event:
        """The newest event of a kind; empty before there is one."""
        self.hear()
        return next((event for event in reversed(self.events[rank]) if event["kind"] == kind), {})

    def steps(self, rank: int) -> list[Event]:
        """All steps that a rank has told of."""
        self.hear()
        return [event for event in self.events[rank] if event["kind"] == "step"]

    def await_step(self, rank: int = 0, *, after: int | None = None) -> int:
        """Wait for a step after `after` (by default, after the newest one), and return its number."""
        known = int(self.last(rank).get("step", 0)) if after is None else after
        self.await_true(lambda: int(self.last(rank).get("step", 0)) > known, "the training goes on")
        return int(self.last(rank)["step"])

    def await_true(self, condition: Callable[[], bool], what: str, within_s: float = WITHIN_S) -> None:
        """Poll until it is so; fails with what the ranks said when it takes too long."""
        await_true(condition, what, within_s, told=self.text)

    @property
    def has_lost_a_rank(self) -> bool:
        """True when one has ended."""
        return any(rank.exitcode is not None for rank in self.ranks)

    def text(self) -> str:
        """What the ranks printed."""
        return "\n".join(path.read_text()[-3000:] for path in sorted(self.events_dir.glob("*.txt")))


@contextmanager
def start(run_dir: Path, events_dir: Path, **options: Any) -> Iterator[Rig]:
    """A training on all ranks, until it steps; whatever is left of it is killed at the end."""
    events_dir.mkdir(parents=True)
    rig = Rig(run_dir, events_dir, events=[[] for _ in range(WORLD)], _read=[0] * WORLD)
    port = _free_port()
    try:
        for rank in range(WORLD):
            arguments = (rank, WORLD, port, str(run_dir), str(events_dir), options)
            process = CONTEXT.Process(target=_train, args=arguments, daemon=True)
            process.start()
            rig.ranks.append(process)
        rig.await_true(lambda: all(rig.last(rank) for rank in range(WORLD)) or rig.has_lost_a_rank, "it steps")
        assert not rig.has_lost_a_rank, rig.text()
        yield rig
    finally:
        rig.end()


def _train(*arguments: Any) -> None:
    from tests.trainer.faults.training import train

    train(*arguments)


# ---------------------------------------------------------------- what is stored


def verified(run_dir: Path) -> list[Found]:
    """The checkpoints that are called verified, oldest first; fails when a byte of one is not as it was written."""
    found = [found for found in find_checkpoints(RunPaths(run_dir).checkpoints()) if found.is_verified]
    for checkpoint in found:
        for file in read_manifest(checkpoint.path).files:
            verdict = check_file(checkpoint.path, file)
            assert verdict.condition is Condition.GOOD, f"{checkpoint.path.name}: {verdict}"
    return sorted(found, key=lambda checkpoint: (checkpoint.step, checkpoint.attempt))


def is_running(pid: int) -> bool:
    """False for what has ended, also when nobody has asked for its exit code yet."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def await_true(
    condition: Callable[[], bool], what: str, within_s: float = WITHIN_S, *, told: Callable[[], str] = str
) -> None:
    """Poll until it is so; fails after the deadline."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"it did not come that {what}\n{told()}"
        time.sleep(0.005)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
