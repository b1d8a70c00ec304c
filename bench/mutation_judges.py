"""Whom a mutated checkpoint must not fool: the service's way to the next attempt, and the training's own way to load.

Both are the product's code, asked as it is asked there; nothing is judged here.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from bench.mutation_scene import ATTEMPTS, RUN
from supervisor.core.checkpoints import choose_resume, fold_verification, fold_view
from supervisor.layouts.own import verify_checkpoint
from supervisor.model import Attempt, Checkpoint, CheckpointSpec, CheckpointState, Verification
from supervisor.rundir_child import CheckpointCache, Notes
from trainer.contract import RunPaths
from trainer.storage import stored
from trainer.storage.sources import SourcePlace, refuse_another_run

SEEN_AT = datetime(2026, 1, 1, tzinfo=UTC)
ENDED_AT = SEEN_AT + timedelta(minutes=1)
READ_AT = SEEN_AT + timedelta(minutes=2)
SPEC = CheckpointSpec()
ROUNDS = 8

Key = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """`resumed`: the name of what would be resumed from, "" for nothing (yet). `condemned`: names called corrupt."""

    resumed: str
    condemned: tuple[str, ...] = ()


def ask_service(run_dir: Path) -> Answer:
    """What the daemon would do once the attempt has ended: look, read back what must be, choose."""
    paths = RunPaths(run_dir)
    attempts = [Attempt(run=RUN, number=n, token="-", nodes_wanted=1, planned_at=SEEN_AT) for n in ATTEMPTS]
    known: dict[Key, Checkpoint] = {}
    for _ in range(ROUNDS):
        views, unknown = CheckpointCache().look(paths, float("inf"), Notes(run_dir))
        for checkpoint, _why in fold_view(known, views, attempts, run=RUN, now=SEEN_AT, unknown=unknown):
            known[checkpoint.key] = checkpoint
        point = choose_resume(tuple(known.values()), SPEC, since=ENDED_AT)
        if not point.read_back:
            name = Path(point.checkpoint.path).name if point.checkpoint is not None else ""
            return Answer(resumed=name, condemned=_condemned(known))
        waits = [_read_back(run_dir, known, checkpoint) for checkpoint in point.read_back]
        if any(waits):
            break  # it can't be read: the service waits, and starts from nothing meanwhile
    return Answer(resumed="", condemned=_condemned(known))


def _read_back(run_dir: Path, known: dict[Key, Checkpoint], checkpoint: Checkpoint) -> bool:
    """True when it could not be read."""
    step, attempt = checkpoint.step, checkpoint.attempt
    path = RunPaths(run_dir).checkpoint(step, attempt)
    found = verify_checkpoint(path, expect_run=RUN, expect_step=step, expect_attempt=attempt)
    result = Verification(
        run=RUN,
        step=step,
        attempt=attempt,
        ok=found.ok,
        detail=found.detail,
        started_at=READ_AT,
        is_covered=found.is_covered,
    )
    learnt = fold_verification(checkpoint, result)
    if learnt is not None:
        known[checkpoint.key] = learnt[0]
    return found.ok is None


def _condemned(known: dict[Key, Checkpoint]) -> tuple[str, ...]:
    return tuple(Path(c.path).name for c in known.values() if c.state is CheckpointState.CORRUPT)


def ask_training(run_dir: Path) -> Answer:
    """What a training without a service would do: the newest that loads, where loading checks every byte first."""
    condemned = []
    place = _place(run_dir)
    found = stored.find_checkpoints(run_dir / "checkpoints")
    for path in stored.choose_resume(found, attempt=place.attempt, given=None, is_supervised=False):
        try:
            refuse_another_run(path, stored.verify_checkpoint(path), place)
        except stored.CheckpointRejected:
            condemned.append(path.name)
            continue
        except stored.CheckpointUnreadable:
            return Answer(resumed="", condemned=tuple(condemned))
        return Answer(resumed=path.name, condemned=tuple(condemned))
    return Answer(resumed="", condemned=tuple(condemned))


def _place(run_dir: Path) -> SourcePlace:
    return SourcePlace(run_dir=run_dir, run=RUN, attempt=max(ATTEMPTS) + 1, rank=0, world=1, node_size=1)


def ask_loader(path: Path) -> bool:
    """Whether the training's loader takes one: it compares everything before it lets anybody have a tensor."""
    from trainer.saving.reading import load_state

    try:
        manifest = stored.read_manifest(path)
        refuse_another_run(path, manifest, _place(path.parents[1]))
        load_state(path, {}, manifest=manifest)
    except (stored.CheckpointRejected, stored.CheckpointUnreadable):
        return False
    return True
