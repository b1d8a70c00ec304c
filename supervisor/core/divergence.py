"""A loss that went wrong: which checkpoints are not believed any more, how far back to go, which batches to leave out.

Pure. The training finds it (trainer.contract.Divergence); here follows what becomes of the run. A checkpoint that was
made at or after the onset holds the wrong state, however whole it is. When the same happens again after going back, the
checkpoint that was gone back to is not believed either: each rollback at one place goes further back, up to a limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from supervisor.model import (
    Attempt,
    Checkpoint,
    CheckpointState,
    DivergenceSpec,
    LossFault,
    Run,
    SkippedSamples,
)
from trainer.contract import Divergence

_MAX_SAMPLE = 2**62  # positions beyond fit nowhere


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What becomes of a run whose loss went wrong: the fault with its decision, and which checkpoints are suspect."""

    fault: LossFault
    suspects: tuple[tuple[Checkpoint, str], ...] = ()  # as they are from now on, and why


def read_fault(record: Divergence | None) -> LossFault:
    """The training's own finding, within what makes sense; without one nobody knows since when."""
    if record is None:
        return LossFault(kind="unknown")
    step = max(0, record.step)
    onset = min(max(0, record.onset_step), step)
    first, end = record.first_sample, record.end_sample
    is_window = 0 <= first < end <= _MAX_SAMPLE
    return LossFault(
        kind="spike" if record.kind == "spike" else "nan",
        onset_step=onset,
        step=step,
        first_sample=first if is_window else 0,
        end_sample=end if is_window else 0,
    )


def describe_fault(fault: LossFault) -> str:
    """One sentence for people."""
    if fault.onset_step is None:
        return "the training says that its loss went wrong, and not since when (no divergence.json)"
    what = "the loss has jumped" if fault.kind == "spike" else "the loss is not a number"
    noticed = f", noticed at step {fault.step}" if fault.step != fault.onset_step else ""
    return f"{what} since step {fault.onset_step}{noticed}"


def judge_fault(
    run: Run, attempt: Attempt, attempts: Sequence[Attempt], checkpoints: Sequence[Checkpoint], fault: LossFault
) -> Verdict:
    """What becomes of the run after `attempt` found `fault`. `attempts`, `checkpoints`: all that are known of it."""
    earlier = _find_earlier(run, attempt, attempts, checkpoints, fault)
    fault = replace(fault, repeats=len(earlier))
    suspects = _find_made_since(fault, attempt, checkpoints)
    floor = _find_floor(fault, attempt, attempts, earlier)
    target = _find_target(run.spec.divergence, checkpoints, floor)
    why_held = _why_held(run.spec.divergence, fault) or _why_stuck(fault, checkpoints, floor, target)
    if why_held:
        return Verdict(fault=replace(fault, decision=f"held: {why_held}"), suspects=suspects)
    fault = replace(fault, is_rolled_back=True, decision=_describe_rollback(run.spec.divergence, fault, target))
    return Verdict(fault=fault, suspects=(*suspects, *_find_passed_over(fault, attempt, checkpoints, target)))


def _find_earlier(
    run: Run, attempt: Attempt, attempts: Sequence[Attempt], checkpoints: Sequence[Checkpoint], fault: LossFault
) -> list[Attempt]:
    """Attempts, newest first, whose loss went wrong at the same place; those before a person's release don't count.

    It is the same place until a checkpoint that is believed still was made beyond it.
    """
    found: list[Attempt] = []
    before = (a for a in attempts if a.number < attempt.number)
    for one in sorted(before, key=lambda a: a.number, reverse=True):
        if run.released_at is not None and one.over_at is not None and one.over_at <= run.released_at:
            break
        onset = one.loss_fault.onset_step if one.loss_fault is not None else None
        if onset is None:
            continue
        limit = fault.onset_step if fault.onset_step is not None else onset
        if any(c.is_kept and c.attempt > one.number and onset < c.step < limit for c in checkpoints):
            break
        found.append(one)
    return found


def _find_made_since(
    fault: LossFault, attempt: Attempt, checkpoints: Sequence[Checkpoint]
) -> tuple[tuple[Checkpoint, str], ...]:
    """Of every attempt so far: an earlier one may have got further than where this one's loss went wrong."""
    onset = fault.onset_step
    if onset is None:
        return ()
    why = f"at or after step {onset}, where the loss of attempt {attempt.number} went wrong ({fault.kind})"
    return tuple(_suspected(c, why) for c in checkpoints if c.is_usable and c.step >= onset)


