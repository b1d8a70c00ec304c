"""From the traces of a recovery to its gap and to where each second of it went. Pure apart from reading files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path

from trainer.contract import RunPaths
from trainer.history import StepRecord, loss_path, read_step_log

# A stage begins where the one before it ends. The traces they are read from: steps, ledger, launcher, worker's log.
_START = (
    ("workers start", "workers.started"),
    ("workers import torch", "imported"),
    ("ranks meet", "met"),
    ("load checkpoint", "resumed"),
    ("first step", "stepped"),
)
IN_JOB = (
    ("notice", "training.interrupted"),
    ("stop, check nodes, choose", "go.sent"),
    *_START,
)
NEW_JOB = (
    ("notice", "detected"),
    ("decide", "planned"),
    ("submit", "submitted"),
    ("Slurm starts the job", "launch.started"),
    ("srun, start checks", "go.sent"),
    *_START,
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


def measure_gap(logs: Iterable[Sequence[StepRecord]], since: float) -> Gap | None:
    """The first gap that ends after `since`, in the step logs of consecutive attempts; None while there is none.

    A start begins with an attempt, with another checkpoint that it resumed from, or with a step that was done before.
    """
    numbered = [(number, record) for number, log in enumerate(logs) for record in log]
    for (number, last), (next_number, first) in pairwise(numbered):
        if last.time is None or first.time is None or first.time <= since:
            continue
        if number != next_number or first.resumed_from != last.resumed_from or first.step <= last.step:
            return Gap(last_step=last.step, last_at=last.time, first_step=first.step, first_at=first.time)
    return None


def find_gap(run_dir: Path, since: float) -> Gap | None:
    """The first gap of a run that ends after `since`."""
    return measure_gap(read_step_logs(run_dir), since)


def read_step_logs(run_dir: Path) -> list[list[StepRecord]]:
    """The step logs of a run's attempts in their order."""
    folder = RunPaths(run_dir).attempt_dir(1).parent
    numbers = sorted(int(path.name) for path in folder.glob("*") if path.name.isdecimal())
    return [read_step_log(loss_path(run_dir, number)) for number in numbers]


def split_gap(gap: Gap, marks: Mapping[str, float], stages: Sequence[tuple[str, str]]) -> dict[str, float]:
    """Seconds of each stage. A mark that is missing adds its stage to the next one; the sum is always the gap."""
    found: dict[str, float] = {}
    since = gap.last_at
    for label, mark in stages:
        at = gap.first_at if mark == "stepped" else marks.get(mark)
        if at is not None:
            found[label] = at - since
            since = at
    return found


def read_launch_marks(run_dir: Path, attempt: int, since: float = 0.0) -> dict[str, float]:
    """The first time after `since` of each event that the launcher of an attempt noted."""
    path = RunPaths(run_dir).attempt_dir(attempt) / "timing.jsonl"
    marks: dict[str, float] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        event = json.loads(line)
        if event["time"] > since:
            marks[event["event"]] = min(event["time"], marks.get(event["event"], event["time"]))
    return marks


def parse_worker_marks(log: str, since: float = 0.0) -> dict[str, float]:
    """When rank 0 had imported torch, met the others, and loaded the checkpoint, first after `since`, from the log."""
    marks: dict[str, float] = {}
    for stamp, text in _WORKER_LINE.findall(log):
        at = datetime.strptime(stamp, "%Y-%m-%d %H:%M:%S,%f").astimezone().timestamp()
        for name, pattern in _WORKER_MARKS:
            if at > since and pattern.match(text) and name not in marks:
                marks[name] = at
    return marks
