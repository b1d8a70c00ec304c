"""A loss that went wrong: what is not believed any more, how far back the run goes, when it is a person's turn."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm.types import JobState
from supervisor.core.checkpoints import choose_prunable, choose_resume, newest_verified
from supervisor.core.divergence import choose_skips, judge_fault, merge_skips, read_fault
from supervisor.model import (
    Attempt,
    AttemptEnd,
    Checkpoint,
    CheckpointState,
    IntentKind,
    IntentState,
    Interruption,
    LossFault,
    NodeMemory,
    Plan,
    Run,
    RunState,
    SkippedSamples,
)
from tests.core.builders import (
    SPEC,
    ago,
    attempt,
    attempt_in,
    checkpoint,
    checkpoint_view,
    checkpoints_in,
    exit_record,
    intents_of,
    job,
    launch,
    over,
    plan_for,
    ports,
    records,
    run,
    run_state,
    snapshot,
    spec,
    view,
    world,
)
from trainer.contract import Divergence

SUSPECT = CheckpointState.SUSPECT
ROLLBACK = spec(divergence={"on_nan": "rollback", "on_spike": "rollback"})
SAVED = tuple(checkpoint(step) for step in (600, 800, 1000, 1200))


def record(
    onset: int = 1000, step: int | None = None, *, kind: str = "nan", number: int = 1, **more: Any
) -> Divergence:
    step = onset if step is None else step
    whole = {"first_sample": onset * 10, "end_sample": step * 10 + 10, **more}
    return Divergence(attempt=number, kind=kind, onset_step=onset, step=step, time=0.0, **whole)


def ended_with(
    found: Divergence | None,
    code: int = 79,
    *,
    of: Run,
    checkpoints: tuple[Checkpoint, ...] = SAVED,
    attempts: tuple[Attempt, ...] = (),
    number: int = 1,
    resume_step: int = 0,
) -> Plan:
    """The cycle that sees the end of an attempt that has written `found`."""
    last = attempt(number, stepped_at=ago(500), resume_step=resume_step, resume_path="x" if resume_step else "")
    views = tuple(checkpoint_view(c.step, c.attempt, is_verified_by_nodes=True) for c in checkpoints)
    seen = view(
        number, exit=exit_record(code, number=number), divergence=found, launch=launch(number=number), checkpoints=views
    )
    known = world(*attempts, last, of=of, checkpoints=checkpoints)
    return plan_for(known, snapshot(job(number), view=seen))


def suspects_in(plan: Plan) -> set[int]:
    return {step for (step, _), c in checkpoints_in(plan).items() if c.state is SUSPECT}


# ---------------------------------------------------------------- the end of the attempt


@pytest.mark.parametrize("code", [79, 1, 0, 75])
def test_an_attempt_that_has_found_its_loss_wrong_has_diverged_whatever_its_exit_code(code: int) -> None:
    ended = attempt_in(ended_with(record(), code, of=run()))
    assert ended.end is AttemptEnd.DIVERGED
    assert "not a number since step 1000" in ended.end_detail


def test_a_divergence_is_an_interruption_of_no_node() -> None:
    plan = ended_with(record(), of=run())
    (found,) = records(plan.facts, Interruption)
    assert (found.kind, found.node, found.is_planned) == ("diverged", None, False)
    assert any("divergence.json" in line for line in found.evidence)
    assert not intents_of(plan, IntentKind.DRAIN)
    assert not records(plan.facts, NodeMemory)


def test_checkpoints_of_the_onset_and_later_are_suspect_and_those_before_are_not() -> None:
    assert suspects_in(ended_with(record(1000), of=run())) == {1000, 1200}


def test_an_earlier_attempts_checkpoint_beyond_the_onset_is_suspect_too() -> None:
    saved = (checkpoint(800), checkpoint(1200), checkpoint(900, 2))
    plan = ended_with(
        record(1000, number=2), of=run(), checkpoints=saved, attempts=(over(1),), number=2, resume_step=800
    )
    assert suspects_in(plan) == {1200}


def test_a_run_is_held_by_default_and_goes_on_from_before_the_onset_when_it_is_released() -> None:
    plan = ended_with(record(), of=run())
    assert run_state(plan) is RunState.HELD
    assert "on_nan" in attempt_in(plan).end_detail
    after = choose_resume(tuple(checkpoints_in(plan).values()) + SAVED[:2], SPEC.checkpoint, since=None)
    assert after.step == 800


def test_exit_79_without_a_word_of_since_when_holds_the_run_whatever_its_policy() -> None:
    plan = ended_with(None, 79, of=run(spec=ROLLBACK))
    assert attempt_in(plan).end is AttemptEnd.DIVERGED
    assert run_state(plan) is RunState.HELD
    assert suspects_in(plan) == set()


def test_a_script_of_a_persons_own_that_ends_with_79_has_diverged() -> None:
    last = attempt(stepped_at=ago(500))
    failed = job(1, JobState.FAILED, exit_code=79, end_at=ago(1))
    plan = plan_for(world(last, of=run()), snapshot(failed, view=view(divergence=record(), log_tail="")))
    assert attempt_in(plan).end is AttemptEnd.DIVERGED


def test_a_person_who_stops_the_run_meanwhile_has_stopped_it_and_its_checkpoints_are_suspect_all_the_same() -> None:
    plan = ended_with(record(), 143, of=run(state=RunState.STOPPING))
    assert attempt_in(plan).end is AttemptEnd.STOPPED
    assert suspects_in(plan) == {1000, 1200}


def test_reading_a_checkpoint_back_that_became_suspect_is_waited_for_no_longer() -> None:
    plan = ended_with(record(), of=run(), checkpoints=(*SAVED[:3], checkpoint(1200, state=CheckpointState.COMPLETE)))
    assert suspects_in(plan) == {1000, 1200}
    assert not [i for i in intents_of(plan, IntentKind.VERIFY) if (i.step or 0) >= 1000]


# ---------------------------------------------------------------- what is suspect


def test_a_suspect_checkpoint_is_neither_resumed_from_nor_counted_as_verified() -> None:
    known = (checkpoint(800), checkpoint(1000, state=SUSPECT))
    assert choose_resume(known, SPEC.checkpoint, since=None).step == 800
    newest = newest_verified(known)
    assert newest is not None
    assert newest.step == 800
    assert choose_prunable((checkpoint(600), *known), SPEC.checkpoint) == ()


def test_where_all_that_is_left_is_suspect_the_run_does_not_begin_at_0() -> None:
    resume = choose_resume((checkpoint(1000, state=SUSPECT),), SPEC.checkpoint, since=None)
    assert resume.is_lost
    assert "1 are suspect" in resume.why


def prune_of(state: RunState) -> set[int | None]:
    known = (checkpoint(500, state=SUSPECT), *(checkpoint(step, 2) for step in (600, 700, 800)))
    there = view(2, checkpoints=tuple(checkpoint_view(c.step, c.attempt, is_verified_by_nodes=True) for c in known))
    plan = plan_for(world(over(1), attempt(2), of=run(state=state), checkpoints=known), snapshot(job(2), view=there))
    return {i.step for i in intents_of(plan, IntentKind.PRUNE)}


def test_a_suspect_checkpoint_stays_while_the_run_is_held_and_is_removed_with_the_others_later() -> None:
    assert prune_of(RunState.HELD) == set()
    assert prune_of(RunState.ACTIVE) == {500}


# ---------------------------------------------------------------- rolling back


def judged(
    onset: int = 1000,
    *,
    number: int = 1,
    resume_step: int = 0,
    earlier: tuple[Attempt, ...] = (),
    checkpoints: tuple[Checkpoint, ...] = SAVED,
    of: Run | None = None,
    kind: str = "nan",
    **divergence: Any,
) -> tuple[LossFault, set[int]]:
    table = {"on_nan": "rollback", "on_spike": "rollback", **divergence}
    one = replace(over(number, AttemptEnd.DIVERGED), resume_step=resume_step)
    verdict = judge_fault(
        of or run(spec=spec(divergence=table)), one, (*earlier, one), checkpoints, read_fault(record(onset, kind=kind))
    )
    return verdict.fault, {c.step for c, _ in verdict.suspects}


def diverged(number: int, onset: int = 1000, **changes: Any) -> Attempt:
    fault = LossFault(kind="nan", onset_step=onset, step=onset, is_rolled_back=True)
    return over(number, AttemptEnd.DIVERGED, loss_fault=fault, **changes)


def test_a_rollback_goes_on_from_the_newest_one_before_the_onset_and_leaves_the_batches_out() -> None:
    plan = ended_with(record(1000, 1004), of=run(spec=ROLLBACK))
    assert run_state(plan) is None
    assert "rolled back to step 800" in attempt_in(plan).end_detail
    gone = replace(attempt_in(plan), is_job_gone=True)
    left = tuple(c for c in SAVED if c.step < 1000) + tuple(checkpoints_in(plan).values())
    there = view(checkpoints=tuple(checkpoint_view(c.step, is_verified_by_nodes=True) for c in SAVED))
    known = world(gone, of=run(spec=ROLLBACK), checkpoints=left)
    again = plan_for(known, snapshot(view=there, ports=ports(n1=0, n2=0, n3=0, n4=0)))
    successor = attempt_in(again, 2)
    assert successor.resume_step == 800
    assert successor.skip_samples == (SkippedSamples(first=10_000, end=10_050),)


def test_a_rollback_is_told_with_its_decision() -> None:
    (told,) = intents_of(ended_with(record(), of=run(spec=ROLLBACK)), IntentKind.NOTIFY)
    assert "rolled back to step 800" in told.text


def test_k_checkpoints_are_gone_back() -> None:
    fault, suspects = judged(rollback_checkpoints=2)
    assert "rolled back to step 600" in fault.decision
    assert suspects == {800, 1000, 1200}


def test_where_there_are_fewer_than_k_the_oldest_is_gone_back_to() -> None:
    fault, suspects = judged(rollback_checkpoints=9)
    assert "rolled back to step 600" in fault.decision
    assert suspects == {800, 1000, 1200}


def test_the_same_again_after_a_rollback_goes_further_back() -> None:
    saved = (*SAVED[:2], *(replace(c, state=SUSPECT) for c in SAVED[2:]), checkpoint(900, 2))
    fault, suspects = judged(number=2, resume_step=800, earlier=(diverged(1),), checkpoints=saved)
    assert fault.repeats == 1
    assert "rolled back to step 600 of attempt 1, rollback 2 of 2" in fault.decision
    assert suspects == {800, 900}


def test_a_crash_in_between_makes_it_no_other_place() -> None:
    saved = (*SAVED[:2], checkpoint(900, 2))
    between = replace(over(2), resume_step=800)
    fault, suspects = judged(number=3, resume_step=900, earlier=(diverged(1), between), checkpoints=saved)
    assert "rolled back to step 600" in fault.decision
    assert suspects == {800, 900}


def test_after_max_rollbacks_at_one_place_the_run_is_held_with_its_evidence() -> None:
    earlier = (diverged(1), diverged(2, resume_step=800))
    fault, suspects = judged(number=3, resume_step=600, earlier=earlier)
    assert not fault.is_rolled_back
    assert "2 rollbacks were made here" in fault.decision
    assert suspects == {1000, 1200}


def test_another_place_further_on_is_counted_anew() -> None:
    saved = (*SAVED[:2], checkpoint(1400, 2))
    fault, _ = judged(1500, number=2, resume_step=800, earlier=(diverged(1),), checkpoints=saved)
    assert fault.repeats == 0
    assert "rolled back to step 1400" in fault.decision


def test_what_was_before_a_release_is_not_counted() -> None:
    released = run(spec=ROLLBACK, released_at=ago(1))
    fault, _ = judged(number=2, earlier=(diverged(1),), of=released)
    assert fault.repeats == 0


def test_where_no_verified_checkpoint_is_left_before_the_onset_the_run_is_held() -> None:
    fault, _ = judged(onset=500)
    assert not fault.is_rolled_back
    assert "no verified checkpoint before step 500" in fault.decision


def test_a_run_that_has_saved_nothing_begins_anew_without_the_batches_once() -> None:
    fault, _ = judged(onset=50, checkpoints=())
    assert "rolled back to the beginning" in fault.decision
    again, _ = judged(onset=60, number=2, earlier=(diverged(1, 50),), checkpoints=())
    assert not again.is_rolled_back


def test_each_kind_has_its_own_policy() -> None:
    assert judged(kind="spike", on_spike="hold")[0].is_rolled_back is False
    assert judged(kind="nan", on_spike="hold")[0].is_rolled_back is True


# ---------------------------------------------------------------- batches


def faulty(number: int, first: int, end: int, *, repeats: int = 0, is_rolled_back: bool = True) -> Attempt:
    fault = LossFault(
        kind="nan", onset_step=1, first_sample=first, end_sample=end, repeats=repeats, is_rolled_back=is_rolled_back
    )
    return over(number, AttemptEnd.DIVERGED, loss_fault=fault)


def test_what_is_left_out_adds_up_over_attempts() -> None:
    skips = choose_skips(run(), (faulty(1, 100, 200), over(2), faulty(3, 500, 520)))
    assert skips == (SkippedSamples(first=100, end=200), SkippedSamples(first=500, end=520))


def test_each_repeat_leaves_out_more_before_the_onset() -> None:
    assert choose_skips(run(), (faulty(1, 100, 120, repeats=2),)) == (SkippedSamples(first=60, end=120),)


def test_a_run_that_was_held_leaves_nothing_out_unless_it_is_released_so() -> None:
    held = (faulty(1, 100, 200, is_rolled_back=False),)
    assert choose_skips(run(), held) == ()
    assert choose_skips(run(skips_released_at=ago(0)), held) == (SkippedSamples(first=100, end=200),)


def test_skipping_can_be_turned_off() -> None:
    assert choose_skips(run(spec=spec(divergence={"skip": False})), (faulty(1, 100, 200),)) == ()


_window = st.builds(
    lambda a, b: SkippedSamples(first=min(a, b), end=max(a, b) + 1), st.integers(0, 300), st.integers(0, 300)
)


@given(st.lists(_window, max_size=12))
def test_merged_windows_hold_the_same_positions_in_order_without_touching(windows: list[SkippedSamples]) -> None:
    merged = merge_skips(windows)
    assert {p for w in merged for p in range(w.first, w.end)} == {p for w in windows for p in range(w.first, w.end)}
    assert all(a.end < b.first for a, b in itertools.pairwise(merged))


_number = st.integers(-(2**70), 2**70)


@given(_number, _number, _number, _number)
def test_whatever_a_training_writes_the_fault_makes_sense(onset: int, step: int, first: int, end: int) -> None:
    fault = read_fault(record(onset, step, first_sample=first, end_sample=end))
    assert fault.onset_step is not None
    assert fault.step is not None
    assert 0 <= fault.onset_step <= fault.step
    assert 0 <= fault.first_sample <= fault.end_sample


_saved = st.lists(
    st.tuples(st.integers(1, 20), st.integers(1, 3), st.sampled_from(list(CheckpointState))), unique_by=lambda c: c[:2]
)


@given(
    onset=st.integers(0, 21),
    resume=st.integers(0, 20),
    saved=_saved,
    k=st.integers(1, 4),
    limit=st.integers(0, 4),
    earlier=st.lists(st.integers(0, 21), max_size=3),
)
def test_whatever_has_happened_nothing_at_or_after_the_onset_is_resumed_from(
    onset: int, resume: int, saved: list[tuple[int, int, CheckpointState]], k: int, limit: int, earlier: list[int]
) -> None:
    known = tuple(checkpoint(step, number, state) for step, number, state in saved)
    before = tuple(diverged(n, o) for n, o in enumerate(earlier, 1))
    fault, _ = judged(
        onset,
        number=len(before) + 1,
        resume_step=resume,
        earlier=before,
        checkpoints=known,
        rollback_checkpoints=k,
        max_rollbacks=limit,
    )
    table = {"on_nan": "rollback", "rollback_checkpoints": k, "max_rollbacks": limit}
    one = replace(over(len(before) + 1, AttemptEnd.DIVERGED), resume_step=resume)
    verdict = judge_fault(run(spec=spec(divergence=table)), one, (*before, one), known, read_fault(record(onset)))
    changed = {c.key: c for c, _ in verdict.suspects}
    after = tuple(changed.get(c.key, c) for c in known)
    point = choose_resume(after, SPEC.checkpoint, since=None)
    candidates = [c for c in (point.checkpoint, *point.read_back) if c is not None]
    assert all(c.step < max(onset, 1) for c in candidates)
    assert fault.repeats <= limit or not fault.is_rolled_back
    assert fault.is_rolled_back <= (fault.repeats < limit)
    if fault.is_rolled_back and fault.repeats:
        assert all(c.step < max(resume, 1) for c in candidates)


def test_an_open_reading_of_a_suspect_checkpoint_is_closed() -> None:
    saved = (*SAVED[:3], checkpoint(1200, state=CheckpointState.COMPLETE))
    before = plan_for(
        world(attempt(stepped_at=ago(500)), checkpoints=saved),
        snapshot(job(), view=view(launch=launch(), checkpoints=tuple(checkpoint_view(c.step) for c in saved))),
    )
    reading = intents_of(before, IntentKind.VERIFY)
    last = attempt(stepped_at=ago(500))
    seen = view(
        exit=exit_record(79),
        divergence=record(),
        launch=launch(),
        checkpoints=tuple(checkpoint_view(c.step) for c in saved),
    )
    plan = plan_for(world(last, checkpoints=saved, open_intents=reading), snapshot(job(), view=seen))
    assert [(i.step, i.state) for i in plan.settled] == [(1200, IntentState.DONE)]
