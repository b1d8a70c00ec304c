"""What a run really did, step by step: written by each rank while it trains, read by whoever audits the run.

A run with restarts has written some steps more than once. The surviving history is the one that its final weights
went through: the last attempt's steps, then those of the checkpoint that it resumed from, and so on back to the
start. Every line names that checkpoint, so no guess is needed.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from trainer.contract import ENV_LAUNCH, RunPaths, parse_checkpoint_name
from trainer.data import SampleOrder

MAX_WRONG_STEPS = 20


def samples_path(run_dir: Path, attempt: int, rank: int) -> Path:
    """Where rank `rank` of an attempt logs the samples it consumed."""
    return RunPaths(run_dir).attempt_dir(attempt) / "samples" / f"rank{rank}.jsonl"


def loss_path(run_dir: Path, attempt: int) -> Path:
    """Where rank 0 of an attempt logs the loss."""
    return RunPaths(run_dir).attempt_dir(attempt) / "loss.jsonl"


class StepLog:
    """Appends one JSON object a line, flushed at once: step, samples or loss, world (ranks in that step), from, launch.

    `from` is the name of the checkpoint that this process resumed from, or empty; `launch` the number of this start of
    the training within the attempt. A line that can't be written (full
    disk) is lost and counted in `lost`; training goes on.
    """

    def __init__(self, path: Path, *, world: int, resumed_from: str = "") -> None:
        self.lost = 0
        launch = os.environ.get(ENV_LAUNCH, "")
        self._tail = {"world": world, "from": resumed_from, "launch": int(launch) if launch.isdigit() else 0}
        self._stream = _open_append(path)

    def append_samples(self, step: int, samples: Sequence[int]) -> None:
        """Record the indices that this rank consumed in a finished step."""
        self._write({"step": step, "samples": list(samples), **self._tail})

    def append_loss(self, step: int, loss: float) -> None:
        """Record the mean loss over the whole global batch of a finished step, and when it was finished."""
        self._write({"step": step, "loss": loss, "time": round(time.time(), 3), **self._tail})

    def close(self) -> None:
        """Close the file."""
        if self._stream is not None:
            self._stream.close()

    def _write(self, record: dict[str, object]) -> None:
        if self._stream is None:
            self.lost += 1
            return
        try:
            self._stream.write(json.dumps(record, separators=(",", ":")).encode() + b"\n")
        except OSError:
            self.lost += 1


def _open_append(path: Path) -> IO[bytes] | None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        stream = path.open("ab", buffering=0)
        if stream.tell():
            stream.write(b"\n")  # ends a line that a crash cut off; readers skip empty lines
    except OSError:
        return None
    return stream


# ---------------------------------------------------------------- reading


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One line of a log. `samples` or `loss` is what that log holds. `time`: the writer's clock, for people only."""

    step: int
    world: int
    resumed_from: str
    samples: tuple[int, ...] = ()
    loss: float | None = None
    time: float | None = None
    launch: int = 0


def read_step_log(path: Path) -> list[StepRecord]:
    """The records of a log in the order written; lines cut off by a crash are left out. No file: none."""
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    return [record for line in lines if (record := _parse_line(line)) is not None]


def _parse_line(line: bytes) -> StepRecord | None:
    try:
        raw = json.loads(line)
        return StepRecord(
            step=int(raw["step"]),
            world=int(raw["world"]),
            resumed_from=str(raw["from"]),
            samples=tuple(int(index) for index in raw.get("samples", ())),
            loss=float(raw["loss"]) if raw.get("loss") is not None else None,
            time=float(raw["time"]) if raw.get("time") is not None else None,
            launch=int(raw.get("launch", 0)),
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The surviving history: for each step its loss, and the samples of all ranks in rank order."""

    losses: Mapping[int, float]
    samples: Mapping[int, tuple[int, ...]]
    attempts: Mapping[int, int]  # step to the attempt whose step survived


def read_history(run_dir: Path, attempt: int) -> History:
    """The history that attempt `attempt` ends; steps whose lines are missing are missing."""
    losses: dict[int, float] = {}
    samples: dict[int, tuple[int, ...]] = {}
    attempts: dict[int, int] = {}
    for number, record in _survivors(run_dir, attempt):
        attempts[record.step] = number
        if record.loss is not None:
            losses[record.step] = record.loss
    for number in set(attempts.values()):
        steps = [step for step, owner in attempts.items() if owner == number]
        samples.update(_samples_of(run_dir, number, steps))
    return History(losses=losses, samples=samples, attempts=attempts)


def _survivors(run_dir: Path, attempt: int) -> Iterator[tuple[int, StepRecord]]:
    """(attempt, line of rank 0's loss log) of each surviving step, newest first."""
    wanted: int | None = None
    next_attempt: int | None = attempt
    while next_attempt is not None:
        attempt, next_attempt = next_attempt, None
        for record in reversed(read_step_log(loss_path(run_dir, attempt))):
            if wanted is not None and record.step != wanted:
                continue  # redone later from an older checkpoint
            yield attempt, record
            wanted = record.step - 1
            parent = parse_checkpoint_name(record.resumed_from)
            if wanted < 1:
                return
            if parent is not None and parent[0] == wanted and parent[1] != attempt:
                next_attempt = parent[1]
                break


def _samples_of(run_dir: Path, attempt: int, steps: Sequence[int]) -> dict[int, tuple[int, ...]]:
    by_rank: list[dict[int, StepRecord]] = []

    def last_records(rank: int) -> dict[int, StepRecord]:
        while len(by_rank) <= rank:
            log = read_step_log(samples_path(run_dir, attempt, len(by_rank)))
            by_rank.append({record.step: record for record in log})
        return by_rank[rank]

    found: dict[int, tuple[int, ...]] = {}
    for step in steps:
        first = last_records(0).get(step)
        if first is not None:
            parts = [last_records(rank).get(step) for rank in range(first.world)]
            found[step] = tuple(index for part in parts if part is not None for index in part.samples)
    return found


# ---------------------------------------------------------------- audit


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """How consumed samples differ from the order they should have followed."""

    steps: int
    repeated: int
    skipped: int
    wrong_steps: tuple[int, ...]  # the first ones whose samples are not those of the order

    @property
    def is_clean(self) -> bool:
        """True if every step took exactly its samples."""
        return not (self.repeated or self.skipped or self.wrong_steps)


def audit_samples(samples: Mapping[int, Sequence[int]], order: SampleOrder, global_batch: int) -> Audit:
    """Compare samples by step (steps count from 1) with the order, from step 1 to the last one there is.

    Positions that the order leaves out are no skipped samples.
    """
    last = max(samples, default=0)
    position = repeated = skipped = 0
    wrong: list[int] = []
    for step in range(1, last + 1):
        wanted = Counter(order.batch(position, global_batch))
        position = order.after(position, global_batch)
        got = Counter(samples.get(step, ()))
        if got != wanted:
            wrong.append(step)
            skipped += (wanted - got).total()
            repeated += (got - wanted).total()
    return Audit(steps=last, repeated=repeated, skipped=skipped, wrong_steps=tuple(wrong[:MAX_WRONG_STEPS]))
