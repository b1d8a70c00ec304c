"""When the first start begins, and on which nodes."""

from __future__ import annotations

from trainer.contract import EXIT_NODE_SILENT, AttemptSpec
from trainer.launching.clock import OwnClock
from trainer.launching.course import choose_fewer
from trainer.launching.fleet import Fleet
from trainer.launching.limits import Limits
from trainer.step import find_blamed_node, find_refusal
from trainer.verdict import EXIT_NOT_STARTED, Candidate, Go, Verdict, choose_nodes


class FirstStart:
    """Asked in each turn until it says something."""

    def __init__(self, spec: AttemptSpec, fleet: Fleet, limits: Limits, clock: OwnClock) -> None:
        self._spec = spec
        self._fleet = fleet
        self._nodes = fleet.nodes
        self._limits = limits
        self._clock = clock
        self._enough_at: float | None = None

    def decide(self) -> Go | Verdict | None:
        """The nodes that begin, that there can be no start, or None while it is too early to tell."""
        now = self._clock.now()
        candidates = [
            Candidate(
                node=n.name,
                is_connected=n.connected_at is not None,
                is_checked=n.is_checked,
                is_silent=n.name in self._fleet.silent_since or bool(n.lost),
                failed=n.failed or (n.end.reason if n.end else ""),
                exit_code=n.end.exit_code if n.end else None,
            )
            for n in self._nodes.values()
        ]
        healthy = [c.node for c in candidates if c.is_checked and not c.failed and not c.is_silent]
        if len(healthy) >= self._spec.nodes and self._enough_at is None:
            self._enough_at = now
        choice = choose_nodes(
            candidates,
            self._spec.nodes,
            may_wait_for_spares=self._enough_at is None or now - self._enough_at < self._limits.spare_grace_s,
            is_too_late=self._is_start_late(now),
        )
        if isinstance(choice, Verdict):
            choice = choose_fewer(choice, candidates, self._spec, is_too_late=self._is_start_late(now))
        if choice is None and self._fleet.is_srun_gone():
            return self._judge_failed_start()
        return choice

    def _is_start_late(self, now: float) -> bool:
        connected = [n.connected_at for n in self._nodes.values() if n.connected_at is not None]
        if now - self._fleet.started_at > self._limits.connect_s and len(connected) < len(self._nodes):
            return True
        limit_s = self._spec.start_checks_timeout_s + self._limits.checks_margin_s
        return len(connected) == len(self._nodes) and now - max(connected) > limit_s

    def _judge_failed_start(self) -> Verdict:
        lines = [line for step in self._fleet.steps for line in step.lines]
        node = find_blamed_node(lines, list(self._nodes))
        code = EXIT_NODE_SILENT if node else EXIT_NOT_STARTED
        refusal = find_refusal(lines)
        said = refusal or next(iter([*(line for line in lines if "error:" in line), *lines]), "it said nothing")
        what_next = "hold" if refusal else ""  # the next job's srun would say the same
        return Verdict(exit_code=code, reason=f"the training step did not start; {said}", node=node, next=what_next)