def _find_passed_over(
    fault: LossFault, attempt: Attempt, checkpoints: Sequence[Checkpoint], target: Checkpoint | None
) -> tuple[tuple[Checkpoint, str], ...]:
    """Between the one that is gone back to and the onset."""
    onset = fault.onset_step or 0
    if target is None:
        return ()
    again = " again" if fault.repeats else ""
    why = f"passed over: the loss of attempt {attempt.number} went wrong{again} at step {onset}"
    return tuple(_suspected(c, why) for c in checkpoints if c.is_usable and target.key < c.key and c.step < onset)


def _suspected(checkpoint: Checkpoint, why: str) -> tuple[Checkpoint, str]:
    return replace(checkpoint, state=CheckpointState.SUSPECT, detail=why), why


def _find_floor(fault: LossFault, attempt: Attempt, attempts: Sequence[Attempt], earlier: Sequence[Attempt]) -> int:
    """Only what was saved before this step is believed: the onset, or what the last rollbacks went back to."""
    onset = fault.onset_step or 0
    if not earlier:
        return onset
    oldest = min(a.number for a in earlier)
    return min([onset, *(a.resume_step for a in (*attempts, attempt) if a.number > oldest)])


def _find_target(spec: DivergenceSpec, checkpoints: Sequence[Checkpoint], floor: int) -> Checkpoint | None:
    """The k-th newest believed one before the floor; where there are fewer, the oldest of them."""
    good = sorted((c for c in checkpoints if c.is_kept and c.step < floor), key=lambda c: c.key, reverse=True)
    return good[min(spec.rollback_checkpoints, len(good)) - 1] if good else None


def _why_held(spec: DivergenceSpec, fault: LossFault) -> str:
    """Why it is a person's turn, by the run file; empty: it is not."""
    key, policy = ("on_spike", spec.on_spike) if fault.kind == "spike" else ("on_nan", spec.on_nan)
    rows: tuple[tuple[bool, str], ...] = (
        (fault.onset_step is None, "no checkpoint of this attempt can be told good or bad"),
        (policy == "hold", f'[divergence] {key} = "hold"'),
        (
            fault.repeats >= spec.max_rollbacks,
            f"{fault.repeats} rollbacks were made here, max_rollbacks allows no more",
        ),
    )
    return next((why for is_so, why in rows if is_so), "")


def _why_stuck(fault: LossFault, checkpoints: Sequence[Checkpoint], floor: int, target: Checkpoint | None) -> str:
    """Why there is nothing to go back to; empty: there is, be it the beginning of a run that has saved nothing."""
    if target is not None:
        return ""
    if fault.repeats and floor <= 0:
        return "there is nothing further back to go to"
    known = [c for c in checkpoints if c.state not in (CheckpointState.FENCED, CheckpointState.PRUNED)]
    return f"no verified checkpoint before step {floor} is there" if known else ""


def _describe_rollback(spec: DivergenceSpec, fault: LossFault, target: Checkpoint | None) -> str:
    where = f"step {target.step} of attempt {target.attempt}" if target is not None else "the beginning"
    again = f", rollback {fault.repeats + 1} of {spec.max_rollbacks} at this place" if fault.repeats else ""
    window = _window(fault)
    if not spec.skip:
        batches = "no batches are left out ([divergence] skip = false)"
    elif window is None:
        batches = "no batches are left out: the training did not name them"
    else:
        batches = f"samples {window.first} to {window.end - 1} are left out"
    return f"rolled back to {where}{again}; {batches}"


# ---------------------------------------------------------------- batches


def choose_skips(run: Run, attempts: Sequence[Attempt]) -> tuple[SkippedSamples, ...]:
    """Sample positions that the next attempt leaves out: of every rollback so far, and of what a person released so."""
    faults = [a.loss_fault for a in attempts if a.loss_fault is not None and _is_skipped(run, a, a.loss_fault)]
    return merge_skips([window for fault in faults if (window := _window(fault)) is not None])


def merge_skips(windows: Sequence[SkippedSamples]) -> tuple[SkippedSamples, ...]:
    """The same positions, in order, no two windows touching."""
    merged: list[SkippedSamples] = []
    for window in sorted(windows, key=lambda w: w.first):
        if merged and window.first <= merged[-1].end:
            merged[-1] = replace(merged[-1], end=max(merged[-1].end, window.end))
        else:
            merged.append(window)
    return tuple(merged)


def _is_skipped(run: Run, attempt: Attempt, fault: LossFault) -> bool:
    until = run.skips_released_at
    is_released = until is not None and attempt.over_at is not None and attempt.over_at <= until
    return is_released or (fault.is_rolled_back and run.spec.divergence.skip)


def _window(fault: LossFault) -> SkippedSamples | None:
    """The batches since the onset; at each repeat as many more before them: what led there may lie further back."""
    size = fault.end_sample - fault.first_sample
    if size <= 0:
        return None
    return SkippedSamples(first=max(0, fault.first_sample - fault.repeats * size), end=fault.end_sample)
