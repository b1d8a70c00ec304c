"""What a Checkpointer is put together from, as the environment says: attempt, schedule, writer, advice, mover."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from trainer.contract import RunPaths, parse_checkpoint_name
from trainer.saving.saver import Saver, Staging
from trainer.session.advice import AdviceReader
from trainer.session.agreement import Agreement
from trainer.session.claims import Claim, RunDirectoryInUse, claim_given, claim_next, why_taken
from trainer.session.place import Place
from trainer.session.runname import settle_name
from trainer.session.schedule import SaveSchedule
from trainer.storage.mover import MoverHandle, start_mover
from trainer.storage.uploads import MoverPlace

DEFAULT_EVERY_S = 600.0  # without a service


def settle(place: Place, agreement: Agreement) -> Place:
    """The place with the ranks as they have met, the run's name, and an attempt that is this training's alone.

    Raises, on every rank, `RunDirectoryInUse`.
    """
    place = replace(place, rank=agreement.rank, world=agreement.world)
    run_dir = place.run_dir
    if run_dir is None:
        return place
    if problems := [problem for problem in agreement.gather(why_taken(run_dir)) if problem]:
        raise RunDirectoryInUse(problems[0])
    claim, run = agreement.from_rank_0(lambda: (_claim(run_dir, place), settle_name(place)))
    place = replace(place, attempt=claim.attempt, claim=claim, run=run)
    if place.rank == 0:
        with suppress(OSError):
            # Of workers that were restarted in place: what they left must not explain how these ones end.
            RunPaths(run_dir).outcome(place.attempt).unlink(missing_ok=True)
    return place


def _claim(run_dir: Path, place: Place) -> Claim:
    return claim_given(run_dir, place.attempt) if place.is_supervised else claim_next(run_dir)


def progress_path(place: Place) -> Path | None:
    """Where the progress goes; None where nobody asks for it."""
    if place.rank != 0 or not place.is_supervised or place.run_dir is None:
        return None
    return RunPaths(place.run_dir).progress(place.attempt)


def make_schedule(place: Place, every_s: float | None, every_steps: int) -> tuple[SaveSchedule, bool]:
    """(the schedule, whether the service may change its interval: not one that the script has chosen)."""
    if every_s is not None or every_steps:
        return SaveSchedule(every_s=every_s or 0.0, every_steps=every_steps), False
    return SaveSchedule(every_s=place.every_s if place.is_supervised else DEFAULT_EVERY_S), True


def open_saver(place: Place, agreement: Agreement, *, keep_last: int, staging: Staging) -> Saver | None:
    """This rank's writer; None without a run directory."""
    if place.run_dir is None:
        return None
    return Saver(
        RunPaths(place.run_dir).checkpoints(),
        run=place.run,
        attempt=place.attempt,
        claim=place.claim,
        rank=place.rank,
        world=place.world,
        node_size=place.local_world,
        gather=agreement.gather,
        staging=staging,
        local_dir=place.local_dir,
        upload_bytes_per_s=place.upload_bytes_per_s,
        keep_last=None if place.is_supervised else keep_last,
    )


def read_advice(place: Place) -> AdviceReader | None:
    """The service's advice; None on other ranks than 0, and without a service."""
    if place.rank != 0 or not place.is_supervised or place.run_dir is None:
        return None
    return AdviceReader(RunPaths(place.run_dir).advice(place.attempt), place.attempt)


def _resume_step(place: Place) -> int | None:
    if not place.is_supervised:
        return None
    named = parse_checkpoint_name(place.resume_from.name) if place.resume_from is not None else None
    return named[0] if named is not None else 0


def open_mover(place: Place) -> MoverHandle | None:
    """What copies this node's checkpoints to object storage; one on each node, where there is such storage."""
    if not place.object_url or place.run_dir is None or place.local_rank != 0:
        return None
    return start_mover(
        MoverPlace(
            run_dir=str(place.run_dir),
            run=place.run,
            attempt=place.attempt,
            node=place.node,
            nodes=-(-place.world // place.local_world),
            world=place.world,
            node_size=place.local_world,
            object_url=place.object_url,
            bytes_per_s=place.upload_bytes_per_s,
            keep_last=place.object_keep_last,
            resume_step=_resume_step(place),
            local_dir=str(place.local_dir) if place.local_dir is not None else "",
        )
    )


def say_uncopied(place: Place) -> str:
    """The last word of a training that has ended while its newest checkpoint was not in object storage."""
    folder = RunPaths(place.run_dir).checkpoints() if place.run_dir is not None else Path()
    return (
        "the newest checkpoint is not in object storage, and the training is over. Unless it goes on, copy it: "
        f"python -m trainer.storage.objects put {folder}/step-... {place.object_url.rstrip('/')}/{place.run}"
    )
