"""What is done about silent nodes where the training is not started again inside the allocation: the service acts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trainer.contract import EXIT_NODE_SILENT, AttemptSpec
from trainer.launching.clock import OwnClock
from trainer.launching.fleet import Fleet
from trainer.launching.limits import Limits
from trainer.launching.state import State
from trainer.verdict import NodeEnd, Verdict


class SilenceWatch:
    """Ends the attempt over a silent node, once nobody else has done anything about it for long enough."""

    def __init__(
        self,
        *,
        spec: AttemptSpec,
        fleet: Fleet,
        state: State,
        limits: Limits,
        clock: OwnClock,
        end_node: Callable[[NodeEnd], None],
    ) -> None:
        self._spec = spec
        self._fleet = fleet
        self._nodes = fleet.nodes
        self._state = state
        self._limits = limits
        self._clock = clock
        self._end_node = end_node

    def judge(self, silent: Sequence[str]) -> Verdict:
        """The end over these silent nodes: the first of them is named."""
        first = min(silent, key=lambda name: self._fleet.silent_since[name])
        reason = f"no beat from {', '.join(silent)} for more than {self._spec.suspect_after_s:g} s"
        return Verdict(exit_code=EXIT_NODE_SILENT, reason=reason, node=first)

    def look(self) -> Verdict | None:
        """Without starts inside the allocation: a silent node that nobody acted upon, an agent that was killed.

        srun tells of a killed agent only when the last process that it left has ended. A kernel that closes a
        connection is alive, so this is no silent node; one that goes down closes them too, and is given the time in
        which the service finds it silent.
        """
        if self._spec.in_job and self._state.training is not None:
            return None
        now = self._clock.now()
        for node in self._nodes.values():
            limit_s = 2 * self._spec.suspect_after_s
            if node.end is None and node.closed_at is not None and now - node.closed_at > limit_s:
                self._end_node(NodeEnd(node=node.name, exit_code=1, reason="its agent ended without a word"))
        if self._state.training is None:
            return None
        silent = [name for name in self._state.training.nodes if name in self._fleet.silent_since]
        if any(now - self._fleet.silent_since[name] > self._limits.silent_s for name in silent):
            return self.judge(silent)
        return None
