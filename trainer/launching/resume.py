"""Where a start inside the allocation begins: the newest verified checkpoint, looked for beside the loop."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from trainer.contract import Advice, AttemptSpec, RunPaths
from trainer.storage.stored import Found, find_checkpoints


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """A checkpoint to go on from; no path: from the beginning."""

    path: str = ""
    step: int = 0


def choose_point(found: Iterable[Found], spec: AttemptSpec, advice: Advice | None) -> ResumePoint:
    """The newest of what the attempt was given, what it has verified itself and what the service advises.

    Of the checkpoints in the run directory only this attempt's own count besides: what another one left was known when
    the attempt was given its start, and has been passed over (a step before a divergence, say).
    """
    points = [ResumePoint(path=spec.resume_from, step=spec.resume_step)]
    points += [ResumePoint(path=str(f.path), step=f.step) for f in found if f.is_verified and f.attempt == spec.attempt]
    if advice is not None and advice.resume_from:
        points.append(ResumePoint(path=advice.resume_from, step=advice.resume_step))
    return max(reversed(points), key=lambda point: (point.step, bool(point.path)))


class ResumeSearch(threading.Thread):
    """One look into the run directory, which may hang. `point` is there once it has ended."""

    def __init__(self, run_dir: Path, spec: AttemptSpec, advice: Callable[[], Advice | None]) -> None:
        super().__init__(name="resume-search", daemon=True)
        self.point: ResumePoint | None = None
        self._run_dir = run_dir
        self._spec = spec
        self._advice = advice
        self.start()

    def run(self) -> None:
        """Look once."""
        try:
            found = find_checkpoints(RunPaths(self._run_dir).checkpoints())
        except OSError:  # unknown: what is known already has to do
            found = []
        self.point = choose_point(found, self._spec, self._advice())
