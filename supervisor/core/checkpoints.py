"""Which checkpoints may be believed, which one to resume from, which ones to keep. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from supervisor.model import (
    Attempt,
    Checkpoint,
    CheckpointSpec,
    CheckpointState,
    CheckpointView,
    Verification,
)
from trainer.contract import RunPaths

LOAD_FAILURES_TO_REJECT = 2


def fold_view(
    known: Mapping[tuple[int, int], Checkpoint],
    views: Sequence[CheckpointView],
    attempts: Sequence[Attempt],
    *,
    run: str,
    now: datetime,
    unknown: Sequence[tuple[int, int]] = (),
) -> list[tuple[Checkpoint, str]]:
    """What a look at the checkpoint folders teaches: (checkpoint as it is now, why).

    `attempts` are as the ledger has them: what an attempt publishes after it was declared over is fenced, and so is
    what bears the number of an attempt that was not made yet. Of `unknown` ones (step, attempt) nothing is learnt,
    least of all that they are gone.
    """
    ended = {a.number: a.is_over for a in attempts}
    learnt = []
    for view in views:
        before = known.get((view.step, view.attempt))
        if before is None:
            first = _first_sight(view, ended.get(view.attempt), run=run, now=now)
            learnt += [first] if first else []
        else:
            learnt += _seen_again(before, view, now)
    seen = {(v.step, v.attempt) for v in views} | set(unknown)
    learnt += [
        (replace(c, state=CheckpointState.CORRUPT, detail="gone from disk"), "gone from disk")
        for key, c in known.items()
        if key not in seen and c.is_usable
    ]
    return learnt


def _first_sight(
    view: CheckpointView, is_over: bool | None, *, run: str, now: datetime
) -> tuple[Checkpoint, str] | None:
    if not view.is_complete:
        return None  # not all of its files are there yet
    checkpoint = Checkpoint(
        run=run,
        step=view.step,
        attempt=view.attempt,
        state=CheckpointState.COMPLETE,
        path=view.path,
        size_bytes=view.size_bytes,
        files=view.files,
        samples=view.samples,
        world_size=view.world_size,
        is_elastic=view.is_elastic,
        first_seen_at=now,
    )
    if is_over is None:  # once that attempt is made, the folder would be taken for its work
        why = f"there before attempt {view.attempt} was"
        return replace(checkpoint, state=CheckpointState.FENCED, detail=why), why
    if is_over:
        why = f"published by attempt {view.attempt} after it was over"
        return replace(checkpoint, state=CheckpointState.FENCED, detail=why), why
    if view.is_rejected_by_nodes:
        return _rejected(checkpoint, view)
    if view.is_verified_by_nodes:
        return _verified(checkpoint, now, "nodes"), "read back by the job's nodes"
    return checkpoint, "manifest there, every file has its recorded size"


def _verified(checkpoint: Checkpoint, at: datetime, by: str) -> Checkpoint:
    return replace(checkpoint, state=CheckpointState.VERIFIED, verified_at=at, verified_by=by, detail="")


def _rejected(checkpoint: Checkpoint, view: CheckpointView) -> tuple[Checkpoint, str]:
    why = "the job's nodes found it corrupt"
    return replace(checkpoint, state=CheckpointState.CORRUPT, detail=view.detail or why), why


def _seen_again(before: Checkpoint, view: CheckpointView, now: datetime) -> list[tuple[Checkpoint, str]]:
    if not before.is_usable:
        return []
    if not view.is_complete:
        why = view.detail or "not all of its files are there any more"
        return [(replace(before, state=CheckpointState.CORRUPT, detail=why), why)]
    if view.is_rejected_by_nodes:
        return [_rejected(before, view)]
    if before.state is CheckpointState.COMPLETE and view.is_verified_by_nodes:
        return [(_verified(before, now, "nodes"), "read back by the job's nodes")]
    return []


def find_brought_back(
    known: Sequence[Checkpoint],
    views: Sequence[CheckpointView],
    attempts: Sequence[Attempt],
    released_at: datetime | None,
    now: datetime,
) -> list[tuple[Checkpoint, str]]:
    """Checkpoints that were refused, or gone, and are whole on disk when a person releases the run: copied back.

    Once for each release, and only until an attempt follows; they are to be read back like any other.
    """
    ended = [a.over_at for a in attempts if a.is_over]
    if released_at is None or any(at is not None and at > released_at for at in ended):
        return []
    whole = {(v.step, v.attempt): v for v in views if v.is_complete and not v.is_rejected_by_nodes}
    why = "whole on disk when a person released the run"
    return [
        (_as_seen(_again(c, whole[c.key], now), whole[c.key], now), why)
        for c in known
        if c.state is CheckpointState.CORRUPT and not c.load_failures  # such a one is whole, and of no use
        if c.key in whole and c.first_seen_at <= released_at
    ]


def _as_seen(checkpoint: Checkpoint, view: CheckpointView, now: datetime) -> Checkpoint:
    """With what this very look says of it: the same look must teach nothing more."""
    learnt = _seen_again(checkpoint, view, now)
    return learnt[-1][0] if learnt else checkpoint


def _again(checkpoint: Checkpoint, view: CheckpointView, now: datetime) -> Checkpoint:
    return replace(
        checkpoint,
        state=CheckpointState.COMPLETE,
        size_bytes=view.size_bytes,
        files=view.files,
        samples=view.samples,
        first_seen_at=now,
        verified_at=None,
        verified_by="",
        detail="",
    )


def fold_verification(before: Checkpoint, result: Verification) -> tuple[Checkpoint, str] | None:
    """What reading a checkpoint back teaches; None when it could not be read (unknown)."""
    if result.ok is None or not before.is_usable:
        return None
    if result.ok and not result.is_covered:  # all of it could be read, and not all of it carries checksums
        return replace(before, verified_at=result.started_at, verified_by="head", detail=result.detail), result.detail
    if result.ok:
        return _verified(before, result.started_at, "head"), "every byte was read back and matched"
    return replace(before, state=CheckpointState.CORRUPT, detail=result.detail), result.detail


def fold_load_failure(before: Checkpoint, detail: str) -> tuple[Checkpoint, str]:
    """A job could not load it: counted; the second time it is rejected."""
    failures = before.load_failures + 1
    after = replace(before, load_failures=failures, detail=detail)
    if failures >= LOAD_FAILURES_TO_REJECT:
        after = replace(after, state=CheckpointState.CORRUPT, detail=f"failed to load {failures} times: {detail}")
    return after, f"failed to load ({failures}): {detail}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """Where to start: a checkpoint, or None for the very beginning; `read_back` must be read before it is trusted."""

    checkpoint: Checkpoint | None = None
    read_back: tuple[Checkpoint, ...] = ()
    is_lost: bool = False  # there were checkpoints and none can be used: never start at 0 by yourself
    why: str = ""

    @property
    def step(self) -> int:
        return self.checkpoint.step if self.checkpoint is not None else 0

    @property
    def place(self) -> str:
        """For people: where, and why there."""
        return f"step {self.step} ({self.why})" if self.checkpoint is not None else f"the beginning ({self.why})"


def resume_path(run_dir: Path, resume: ResumePoint) -> str:
    """The path that an attempt is given; empty: from the beginning."""
    point = resume.checkpoint
    if point is None:
        return ""
    return point.path if point.stamp else str(RunPaths(run_dir).checkpoint(point.step, point.attempt))


def find_resumed(attempt: Attempt, checkpoints: Sequence[Checkpoint], run_dir: Path) -> Checkpoint | None:
    """The checkpoint that an attempt was given; None: none, or one that is not known any more."""
    if not attempt.resume_path:
        return None
    there = (c for c in checkpoints if c.step == attempt.resume_step)
    return next((c for c in there if resume_path(run_dir, ResumePoint(checkpoint=c)) == attempt.resume_path), None)


def choose_resume(checkpoints: Sequence[Checkpoint], spec: CheckpointSpec, *, since: datetime | None) -> ResumePoint:
    """The newest checkpoint that may be believed.

    Newest VERIFIED step, else (by policy) newest COMPLETE one. A checkpoint that the head node can read is read back
    once more after the attempt ended (`since`): bytes rot between the first verification and the restart. Until that
    is done it is listed in `read_back` and nothing is decided.
    """
    counted = [c for c in checkpoints if c.state not in (CheckpointState.FENCED, CheckpointState.PRUNED)]
    usable = sorted(
        (c for c in counted if c.is_usable),
        key=lambda c: c.key,
        reverse=True,
    )
    read_back: list[Checkpoint] = []
    for checkpoint in usable:
        is_small = checkpoint.size_bytes <= spec.verify_on_head_max_bytes
        is_verified = checkpoint.state is CheckpointState.VERIFIED
        is_recent = since is None or _is_read_since(checkpoint, since)
        if is_small and not (is_verified and is_recent):
            read_back.append(checkpoint)
        if is_verified:
            return ResumePoint(checkpoint=checkpoint, read_back=tuple(read_back), why="newest verified")
    if read_back:
        return ResumePoint(read_back=tuple(read_back), why="not verified yet")
    if usable and spec.resume_from_complete:
        return ResumePoint(checkpoint=usable[0], why="newest complete; none is verified, and it was allowed")
    if counted:
        return ResumePoint(is_lost=True, why=why_none_usable(counted))
    return ResumePoint(why="no checkpoint yet")


def _is_read_since(checkpoint: Checkpoint, since: datetime) -> bool:
    """True when this machine has read it: the job's word may be as old as its record, however late it was seen."""
    at = checkpoint.verified_at
    return checkpoint.verified_by == "head" and at is not None and at >= since


