"""What a script's job leaves that Slurm has forgotten before its number was known."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from supervisor.core.traces import Traces, find_traces
from supervisor.model import EPOCH, Attempt, Checkpoint, CheckpointState, CheckpointView, LogFile, RunView, Seen
from trainer.contract import Progress

PLANNED = EPOCH + timedelta(days=1)
ATTEMPT = Attempt(
    run="r", number=2, token="t", nodes_wanted=1, planned_at=PLANNED, resume_step=10, resume_path="/c/10", log_offset=40
)
VIEW = RunView(attempt=2)


def log(job_id: int | None = 7, *, size: int = 5, late_s: float = 1.0) -> LogFile:
    return LogFile(name="l", job_id=job_id, size_bytes=size, changed_at_s=PLANNED.timestamp() + late_s)


def checkpoint(step: int, attempt: int = 2) -> Checkpoint:
    return Checkpoint(
        run="r", step=step, attempt=attempt, state=CheckpointState.COMPLETE, path=f"/c/{step}", first_seen_at=PLANNED
    )


def seen(step: int, *, is_complete: bool = True) -> RunView:
    return replace(
        VIEW, checkpoints=(CheckpointView(step=step, attempt=0, path=f"/c/{step}", is_complete=is_complete),)
    )


def find(view: RunView = VIEW, *logs: LogFile, known: tuple[Checkpoint, ...] = ()) -> Traces | None:
    return find_traces(ATTEMPT, view, logs, checkpoints=(checkpoint(10, 1), *known), others={3})


@pytest.mark.parametrize("own", [log(), log(size=0), log(None), log(None, size=39)])
def test_a_log_that_was_begun_since_is_a_sign(own: LogFile) -> None:
    found = find(VIEW, own)
    assert found is not None
    assert (found.signs, found.is_learnt, found.last_step) == (("the log l",), True, None)


@pytest.mark.parametrize("other", [log(late_s=-60), log(3), log(None, size=40), log(None, late_s=-60)])
def test_a_log_of_before_or_of_another_job_is_none(other: LogFile) -> None:
    assert find(VIEW, other) is None


def test_a_checkpoint_of_the_attempt_is_a_sign_and_one_that_it_began_from_is_none() -> None:
    found = find(seen(15), known=(checkpoint(15),))
    assert found is not None
    assert (found.signs, found.is_learnt, found.last_step) == (("the checkpoint of step 15",), True, 15)
    assert find(seen(10)) is None
    assert find(seen(10), known=(checkpoint(10),)) is None  # `last.ckpt` beside it
    assert find(seen(15, is_complete=False)) is None


def test_a_checkpoint_that_the_ledger_has_not_got_yet_is_waited_for() -> None:
    found = find(seen(15))
    assert found is not None
    assert (found.is_learnt, found.last_step) == (False, 15)
    unsettled = find(replace(VIEW, unsettled_paths=("/c/20",)), log())
    assert unsettled is not None
    assert not unsettled.is_learnt


def test_progress_of_the_attempt_is_a_sign() -> None:
    progress = Progress(attempt=2, step=12, phase="step", time=0.0, seq=3)
    found = find(replace(VIEW, progress=Seen(value=progress, unchanged_s=1.0)))
    assert found is not None
    assert (found.signs, found.last_step) == (("progress up to step 12",), 12)


def test_what_goes_on_changes_its_stamp() -> None:
    stamps = {found.stamp for size in (1, 2) if (found := find(VIEW, log(size=size))) is not None}
    assert len(stamps) == 2
