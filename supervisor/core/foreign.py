"""Checkpoints of trainings that know nothing of the supervisor: what a look teaches, and where to resume. Pure.

Their names hold no attempt: one belongs to the attempt that was the newest when it was first seen (0: it was there
before the first). The same path with another stamp is another publication. COMPLETE is often the best there is, as most
formats carry no checksums: the reason says so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime

from supervisor.core.checkpoints import LOAD_FAILURES_TO_REJECT, ResumePoint, why_none_usable
from supervisor.model import (
    Attempt,
    AttemptEnd,
    Checkpoint,
    CheckpointSpec,
    CheckpointState,
    CheckpointView,
    RunView,
)

OWN_LAYOUT = "supervisor"
SETTLING_S = 60.0  # after an end, a checkpoint that does not come to rest is waited for no longer
UNRECOGNISED_S = 600.0  # a first save is waited for this long, or for the interval that was given
UNFINISHED_S = 60.0  # several saves of which none has an end: so long, one of them may be being written
LOADING_S = 600.0  # an attempt that crashes later than this without a step told has got past loading


Learnt = list[tuple[Checkpoint, str]]


def is_foreign(spec: CheckpointSpec) -> bool:
    """True when the training lays its checkpoints out its own way."""
    return spec.layout != OWN_LAYOUT


def why_unknown(view: RunView, known: Sequence[Checkpoint]) -> str:
    """Why nothing can be said of the checkpoints now; empty when it can.

    A folder that is not there is empty to a run that never had a checkpoint, and unknown to one that had: its file
    system may be away.
    """
    if view.checkpoints_unknown:
        return f"the checkpoint folder can't be looked at: {view.checkpoints_unknown}"
    if not view.has_checkpoint_folder and any(c.is_usable for c in known):
        return "the checkpoint folder is not there, and it was"
    if view.unknown_paths and not any(v.is_complete for v in view.checkpoints):
        return f"{view.unknown_paths[-1]} could not be looked at yet"
    return ""


def why_unsettled(view: RunView, last: Attempt | None, now: datetime) -> str:
    """Why a start waits for the next looks: a checkpoint seems whole and nothing says so yet. Not for long."""
    if not view.unsettled_paths:
        return ""
    if last is not None and last.over_at is not None and (now - last.over_at).total_seconds() > SETTLING_S:
        return ""
    return f"{view.unsettled_paths[-1]} may still be written"


def why_none_whole(view: RunView, attempts: Sequence[Attempt]) -> str:
    """Why a first attempt must not begin at 0: checkpoints lie there, and none is whole.

    Saves that did not end are left out: they never were checkpoints.
    """
    there = [v for v in view.checkpoints if not v.is_unfinished]
    broken = [v for v in there if not v.is_complete]
    if attempts or not broken or len(broken) < len(there):
        return ""
    return f"{len(broken)} checkpoints are there and none is whole; the newest: {broken[-1].detail}"


def why_unrecognised(
    view: RunView, spec: CheckpointSpec, last: Attempt | None, known: Sequence[Checkpoint], now: datetime
) -> str:
    """What a running attempt leaves in place of checkpoints, once it should have saved; empty while all may be well."""
    if known or view.checkpoints_unknown or last is None or last.is_over or last.started_at is None:
        return ""
    age_s, patience_s = (now - last.started_at).total_seconds(), max(UNRECOGNISED_S, spec.every_s)
    if not view.has_checkpoint_folder:
        is_late = spec.directory is not None and age_s >= patience_s
        return f"{spec.directory} is not there, {patience_s / 60:.0f} min after the start" if is_late else ""
    if len(view.checkpoints) > 1:
        patience_s = UNFINISHED_S
    return view.unrecognised if min(age_s, view.unrecognised_s) >= patience_s else ""


def fold_foreign(
    known: Sequence[Checkpoint], view: RunView, attempts: Sequence[Attempt], *, run: str, now: datetime
) -> Learnt:
    """What a look at the checkpoint folder teaches: (checkpoint as it is now, why). `attempts`: as the ledger has them.

    Of what could not be looked at nothing is learnt, least of all that it is gone.
    """
    if view.checkpoints_unknown or not view.has_checkpoint_folder:
        return []
    by_path: dict[str, list[Checkpoint]] = defaultdict(list)
    for checkpoint in known:
        by_path[checkpoint.path].append(checkpoint)
    newest_whole = max((v.step for v in view.checkpoints if v.is_complete), default=None)
    old: Learnt = []
    new: Learnt = []
    for seen in view.checkpoints:
        before = by_path.get(seen.path, [])
        if not seen.is_complete:
            old += _broken(before, seen)
        elif not any((c.stamp, c.step) == (seen.stamp, seen.step) for c in before):
            old += _written_again(before)
            new.append(_first_sight(seen, attempts, run=run, now=now))
    paths = {v.path for v in view.checkpoints} | set(view.unknown_paths) | set(view.unsettled_paths)
    old += [_gone(c, newest_whole) for c in known if c.path not in paths and c.is_usable]
    whole = {(v.path, v.stamp) for v in view.checkpoints if v.is_complete}
    return old + _without_twins(new, known, old, whole)


def _broken(before: Sequence[Checkpoint], seen: CheckpointView) -> Learnt:
    why = seen.detail or "not all of its files are there any more"
    return [(replace(c, state=CheckpointState.CORRUPT, detail=why), why) for c in before if c.is_usable]


def _written_again(before: Sequence[Checkpoint]) -> Learnt:
    why = "written again"
    return [(replace(c, state=CheckpointState.PRUNED, detail=why), why) for c in before]


def _gone(checkpoint: Checkpoint, newest_whole: int | None) -> tuple[Checkpoint, str]:
    """A training removes old ones itself. When no newer one is there, something else has removed it."""
    if newest_whole is not None and newest_whole > checkpoint.step:
        why = "removed by the training"
        return replace(checkpoint, state=CheckpointState.PRUNED, detail=why), why
    why = "gone from disk"
    return replace(checkpoint, state=CheckpointState.CORRUPT, detail=why), why


def _first_sight(
    seen: CheckpointView, attempts: Sequence[Attempt], *, run: str, now: datetime
) -> tuple[Checkpoint, str]:
    newest = max(attempts, key=lambda a: a.number, default=None)
    checkpoint = Checkpoint(
        run=run,
        step=seen.step,
        attempt=newest.number if newest is not None else 0,
        state=CheckpointState.COMPLETE,
        path=seen.path,
        size_bytes=seen.size_bytes,
        files=seen.files,
        world_size=seen.world_size,
        is_elastic=seen.is_elastic,
        first_seen_at=now,
        detail=seen.detail,
        stamp=seen.stamp,
    )
    if newest is not None and newest.is_over:
        why = f"published after attempt {newest.number} was over"
        return replace(checkpoint, state=CheckpointState.FENCED, detail=why), why
    return checkpoint, "whole, by what its layout says"


def _without_twins(new: Learnt, known: Sequence[Checkpoint], old: Learnt, whole: set[tuple[str, str]]) -> Learnt:
    """Of two that one attempt wrote at one step (`last.ckpt` beside `step=10.ckpt`) the first stays.

    Whatever is held of it, as long as it lies there as it did: two that took turns would never come to rest.
    """
    given_up = {(c.key, c.path) for c, _ in old}
    kept_known = [c for c in known if (c.key, c.path) not in given_up]
    taken = {c.key for c in kept_known if c.is_usable or (c.path, c.stamp) in whole}
    kept: Learnt = []
    for checkpoint, why in new:
        if checkpoint.key not in taken:
            taken.add(checkpoint.key)
            kept.append((checkpoint, why))
    return kept


# ---------------------------------------------------------------- resuming


def choose_foreign_resume(
    checkpoints: Sequence[Checkpoint], spec: CheckpointSpec, *, since: datetime | None
) -> ResumePoint:
    """The newest whole one. What the head node may read is read back first, once after the attempt ended (`since`)."""
    counted = [c for c in checkpoints if c.state not in (CheckpointState.FENCED, CheckpointState.PRUNED)]
    newest = max((c for c in counted if c.is_usable), key=lambda c: c.key, default=None)
    if newest is None and counted:
        return ResumePoint(is_lost=True, why=why_none_usable(counted))
    if newest is None:
        return ResumePoint(why="no checkpoint yet")
    is_recent = newest.verified_at is not None and (since is None or newest.verified_at >= since)
    is_small = newest.size_bytes <= spec.verify_on_head_max_bytes
    if is_small and not is_recent:
        return ResumePoint(read_back=(newest,), why="not read back yet")
    return ResumePoint(checkpoint=newest, why=_why_this(newest))


def _why_this(checkpoint: Checkpoint) -> str:
    if checkpoint.state is CheckpointState.VERIFIED:
        return "newest verified"
    if checkpoint.verified_at is not None:
        return f"newest complete; {checkpoint.detail or 'not all of it carries checksums'}"
    return "newest complete; larger than the head node reads back"


def find_barren(
    attempts: Sequence[Attempt], checkpoints: Sequence[Checkpoint], released_at: datetime | None
) -> tuple[Checkpoint, str] | None:
    """A checkpoint that attempts in a row crashed upon, right after resuming from it: it can't be loaded, it seems.

    Such a script has no exit code to say so. An attempt that told of a new step, published something, or crashed long
    after its start has loaded it. What was before a person released the run is forgiven.
    """
    counted = [a for a in attempts if a.is_over and not _is_forgiven(a, released_at)]
    ended = sorted(counted, key=lambda a: a.number, reverse=True)[:LOAD_FAILURES_TO_REJECT]
    path = ended[0].resume_path if ended else ""
    if not path or len(ended) < LOAD_FAILURES_TO_REJECT or any(a.resume_path != path for a in ended):
        return None
    if not all(_is_barren(a, checkpoints) for a in ended):
        return None
    found = [c for c in checkpoints if c.path == path and c.is_usable]
    if not found or found[0].attempt >= min(a.number for a in ended):
        return None  # written again since
    why = f"{len(ended)} attempts in a row crashed right after resuming from it"
    return replace(found[0], state=CheckpointState.CORRUPT, load_failures=len(ended), detail=why), why


def find_forgiven(
    attempts: Sequence[Attempt], checkpoints: Sequence[Checkpoint], view: RunView, released_at: datetime | None
) -> Learnt:
    """Checkpoints that attempts crashed upon before a person released the run: it may have been the script's fault."""
    ended = [a for a in attempts if a.is_over]
    if released_at is None or not ended or not all(_is_forgiven(a, released_at) for a in ended):
        return []
    whole = {(v.path, v.stamp) for v in view.checkpoints if v.is_complete}
    why = "tried again: a person has released the run"
    return [
        (replace(c, state=CheckpointState.COMPLETE, load_failures=0, verified_at=None, detail=""), why)
        for c in checkpoints
        if c.state is CheckpointState.CORRUPT and c.load_failures and (c.path, c.stamp) in whole
    ]


def _is_forgiven(attempt: Attempt, released_at: datetime | None) -> bool:
    return released_at is not None and (attempt.over_at is None or attempt.over_at <= released_at)


def _is_barren(attempt: Attempt, checkpoints: Sequence[Checkpoint]) -> bool:
    if attempt.end is not AttemptEnd.CRASHED or any(c.attempt == attempt.number for c in checkpoints):
        return False
    if attempt.last_step is not None and attempt.last_step > attempt.resume_step:
        return False
    if attempt.started_at is None or attempt.over_at is None:
        return False
    return (attempt.over_at - attempt.started_at).total_seconds() < LOADING_S
