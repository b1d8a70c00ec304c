"""What is told of saves: failed ones, work that no verified checkpoint holds, and what would be lost now."""

from __future__ import annotations

from typing import Any

import pytest

from supervisor.core.saves import alert_limit_s, classify_save_error, newest_kept, steps_at_risk
from supervisor.model import Attempt, Checkpoint, CheckpointSpec, CheckpointState, IntentKind, NodeMemory, Plan, Run
from tests.core.builders import (
    SPEC,
    ago,
    attempt,
    attempt_in,
    checkpoint,
    checkpoint_view,
    intents_of,
    job,
    launch,
    plan_for,
    progress,
    records,
    run,
    run_in,
    snapshot,
    spec,
    view,
    world,
)

QUOTA = "OSError: [Errno 122] Disk quota exceeded: '/shared/runs/gpt/checkpoints/step-2000.a1/__0_0.distcp'"


def looked(
    one: Attempt,
    *checkpoints: Checkpoint,
    step: int = 2600,
    of: Run | None = None,
    told: Plan | None = None,
    **said: Any,
) -> Plan:
    """One cycle of a running training that says this of its saves; `told`: the cycle before."""
    views = tuple(checkpoint_view(c.step, c.attempt, is_verified_by_nodes=True) for c in checkpoints)
    seen = view(progress=progress(step, **said), launch=launch(), checkpoints=views)
    settled = told.intents if told is not None else ()
    return plan_for(
        world(one, of=of or run(), checkpoints=checkpoints, settled_intents=settled), snapshot(job(), view=seen)
    )


def running(**changes: Any) -> Attempt:
    return attempt(stepped_at=ago(580), last_step=2600, progress_at=ago(1), **changes)


def texts(plan: Plan) -> list[str]:
    return [i.text for i in intents_of(plan, IntentKind.NOTIFY)]


def test_a_failed_save_is_told_at_once_with_the_steps_at_risk_and_the_last_verified_step_stays() -> None:
    """CK-08: the save of step 2000 failed without a word, 1000 is the last verified one, the training is at 2600."""
    saved = checkpoint(1000)
    plan = looked(running(), saved, save_failures=1, save_error="async save of step 2000 failed: barrier timeout")
    (text,) = texts(plan)
    assert "steps at risk: 1600" in text
    assert "time-out" in text
    newest = newest_kept((saved,))
    assert newest is not None
    assert newest.step == 1000
    assert attempt_in(plan).save_failures == 1


def test_a_full_quota_is_told_by_its_class_with_the_path_once_and_no_node_is_blamed() -> None:
    """CK-17: three saves in a row fail with EDQUOT; the training goes on."""
    first = looked(running(), checkpoint(1000), save_failures=1, save_error=QUOTA)
    (text,) = texts(first)
    assert "filesystem (quota)" in text
    assert "step-2000.a1/__0_0.distcp" in text
    assert str(SPEC.paths.checkpoints()) in text
    third = looked(running(save_failures=2), checkpoint(1000), told=first, save_failures=3, save_error=QUOTA)
    assert texts(third) == []
    shown = run_in(third)
    assert shown is not None
    assert "3 in a row" in shown.reason
    for plan in (first, third):
        assert not records(plan.facts, NodeMemory)
        assert not intents_of(plan, IntentKind.DRAIN)
        assert not intents_of(plan, IntentKind.CANCEL)


def test_unsaved_work_beyond_the_limit_is_critical() -> None:
    """CK-17, CK-08: the age of the last verified checkpoint has passed the limit."""
    limited = run(spec=spec(checkpoint={"alert_after_s": 250.0}))
    saved = checkpoint(1000, first_seen_at=ago(300))
    (text,) = [t for t in texts(looked(running(), saved, of=limited)) if "critical" in t]
    assert "step 1000" in text
    assert "steps at risk: 1600" in text
    fresh = checkpoint(1000, first_seen_at=ago(200))
    assert texts(looked(running(), fresh, of=limited)) == []


def test_a_run_that_never_saves_is_told_after_three_intervals() -> None:
    never = looked(running(checkpoint_every_s=100.0))
    (text,) = texts(never)
    assert "no checkpoint is verified" in text
    assert texts(looked(running(checkpoint_every_s=250.0))) == []


def test_once_saves_work_again_the_reason_passes() -> None:
    failing = run(reason="saves fail: 3 in a row; filesystem (quota)")
    plan = looked(running(save_failures=3, save_error=QUOTA), checkpoint(2500), of=failing, save_failures=0)
    shown = run_in(plan)
    assert shown is not None
    assert shown.reason == ""
    assert attempt_in(plan).save_error == ""


def test_a_suspended_training_is_not_accused_of_not_saving() -> None:
    """Its job is stopped: nothing is computed, and nothing is at risk that was not before."""
    limited = run(spec=spec(checkpoint={"alert_after_s": 100.0}))
    assert texts(looked(running(phase="suspended"), of=limited, step=2600)) == []


def test_a_training_of_a_foreign_layout_is_only_held_to_a_limit_that_was_given() -> None:
    assert alert_limit_s(CheckpointSpec(layout="dcp"), attempt()) is None
    assert alert_limit_s(CheckpointSpec(layout="dcp", alert_after_s=900), attempt()) == 900


def test_a_save_that_takes_long_is_allowed_for() -> None:
    assert alert_limit_s(CheckpointSpec(), attempt(checkpoint_every_s=100.0, save_total_s=50.0)) == 450


def test_what_is_suspect_or_only_complete_keeps_no_steps() -> None:
    known = (
        checkpoint(1000),
        checkpoint(2000, state=CheckpointState.COMPLETE),
        checkpoint(2500, state=CheckpointState.SUSPECT),
    )
    assert steps_at_risk(attempt(), known, step=2600) == 1600


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (QUOTA, "filesystem (quota)"),
        ("OSError: [Errno 28] No space left on device", "filesystem (full)"),
        ("[Errno 30] Read-only file system: '/x'", "filesystem (read-only)"),
        ("OSError: [Errno 116] Stale file handle", "filesystem (stale handle)"),
        ("OSError: [Errno 5] Input/output error", "filesystem (I/O)"),
        ("rank 3: writer died", "writer"),
        ("barrier timeout", "time-out"),
        ("timed out after 600 s", "time-out"),
        ("KeyError: 'exp_avg'", "other"),
        ("", "other"),
    ],
)
def test_a_failed_save_has_a_class(error: str, kind: str) -> None:
    assert classify_save_error(error) == kind


def test_what_a_training_says_of_a_failed_save_is_bounded() -> None:
    after = attempt_in(looked(running(), save_failures=1, save_error="x" * 10_000))
    assert len(after.save_error) <= 500
