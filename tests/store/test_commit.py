import itertools
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from supervisor.model import (
    Attempt,
    AttemptState,
    Checkpoint,
    CheckpointState,
    CheckRow,
    Fact,
    IntentKind,
    IntentState,
    Interruption,
    NodeMemory,
    Plan,
    Record,
    Run,
    RunState,
    Verdict,
)
from supervisor.store import IntentSettled, NameInUse, Store, TokenInUse, TwoLiveAttempts
from tests.store.records import (
    NOW,
    attempt,
    checkpoint,
    event,
    facts,
    histories,
    intent,
    interruption,
    plan,
    run,
)
from trainer.contract import CheckResult

LATER = NOW + timedelta(seconds=5)
OVER = AttemptState.OVER


# ---------------------------------------------------------------- facts


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(histories())
def test_the_world_is_what_was_committed(tmp_path_factory: pytest.TempPathFactory, history: tuple[Record, ...]) -> None:
    with Store.open(tmp_path_factory.mktemp("store") / "ledger.db", now=NOW) as store:
        store.commit(plan(*history), NOW)
        world = store.load_world(NOW)

    attempts = {r.name: [a for a in history if isinstance(a, Attempt) and a.run == r.name] for r in runs_of(history)}
    live = {r.name: r for r in runs_of(history) if is_in_world(r, attempts[r.name])}
    assert {r.name: r for r in world.runs} == live
    assert world.attempts == {name: tuple(a for a in attempts[name] if not a.is_aside) for name in live}
    assert world.aside == {name: tuple(a for a in attempts[name] if a.is_aside) for name in live}
    assert world.checkpoints == {
        name: tuple(
            c for c in history if isinstance(c, Checkpoint) and c.run == name and c.state is not CheckpointState.PRUNED
        )
        for name in live
    }
    assert set(world.interruptions) == {
        i for i in history if isinstance(i, Interruption) and i.run in live and i.caught_up_at is None
    }


def runs_of(history: tuple[Record, ...]) -> list[Run]:
    return [record for record in history if isinstance(record, Run)]


def is_in_world(asked: Run, attempts: list[Attempt]) -> bool:
    is_done = asked.state in (RunState.FINISHED, RunState.STOPPED)
    return not is_done or any(not attempt.is_job_gone for attempt in attempts)


def test_a_fact_replaces_the_record_of_its_key(store: Store) -> None:
    store.commit(plan(run(), attempt()), NOW)
    store.commit(plan(replace(attempt(), job_id=7, last_step=40)), LATER)
    assert store.load_attempts("gpt") == (replace(attempt(), job_id=7, last_step=40),)


def test_the_last_of_two_facts_about_one_record_counts(store: Store) -> None:
    store.commit(plan(run(), attempt(state=OVER), attempt(state=AttemptState.RUNNING)), NOW)
    assert store.load_attempts("gpt")[0].state is AttemptState.RUNNING


def test_node_events_and_checks_are_appended(store: Store) -> None:
    check = CheckRow(node="n2", at=NOW, result=CheckResult(check="disk", ok=False, value=1.0, limit=5.0))
    for _ in range(2):
        store.commit(plan(event(), check), NOW)
    assert store.load_node_events("n2") == (event(), event())
    assert store.load_checks("n2") == (check, check)


def test_the_database_refuses_a_second_live_attempt_and_keeps_nothing_of_the_plan(store: Store) -> None:
    store.commit(plan(run(), attempt(1)), NOW)
    with pytest.raises(TwoLiveAttempts, match="attempt 2"):
        store.commit(plan(event(), attempt(2), intents=(intent(),)), LATER)
    assert store.load_attempts("gpt") == (attempt(1),)
    assert store.load_node_events() == ()
    assert store.load_intents() == ()


