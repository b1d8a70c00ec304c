"""From the traces of a recovery to its gap and to where each second of it went. Pure apart from reading files."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from trainer.contract import RunPaths
from trainer.history import StepRecord, loss_path, read_step_log

# A stage begins where the one before it ends. The traces they are read from: steps, ledger, launcher, worker's log.
STAGES = (
    ("notice", "detected"),
    ("decide", "planned"),
    ("submit", "submitted"),
    ("Slurm starts the job", "launch.started"),
    ("srun, start checks", "go.sent"),
    ("torchrun", "workers.started"),
    ("workers import torch", "imported"),
    ("ranks meet", "met"),
    ("load checkpoint", "resumed"),
    ("first step", "stepped"),
)

_WORKER_LINE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) rank 0 INFO (.*)")
_WORKER_MARKS = (
    ("imported", re.compile(r"torch is imported")),
    ("met", re.compile(r"\d+ ranks have met")),
    ("resumed", re.compile(r"resumed from ")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """The time between the last step of one start of the training and the first step of the next one."""

    last_step: int
    last_at: float
    first_step: int
    first_at: float

    @property
    def seconds(self) -> float:
        return self.first_at - self.last_at

    @property
    def redone_steps(self) -> int:
        """Steps that were done again because they were in no checkpoint."""
        return self.last_step - self.first_step + 1


def measure_gap(before: Sequence[StepRecord], after: Sequence[StepRecord]) -> Gap | None:
    """The gap between two step logs; None while the second one has no step yet."""
    if not before or not after:
        return None
    last, first = before[-1], after[0]
    if last.time is None or first.time is None:
        return None
    return Gap(last_step=last.step, last_at=last.time, first_step=first.step, first_at=first.time)


def find_gap(run_dir: Path, attempt: int) -> Gap | None:
    """The gap before the first step of `attempt`, its predecessor being the attempt before it."""
    before = read_step_log(loss_path(run_dir, attempt - 1))
    return measure_gap(before, read_step_log(loss_path(run_dir, attempt)))


def split_gap(gap: Gap, marks: Mapping[str, float]) -> dict[str, float]:
    """Seconds of each stage. A mark that is missing adds its stage to the next one; the sum is always the gap."""
    stages: dict[str, float] = {}
    since = gap.last_at
    for label, mark in STAGES:
        at = gap.first_at if mark == "stepped" else marks.get(mark)
        if at is not None:
            stages[label] = at - since
            since = at
    return stages


def read_launch_marks(run_dir: Path, attempt: int) -> dict[str, float]:
    """The first time of each event that the launcher of an attempt noted."""
    path = RunPaths(run_dir).attempt_dir(attempt) / "timing.jsonl"
    marks: dict[str, float] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        event = json.loads(line)
        marks[event["event"]] = min(event["time"], marks.get(event["event"], event["time"]))
    return marks


def parse_worker_marks(log: str) -> dict[str, float]:
    """When rank 0 had imported torch, met the others, and loaded the checkpoint, from the job's log."""
    marks: dict[str, float] = {}
    for stamp, text in _WORKER_LINE.findall(log):
        for name, pattern in _WORKER_MARKS:
            if pattern.match(text) and name not in marks:
                marks[name] = datetime.strptime(stamp, "%Y-%m-%d %H:%M:%S,%f").astimezone().timestamp()
    return marks
