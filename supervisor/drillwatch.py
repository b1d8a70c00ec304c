"""What a drill looks at: the ledger, and the files of the run directory that the job writes. Reads only.

It runs as the person who asked for the drill, who owns the run or is an administrator. Files are read whole, bounded by
the contract's limits; what can't be read now is read again at the next look.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from supervisor.drill import StepFact, Traces
from supervisor.model import Attempt, AttemptState, Checkpoint, CheckpointState, Interruption, Run
from supervisor.store import Store
from trainer.contract import (
    MAX_JSON_BYTES,
    ContractError,
    InterruptionRecord,
    LaunchReport,
    Progress,
    RunPaths,
    parse,
)
from trainer.history import StepRecord, loss_path, read_step_log, samples_path
from trainer.storage.stored import find_checkpoints

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """One look at a run."""

    run: Run
    attempt: Attempt | None
    interruptions: tuple[Interruption, ...]
    verified: frozenset[int]  # steps of checkpoints that are verified now
    launch: LaunchReport | None = None
    progress: Progress | None = None

    @property
    def launch_number(self) -> int:
        """Which start of the training this is, as the launcher says."""
        return self.launch.launch if self.launch is not None else 0

    @property
    def step(self) -> int | None:
        """The newest step that the present start of the training has done."""
        told = self.progress
        if told is not None and (told.launch is None or told.launch == self.launch_number):
            return told.step if told.step > 0 else None
        return None


def look(ledger: Path, name: str) -> Sight | None:
    """The run as it is now; None where there is none of that name. Raises LedgerError."""
    with Store.open_readonly(ledger) as store, store.reading():
        run = store.load_run(name)
        if run is None:
            return None
        attempts = [a for a in store.load_attempts(name) if a.state is not AttemptState.AHEAD]
        checkpoints, interruptions = store.load_checkpoints(name), store.load_interruptions(name)
    last = max(attempts, key=lambda a: a.number, default=None)
    sight = Sight(run=run, attempt=last, interruptions=interruptions, verified=_verified(run, checkpoints))
    if last is None:
        return sight
    paths = RunPaths(run.spec.run_dir)
    launch = _read(LaunchReport, paths.launch_report(last.number))
    return replace(sight, launch=launch, progress=_read(Progress, paths.progress(last.number)))


def read_record(run: Run, attempt: int, launch: int) -> InterruptionRecord | None:
    """The launcher's own record of the start that was interrupted."""
    return _read(InterruptionRecord, RunPaths(run.spec.run_dir).interruption(attempt, launch))


def _verified(run: Run, checkpoints: tuple[Checkpoint, ...]) -> frozenset[int]:
    known = {c.step for c in checkpoints if c.state is CheckpointState.VERIFIED}
    try:
        return frozenset(
            known | {f.step for f in find_checkpoints(RunPaths(run.spec.run_dir).checkpoints()) if f.is_verified}
        )
    except OSError:
        return frozenset(known)


def _read(kind: type[T], path: Path) -> T | None:
    try:
        with path.open("rb") as stream:
            return parse(kind, stream.read(MAX_JSON_BYTES + 1))
    except (OSError, ContractError):
        return None


# ---------------------------------------------------------------- traces


@dataclass(slots=True)
class ProgressTrace:
    """Steps as the progress file told them, by start of the training: what is there of any training."""

    seen: dict[tuple[int, int], dict[int, StepFact]] = field(default_factory=dict)  # (attempt, launch) to its steps

    def add(self, sight: Sight) -> None:
        """Keep the step of this look."""
        told = sight.progress
        if told is None or sight.step is None or sight.attempt is None:
            return
        key = (sight.attempt.number, sight.launch_number)
        fact = StepFact(step=told.step, loss=told.loss, position=told.samples)
        self.seen.setdefault(key, {})[told.step] = fact

    def traces(self, before: tuple[int, int], after: tuple[int, int]) -> Traces:
        """Of two starts."""
        return Traces(
            before=self.seen.get(before, {}), after=self.seen.get(after, {}), source="the progress file, now and then"
        )


def read_step_traces(run: Run, before: tuple[int, int], after: tuple[int, int]) -> Traces | None:
    """From the step logs that a training of ours writes (trainer.history); None where it writes none.

    `before`, `after`: (attempt, launch).
    """
    old, new = _read_facts(run.spec.run_dir, *before), _read_facts(run.spec.run_dir, *after)
    return Traces(before=old, after=new, source="the training's step log") if old and new else None


def _read_facts(run_dir: Path, attempt: int, launch: int) -> dict[int, StepFact]:
    losses = _of_launch(loss_path(run_dir, attempt), launch)
    if not losses:
        return {}
    world = max(record.world for record in losses.values())
    ranks = [_of_launch(samples_path(run_dir, attempt, rank), launch) for rank in range(world)]
    return {
        step: StepFact(
            step=step,
            loss=record.loss,
            samples=tuple(index for rank in ranks if step in rank for index in rank[step].samples)
            if all(step in rank for rank in ranks)  # a rank that was killed has not told its last step
            else (),
            world=record.world,
        )
        for step, record in losses.items()
    }


def _of_launch(path: Path, launch: int) -> dict[int, StepRecord]:
    return {record.step: record for record in read_step_log(path) if record.launch == launch}


# ---------------------------------------------------------------- waiting


def is_stepping(sight: Sight, after_launch: tuple[int, int]) -> bool:
    """True when a later start of the training than (attempt, launch) has done a new step."""
    if sight.attempt is None or (sight.attempt.number, sight.launch_number) <= after_launch:
        return False
    begun_from = resume_step_of(sight)
    return sight.step is not None and begun_from is not None and sight.step > begun_from


def resume_step_of(sight: Sight) -> int | None:
    """The step that the present start of the training began from."""
    if sight.attempt is None:
        return None
    if sight.launch is not None and sight.launch.attempt == sight.attempt.number and sight.launch.launch > 0:
        return sight.launch.resume_step
    return sight.attempt.resume_step