def test_one_attempt_may_be_queued_ahead_of_the_live_one_and_no_second_one(store: Store) -> None:
    ahead = attempt(2, AttemptState.AHEAD)
    store.commit(plan(run(), attempt(1), ahead), NOW)
    with pytest.raises(TwoLiveAttempts, match="attempt 3"):
        store.commit(plan(attempt(3, AttemptState.AHEAD)), LATER)
    assert (store.load_attempts("gpt"), store.load_aside("gpt")) == ((attempt(1),), (ahead,))


def test_one_that_was_queued_ahead_takes_the_live_ones_place_only_when_that_is_over(store: Store) -> None:
    store.commit(plan(run(), attempt(1), attempt(2, AttemptState.AHEAD)), NOW)
    with pytest.raises(TwoLiveAttempts):
        store.commit(plan(attempt(2, AttemptState.SUBMITTED)), LATER)
    store.commit(plan(attempt(2, AttemptState.SUBMITTED), attempt(1, OVER)), LATER)
    assert [a.state for a in store.load_attempts("gpt")] == [OVER, AttemptState.SUBMITTED]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_one_plan_may_end_an_attempt_and_begin_the_next_in_any_order(store: Store, order: tuple[int, ...]) -> None:
    store.commit(plan(run(), attempt(1)), NOW)
    items: list[Record] = [attempt(1, OVER), attempt(2, AttemptState.PLANNED), interruption(1)]
    store.commit(plan(*(items[i] for i in order)), LATER)
    assert [a.state for a in store.load_attempts("gpt")] == [OVER, AttemptState.PLANNED]


def test_two_attempts_never_share_a_token(store: Store) -> None:
    store.commit(plan(run(), attempt(1, OVER)), NOW)
    with pytest.raises(TokenInUse):
        store.commit(plan(replace(attempt(2), token=attempt(1).token)), NOW)


def test_an_empty_plan_writes_nothing(store: Store, path: Path) -> None:
    store.commit(plan(run(), intents=(intent(),)), NOW)
    wal = path.with_name(path.name + "-wal")
    before = (path.read_bytes(), wal.read_bytes(), store._connection.total_changes)
    assert [i.key for i in store.commit(Plan(notes=("blind",), wake_after_s=2.0), LATER)] == [intent().key]
    assert (path.read_bytes(), wal.read_bytes(), store._connection.total_changes) == before


def test_an_empty_plan_does_not_wait_for_another_writer(store: Store, path: Path) -> None:
    with Store.open(path, now=NOW) as other, other._writing():
        store._db.execute("PRAGMA busy_timeout=20")
        assert store.commit(Plan(), NOW) == ()


def test_a_change_of_what_is_wanted_of_a_run_is_kept_with_its_reason(store: Store) -> None:
    stored = store.add_run(run(), NOW)
    held = replace(stored, state=RunState.HELD)
    store.commit(Plan(facts=(Fact(record=held, reason="three restarts without progress"),)), LATER)
    store.set_run(replace(held, state=RunState.ACTIVE), LATER, "released by uid 1000")
    assert [(c.state, c.why) for c in store.load_run_changes("gpt")] == [
        (RunState.ACTIVE, "submitted"),
        (RunState.HELD, "three restarts without progress"),
        (RunState.ACTIVE, "released by uid 1000"),
    ]


# ---------------------------------------------------------------- intents


def test_committed_intents_come_back_open_with_ids(store: Store) -> None:
    (kept,) = store.commit(plan(run(), intents=(intent(),)), NOW)
    assert kept == replace(intent(), id=kept.id, created_at=NOW)
    assert kept.id is not None


def test_a_plan_applied_twice_means_one_act(store: Store) -> None:
    twice = plan(run(), attempt(), intents=(intent("a"), intent("b"), intent("a")))
    first = store.commit(twice, NOW)
    assert store.commit(twice, LATER) == first
    assert [i.key for i in first] == ["a", "b"]


