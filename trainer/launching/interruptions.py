"""The record of an interruption while it grows: written when it is found, when it is over, and when more is known."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from trainer.contract import CutOff, InterruptionRecord
from trainer.launching.silence import Loss
from trainer.launching.training import Training

LIVED_S = 10.0  # ranks that tell nothing and live for so long have begun


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Why a start is interrupted. `exit_code`: the attempt's, should it end over this."""

    kind: str
    cause: str
    exit_code: int
    nodes: tuple[str, ...] = ()
    hint: str = ""
    evidence: tuple[str, ...] = ()
    detect_s: float = 0.0
    is_weak: bool = False  # another one, once it is known, says better what happened


class Interruption:
    """One interruption of the training and what followed."""

    def __init__(self, record: InterruptionRecord, now: float, *, was_mute: bool = False) -> None:
        self.record = record
        self._was_mute = was_mute  # the start before told no steps in a long time
        self._found_at = now
        self._parts: dict[str, float] = dict(record.parts_s)

    def note_part(self, name: str, seconds: float) -> None:
        """So long did this part take."""
        self._parts[name] = round(self._parts.get(name, 0.0) + seconds, 3)
        self.record = replace(self.record, parts_s=dict(self._parts))

    def amend(self, **changes: object) -> None:
        """Set fields of the record."""
        self.record = replace(self.record, **changes)  # type: ignore[arg-type]

    def add(self, finding: Finding, *, instead: bool) -> None:
        """One more finding before the next start; `instead`: it says what happened, the first was its consequence."""
        record = self.record
        nodes = tuple(dict.fromkeys((*record.nodes, *finding.nodes)))
        evidence = tuple(dict.fromkeys((*record.evidence, *finding.evidence)))
        if instead:
            self.amend(kind=finding.kind, cause=finding.cause, nodes=nodes, hint=finding.hint, evidence=evidence)
        else:
            cause = record.cause if finding.cause in record.cause else f"{record.cause}; {finding.cause}"
            self.amend(cause=cause[:2000], nodes=nodes, evidence=evidence)

    def follow(self, training: Training, now: float) -> bool:
        """Look how far the start that followed has come; True when its first new step was just seen.

        Of a training that tells no steps, the first line that it prints has to do, and at last that its ranks live.
        """
        if training.launch != self.record.launch + 1 or self.record.resumed_at is not None:
            return False
        if training.ranks_at is not None and "start" not in self._parts:
            self.note_part("start", training.ranks_at - training.began_at)
        if training.stepped_at is not None:
            self._resume("first_step", training.stepped_at, training)
            return True
        if training.last_step is not None or training.ranks_at is None:
            return False
        lived_s = now - training.ranks_at
        if training.is_mute(now) or (self._was_mute and training.printed_at is not None):
            self._resume("first_sign", training.printed_at or training.ranks_at, training)
        elif self._was_mute and lived_s > LIVED_S:
            self._resume("first_sign", training.ranks_at, training)
        return self.record.resumed_at is not None

    def _resume(self, part: str, at: float, training: Training) -> None:
        self.note_part(part, at - (training.ranks_at or training.began_at))
        self.amend(resumed_at=round(self.record.detected_at + at - self._found_at, 3))

    def take_word(self, word: CutOff) -> bool:
        """A lost node's word that it lives: it was the cable. True when the record says so now."""
        if self.record.kind not in ("node_lost", "node_frozen") or word.node not in self.record.nodes:
            return False
        said = f"{word.node} left word that it lives and had not heard the launcher for {word.since_s:.1f} s"
        self.amend(
            kind="node_cut_off",
            cause=f"{word.node} is cut off: no beat, though it lives",
            evidence=(*self.record.evidence, said),
        )
        return True


def record_of(
    finding: Finding, *, attempt: int, launch: int, last_step: int | None, trained: tuple[str, ...] = ()
) -> InterruptionRecord:
    """The record as it is when an interruption is found."""
    return InterruptionRecord(
        attempt=attempt,
        launch=launch,
        kind=finding.kind,
        cause=finding.cause,
        nodes=finding.nodes,
        hint=finding.hint,
        evidence=finding.evidence,
        trained=trained,
        last_step=last_step,
        detected_at=round(time.time(), 3),
        parts_s={"detect": round(finding.detect_s, 3)},
    )


def finding_of(loss: Loss, exit_code: int) -> Finding:
    """A lost node as the reason of an interruption."""
    return Finding(
        kind=loss.kind,
        cause=loss.cause,
        exit_code=exit_code,
        nodes=(loss.node,) if loss.is_blamed else (),
        hint="" if loss.is_blamed else loss.node,
        evidence=loss.evidence,
        detect_s=loss.age_s,
    )
