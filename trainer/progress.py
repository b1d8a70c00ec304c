"""The progress file: where the training is, and how long it may be silent before that is a stall.

The training announces its own limit for each phase, learnt from the durations it has seen, because nobody outside
knows that a step takes 8 s and a save 90. The first step after a start counts as phase "start": it compiles, warms
up and opens the data, and may take a hundred times as long as the next one.

Writing never fails or delays the training: a thread of its own publishes the newest record, at most once a second
except when the phase changes, and goes on when the disk is full.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self

from trainer.contract import ENV_LAUNCH, PHASES, Progress, write_json
from trainer.ranklink import open_link
from trainer.steptime import TIMES

log = logging.getLogger("trainer.progress")

# Before anything was seen in a phase. "start" covers imports of large indexes, compilation and the first step.
DEFAULT_FIRST_LIMITS_S: Mapping[str, float] = MappingProxyType(
    {
        "start": 1800.0,
        "restore": 3600.0,
        "compile": 3600.0,
        "step": 600.0,
        "save": 1800.0,
        "eval": 3600.0,
        "end": 1800.0,
    }
)
SECOND_STEP_S = 120.0  # at least, whatever the start took


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitPolicy:
    """How a limit follows from observed durations: factor x the longest recent one, between min_s and max_s.

    `min_s` covers what is no stall at all (a slow file system, a busy host); `max_s` bounds how long a real hang
    can hide behind one slow step.
    """

    factor: float = 5.0
    min_s: float = 5.0
    max_s: float = 7200.0
    recent: int = 20
    first_s: Mapping[str, float] = field(default_factory=lambda: DEFAULT_FIRST_LIMITS_S)

    def __post_init__(self) -> None:
        if self.factor < 1 or not 0 < self.min_s <= self.max_s or self.recent < 1:
            raise ValueError("a limit needs factor >= 1, 0 < min_s <= max_s and recent >= 1")
        unknown = set(self.first_s) - set(PHASES)
        if unknown:
            raise ValueError(f"first_s: {', '.join(sorted(unknown))} is none of {', '.join(PHASES)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseLimits:
    """What has been learnt so far; `learn` returns the next value."""

    policy: LimitPolicy = field(default_factory=LimitPolicy)
    seen_s: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    def learn(self, phase: str, duration_s: float) -> PhaseLimits:
        """These limits after one more observed duration of a phase."""
        recent = (*self.seen_s.get(phase, ()), max(0.0, duration_s))[-self.policy.recent :]
        return replace(self, seen_s={**self.seen_s, phase: recent})

    def limit_s(self, phase: str) -> float:
        """Silence longer than this, in this phase, is a stall."""
        seen = self.seen_s.get(phase)
        if not seen:
            first_s = self.policy.first_s.get(phase, DEFAULT_FIRST_LIMITS_S[phase])
            start = self.seen_s.get("start") if phase == "step" else None
            if not start:
                return first_s
            # A second step may compile once more, and is hardly ever much slower than all that came before the first.
            return min(first_s, max(self.policy.factor * max(start), SECOND_STEP_S))
        return min(max(self.policy.factor * max(seen), self.policy.min_s), self.policy.max_s)


class ProgressWriter:
    """Publishes the progress of one attempt; on ranks other than 0, without a path, there is no file.

    Under a node agent every rank's is told to the agent, too (trainer.ranklink).

    `step_done` and `phase` are called by the training loop only. Steps count from 1; before the first one of a
    fresh run the step is -1.
    """

    def __init__(
        self,
        path: Path | None,
        attempt: int,
        *,
        step: int = -1,
        final_step: int | None = None,
        policy: LimitPolicy | None = None,
        min_interval_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._limits = PhaseLimits(policy=policy or LimitPolicy())
        self._clock = clock
        self._wall = wall
        self._mark = clock()
        self._away_s = 0.0  # time spent in other phases since the last step
        self._record = Progress(attempt=attempt, step=step, final_step=final_step, time=wall(), launch=_read_launch())
        self._publisher = _Publisher(path, min_interval_s) if path is not None else None
        self._link = open_link()
        self._entered: Mapping[str, int] = {}  # long phases, how often: ranks that enter them together are compared
        self._enter("start")

    @property
    def limits(self) -> PhaseLimits:
        """What has been learnt so far."""
        return self._limits

    @property
    def record(self) -> Progress:
        """The newest record, whether or not it has been written yet."""
        return self._record

    def resumed(self, step: int, samples: int) -> None:
        """Say that a checkpoint of this step was loaded; the phase stays "start" until the next step is done."""
        TIMES.restart()
        self._record = replace(self._record, step=step, samples=samples)
        self._enter(self._record.phase)

    def step_done(
        self, step: int, *, loss: float | None = None, samples: int | None = None, own_s: float | None = None
    ) -> None:
        """Say that an optimizer step is finished. `own_s`: of it, this rank's own time, if the training measures it."""
        now = self._clock()
        was = self._record.phase
        TIMES.step_done(step, own_s)
        self._limits = self._limits.learn(was, now - self._mark - self._away_s)
        self._mark, self._away_s = now, 0.0
        is_last = self._record.final_step is not None and step >= self._record.final_step
        self._record = replace(self._record, step=step, loss=loss, samples=samples)
        self._enter("end" if is_last else "step", urgent=was == "start" or is_last)

    @contextmanager
    def phase(self, name: str, *, limit_s: float = 0.0, is_counted: bool = True) -> Iterator[None]:
        """Announce another phase (restore, compile, save, eval) for a while, then come back to the one before.

        `limit_s`: it may be silent for so long at least, whatever was learnt. `is_counted` False: how long it takes
        says nothing of the next one.
        """
        TIMES.spoil()
        self._entered = {**self._entered, name: self._entered.get(name, 0) + 1}
        before, began = self._record.phase, self._clock()
        self._enter(name, least_s=limit_s)
        try:
            yield
        finally:
            took = self._clock() - began
            self._away_s += took
            if is_counted:
                self._limits = self._limits.learn(name, took)
            if is_counted and name == "save":
                self._record = replace(self._record, save_blocking_s=took)
            self._enter(before)

    def waiting(self) -> AbstractContextManager[None]:
        """Around a wait for the other ranks: it is not this rank's own time."""
        return TIMES.waiting()

    def save_ended(self, *, saved_step: int | None, total_s: float | None, failures: int, error: str) -> None:
        """Say how saving stands, now that a save has ended. `failures`: in a row, `error`: of the newest of them."""
        self._record = replace(
            self._record, saved_step=saved_step, save_total_s=total_s, save_failures=failures, save_error=error
        )
        self._enter(self._record.phase)

    def fix_size(self) -> None:
        """Say that the position in the data can't be carried to another number of ranks."""
        self._record = replace(self._record, is_elastic=False)

    def enter(self, name: str) -> None:
        """Change the phase for good, for instance to "end"."""
        self._enter(name)

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Wait until the newest record is on disk or was given up; False if that takes longer."""
        return self._publisher is None or self._publisher.flush(timeout_s)

    def close(self, timeout_s: float = 5.0) -> None:
        """Publish the newest record and end the thread; a hanging file system is not waited for."""
        if self._publisher is not None:
            self._publisher.close(timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _enter(self, name: str, *, urgent: bool = True, least_s: float = 0.0) -> None:
        self._record = replace(
            self._record,
            phase=name,
            limit_s=max(self._limits.limit_s(name), least_s),
            time=self._wall(),
            seq=self._record.seq + 1,
        )
        if self._publisher is not None:
            self._publisher.offer(self._record, urgent=urgent)
        if self._link is not None:
            record = self._record
            self._link.tell((record.step, name, record.limit_s, self._entered), urgent=urgent)


def _read_launch() -> int | None:
    number = os.environ.get(ENV_LAUNCH, "")
    return int(number) if number.isdecimal() else None


class _Publisher:
    """Writes the newest offered record from its own thread; what could not be written is dropped and logged once."""

    def __init__(self, path: Path, min_interval_s: float) -> None:
        self._path = path
        self._min_interval_s = min_interval_s
        self._changed = threading.Condition()
        self._pending: Progress | None = None
        self._urgent = False
        self._writing = False
        self._closed = False
        self._failing = False
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)
        self._thread.start()

    def offer(self, record: Progress, *, urgent: bool) -> None:
        with self._changed:
            self._pending = record
            self._urgent = self._urgent or urgent
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        with self._changed:
            self._urgent = True
            self._changed.notify_all()
            return self._changed.wait_for(lambda: self._pending is None and not self._writing, timeout_s)

    def close(self, timeout_s: float) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (record := self._take()) is not None:
            self._write(record)
            with self._changed:
                self._writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._urgent or self._closed, self._min_interval_s)

    def _take(self) -> Progress | None:
        with self._changed:
            self._changed.wait_for(lambda: self._pending is not None or self._closed)
            record, self._pending = self._pending, None
            self._urgent = False
            self._writing = record is not None
            return record

    def _write(self, record: Progress) -> None:
        try:
            write_json(self._path, record)
        except Exception as error:  # noqa: BLE001 - whatever it is, training is worth more than its progress file
            if not self._failing:
                log.warning("progress file %s is not written: %s", self._path, error)
            self._failing = True
        else:
            self._failing = False
