"""What the status says of a run's saves."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from supervisor.model import Attempt, AttemptState, Checkpoint, CheckpointSpec, CheckpointState
from supervisor.reports.liveness import Liveness
from supervisor.reports.saves import SaveStatus, save_lines, saves_as_json
from supervisor.reports.status import Status, find_saves_of, judge_run, status_as_json
from tests.reports.test_status import NOW, run

LAST = Attempt(
    run="a",
    number=1,
    token="t",
    nodes_wanted=2,
    planned_at=NOW,
    state=AttemptState.RUNNING,
    started_at=NOW - timedelta(hours=10),
    stepped_at=NOW - timedelta(hours=10),
    last_step=2600,
    checkpoint_every_s=474.0,
    save_costs_s=(0.4, 0.5),
    save_total_s=20.0,
)
SAVED = Checkpoint(
    run="a",
    step=1000,
    attempt=1,
    state=CheckpointState.VERIFIED,
    path="/c/1000",
    first_seen_at=NOW - timedelta(minutes=5),
)


def saves(last: Attempt = LAST, *checkpoints: Checkpoint) -> SaveStatus:
    return find_saves_of(judge_run(run(), (last,), checkpoints, (), NOW), NOW)


def text(last: Attempt = LAST, *checkpoints: Checkpoint) -> str:
    return "\n".join(save_lines(saves(last, *checkpoints), NOW))


def test_the_interval_is_shown_with_its_expected_loss_and_what_it_rests_on() -> None:
    shown = text(LAST, SAVED)
    assert "saves: every 7.9 min" in shown
    assert "expected loss" in shown
    assert "0 failures in 0.83 node-days, and the prior" in shown


def every(seconds: float, count: int = 5) -> list[Checkpoint]:
    """Checkpoints of the attempt that were seen so far apart."""
    return [
        replace(SAVED, step=n, path=f"/c/{n}", first_seen_at=NOW - timedelta(seconds=seconds * (count - n)))
        for n in range(1, count + 1)
    ]


def test_an_interval_is_the_services_choice_only_where_the_saves_keep_to_it() -> None:
    assert "chosen by the service" in text(LAST, *every(480))
    for shown in (text(LAST, SAVED), text(LAST, *every(50))):
        assert "advised by the service" in shown
        assert "chosen" not in shown
    assert "the last ones came every 50.0 s" in text(LAST, *every(50))
    assert saves_as_json(saves(LAST, *every(50)))["seen_s"] == 50.0
    assert saves_as_json(saves(LAST, SAVED))["seen_s"] is None


def test_a_fixed_interval_that_the_training_does_not_keep_to_is_seen() -> None:
    fixed = replace(run(), spec=replace(run().spec, checkpoint=CheckpointSpec(interval="fixed")))
    shown = "\n".join(
        save_lines(find_saves_of(judge_run(fixed, (LAST,), every(50), (), NOW), NOW), NOW),
    )
    assert "fixed by the run file; the last ones came every 50.0 s" in shown


def test_checkpoints_of_earlier_attempts_tell_nothing_of_how_often_this_one_saves() -> None:
    assert saves(replace(LAST, number=2), *every(50)).seen_s is None


def test_checkpoints_that_were_all_found_at_once_tell_nothing_of_it_either() -> None:
    assert saves(LAST, *every(0)).seen_s is None


def test_steps_at_risk_and_the_newest_verified_step_are_shown() -> None:
    """CK-08."""
    assert "steps at risk: 1600; newest verified checkpoint: step 1000" in text(LAST, SAVED)
    assert "steps at risk: 2600; newest verified checkpoint: none" in text()


def test_before_a_save_was_measured_the_status_says_so() -> None:
    assert "was not measured yet" in text(replace(LAST, save_costs_s=()))


def test_failing_saves_and_suspect_checkpoints_are_shown() -> None:
    shown = text(replace(LAST, save_failures=3, save_error="quota"), replace(SAVED, state=CheckpointState.SUSPECT))
    assert "saves fail, 3 in a row: quota" in shown
    assert "never resumed from: 1" in shown


def test_copies_to_object_storage_are_shown_with_why_they_fail_also_when_the_run_is_over() -> None:
    there = replace(run(), spec=replace(run().spec, checkpoint=CheckpointSpec(object_url="s3://b/x")))
    failing = replace(LAST, uploaded="step-900.a1", upload_failures=5, upload_error="no such bucket")
    for last in (failing, replace(failing, state=AttemptState.OVER)):
        found = find_saves_of(judge_run(there, (last,), (SAVED,), (), NOW), NOW)
        shown = "\n".join(save_lines(found, NOW))
        assert "object storage s3://b/x: newest there step-900.a1" in shown
        assert "5 tries in a row failed: no such bucket" in shown
        assert saves_as_json(found)["object_storage"]["failures"] == 5
    assert "object storage" not in text(LAST, SAVED)


def test_as_json_shares_are_numbers_and_nothing_is_left_out_before_it_was_measured() -> None:
    live = Liveness(is_answering=True, is_there=True)
    for last, is_known in ((LAST, True), (replace(LAST, save_costs_s=()), False)):
        status = Status(
            now=NOW, liveness=live, daemon=None, is_paused=False, runs=(judge_run(run(), (last,), (SAVED,), (), NOW),)
        )
        found = status_as_json(status)["runs"][0]
        assert found["steps_at_risk"] == 1600
        assert (found["saves"]["loss"] is not None) is is_known
        assert set(found["saves"]) >= {"every_s", "loss", "blocking_s", "mtbf_h", "failures_seen", "prior_share"}


def test_a_run_that_is_over_has_nothing_at_risk() -> None:
    assert saves(replace(LAST, state=AttemptState.OVER), SAVED).at_risk is None