def test_the_key_of_a_settled_intent_may_be_meant_again(store: Store) -> None:
    (first,) = store.commit(plan(intents=(intent(),)), NOW)
    store.settle(first, IntentState.REFUSED, "no", NOW)
    (second,) = store.commit(plan(intents=(intent(),)), LATER)
    assert second.id != first.id


def test_an_intent_never_tried_is_withdrawn_when_no_longer_wanted(store: Store) -> None:
    (kept,) = store.commit(plan(intents=(intent(),)), NOW)
    assert store.commit(Plan(withdrawn=(kept,)), LATER) == ()
    assert store.load_intents()[0].state is IntentState.WITHDRAWN


def test_an_intent_that_was_tried_cannot_be_withdrawn(store: Store) -> None:
    (kept,) = store.commit(plan(intents=(intent(),)), NOW)
    tried = store.mark_tried(kept, NOW)
    assert store.commit(Plan(withdrawn=(kept,)), LATER) == (tried,)


def test_one_plan_may_withdraw_an_intent_and_mean_its_key_anew(store: Store) -> None:
    (old,) = store.commit(plan(intents=(intent(),)), NOW)
    (new,) = store.commit(Plan(withdrawn=(old,), intents=(replace(intent(), text="other"),)), LATER)
    assert new.text == "other"


def test_an_outcome_that_was_observed_settles_its_intent(store: Store) -> None:
    (kept,) = store.commit(plan(intents=(intent(),)), NOW)
    seen = replace(kept, state=IntentState.DONE, outcome="job 7 has its token")
    assert store.commit(Plan(settled=(seen,)), LATER) == ()
    assert store.load_intents() == (replace(seen, settled_at=LATER),)


def test_each_try_is_committed_before_the_act(store: Store, path: Path) -> None:
    (kept,) = store.commit(plan(intents=(intent(),)), NOW)
    store.mark_tried(kept, NOW)
    again = store.mark_tried(kept, LATER)
    assert (again.tries, again.tried_at) == (2, LATER)
    with Store.open_readonly(path) as reader:
        assert reader.load_intents(IntentState.OPEN) == (again,)


def test_an_outcome_and_what_was_learnt_by_it_are_one_change(store: Store) -> None:
    (kept,) = store.commit(plan(run(), attempt(1), intents=(intent(),)), NOW)
    with pytest.raises(TwoLiveAttempts):
        store.settle(kept, IntentState.DONE, "job 7", LATER, facts=facts(attempt(2)))
    assert store.load_intents(IntentState.OPEN) == (kept,)
    store.settle(kept, IntentState.DONE, "job 7", LATER, facts=facts(replace(attempt(1), job_id=7)))
    assert store.load_attempts("gpt")[0].job_id == 7
    assert store.load_intents(IntentState.DONE)[0].outcome == "job 7"


def test_an_unconfirmed_outcome_leaves_the_intent_open(store: Store) -> None:
    (kept,) = store.commit(plan(intents=(intent(),)), NOW)
    store.settle(kept, IntentState.OPEN, "no answer from sbatch", LATER)
    assert store.load_intents(IntentState.OPEN) == (replace(kept, outcome="no answer from sbatch"),)


@pytest.mark.parametrize(
    "act",
    [
        lambda store, kept: store.mark_tried(kept, LATER),
        lambda store, kept: store.settle(kept, IntentState.DONE, "", LATER, facts=facts(event())),
    ],
)
def test_an_intent_that_is_not_open_any_more_is_not_acted_upon(
    store: Store, act: Callable[[Store, object], object]
) -> None:
    (kept,) = store.commit(plan(intents=(intent(),)), NOW)
    store.commit(Plan(withdrawn=(kept,)), NOW)
    with pytest.raises(IntentSettled):
        act(store, kept)
    assert store.load_node_events() == ()