def why_none_usable(counted: Sequence[Checkpoint]) -> str:
    """What stands in the way of every one of these."""
    suspect = sum(1 for c in counted if c.state is CheckpointState.SUSPECT)
    since = f" ({suspect} are suspect: made when the loss had gone wrong)" if suspect else ""
    return f"none of {len(counted)} known checkpoints can be used{since}"


def choose_prunable(checkpoints: Sequence[Checkpoint], spec: CheckpointSpec) -> tuple[Checkpoint, ...]:
    """Checkpoints that may be removed: older than the last `keep_last` VERIFIED ones (never fewer than two).

    The newest one that the head node itself has read back stays: what the job says of its newer ones is not proof.
    """
    verified = sorted((c for c in checkpoints if c.state is CheckpointState.VERIFIED), key=lambda c: c.key)
    kept = verified[-max(2, spec.keep_last) :]
    if len(kept) < max(2, spec.keep_last):
        return ()
    oldest_kept = kept[0].key
    proven = max((c.key for c in verified if c.verified_by == "head"), default=None)
    return tuple(
        c for c in checkpoints if c.key < oldest_kept and c.key != proven and c.state is not CheckpointState.PRUNED
    )


def newest_verified(checkpoints: Sequence[Checkpoint]) -> Checkpoint | None:
    """The newest VERIFIED checkpoint by (step, attempt)."""
    return max((c for c in checkpoints if c.state is CheckpointState.VERIFIED), key=lambda c: c.key, default=None)


def newest_advisable(checkpoints: Sequence[Checkpoint], spec: CheckpointSpec) -> Checkpoint | None:
    """The newest checkpoint that a running job may start again from, without anything being looked at first.

    Its bytes were read back; of another framework's layout, one too large to be read here will do, as for a new job.
    """
    believed = (
        c
        for c in checkpoints
        if c.is_usable and (c.verified_at is not None or (c.stamp and c.size_bytes > spec.verify_on_head_max_bytes))
    )
    return max(believed, key=lambda c: c.key, default=None)
