"""The current start of the training: its nodes, what its ranks tell, how they ended."""

from __future__ import annotations

from typing import Any

from trainer.contract import Progress
from trainer.launching.resume import ResumePoint
from trainer.verdict import NodeEnd

MUTE_S = 60.0  # a training that tells steps has told one by then, or has said that it restores


class Training:
    """One start of the training. Instants are of the launcher's own clock."""

    def __init__(self, launch: int, nodes: tuple[str, ...], point: ResumePoint, now: float) -> None:
        self.launch = launch
        self.nodes = nodes  # in rank order
        self.point = point
        self.began_at = now
        self.ends: list[NodeEnd] = []  # in the order of their arrival
        self.failed_at: float | None = None
        self.killed_at: float | None = None
        self.is_open = False  # the first node's torchrun listens: the others may come
        self.last_step: int | None = None
        self.ranks_at: float | None = None  # the first word of a rank
        self.stepped_at: float | None = None  # the first new step
        self.printed_at: float | None = None  # the first growth of a log after the first word of a rank
        self._log_bytes: dict[int, int] = {}  # by rank: of its node's logs
        self._first_steps: dict[int, int] = {}

    def feed(self, ranks: Any, now: float) -> None:
        """What a beat says of the ranks of its node; strangers' shapes are passed over."""
        for rank in ranks if isinstance(ranks, list) else ():
            if isinstance(rank, dict):
                number, step = rank.get("rank"), rank.get("step")
                self.ranks_at = now if self.ranks_at is None else self.ranks_at
                if type(number) is int and type(step) is int:
                    self._take_step(number, step, now)
                elif type(number) is int and type(size := rank.get("log_bytes")) is int:
                    has_grown = self._log_bytes.setdefault(number, size) != size
                    self.printed_at = now if has_grown and self.printed_at is None else self.printed_at

    def is_stillborn(self, now: float) -> bool:
        """True when it failed before anything had begun, as far as can be told."""
        return self.last_step is None and now - self.began_at < MUTE_S

    def is_mute(self, now: float) -> bool:
        """True when it runs and tells no steps: that it runs is all there is to see."""
        return self.last_step is None and now - self.began_at > MUTE_S

    def feed_progress(self, progress: Progress, now: float) -> None:
        """What the progress file says; one of another start is passed over."""
        if progress.launch == self.launch or (progress.launch is None and self.launch == 0):
            self._take_step(-1, progress.step, now)

    def _take_step(self, rank: int, step: int, now: float) -> None:
        first = self._first_steps.setdefault(rank, step)
        if self.last_step is None or step > self.last_step:
            self.last_step = step
        if self.stepped_at is None and step > max(first, self.point.step):
            self.stepped_at = now