def test_the_world_shows_intents_settled_in_the_last_six_hours(store: Store) -> None:
    old, young = store.commit(plan(intents=(intent("old"), intent("young", IntentKind.DRAIN))), NOW)
    store.settle(old, IntentState.DONE, "", NOW - timedelta(hours=6, seconds=1))
    store.settle(young, IntentState.DONE, "", NOW - timedelta(hours=5))
    assert [i.key for i in store.load_world(NOW).settled_intents] == ["young"]


# ---------------------------------------------------------------- what people ask for


def test_a_new_run_is_active_from_now_on(store: Store) -> None:
    assert store.add_run(run(), NOW) == replace(run(), created_at=NOW, changed_at=NOW) == store.load_run("gpt")


@pytest.mark.parametrize("state", list(RunState))
def test_a_name_is_used_once_whatever_became_of_its_run(store: Store, state: RunState) -> None:
    store.add_run(run(), NOW)
    store.set_run(run(state=state), NOW, "test")
    with pytest.raises(NameInUse, match=rf"'gpt'.*{state}"):
        store.add_run(run(), LATER)


def test_pausing_the_service_is_seen_by_the_core(store: Store) -> None:
    assert not store.load_world(NOW).is_paused
    store.set_paused(True, NOW, "uid 0")
    assert store.load_world(NOW).is_paused
    store.set_paused(False, NOW, "uid 0")
    assert not store.load_world(NOW).is_paused


def test_an_accepted_request_is_kept(store: Store) -> None:
    store.record_request(1000, '{"do": "stop", "run": "gpt"}', NOW)
    (kept,) = store.load_requests()
    assert (kept.who_uid, kept.at) == (1000, NOW)


# ---------------------------------------------------------------- reports


def test_reports_choose_by_run_node_and_time(store: Store) -> None:
    broken = NodeMemory(node="n2", verdict=Verdict.BROKEN)
    store.commit(
        plan(
            run("a"),
            run("b", RunState.FINISHED),
            attempt(1, of="a"),
            attempt(1, of="b"),
            replace(interruption(1, of="a"), detected_at=NOW - timedelta(days=2)),
            interruption(1, of="b"),
            checkpoint(20, of="a"),
            checkpoint(10, of="a", state=CheckpointState.PRUNED),
            event("n1"),
            event("n2"),
            broken,
        ),
        NOW,
    )
    assert [r.name for r in store.load_runs()] == ["a", "b"]
    assert [r.name for r in store.load_runs(all=False)] == ["a"]
    assert [c.step for c in store.load_checkpoints("a")] == [10, 20]
    assert [i.run for i in store.load_interruptions()] == ["a", "b"]
    assert [i.run for i in store.load_interruptions("a")] == ["a"]
    assert [i.run for i in store.load_interruptions(since=NOW - timedelta(days=1))] == ["b"]
    assert [e.node for e in store.load_node_events()] == ["n1", "n2"]
    assert store.load_nodes() == (broken,)


def test_limits_keep_the_newest_and_put_it_last(store: Store) -> None:
    store.commit(plan(*(event(at=NOW + timedelta(seconds=s)) for s in range(5))), NOW)
    assert [e.at for e in store.load_node_events(limit=2)] == [NOW + timedelta(seconds=s) for s in (3, 4)]


def test_pruning_removes_old_lines_and_keeps_what_rates_are_computed_from(store: Store) -> None:
    old, young = NOW - timedelta(days=40), NOW - timedelta(days=20)
    check = CheckRow(node="n1", at=old, result=CheckResult(check="disk", ok=False))
    past = replace(interruption(), detected_at=old)
    store.commit(
        plan(run(), attempt(state=OVER), past, event(at=old), event(at=young), check, intents=(intent(),)), old
    )
    done, still_open = store.commit(plan(intents=(intent("open"),)), old)
    store.settle(done, IntentState.DONE, "", old)
    store.record_request(0, "old", old)
    assert store.prune_history(NOW, keep_days=30) == 4
    assert store.load_interruptions() == (past,)
    assert store.load_node_events() == (event(at=young),)
    assert store.load_intents() == (still_open,)
