"""From the checkpoints that there are to the one that is loaded: the newest that is whole, the same on every rank."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trainer.contract import Manifest, RunPaths
from trainer.saving.reading import load_state
from trainer.session.agreement import Agreement
from trainer.session.place import Place
from trainer.state import Loaded, StateMismatch, TrainState
from trainer.storage.recovery import recover_own
from trainer.storage.sources import Locate, SourcePlace, read_checkpoint
from trainer.storage.stored import CheckpointRejected, choose_resume, find_checkpoints, publish_verification

log = logging.getLogger("trainer.checkpoint")


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """The checkpoint that training goes on from.

    `is_reseeded`: it was saved by another number of ranks (`world_size`), so random states were seeded anew and the
    run is no longer bit-identical to an undisturbed one. `notes`: what could not be taken over.
    """

    path: Path
    step: int
    samples: int
    tokens: int | None
    world_size: int
    is_reseeded: bool
    notes: tuple[str, ...] = ()


def restore(state: TrainState, place: Place, agreement: Agreement) -> Restored | None:
    """Load the newest checkpoint that counts into `state`; None when there is none. Every rank calls it.

    This attempt's own ones come first: its workers may have been restarted in place after it saved. Raises
    `CheckpointRejected` of the last candidate when all are rejected: a fresh start would throw the run away.
    """
    if place.local_dir is not None:  # where the workers were restarted in place after a save had got to the disks alone
        recover_own(_sources(place), agreement.gather)
    candidates = agreement.from_rank_0(lambda: _find_candidates(place))
    for path in candidates:
        try:
            loaded = _load(path, state, place, agreement)
        except CheckpointRejected as error:
            _denounce(place, error)
            if path == candidates[-1]:
                raise
            continue
        return _tell(path, loaded, state)
    if place.rank == 0:
        _tell_passed_over(place)
    return None


def _find_candidates(place: Place) -> list[Path]:
    assert place.run_dir is not None
    found = find_checkpoints(RunPaths(place.run_dir).checkpoints())
    return choose_resume(found, attempt=place.attempt, given=place.resume_from, is_supervised=place.is_supervised)


def _tell_passed_over(place: Place) -> None:
    """Saves that did not end are no checkpoints; who sees their folders would think that they are gone on from."""
    assert place.run_dir is not None
    root = RunPaths(place.run_dir).checkpoints()
    passed_over = [found.path.name for found in find_checkpoints(root) if not found.is_complete]
    if passed_over:
        more = f" and {len(passed_over) - 1} more" if len(passed_over) > 1 else ""
        verb = "were" if more else "was"
        log.warning("training begins at 0: %s%s in %s %s never finished", passed_over[-1], more, root.name, verb)


def _load(path: Path, state: TrainState, place: Place, agreement: Agreement) -> Loaded:
    filled: dict[str, object] = {}

    def make(items: dict[str, bytes]) -> dict[str, object]:
        filled.clear()
        filled.update(state.template(items))
        return filled

    wanted = ("shared", f"rank.{state.rank}")

    def load(manifest: Manifest, locate: Locate) -> dict[str, bytes]:
        return load_state(
            path,
            make,
            group=agreement.group,
            manifest=manifest,
            locate=locate,
            wanted=lambda key: key in wanted,
        )

    try:
        items = read_checkpoint(path, load, place=_sources(place), gather=agreement.gather)
    except StateMismatch as mismatch:  # on every rank
        raise CheckpointRejected(path, [f"does not fit: {mismatch}"]) from None
    return _alike(agreement, path, lambda: state.apply(items, filled))


def _sources(place: Place) -> SourcePlace:
    assert place.run_dir is not None
    return SourcePlace(
        run_dir=place.run_dir,
        run=place.run,
        attempt=place.attempt,
        rank=place.rank,
        world=place.world,
        node_size=place.local_world,
        local_dir=str(place.local_dir) if place.local_dir is not None else "",
        object_url=place.object_url,
    )


def _alike(agreement: Agreement, path: Path, apply: Callable[[], Loaded]) -> Loaded:
    """What `apply` returns, or its error; where another rank failed, that it did."""
    loaded: Loaded | None = None
    error: Exception | None = None
    try:
        loaded = apply()
    except StateMismatch as mismatch:
        error = CheckpointRejected(path, [f"does not fit: {mismatch}"])
    except Exception as failure:  # noqa: BLE001 - whatever it is, the other ranks must not wait for this one
        error = failure
    problems = [text for text in agreement.gather(str(error) if error is not None else "") if text]
    if error is not None:
        raise error
    if problems or loaded is None:
        raise CheckpointRejected(path, [f"does not fit another rank: {problems[0]}"])
    return loaded


def _tell(path: Path, loaded: Loaded, state: TrainState) -> Restored:
    log.info("resumed from %s: step %d, %d samples", path.name, loaded.step, loaded.samples)
    if state.rank == 0:
        for note in loaded.notes:
            log.warning("%s: %s", path.name, note)
        if loaded.is_reseeded:
            log.warning(
                "%d ranks instead of %d: random states are seeded anew from (%d, step %d, rank); the run is no "
                "longer bit-identical to an undisturbed one",
                state.world,
                loaded.world_size,
                state.seed,
                loaded.step,
            )
    return Restored(
        path=path,
        step=loaded.step,
        samples=loaded.samples,
        tokens=loaded.tokens,
        world_size=loaded.world_size,
        is_reseeded=loaded.is_reseeded,
        notes=loaded.notes,
    )


def _denounce(place: Place, error: CheckpointRejected) -> None:
    log.error("%s", error)
    if place.rank == 0 and error.path.name.endswith(f".a{place.attempt}"):
        try:  # so that nobody tries it again, and this attempt may write that step anew
            publish_verification(error.path, ok=False, bad_files=error.problems, now=time.time())
        except (CheckpointRejected, OSError) as failure:
            log.warning("%s is not marked as damaged: %s", error.path, failure)
