"""Checkpoints of trainings that know nothing of us: what a look teaches, and where the next attempt starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from supervisor.core import foreign
from supervisor.core.restarts import count_failures
from supervisor.model import (
    Attempt,
    AttemptEnd,
    Checkpoint,
    CheckpointSpec,
    CheckpointState,
    CheckpointView,
    IntentKind,
    RunView,
    Verification,
)
from tests.core.builders import (
    NOW,
    RUN,
    ago,
    attempt,
    checkpoints_in,
    cluster,
    intents_of,
    over,
    plan_for,
    run,
    run_in,
    run_state,
    snapshot,
    spec,
    world,
)

LAYOUT = CheckpointSpec(layout="dcp")
FOREIGN = run(spec=spec(checkpoint=LAYOUT))
COMPLETE, VERIFIED, CORRUPT = CheckpointState.COMPLETE, CheckpointState.VERIFIED, CheckpointState.CORRUPT
FENCED, PRUNED = CheckpointState.FENCED, CheckpointState.PRUNED


def seen(step: int, stamp: str = "s", **changes: Any) -> CheckpointView:
    one = CheckpointView(step=step, attempt=0, path=f"/saves/step-{step}", size_bytes=10, is_complete=True, stamp=stamp)
    return replace(one, **changes)


def broken(step: int) -> CheckpointView:
    return seen(step, "-", is_complete=False, detail="cut")


def known(step: int, number: int = 1, state: CheckpointState = COMPLETE, **changes: Any) -> Checkpoint:
    one = Checkpoint(
        run="gpt",
        step=step,
        attempt=number,
        state=state,
        path=f"/saves/step-{step}",
        size_bytes=10,
        first_seen_at=ago(300),
        stamp="s",
    )
    return replace(one, **changes)


def fold(
    before: list[Checkpoint], *views: CheckpointView, attempts: tuple[Attempt, ...] = (attempt(),), **changes: Any
) -> dict[tuple[int, int], CheckpointState]:
    view = RunView(attempt=1, checkpoints=views, **changes)
    learnt = foreign.fold_foreign(before, view, attempts, run="gpt", now=NOW)
    return {c.key: c.state for c, _ in learnt}


# ---------------------------------------------------------------- what a look teaches


def test_a_new_one_is_the_newest_attempts() -> None:
    assert fold([], seen(10), attempts=(over(1), attempt(2))) == {(10, 2): COMPLETE}


def test_what_was_there_before_the_first_attempt_is_of_attempt_0() -> None:
    assert fold([], seen(10), attempts=()) == {(10, 0): COMPLETE}


def test_the_same_one_teaches_nothing() -> None:
    assert fold([known(10)], seen(10), attempts=(over(1), attempt(2))) == {}


def test_one_that_appears_after_its_attempt_was_over_is_fenced_and_stays_so() -> None:
    assert fold([], seen(10), attempts=(over(1),)) == {(10, 1): FENCED}
    assert fold([known(10, state=FENCED)], seen(10), attempts=(over(1), attempt(2))) == {}


def test_a_step_that_a_later_attempt_writes_again_is_another_one() -> None:
    assert fold([known(10)], seen(10, "t"), attempts=(over(1), attempt(2))) == {(10, 1): PRUNED, (10, 2): COMPLETE}


def test_a_step_that_the_same_attempt_writes_again_is_unread_again() -> None:
    before = known(10, state=VERIFIED, verified_at=ago(10))
    view = RunView(attempt=1, checkpoints=(seen(10, "t"),))
    learnt = {c.key: c for c, _ in foreign.fold_foreign([before], view, (attempt(),), run="gpt", now=NOW)}
    assert (learnt[10, 1].state, learnt[10, 1].verified_at, learnt[10, 1].stamp) == (COMPLETE, None, "t")


def test_one_that_was_whole_and_is_not_any_more_is_refused() -> None:
    assert fold([known(10), known(20)], seen(10), broken(20)) == {(20, 1): CORRUPT}


def test_one_that_never_was_whole_is_nothing() -> None:
    assert fold([], broken(20)) == {}


def test_an_older_one_that_is_gone_was_removed_by_the_training() -> None:
    assert fold([known(10), known(20)], seen(20)) == {(10, 1): PRUNED}


def test_when_all_are_gone_something_else_has_removed_them() -> None:
    assert fold([known(10), known(20)]) == {(10, 1): CORRUPT, (20, 1): CORRUPT}


def test_what_could_not_be_looked_at_is_not_gone() -> None:
    assert fold([known(10), known(20)], seen(10), unknown_paths=("/saves/step-20",)) == {}


def test_a_folder_that_cannot_be_looked_at_teaches_nothing() -> None:
    assert fold([known(10)], checkpoints_unknown="permission denied") == {}
    assert fold([known(10)], has_checkpoint_folder=False) == {}


def test_two_names_of_one_step_are_one_checkpoint() -> None:
    assert fold([], seen(10), seen(10, "l", path="/saves/last")) == {(10, 1): COMPLETE}
    assert fold([known(10)], seen(10), seen(10, "l", path="/saves/last")) == {}


def test_the_second_name_stands_in_when_the_first_is_broken() -> None:
    twin = seen(10, "l", path="/saves/last")
    view = RunView(attempt=1, checkpoints=(broken(10), twin))
    learnt = foreign.fold_foreign([known(10)], view, (attempt(),), run="gpt", now=NOW)
    assert (learnt[-1][0].state, learnt[-1][0].path) == (COMPLETE, "/saves/last")


# ---------------------------------------------------------------- resuming


def next_attempt(*checkpoints: Checkpoint, views: tuple[CheckpointView, ...], **changes: Any) -> Attempt | None:
    view = RunView(attempt=1, checkpoints=views, **changes)
    plan = plan_for(world(over(), of=FOREIGN, checkpoints=checkpoints), snapshot(nodes=cluster(), view=view))
    found = [f.record for f in plan.facts if isinstance(f.record, Attempt) and f.record.number == 2]
    return found[0] if found else None


def test_the_newest_is_read_back_first_and_then_taken() -> None:
    views = (seen(10), seen(20))
    assert next_attempt(known(10), known(20), views=views) is None
    started = next_attempt(known(10), known(20, verified_at=NOW), views=views)
    assert started is not None
    assert (started.resume_step, started.resume_path) == (20, "/saves/step-20")


def test_a_verified_one_is_not_preferred_to_a_newer_complete_one() -> None:
    checkpoints = (known(10, state=VERIFIED, verified_at=NOW), known(20, verified_at=NOW))
    started = next_attempt(*checkpoints, views=(seen(10), seen(20)))
    assert started is not None
    assert started.resume_step == 20


def test_one_too_large_to_be_read_here_is_taken_as_it_is() -> None:
    large = known(20, size_bytes=2**50)
    started = next_attempt(large, views=(seen(20),))
    assert started is not None
    assert started.resume_step == 20


def test_the_reason_says_what_it_rests_on() -> None:
    point = foreign.choose_foreign_resume([known(20, verified_at=NOW, detail="5 bytes bare")], LAYOUT, since=ago(1))
    assert point.why == "newest complete; 5 bytes bare"


def test_when_none_of_the_known_ones_is_left_the_run_is_held() -> None:
    plan = plan_for(
        world(over(), of=FOREIGN, checkpoints=[known(10, state=CORRUPT)]),
        snapshot(view=RunView(attempt=1, checkpoints=(broken(10),))),
    )
    assert run_state(plan) == "held"


@pytest.mark.parametrize(
    "view",
    [
        {"checkpoints_unknown": "permission denied"},
        {"has_checkpoint_folder": False},
        {"unknown_paths": ("/saves/step-10",)},
    ],
)
def test_unknown_checkpoints_are_not_no_checkpoints(view: dict[str, Any]) -> None:
    checkpoints = (known(10, verified_at=NOW),)
    plan = plan_for(world(over(), of=FOREIGN, checkpoints=checkpoints), snapshot(view=RunView(attempt=1, **view)))
    assert intents_of(plan, IntentKind.SUBMIT) == ()
    changed = run_in(plan)
    assert changed is not None
    assert changed.reason.startswith("waiting: ")


def test_one_that_may_still_be_written_is_waited_for_but_not_for_long() -> None:
    view = RunView(attempt=1, checkpoints=(seen(10),), unsettled_paths=("/saves/step-20",))
    for over_at, starts in ((ago(5), False), (ago(120), True)):
        known_world = world(over(over_at=over_at), of=FOREIGN, checkpoints=[known(10, verified_at=NOW)])
        assert bool(intents_of(plan_for(known_world, snapshot(view=view)), IntentKind.SUBMIT)) is starts


def test_a_first_attempt_does_not_begin_at_0_beside_checkpoints_of_which_none_is_whole() -> None:
    view = RunView(attempt=0, checkpoints=(broken(10), broken(20)))
    plan = plan_for(world(of=FOREIGN), snapshot(view=view))
    assert run_state(plan) == "held"
    assert intents_of(plan, IntentKind.SUBMIT) == ()
    released = replace(FOREIGN, released_at=ago(1))
    assert len(intents_of(plan_for(world(of=released), snapshot(view=view)), IntentKind.SUBMIT)) == 1


def test_saves_that_did_not_end_are_left_over_and_hold_nothing_up() -> None:
    view = RunView(attempt=0, checkpoints=(replace(broken(10), is_unfinished=True),))
    assert len(intents_of(plan_for(world(of=FOREIGN), snapshot(view=view)), IntentKind.SUBMIT)) == 1


def test_the_first_save_of_a_first_attempt_may_be_cut_short() -> None:
    view = RunView(attempt=1, checkpoints=(broken(10),))
    plan = plan_for(world(over(), of=FOREIGN), snapshot(view=view))
    assert len(intents_of(plan, IntentKind.SUBMIT)) == 1


def test_a_folder_that_is_not_there_yet_is_no_checkpoint_to_a_run_that_never_had_one() -> None:
    plan = plan_for(world(of=FOREIGN), snapshot(view=RunView(attempt=0, has_checkpoint_folder=False)))
    assert len(intents_of(plan, IntentKind.SUBMIT)) == 1


def test_an_unreadable_folder_is_told_after_a_while_and_the_job_goes_on() -> None:
    view = RunView(attempt=1, checkpoints_unknown="hangs", checkpoints_unknown_s=70)
    plan = plan_for(world(attempt(), of=FOREIGN), snapshot(view=view))
    assert ["hangs" in i.text for i in intents_of(plan, IntentKind.NOTIFY)] == [True]
    assert intents_of(plan, IntentKind.CANCEL) == ()


def test_an_unreadable_folder_is_the_reason_within_seconds_and_until_it_can_be_read() -> None:
    hidden = RunView(attempt=1, checkpoints_unknown="Not a directory", checkpoints_unknown_s=4)
    shown = run_in(plan_for(world(attempt(), of=FOREIGN), snapshot(view=hidden)))
    assert shown is not None
    assert shown.reason == "the checkpoint folder can't be looked at: Not a directory"
    again = run_in(plan_for(world(attempt(), of=shown), snapshot(view=RunView(attempt=1))))
    assert again is not None
    assert again.reason == ""


SAVED_NOTHING: dict[str, Any] = {
    "unrecognised": "12 entries lie in /saves, none is a whole checkpoint",
    "unrecognised_s": 700.0,
}
AT_SAVES = replace(FOREIGN, spec=replace(FOREIGN.spec, checkpoint=replace(LAYOUT, directory=Path("/saves"))))


@pytest.mark.parametrize(
    ("view", "started_s", "says"),
    [
        (SAVED_NOTHING, 700, "12 entries lie in /saves"),
        (SAVED_NOTHING, 300, ""),  # the first save may still come
        (SAVED_NOTHING | {"checkpoints": (broken(5), broken(10))}, 300, "12 entries lie in /saves"),
        ({"has_checkpoint_folder": False}, 700, "/saves is not there, 10 min after the start"),
        ({"has_checkpoint_folder": False}, 300, ""),
        ({"checkpoints": (seen(5),)}, 700, ""),
    ],
)
def test_a_training_that_saves_nothing_that_counts_is_told_of(
    view: dict[str, Any], started_s: float, says: str
) -> None:
    running = attempt(started_at=ago(started_s))
    plan = plan_for(world(running, of=AT_SAVES), snapshot(view=RunView(attempt=1, **view)))
    changed = run_in(plan)
    reason = changed.reason if changed is not None else ""
    assert reason.startswith(f"no checkpoint is recognised: {says}") if says else not reason
    assert [says in i.text for i in intents_of(plan, IntentKind.NOTIFY)] == ([True] if says else [])


def test_who_has_a_checkpoint_is_not_told_that_there_is_none() -> None:
    running = attempt(started_at=ago(700))
    plan = plan_for(
        world(running, of=AT_SAVES, checkpoints=[known(10)]), snapshot(view=RunView(attempt=1, **SAVED_NOTHING))
    )
    assert intents_of(plan, IntentKind.NOTIFY) == ()


# ---------------------------------------------------------------- the rest of its life


def test_reading_back_without_checksums_leaves_it_complete_and_is_not_done_again() -> None:
    result = Verification(run="gpt", step=10, attempt=1, ok=True, detail="10 bare", started_at=NOW, is_covered=False)
    known_world = world(attempt(), of=FOREIGN, checkpoints=[known(10)])
    plan = plan_for(known_world, snapshot(view=RunView(attempt=1, checkpoints=(seen(10),)), verifications=(result,)))
    assert (checkpoints_in(plan)[10, 1].state, checkpoints_in(plan)[10, 1].verified_at) == (COMPLETE, NOW)
    assert intents_of(plan, IntentKind.VERIFY) == ()


def test_the_trainings_own_checkpoints_are_never_removed_by_us() -> None:
    many = [known(step, state=VERIFIED, verified_at=NOW, verified_by="head") for step in range(10, 110, 10)]
    views = tuple(seen(c.step) for c in many)
    plan = plan_for(
        world(attempt(), of=FOREIGN, checkpoints=many), snapshot(view=RunView(attempt=1, checkpoints=views))
    )
    assert intents_of(plan, IntentKind.PRUNE) == ()


def test_a_complete_one_counts_as_progress() -> None:
    ended = (over(1), over(2, resume_step=10), over(3, resume_step=20))
    assert count_failures(RUN, ended, [known(10, 1), known(20, 2)]) == 1


def crashed(number: int, step: int = 20, **changes: Any) -> Attempt:
    """Resumed, ran for a minute, crashed."""
    return over(number, resume_step=step, resume_path=f"/saves/step-{step}", started_at=ago(120), **changes)


def test_two_crashes_right_after_resuming_walk_back_one() -> None:
    checkpoints = (known(10, verified_at=NOW), known(20, verified_at=NOW))
    view = RunView(attempt=3, checkpoints=(seen(10), seen(20)))
    plan = plan_for(world(over(1), crashed(2), crashed(3), of=FOREIGN, checkpoints=checkpoints), snapshot(view=view))
    assert checkpoints_in(plan)[20, 1].state is CORRUPT
    (started,) = [f.record for f in plan.facts if isinstance(f.record, Attempt) and f.record.number == 4]
    assert started.resume_step == 10


@pytest.mark.parametrize(
    "last",
    [
        crashed(3, last_step=21),
        crashed(3, step=10),
        replace(crashed(3), started_at=ago(3600)),
        crashed(3, end=AttemptEnd.NODE_FAILED),
        crashed(3, end=AttemptEnd.PREEMPTED),
    ],
)
def test_an_attempt_that_got_past_loading_says_nothing_against_a_checkpoint(last: Attempt) -> None:
    assert foreign.find_barren((crashed(2), last), [known(10), known(20)], None) is None


def test_a_release_by_a_person_forgives_the_checkpoint() -> None:
    attempts, refused = (crashed(2), crashed(3)), known(20, state=CORRUPT, load_failures=2)
    view = RunView(attempt=3, checkpoints=(seen(20),))
    assert foreign.find_barren(attempts, [known(20)], ago(1)) is None
    assert foreign.find_forgiven(attempts, [refused], view, None) == []
    ((after, _),) = foreign.find_forgiven(attempts, [refused], view, ago(1))
    assert (after.state, after.load_failures) == (COMPLETE, 0)


# ---------------------------------------------------------------- properties

VIEWS = st.lists(
    st.builds(
        lambda step, name, stamp, is_complete: seen(
            step, stamp if is_complete else "-", path=f"/saves/{name}", is_complete=is_complete
        ),
        step=st.integers(1, 3),
        name=st.sampled_from("abcd"),
        stamp=st.sampled_from("stu"),
        is_complete=st.booleans(),
    ),
    max_size=4,
    unique_by=lambda view: view.path,
)
LOOKS = st.lists(st.tuples(VIEWS, st.integers(0, 3), st.booleans()), min_size=1, max_size=6)


@settings(max_examples=300, deadline=None)
@given(LOOKS)
def test_the_same_look_teaches_nothing_twice_and_only_what_is_whole_now_is_resumed_from(
    looks: list[tuple[list[CheckpointView], int, bool]],
) -> None:
    ledger: dict[tuple[int, int], Checkpoint] = {}
    for views, number, is_over in looks:
        attempts = tuple(over(n) for n in range(1, number)) + (
            ((over(number) if is_over else attempt(number)),) if number else ()
        )
        view = RunView(attempt=number, checkpoints=tuple(sorted(views, key=lambda v: (v.step, v.path))))
        for again in (False, True):
            learnt = foreign.fold_foreign(list(ledger.values()), view, attempts, run="gpt", now=NOW)
            assert not (again and learnt)
            ledger |= {c.key: c for c, _ in learnt}
            ledger = {key: c for key, c in ledger.items() if c.state is not PRUNED}
        whole = {(v.path, v.stamp, v.step) for v in view.checkpoints if v.is_complete}
        point = foreign.choose_foreign_resume(list(ledger.values()), LAYOUT, since=None)
        for chosen in (*point.read_back, *([point.checkpoint] if point.checkpoint else [])):
            assert (chosen.path, chosen.stamp, chosen.step) in whole
