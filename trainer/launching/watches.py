"""What is judged from the ranks' own words while they train: hangs and stragglers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

from trainer.contract import EXIT_HUNG, AttemptSpec, Progress, Straggler
from trainer.launching.hangs import Hang, HangWatch
from trainer.launching.interruptions import Finding
from trainer.launching.missing import name_missing
from trainer.launching.stragglers import StragglerWatch
from trainer.launching.training import Training
from trainer.verdict import EXIT_NOT_STARTED

JUDGE_INTERVAL_S = 0.25
MANY_RANKS = 256
MANY_INTERVAL_S = 1.0
PROGRESS_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What the watches find now. `wants_evidence`: a hang may be coming, and its evidence is worth having."""

    finding: Finding | None = None
    wants_evidence: bool = False
    hang: Hang | None = None


class Watches:
    """The watches over the ranks of the current start."""

    def __init__(self, spec: AttemptSpec) -> None:
        self._hangs = HangWatch(spec)
        self._slow = StragglerWatch(spec)
        self._judged_at = self._progress_at = float("-inf")
        self._interval_s = JUDGE_INTERVAL_S
        self._is_suspecting = False

    def begin(self, training: Training, procs_per_node: int, now: float) -> None:
        """Another start begins."""
        nodes = {
            index * procs_per_node + local: node
            for index, node in enumerate(training.nodes)
            for local in range(procs_per_node)
        }
        self._interval_s = MANY_INTERVAL_S if len(nodes) > MANY_RANKS else JUDGE_INTERVAL_S
        self._is_suspecting = False
        self._hangs.begin(training.launch, training.nodes, now)
        self._slow.begin(now, nodes)

    def feed(self, node: str, ranks: Any, now: float) -> None:
        """The ranks in a node's beat; other shapes than the agreed one are passed over."""
        known = [rank for rank in ranks if isinstance(rank, dict)] if isinstance(ranks, list) else []
        self._hangs.feed(node, known, now)
        if known:
            self._slow.feed(now, node, known)

    def feed_progress(self, progress: Progress | None, now: float) -> None:
        """The progress file as it is now."""
        if now - self._progress_at >= PROGRESS_INTERVAL_S:
            self._progress_at = now
            self._hangs.feed_progress(progress, now)

    def judge(self, now: float, *, saved_step: int | None, has_spare: bool) -> tuple[Judgement, tuple[Straggler, ...]]:
        """What is found now, and who is slow."""
        stragglers = self._slow.judge(now)
        if now - self._judged_at < self._interval_s:
            return Judgement(), stragglers
        self._judged_at = now
        hang = self._hangs.judge(now)
        if hang is not None:
            return Judgement(finding=finding_of_hang(hang), hang=hang), stragglers
        was_suspecting, self._is_suspecting = self._is_suspecting, self._hangs.suspects(now)
        slow = self._slow.replacement(saved_step, has_spare=has_spare)
        finding = None if slow is None else finding_of_straggler(slow)
        wants_evidence = self._is_suspecting and not was_suspecting
        return Judgement(finding=finding, wants_evidence=wants_evidence), stragglers

    def settle(self, hang: Hang) -> Hang:
        """Take a hang as it is acted upon."""
        return self._hangs.settle(hang)


class HangNaming(Thread):
    """Reads what the nodes have collected of a hang, beside the loop: which rank do the others wait for?"""

    def __init__(self, hang: Hang, folder: Path, world: int) -> None:
        super().__init__(name="hang-naming", daemon=True)
        self.hang = hang
        self.is_done = False
        self._folder = folder
        self._world = world
        self.start()

    def run(self) -> None:
        """Look once."""
        try:
            self.hang = name_missing(self.hang, self._folder, world=self._world)
        finally:
            self.is_done = True


def finding_of_hang(hang: Hang) -> Finding:
    """A hang as the reason of an interruption."""
    return Finding(
        kind="hang",
        cause=hang.cause,
        exit_code=EXIT_HUNG,
        nodes=hang.nodes,
        hint=hang.hint,
        evidence=_texts(hang.evidence),
        detect_s=hang.silent_s,
    )


def finding_of_straggler(slow: Straggler) -> Finding:
    """A straggler that is to be replaced as the reason of an interruption."""
    return Finding(
        kind="straggler",
        cause=f"rank {slow.rank} on {slow.node} is {slow.ratio:.2f} times slower than the others: replaced",
        exit_code=EXIT_NOT_STARTED,
        nodes=(slow.node,),
        evidence=(slow.detail,),
    )


def _texts(evidence: Sequence[str]) -> tuple[str, ...]:
    return tuple(str(line)[:1000] for line in evidence[:50])
