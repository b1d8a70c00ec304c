"""Ranks started by the node's agent itself, with what torchrun would give them and without its seconds."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import BinaryIO

from trainer.agent.place import Place
from trainer.agent.program import Program
from trainer.agent.rank_processes import RankProcesses, make_log_folder, port_taken
from trainer.agent.store import PreparedStore
from trainer.agent.workers import START_FAILED, RankStart, Setting, WorkersEnd, plan_ranks
from trainer.verdict import EXIT_MISCONFIGURED, EXIT_NOT_STARTED

_PR_SET_PDEATHSIG = 1


class DirectWorkers:
    """One fresh process for each rank."""

    opens_port = False

    def __init__(self, setting: Setting, program: Program, environment: Mapping[str, str], *, can_serve: bool) -> None:
        """`can_serve`: a store for the ranks can be served beside them, under the program's own Python."""
        self._setting = setting
        self._program = program
        self._environment = environment
        self._store = PreparedStore() if can_serve else None
        self._processes: RankProcesses | None = None

    def prepare(self) -> None:
        """Nothing: what is prepared now would be in the way of the ranks."""

    def settle(self) -> None:
        """Have a store at hand for the next start."""
        if self._store is not None:
            self._store.prepare(self._environment.get("PYTHON_EXEC") or self._program.python, self._environment)

    def start(self, place: Place, program: Program, environment: Mapping[str, str]) -> None:
        """Start every rank, rank 0 first: the others look for it."""
        self._program, self._environment = program, environment
        self._end_store()
        plan = plan_start(self._setting, place, program, environment)
        self._processes = plan.processes
        store = None
        if plan.ranks and place.rank == 0 and self._store is not None:
            store = self._store.serve(place.master_port, self._setting.others())
        if store is not None:
            self._processes.add({}, store)
        for rank in plan.ranks:
            try:
                self._processes.add({rank.local_rank: spawn(rank if store is None else meeting_elsewhere(rank))})
            except OSError as error:
                self._processes.fail(not_started(rank.command[0], error))
                return

    def poll(self) -> WorkersEnd | None:
        """See `Workers`."""
        return self._processes.poll() if self._processes is not None else None

    def pids(self) -> Mapping[int, int]:
        """See `Workers`."""
        return self._processes.pids() if self._processes is not None else {}

    def kept(self) -> frozenset[int]:
        """What serves stores, and the store of ranks of which only others may still run."""
        own = frozenset() if self._store is None else self._store.pids()
        return own if self._processes is None else own | self._processes.store()

    def stop(self, grace_s: float) -> list[int]:
        """See `Workers`."""
        if self._processes is None:
            return []
        return self._processes.stop(grace_s, {*self._setting.others(), *self.kept()})

    def close(self) -> None:
        """End the ranks that still run, and their store."""
        if self._store is not None:
            self._store.close()
        self._end_store()
        self.stop(0.0)

    def _end_store(self) -> None:
        if self._processes is not None:
            self._processes.end_store()


class Plan:
    """One start that is about to be made: its ranks, or none and the reason in `processes`."""

    def __init__(self, ranks: list[RankStart], processes: RankProcesses) -> None:
        self.ranks = ranks
        self.processes = processes


def plan_start(setting: Setting, place: Place, program: Program, environment: Mapping[str, str]) -> Plan:
    """The ranks of one start, their log folders made and, where they are to meet here, the port looked at."""
    if place.rank == 0 and not is_free(place.master_port):
        return _refused(place, port_taken(place))
    try:
        folder = make_log_folder(setting.log_dir, place)
        ranks = plan_ranks(setting, place, program, environment, folder=folder)
        for rank in ranks:
            rank.folder.mkdir(parents=True)
    except OSError as error:
        return _refused(place, WorkersEnd(kind=START_FAILED, exit_code=EXIT_NOT_STARTED, reason=f"logs: {error}"))
    return Plan(ranks, RankProcesses(place, ranks))


def _refused(place: Place, end: WorkersEnd) -> Plan:
    processes = RankProcesses(place, [])
    processes.fail(end)
    return Plan([], processes)


def meeting_elsewhere(rank: RankStart) -> RankStart:
    """The same rank, for a store that is there already: rank 0 then opens none."""
    return replace(rank, environment={**rank.environment, "TORCHELASTIC_USE_AGENT_STORE": "True"})


def not_started(program: str, error: OSError) -> WorkersEnd:
    """The end of a start whose program could not be run."""
    return WorkersEnd(
        kind=START_FAILED,
        exit_code=EXIT_MISCONFIGURED if isinstance(error, (FileNotFoundError, PermissionError)) else EXIT_NOT_STARTED,
        reason=f"{program} could not be started: {error}",
    )


def is_free(port: int) -> bool:
    """True when nothing listens on a TCP port of this host; a socket that only holds it does not count."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("", port))
            sock.listen(1)
        except OSError:
            return False
    return True


def spawn(rank: RankStart) -> int:
    """Start one rank as a process of its own, which ends when this one does. Raises OSError."""
    with rank.stdout.open("wb") as out, rank.stderr.open("wb") as err:
        return _spawn(rank, out, err)


def _spawn(rank: RankStart, out: BinaryIO, err: BinaryIO) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads: the hook below takes no lock
        process = subprocess.Popen(
            rank.command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=dict(rank.environment),
            start_new_session=True,
            preexec_fn=_end_with_parent(os.getpid()),  # noqa: PLW1509
        )
    process.returncode = 0  # whoever adopts the pid waits for it
    return process.pid


def _end_with_parent(parent: int) -> Callable[[], None]:
    """SIGKILL when the agent dies: nobody would stop the ranks then, and others may write in their place."""
    prctl = ctypes.CDLL(None).prctl

    def hook() -> None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return hook
