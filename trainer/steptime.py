"""How long a rank's steps take, and how much of that is its own doing. Standard library only.

In a synchronous training all ranks have the same step time: the slow one works, the others wait for it. What tells
them apart is the own time: the step's time without the waits for other ranks. Where the waits are seen:

* on CPUs `trainer.session.waits` sees them in the collectives and at the end of a backward pass;
* with NCCL a wait is a kernel on the GPU, which the Flight Recorder times (`flight_reader` of `StepTimes`);
* a script that knows better says so: `with progress.waiting():` around what it waits for, or
  `progress.step_done(step, own_s=...)`.

Without any of them the own time is unknown, and nobody is called slow. Steps during which something else was done (a
save, an evaluation, the first one after a start) are left out. Totals are told, not the newest values: whoever asks
now and then loses nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

FLIGHT_EVERY_S = 10.0  # between two looks at the Flight Recorder: one costs some milliseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightLook:
    """What the Flight Recorder holds: durations of finished collectives by their number, in seconds."""

    durations_s: Mapping[int, float]
    first: int  # number of the oldest record; older ones were overwritten
    last: int  # number of the newest one


class StepTimes:
    """Adds up the times of ordinary steps. `step_done`, `spoil` and waits belong to the thread that trains.

    `told` may be called by another thread. A call costs less than a microsecond or two.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._began: float | None = None  # the end of the step before; None: the next step is not ordinary
        self._waited_s = 0.0  # in the step that is being done
        self._depth = 0
        self._is_spoilt = False
        self._thread = 0
        self._sees_waits = False
        self._totals: tuple[int, int, float, float | None] = (0, 0, 0.0, None)  # one value: another thread reads it
        self._spoilt = 0
        self._flight: _Flight | None = None

    # ------------------------------------------------------------ the thread that trains

    def step_done(self, step: int, own_s: float | None = None) -> None:
        """Step number `step` is over. `own_s`: its own time, where the script measures it."""
        now = self._clock()
        began, waited_s, is_spoilt = self._began, self._waited_s, self._is_spoilt
        self._began, self._waited_s, self._is_spoilt = now, 0.0, False
        self._thread = threading.get_ident()
        if began is None or is_spoilt:
            self._spoilt += 1
            return
        step_s = now - began
        _, steps, total_s, own_total_s = self._totals
        if own_s is None and self._sees_waits:
            own_s = max(0.0, step_s - waited_s)
        if own_s is not None:
            own_total_s = (own_total_s or 0.0) + min(max(0.0, own_s), step_s)
        self._totals = (step, steps + 1, total_s + step_s, own_total_s)

    def spoil(self) -> None:
        """Leave out the step that is being done: something else is done in it."""
        self._is_spoilt = True

    def restart(self) -> None:
        """Leave out everything until the next step is over: a start, a restore."""
        self._began = None

    def waited(self, seconds: float) -> None:
        """Part of the step went by waiting for other ranks."""
        self._waited_s += seconds

    @property
    def waited_s(self) -> float:
        """Seconds of waiting in the step that is being done, as far as they are over."""
        return self._waited_s

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """What is done inside is waiting for other ranks. One inside another counts once; other threads don't count."""
        if self._thread and threading.get_ident() != self._thread:
            yield
            return
        self._sees_waits = True
        began, self._depth = self._clock(), self._depth + 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self._waited_s += self._clock() - began

    # ------------------------------------------------------------ sources

    def see_waits(self) -> None:
        """From now on every wait is told here, so that a step without one is a rank's own."""
        self._sees_waits = True

    def read_flight(self, look: Callable[[], FlightLook | None]) -> None:
        """Take the waits from the Flight Recorder, as on GPUs, where the thread that trains waits for nobody."""
        self._sees_waits = False
        self._flight = _Flight(look)

    # ------------------------------------------------------------ another thread

    def told(self) -> dict[str, float]:
        """Totals since the process began, {} while they are unknown.

        "timed": ordinary steps up to "timed_step"; "step_s", "own_s": the seconds of them, and the rank's own.
        """
        step, steps, total_s, own_s = self._totals
        if own_s is None and self._flight is not None:
            return self._flight.told(self._clock(), (step, steps, total_s, self._spoilt))
        return _render(step, steps, total_s, own_s) if own_s is not None else {}


def _render(step: int, steps: int, total_s: float, own_s: float) -> dict[str, float]:
    return {"timed_step": step, "timed": steps, "step_s": round(total_s, 6), "own_s": round(own_s, 6)}


class _Flight:
    """Own times from what the Flight Recorder says of the collectives, in spans of some seconds.

    A span in which a step was spoilt, or of which records were overwritten before they were read, is left out.
    """

    def __init__(self, look: Callable[[], FlightLook | None]) -> None:
        self._look = look
        self._at: float | None = None
        self._seen: tuple[int, float, int, int] | None = None  # steps, their seconds, spoilt ones, last record
        self._step, self._steps, self._total_s, self._own_s = 0, 0, 0.0, 0.0

    def told(self, now: float, totals: tuple[int, int, float, int]) -> dict[str, float]:
        if self._at is None or now - self._at >= FLIGHT_EVERY_S:
            self._at = now
            self._read(*totals)
        return _render(self._step, self._steps, self._total_s, self._own_s) if self._steps else {}

    def _read(self, step: int, steps: int, total_s: float, spoilt: int) -> None:
        look = self._look()
        if look is None:
            return
        seen, self._seen = self._seen, (steps, total_s, spoilt, look.last)
        if seen is None or spoilt != seen[2] or steps == seen[0] or look.first > seen[3] + 1:
            return
        waited_s = sum(s for number, s in look.durations_s.items() if seen[3] < number <= look.last)
        self._step = step
        self._steps += steps - seen[0]
        self._total_s += total_s - seen[1]
        self._own_s += max(0.0, total_s - seen[1] - waited_s)


TIMES = StepTimes()  # of this process: one rank, one training
