"""The ranks of this node: one start of the training after another, and what has to be told to them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path

from trainer import nccl
from trainer.agent.place import Place
from trainer.agent.program import Program, choose_program, fill_command
from trainer.agent.ranks import RankDesk
from trainer.agent.surroundings import (
    choose_nccl_settings,
    find_interface,
    is_listening,
    training_environment,
    wanted_environment,
)
from trainer.agent.worker_start import create_workers
from trainer.agent.workers import WorkersEnd
from trainer.container import IMAGE_PYTHON
from trainer.contract import AttemptSpec, RunPaths
from trainer.descendants import signal_ranks

_SETTLED_S = 60.0  # a start takes no longer, mostly; who tells of no step may be stepping by now


class Training:
    """What runs here of the training now, if anything does."""

    def __init__(
        self,
        *,
        spec: AttemptSpec,
        run_dir: Path,
        node: str,
        environment: Mapping[str, str],
        desk: RankDesk,
        local_address: Callable[[], str],
        others: Callable[[], Collection[int]],
    ) -> None:
        self._spec = spec
        self._run_dir = run_dir
        self._node = node
        self._given = environment
        self._local_address = local_address
        self._desk = desk
        self._log_dir = RunPaths(run_dir).logs(spec.attempt) / node
        self._watched: frozenset[int] = frozenset()
        self._requests: dict[int, int] = {}  # signals that the training is to get, by the launcher's count
        self._told: dict[int, set[int]] = {}  # who has had each of them
        self._untold: set[int] = set()
        self._has_settled = False
        self._started_at = 0.0
        self.place: Place | None = None  # of the newest start
        self.is_running = False
        first = Place(
            launch=0,
            rank=0,
            nodes=spec.nodes,
            master_addr="",
            master_port=0,
            rdzv_id="",
            resume_from=spec.resume_from,
            resume_step=spec.resume_step,
        )
        self._workers = create_workers(
            spec,
            self._program(first),
            self.environment(first),
            log_dir=self._log_dir,
            local_addr=local_address,
            others=others,
            say=self._say,
        )

    def prepare(self) -> None:
        """Do what the next start needs ahead of it. Returns at once."""
        self._workers.prepare()

    def start(self, place: Place) -> None:
        """Start this node's ranks. What goes wrong is told by `look`."""
        if place.rank == 0 and self.place is None:
            for line in self._describe_settings(place):
                self._say(line)
        self.place, self.is_running, self._watched = place, True, frozenset()
        self._untold, self._told = set(self._requests), {count: set() for count in self._requests}  # new processes
        self._has_settled, self._started_at = False, time.monotonic()
        self._desk.begin(place.launch)
        self._make_folder(RunPaths(self._run_dir).evidence(self._spec.attempt, place.launch))
        self._workers.start(place, self._program(place), self.environment(place))
        self._watch()

    def _program(self, place: Place) -> Program:
        python = IMAGE_PYTHON if self._spec.command_prefix else sys.executable
        return choose_program(fill_command(self._spec, self._run_dir, place), python)

    def _describe_settings(self, place: Place) -> tuple[str, ...]:
        wanted = wanted_environment(self._spec, self._given)
        ours = choose_nccl_settings(self._spec, self._run_dir, wanted, launch=place.launch, socket=self._desk.path)
        return nccl.tell_settings(ours, wanted), *nccl.check_environment({**ours, **wanted})

    def environment(self, place: Place) -> dict[str, str]:
        """What the ranks of one start find in their environment, apart from what tells one from another."""
        spec = replace(self._spec, resume_from=place.resume_from, resume_step=place.resume_step)
        found = training_environment(spec, self._run_dir, self._given, launch=place.launch, socket=self._desk.path)
        interface = find_interface(self._local_address())
        names = {"GLOO_SOCKET_IFNAME": interface, "TP_SOCKET_IFNAME": interface} if interface else {}
        return {**names, **found}

    def look(self) -> WorkersEnd | None:
        """How the ranks ended, when they did just now."""
        if not self.is_running:
            return None
        end = self._workers.poll()
        if end is None:
            self._watch()
            self._pass_requests_on()
            self._settle()
        return end

    def stop(self, grace_s: float) -> list[int]:
        """End the ranks, with everything below them; the pids that survive SIGKILL."""
        self.is_running = False
        return list(self._workers.stop(grace_s))

    def request(self, count: int, number: int) -> None:
        """Remember a signal for the training, which may not run yet."""
        if count not in self._requests:
            self._requests[count] = number
            self._told[count] = set()
            self._untold.add(count)

    def pids(self) -> dict[int, int]:
        """The processes of the ranks that run here, by global rank."""
        if self.place is None or not self.is_running:
            return {}
        first = self.place.rank * self._spec.procs_per_node
        return {first + local_rank: pid for local_rank, pid in self._workers.pids().items()}

    def is_opening(self) -> bool:
        """True while the other nodes wait for this one: its ranks run, and the first serves all."""
        return self.is_running and self.place is not None and self.place.rank == 0 and self._workers.opens_port

    def has_opened(self) -> bool:
        """True when something listens where the ranks are to meet: who knocks sooner waits half a second in vain."""
        return self.place is not None and is_listening(self._local_address(), self.place.master_port)

    def close(self) -> None:
        """End the ranks, and what was prepared for the next ones."""
        self.is_running = False
        self._workers.close()

    def make_log_folder(self) -> None:
        """Make the folder of this node's logs; without one the ranks will fail and say so."""
        self._make_folder(self._log_dir)

    @property
    def log_dir(self) -> Path:
        """Where the logs of this node's ranks are."""
        return self._log_dir

    def _say(self, text: str) -> None:
        print(f"{self._node}: {text}", file=sys.stderr, flush=True)

    def _make_folder(self, path: Path) -> None:
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self._say(str(error))

    def _watch(self) -> None:
        """Let the desk look after the processes, as each of them comes; once all are there, nobody looks any more."""
        if len(self._watched) >= self._spec.procs_per_node:
            return
        pids = self.pids()
        if frozenset(pids.values()) != self._watched:
            self._watched = frozenset(pids.values())
            self._desk.watch(pids, self._log_dir)

    def _settle(self) -> None:
        """Once the training steps, or has run for long, let what would have been in its way be prepared.

        On the first node only: there the ranks meet.
        """
        if self._has_settled or self.place is None or self.place.rank != 0:
            return
        has_run_long = time.monotonic() - self._started_at > _SETTLED_S
        if has_run_long or any(state.get("phase") == "step" for state in self._desk.states()):
            self._has_settled = True
            self._workers.settle()

    def _pass_requests_on(self) -> None:
        if not self._untold:
            return
        pids = self._workers.pids().values()
        for count in sorted(self._untold):
            has_reached_all = signal_ranks(self._requests[count], pids, told=self._told[count])
            if has_reached_all and len(pids) >= self._spec.procs_per_node:
                self._untold.discard(count)
