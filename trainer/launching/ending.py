"""The end of an attempt: the nodes stop and go, srun ends, all within bounds."""

from __future__ import annotations

import time
from collections.abc import Callable

from trainer.launching.course import EXIT_TERMINATED
from trainer.launching.fleet import Fleet
from trainer.launching.limits import Limits
from trainer.launching.state import State
from trainer.verdict import Verdict


class Ending:
    """Ends what runs. `turn` takes what comes meanwhile."""

    def __init__(self, fleet: Fleet, state: State, limits: Limits, turn: Callable[[], None]) -> None:
        self._fleet = fleet
        self._nodes = fleet.nodes
        self._state = state
        self._limits = limits
        self._turn = turn

    def stop_nodes(self, verdict: Verdict) -> None:
        """Have every node that may still run ranks kill them and say so; bounded."""
        deadline = time.monotonic() + self._limits.kill_s
        told: set[str] = set()
        while time.monotonic() < deadline and not self._fleet.is_over():
            open_nodes = [
                name
                for name, node in self._nodes.items()
                if node.end is None and node.connected_at is not None and not self._is_gone(name)
                if self._state.training is None or node.stopped_for < self._state.training.launch
            ]
            if not open_nodes:
                return
            for name in open_nodes:
                if name not in told and self._fleet.server.is_connected(name):
                    told.add(name)
                    is_spare = self._state.training is not None and name not in self._state.training.nodes
                    code = 0 if is_spare else EXIT_TERMINATED
                    self._fleet.send(name, {"type": "kill", "exit_code": code, "reason": verdict.reason})
            self._turn()

    def _is_gone(self, name: str) -> bool:
        return name in self._fleet.silent_since or bool(self._nodes[name].lost)

    def wait_for_srun(self) -> None:
        """Wait for agents and srun to end by themselves; bounded, and short for nodes that are gone."""
        deadline = time.monotonic() + self._limits.step_end_s
        is_stuck = False
        while not self._fleet.is_over() and time.monotonic() < deadline:
            if not is_stuck and self._is_srun_stuck():
                is_stuck = True
                deadline = min(deadline, time.monotonic() + self._limits.last_word_s)
            self._turn()

    def _is_srun_stuck(self) -> bool:
        """True when it can only be waiting for nodes that are gone; Slurm ends what is left of them with the job."""
        is_anyone_left = any(self._fleet.server.is_connected(n) and not self._is_gone(n) for n in self._nodes)
        has_lost_nodes = any(self._is_gone(n) or node.connected_at is None for n, node in self._nodes.items())
        return has_lost_nodes and not is_anyone_left
