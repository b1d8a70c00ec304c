"""`supervisor history`: every interruption with its cause, cost and evidence, and what follows from them. Read-only."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from supervisor.core.reliability import Gap, Mtbf, estimate_mtbf, running_s, split_gap
from supervisor.model import Attempt, Interruption
from supervisor.reports.status import mtbf_words
from supervisor.reports.table import Table, duration, instant, number, one_line
from supervisor.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Interruptions of a window, and the running time that they are measured against."""

    interruptions: tuple[Interruption, ...]
    observed_s: float
    since: datetime | None
    attempts: tuple[Attempt, ...] = ()
    now: datetime | None = None  # open ones count up to here

    @property
    def unplanned(self) -> tuple[Interruption, ...]:
        return tuple(interruption for interruption in self.interruptions if not interruption.is_planned)

    @property
    def planned(self) -> tuple[Interruption, ...]:
        return tuple(interruption for interruption in self.interruptions if interruption.is_planned)

    @property
    def slurm_restarts(self) -> int:
        """Restarts that Slurm counts (its RestartCnt); ours, and MTBF, count interruptions."""
        return sum(attempt.slurm_restarts for attempt in self.attempts)

    def gap(self, interruption: Interruption) -> Gap:
        """What one of them has cost, in parts."""
        key = (interruption.run, interruption.attempt)
        ended = next((a for a in self.attempts if (a.run, a.number) == key), None)
        return split_gap(interruption, ended, self.now or interruption.detected_at)

    @property
    def mtbf(self) -> Mtbf | None:
        """Over the window; None when nothing ran in it."""
        return estimate_mtbf(self.observed_s, len(self.unplanned)) if self.observed_s > 0 else None


def read_history(store: Store, now: datetime, *, name: str | None = None, since: datetime | None = None) -> History:
    """Interruptions of one run or of all, noticed at `since` or later."""
    with store.reading():
        names = [run.name for run in store.load_runs()] if name is None else [name]
        attempts: list[Attempt] = [attempt for run in names for attempt in store.load_attempts(run)]
        return History(
            interruptions=store.load_interruptions(name, since),
            observed_s=running_s(attempts, now, since=since),
            since=since,
            attempts=tuple(attempts),
            now=now,
        )


def history_as_json(history: History) -> dict[str, Any]:
    """The report of `supervisor history --json`."""
    return {
        "interruptions": [_as_json(interruption, history.gap(interruption)) for interruption in history.interruptions],
        "summary": _summary_as_json(history),
    }


def _as_json(interruption: Interruption, gap: Gap) -> dict[str, Any]:
    return {
        "run": interruption.run,
        "attempt": interruption.attempt,
        "launch": interruption.launch,
        "in_job": interruption.is_in_job,
        "kind": interruption.kind,
        "cause": interruption.cause,
        "node": interruption.node,
        "nodes": list(interruption.nodes),
        "planned": interruption.is_planned,
        "drill": interruption.drill or None,
        "injected_at": None,  # known only to whoever broke it on purpose
        "detected_at": interruption.detected_at,
        "resumed_at": interruption.resumed_at,
        "caught_up_at": interruption.caught_up_at,
        "recovery_s": interruption.recovery_s,
        "gap": {
            "detection_s": gap.detection_s,
            "restart_s": gap.restart_s,
            "recompute_s": gap.recompute_s,
            "total_s": gap.total_s,
            "open": gap.is_open,
            "clock_stepped": gap.has_clock_step,
        },
        "parts_s": {part.name: part.seconds for part in interruption.parts},
        "last_step": interruption.last_step,
        "resume_step": interruption.resume_step,
        "lost_steps": interruption.lost_steps,
        "evidence": list(interruption.evidence),
    }


