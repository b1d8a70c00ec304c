"""What a drill concludes from built histories, good and bad."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from supervisor.drill import After, Before, Check, StepFact, Traces, judge_drill, rung
from supervisor.model import Interruption
from supervisor.reports.drill import drill_as_json, drill_text
from trainer.contract import InterruptionRecord

AT = datetime(2026, 1, 2, 12, tzinfo=UTC)

BEFORE = Before(
    run="llama",
    kind="node",
    node="n2",
    how="power of n2 cut",
    attempt=1,
    launch=0,
    training=("n1", "n2"),
    host="n1",
    step=24,
    verified_step=20,
    made_at=AT,
)
INTERRUPTION = Interruption(
    run="llama",
    attempt=1,
    is_in_job=True,
    kind="node_lost",
    cause="n2 is silent and nothing of it answers",
    node="n2",
    is_planned=True,
    drill="ab12",
    detected_at=AT + timedelta(seconds=3),
    resumed_at=AT + timedelta(seconds=8),
)
RECORD = InterruptionRecord(
    attempt=1,
    launch=0,
    kind="node_lost",
    cause="n2 is silent",
    nodes=("n2",),
    detected_at=0.0,
    parts_s={"stop": 0.2, "start": 4.0},
)
AFTER = After(
    attempt=1,
    launch=1,
    training=("n1", "n3"),
    resume_step=20,
    verified_steps=frozenset({10, 20}),
    recovered_s=8.0,
    noticed_s=3.0,
    interruptions=(INTERRUPTION,),
    record=RECORD,
)


def steps(first: int, last: int, *, shift: float = 0.0, offset: int = 0) -> dict[int, StepFact]:
    return {
        step: StepFact(
            step=step,
            loss=5.0 - 0.01 * step + shift,
            samples=tuple(range(4 * step + offset, 4 * step + 4 + offset)),
            world=2,
        )
        for step in range(first, last + 1)
    }


TRACES = Traces(before=steps(1, 24), after=steps(21, 28), source="the training's step log")


def check(name: str, *, before: Before = BEFORE, after: After = AFTER, traces: Traces = TRACES) -> Check:
    found = judge_drill(before, after, traces)
    one = next(c for c in found.checks if c.name == name)
    if one.is_ok is False:
        assert not found.is_passed
    return one


def test_a_recovery_as_it_must_be_passes_every_check() -> None:
    outcome = judge_drill(BEFORE, AFTER, TRACES)
    assert outcome.is_passed
    assert [(c.name, c.is_ok) for c in outcome.checks] == [
        (name, True) for name in ("recovered", "checkpoint", "loss", "samples", "node", "ledger")
    ]
    report = drill_as_json(outcome)
    assert (report["ok"], report["recovered_s"], report["rung"]) == (True, 8.0, 2)
    assert "start 4.0 s" in drill_text(outcome)


def test_no_recovery_fails_and_says_where_it_stands() -> None:
    found = check("recovered", after=replace(AFTER, recovered_s=None, ending="the run is held: no checkpoint loads"))
    assert found.is_ok is False
    assert "held" in found.detail


@pytest.mark.parametrize(
    "change",
    [
        {"resume_step": 10},  # older than what was verified
        {"resume_step": 22},  # newer, and never verified
        {"resume_step": 0},
        {"resume_step": None},
    ],
)
def test_a_start_from_an_older_or_an_unverified_checkpoint_fails(change: dict[str, int | None]) -> None:
    assert check("checkpoint", after=replace(AFTER, **change)).is_ok is False  # type: ignore[arg-type]


def test_a_checkpoint_that_was_verified_just_before_the_node_went_may_be_newer_than_the_one_seen() -> None:
    after = replace(AFTER, resume_step=22, verified_steps=frozenset({10, 20, 22}))
    assert check("checkpoint", after=after).is_ok is True


@pytest.mark.parametrize("shift", [0.1, -0.02, float("nan"), float("inf")])
def test_another_loss_in_a_step_that_was_done_twice_fails(shift: float) -> None:
    assert check("loss", traces=replace(TRACES, after=steps(21, 28, shift=shift))).is_ok is False


def test_the_same_sums_in_another_order_pass() -> None:
    assert check("loss", traces=replace(TRACES, after=steps(21, 28, shift=1e-5))).is_ok is True


def test_one_wrong_step_among_right_ones_fails() -> None:
    after = {**steps(21, 28), 23: StepFact(step=23, loss=9.0)}
    assert check("loss", traces=replace(TRACES, after=after)).is_ok is False


def test_a_step_left_out_fails() -> None:
    after = steps(21, 28)
    del after[25]
    assert check("loss", traces=replace(TRACES, after=after)).is_ok is False
    assert check("loss", traces=replace(TRACES, after=steps(23, 28))).is_ok is False


def test_where_no_step_was_done_twice_a_jump_of_the_loss_fails() -> None:
    progress = replace(TRACES, source="the progress file, now and then", before=steps(1, 20))
    assert check("loss", traces=replace(progress, after=steps(21, 28))).is_ok is True
    assert check("loss", traces=replace(progress, after=steps(21, 28, shift=1.0))).is_ok is False


def test_samples_that_come_twice_or_never_fail() -> None:
    found = check("samples", traces=replace(TRACES, after=steps(21, 28, offset=1)))
    assert found.is_ok is False
    assert found.detail.startswith("4 repeated, 4 skipped")


def test_where_no_step_was_done_twice_a_batch_that_was_taken_before_fails() -> None:
    before, after = steps(1, 20), steps(21, 28)
    assert check("samples", traces=replace(TRACES, before=before, after=after)).is_ok is True
    lost = {**after, 21: replace(before[1], step=21)}
    assert check("samples", traces=replace(TRACES, before=before, after=lost)).is_ok is False
    tiny = {step: replace(fact, samples=(1, 2)) for step, fact in {**before, **after}.items()}
    every_time = replace(TRACES, before={s: tiny[s] for s in before}, after={s: tiny[s] for s in after})
    assert check("samples", traces=every_time).is_ok is None


def test_another_position_at_the_same_step_fails() -> None:
    before = {5: StepFact(step=5, position=50)}
    source = "the progress file, now and then"
    same = Traces(before=before, after={5: StepFact(step=5, position=50)}, source=source)
    other = Traces(before=before, after={5: StepFact(step=5, position=60)}, source=source)
    assert check("samples", traces=same).is_ok is True
    assert check("samples", traces=other).is_ok is False


def test_what_the_training_does_not_tell_is_open_and_no_failure() -> None:
    outcome = judge_drill(BEFORE, AFTER, Traces())
    assert {c.name: c.is_ok for c in outcome.checks if c.is_ok is None} == {"loss": None, "samples": None}
    assert outcome.is_passed


def test_another_node_named_fails() -> None:
    assert check("node", after=replace(AFTER, interruptions=(replace(INTERRUPTION, node="n1"),))).is_ok is False
    assert check("node", after=replace(AFTER, record=replace(RECORD, nodes=("n1", "n2")))).is_ok is False
    assert check("node", after=replace(AFTER, record=replace(RECORD, hint="n1"))).is_ok is False


def test_no_node_named_fails_unless_a_process_died() -> None:
    nobody = replace(AFTER, interruptions=(replace(INTERRUPTION, node=None),), record=replace(RECORD, nodes=()))
    assert check("node", after=nobody).is_ok is False
    assert check("node", before=replace(BEFORE, kind="process"), after=nobody).is_ok is True


def test_a_lost_node_that_trains_again_fails() -> None:
    assert check("node", after=replace(AFTER, training=("n1", "n2"))).is_ok is False


@pytest.mark.parametrize(
    "interruptions",
    [
        (),
        (INTERRUPTION, INTERRUPTION),
        (replace(INTERRUPTION, drill="", is_planned=False),),  # the service takes it for a real failure
        (replace(INTERRUPTION, kind="hang"),),
        (replace(INTERRUPTION, resumed_at=None),),
    ],
)
def test_none_or_two_or_another_or_an_open_interruption_in_the_ledger_fails(
    interruptions: tuple[Interruption, ...],
) -> None:
    assert check("ledger", after=replace(AFTER, interruptions=interruptions)).is_ok is False


@pytest.mark.parametrize(
    ("training", "attempt", "number"),
    [(("n1", "n2"), 1, "1"), (("n1", "n3"), 1, "2"), (("n1",), 1, "2"), (("n1", "n3"), 2, "3")],
)
def test_the_rung_is_told_by_where_it_trains_now(training: tuple[str, ...], attempt: int, number: str) -> None:
    assert rung(BEFORE, replace(AFTER, training=training, attempt=attempt))[0] == number


def test_steps_done_again_are_counted_from_the_newest_step_that_anybody_knows_of() -> None:
    known = replace(INTERRUPTION, last_step=22, resume_step=20)
    found = check("checkpoint", after=replace(AFTER, interruptions=(known,)))
    assert "4 steps were done again (history: 2," in found.detail
    late = replace(AFTER, record=replace(RECORD, last_step=26))
    assert "6 steps were done again" in check("checkpoint", after=late).detail
    one = replace(BEFORE, step=21)
    assert "1 step was done again" in check("checkpoint", before=one, traces=replace(TRACES, before={})).detail
