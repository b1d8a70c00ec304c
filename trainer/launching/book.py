"""The interruptions of an attempt, each in its file: opened, followed to the first new step, amended by late words."""

from __future__ import annotations

from trainer.launching.fleet import Fleet
from trainer.launching.interruptions import Finding, Interruption, record_of
from trainer.launching.limits import Limits
from trainer.launching.training import Training
from trainer.launching.watched import WatchedFiles
from trainer.launching.writer import Writer


class InterruptionBook:
    """Every interruption so far, the newest last."""

    def __init__(self, attempt: int, fleet: Fleet, files: WatchedFiles, writer: Writer, limits: Limits) -> None:
        self._attempt = attempt
        self._fleet = fleet
        self._files = files
        self._writer = writer
        self._limits = limits
        self._interruptions: list[Interruption] = []

    def open(self, finding: Finding, training: Training, now: float) -> Interruption:
        """One more; its nodes to blame are the last ones to be used again."""
        for name in finding.nodes:
            node = self._fleet.nodes[name]
            node.blamed += not node.lost  # a loss has counted already
        record = record_of(
            finding,
            attempt=self._attempt,
            launch=training.launch,
            trained=training.nodes,
            last_step=training.last_step,
        )
        self._interruptions.append(Interruption(record, now, was_mute=training.is_mute(now)))
        self.write(self._interruptions[-1])
        return self._interruptions[-1]

    def write(self, interruption: Interruption) -> None:
        """Write it as it is now."""
        self._writer.record(interruption.record)

    def follow(self, training: Training, now: float) -> bool:
        """True when the first new step since the newest interruption, or what stands for it, was just seen."""
        if not self._interruptions or not self._interruptions[-1].follow(training, now):
            return False
        self.write(self._interruptions[-1])
        return True

    def follow_words(self, now: float) -> None:
        """What nodes have left that live and can't reach us: it settles their loss, or says later what it was."""
        nodes, silent = self._fleet.nodes, self._fleet.silent_since
        lost = {n.name for n in nodes.values() if n.lost and now - n.lost_at < self._limits.cut_off_s}
        self._files.awaited = frozenset(lost | silent.keys())
        for word in self._files.take_words():
            if word.node in silent and not nodes[word.node].lost:
                nodes[word.node].has_left_word = True
                continue
            amended = next((i for i in reversed(self._interruptions) if i.take_word(word)), None)
            if amended is not None:
                self.write(amended)

    def blamed(self) -> tuple[str, ...]:
        """The nodes that the newest interruption blames."""
        return self._interruptions[-1].record.nodes if self._interruptions else ()
