"""The node's clock against the head node's. Travel times of question and answer are only bounded."""

from __future__ import annotations

import time
from dataclasses import dataclass

from trainer.contract import CheckResult


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockReading:
    """Seconds since the epoch. The node read its clock between `asked_at` and `answered_at` of the head node."""

    asked_at: float  # head node
    node_started_at: float  # node, first thing
    node_ended_at: float  # node, last thing
    answered_at: float  # head node; when it is not known, a time by which the answer is surely in


def measure(asked_at: float, *, started_at: float, wait_s: float) -> ClockReading:
    """Read the node's clock; the answer is taken to be in `wait_s` after the question."""
    return ClockReading(
        asked_at=asked_at, node_started_at=started_at, node_ended_at=time.time(), answered_at=asked_at + wait_s
    )


def judge(reading: ClockReading, *, max_skew_s: float) -> CheckResult:
    """Fails only when the clock is off by more than the limit whatever the travel times were; 0 turns it off."""
    at_most = reading.node_started_at - reading.asked_at  # skew, if the question took no time
    at_least = reading.node_ended_at - reading.answered_at  # skew, if the answer took no time
    skew = 0.0
    if at_most < 0:
        skew = at_most
    elif at_least > 0:
        skew = at_least
    ok = not max_skew_s or abs(skew) <= max_skew_s
    word = "behind" if skew < 0 else "ahead of"
    detail = "" if ok else f"the clock is at least {abs(skew):.1f} s {word} the head node's"
    return CheckResult(check="clock", ok=ok, detail=detail, value=skew, limit=max_skew_s)