def _summary_as_json(history: History) -> dict[str, Any]:
    mtbf = history.mtbf
    recoveries = _recoveries_s(history.unplanned)
    return {
        "since": history.since,
        "interruptions": len(history.unplanned),
        "planned": len(history.planned),
        "in_job": sum(1 for interruption in history.unplanned if interruption.is_in_job),
        "down_s": _down_s(history, history.unplanned),
        "planned_down_s": _down_s(history, history.planned),
        "slurm_restarts": history.slurm_restarts,
        "by_kind": dict(Counter(interruption.kind for interruption in history.unplanned)),
        "by_node": dict(Counter(i.node for i in history.unplanned if i.node)),
        "observed_h": history.observed_s / 3600,
        "mtbf_h": mtbf.mtbf_h if mtbf else None,
        "mtbf_low_h": mtbf.low_h if mtbf else None,
        "mtbf_high_h": mtbf.high_h if mtbf else None,
        "recovery_median_s": statistics.median(recoveries) if recoveries else None,
        "recovery_max_s": max(recoveries, default=None),
        "lost_steps": _lost_steps(history.unplanned),
        "not_resumed": sum(1 for interruption in history.unplanned if interruption.resumed_at is None),
    }


def _down_s(history: History, interruptions: Sequence[Interruption]) -> float:
    """Seconds between notice and the first new step; of those that are still open, until now."""
    return math.fsum(history.gap(interruption).restart_s for interruption in interruptions)


def _lost_steps(interruptions: Sequence[Interruption]) -> int | None:
    """Steps done again, as far as they are known; None where there were interruptions and it is known of none."""
    known = [i.lost_steps for i in interruptions if i.lost_steps is not None]
    return sum(known) if known or not interruptions else None


def _recoveries_s(interruptions: Sequence[Interruption]) -> list[float]:
    return [i.recovery_s for i in interruptions if i.recovery_s is not None]


# ---------------------------------------------------------------- for people

_COLUMNS = ("detected (UTC)", "run", "attempt", "kind", "node", "recovery", "lost steps", "cause")


def history_table(history: History) -> Table:
    """One line per interruption, oldest first."""
    return Table(
        columns=_COLUMNS,
        rows=tuple(_row(interruption) for interruption in history.interruptions),
        numeric=frozenset({"attempt", "lost steps", "recovery"}),
    )


def _row(interruption: Interruption) -> tuple[str, ...]:
    return (
        instant(interruption.detected_at),
        interruption.run,
        attempt_words(interruption),
        _kind(interruption),
        interruption.node or "-",
        duration(interruption.recovery_s),
        number(interruption.lost_steps),
        one_line(interruption.cause),
    )


def _kind(interruption: Interruption) -> str:
    if interruption.drill:
        return f"{interruption.kind} (drill)"
    return f"{interruption.kind} (planned)" if interruption.is_planned else interruption.kind


def attempt_words(interruption: Interruption) -> str:
    """The attempt; where it was started more than once, the number of the start says which one: 1.2."""
    has_starts = interruption.is_in_job or interruption.launch > 0
    return f"{interruption.attempt}.{interruption.launch}" if has_starts else str(interruption.attempt)


def summary_line(history: History) -> str:
    """What the interruptions come to; planned work and Slurm's own count in words of their own."""
    return _unplanned_words(history) + _planned_words(history) + _slurm_words(history)


def _planned_words(history: History) -> str:
    if not history.planned:
        return ""
    drills = sum(1 for interruption in history.planned if interruption.drill)
    of_them = f" ({drills} of them drills)" if drills else ""
    return (
        f"; {len(history.planned)} planned{of_them}, {duration(_down_s(history, history.planned))} of planned down time"
    )


def _slurm_words(history: History) -> str:
    count = history.slurm_restarts
    return f"; Slurm counts {count} restarts of its own (Restarts)" if count else ""


def _unplanned_words(history: History) -> str:
    if not history.unplanned:
        return (
            f"no unplanned interruption in {duration(history.observed_s)} of running; MTBF {mtbf_words(history.mtbf)}"
        )
    recoveries = _recoveries_s(history.unplanned)
    median = f", recovered in {duration(statistics.median(recoveries))} (median)" if recoveries else ""
    lost = _lost_steps(history.unplanned)
    again = f", {lost} steps done again" if lost is not None else ""
    return (
        f"{len(history.unplanned)} unplanned{_inside_words(history)} in {duration(history.observed_s)} of running: "
        f"MTBF {mtbf_words(history.mtbf)}{median}{again}"
    )


def _inside_words(history: History) -> str:
    count = sum(1 for interruption in history.unplanned if interruption.is_in_job)
    return f" ({count} inside a job)" if count else ""
