"""The rules in their order, on whole worlds: what one cycle learns and means."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from slurm.types import JobState, NodeBase
from supervisor.model import (
    Attempt,
    AttemptEnd,
    AttemptState,
    CheckpointState,
    CheckRow,
    IntentKind,
    IntentState,
    Interruption,
    NodeChecks,
    NodeEvent,
    NodeMemory,
    Plan,
    Policy,
    RunState,
    Snapshot,
    Stale,
    Verdict,
    Verification,
    World,
)
from tests.core.builders import (
    LATER,
    NOW,
    STALE,
    ago,
    attempt,
    attempt_in,
    attempts_in,
    broken,
    checkpoint,
    checkpoint_view,
    checkpoints_in,
    cluster,
    exit_record,
    intents_of,
    job,
    launch,
    node,
    node_in,
    over,
    plan_for,
    ports,
    progress,
    records,
    run,
    run_in,
    run_state,
    snapshot,
    spec,
    submit_intent,
    view,
    world,
)
from trainer.contract import CheckResult

SUBMIT, CANCEL, VERIFY, PRUNE = IntentKind.SUBMIT, IntentKind.CANCEL, IntentKind.VERIFY, IntentKind.PRUNE


def submitted(plan: Plan) -> Attempt | None:
    """The attempt that the plan means to submit."""
    meant = intents_of(plan, SUBMIT)
    return attempts_in(plan)[meant[0].attempt or 0] if meant else None


def started_again(plan: Plan) -> bool:
    return submitted(plan) is not None


SEEN_PORTS = ports(n1=0, n2=0, n3=0, n4=0)


# ---------------------------------------------------------------- the first attempt


def test_a_new_run_gets_its_first_attempt() -> None:
    first = submitted(plan_for(world(), snapshot()))
    assert first is not None
    assert (first.number, first.state, first.nodes_wanted, first.resume_path) == (1, AttemptState.PLANNED, 3, "")


def test_every_attempt_has_a_token_of_its_own() -> None:
    first = submitted(plan_for(world(), snapshot()))
    second = submitted(plan_for(world(over(end=AttemptEnd.SAVED)), snapshot()))
    other = submitted(plan_for(world(of=run(created_at=NOW)), snapshot()))
    assert first is not None
    assert second is not None
    assert other is not None
    assert len({first.token, second.token, other.token}) == 3


@pytest.mark.parametrize(
    "seen", [replace(snapshot(), jobs=STALE), replace(snapshot(), nodes=STALE)], ids=["squeue", "scontrol"]
)
def test_no_attempt_is_planned_while_slurm_does_not_answer(seen: Snapshot) -> None:
    plan = plan_for(world(), seen)
    assert not started_again(plan)
    assert plan.notes


@pytest.mark.parametrize("runs", [{}, {"gpt": STALE}], ids=["not read yet", "unreadable"])
def test_no_attempt_is_planned_while_the_run_directory_is_unknown(runs: Any) -> None:
    """No checkpoint seen is not the same as no checkpoint."""
    plan = plan_for(world(), replace(snapshot(), runs=runs))
    assert not started_again(plan)
    assert plan.notes


@pytest.mark.parametrize(
    ("known", "policy"),
    [
        (world(is_paused=True), Policy()),
        (world(of=run(is_paused=True)), Policy()),
        (world(), Policy(is_observe_only=True)),
        (world(of=run(state=RunState.HELD)), Policy()),
    ],
    ids=["service paused", "run paused", "observe only", "held"],
)
def test_no_attempt_is_planned_where_a_person_has_said_so(known: World, policy: Policy) -> None:
    assert not started_again(plan_for(known, snapshot(), policy))


def test_below_the_minimum_the_run_waits_and_says_so() -> None:
    """Case RR-11."""
    plan = plan_for(world(), snapshot(nodes=cluster(1)))
    changed = run_in(plan)
    assert not started_again(plan)
    assert changed is not None
    assert (changed.state, changed.reason) == (RunState.ACTIVE, "waiting: 1 healthy nodes, the minimum is 2")


def test_a_waiting_run_starts_once_a_node_returns_and_no_longer_waits() -> None:
    plan = plan_for(world(of=run(reason="waiting: 1 healthy nodes")), snapshot())
    changed = run_in(plan)
    assert started_again(plan)
    assert changed is not None
    assert changed.reason == ""


def test_a_run_that_is_stopped_before_its_first_attempt_is_stopped() -> None:
    assert run_state(plan_for(world(of=run(state=RunState.STOPPING)), snapshot())) is RunState.STOPPED


# ---------------------------------------------------------------- planned


PLANNED = attempt(state=AttemptState.PLANNED)


def test_a_planned_attempt_is_not_planned_again() -> None:
    plan = plan_for(world(PLANNED, open_intents=(submit_intent(),)), snapshot())
    assert (plan.facts, plan.intents) == ((), ())


def test_a_submission_that_was_never_tried_is_taken_back_by_a_stop() -> None:
    known = world(PLANNED, of=run(state=RunState.STOPPING), open_intents=(submit_intent(),))
    plan = plan_for(known, snapshot())
    assert [i.key for i in plan.withdrawn] == ["submit:gpt:1"]
    assert attempt_in(plan).end is AttemptEnd.STOPPED
    assert run_state(plan) is RunState.STOPPED


def test_a_submission_that_was_tried_is_not_taken_back_because_the_job_may_exist() -> None:
    tried = submit_intent(tries=1, tried_at=ago(3))
    plan = plan_for(world(PLANNED, of=run(state=RunState.STOPPING), open_intents=(tried,)), snapshot())
    assert (plan.withdrawn, attempts_in(plan)) == ((), {})


def test_a_planned_attempt_whose_intent_is_settled_is_ended_by_a_stop() -> None:
    plan = plan_for(world(PLANNED, of=run(state=RunState.STOPPING)), snapshot())
    assert attempt_in(plan).is_over


# ---------------------------------------------------------------- running


def test_a_running_attempt_is_left_alone() -> None:
    seen = snapshot(job(), view=view(progress=progress(), launch=launch()), ports=SEEN_PORTS)
    plan = plan_for(world(attempt(stepped_at=ago(60), last_step=10, phase="step", progress_at=ago(1))), seen)
    assert (plan.facts, plan.intents) == ((), ())


def test_the_first_new_step_ends_an_interruption() -> None:
    was = Interruption(
        run="gpt", attempt=1, kind="crashed", cause="", node=None, is_planned=False, detected_at=ago(90), last_step=30
    )
    second = attempt(2, resume_step=20)
    seen = snapshot(job(2), view=view(2, progress=progress(21, attempt=2), launch=launch(number=2)))
    plan = plan_for(world(over(), second, interruptions=(was,)), seen)
    (after,) = records(plan.facts, Interruption)
    assert (after.resumed_at, after.recovery_s, after.lost_steps) == (NOW, 90, 10)


def test_a_suspected_node_is_watched_with_some_to_compare() -> None:
    seen = snapshot(job(), view=view(progress=progress(), launch=launch({"n1": 0.1, "n2": 2.0})))
    assert plan_for(world(attempt()), seen).probe == {"n1", "n2", "n3", "n4"}


def test_the_final_step_that_the_training_announces_is_kept() -> None:
    plan = plan_for(world(attempt()), snapshot(job(), view=view(progress=progress(final_step=500), launch=launch())))
    changed = run_in(plan)
    assert changed is not None
    assert changed.final_step == 500


def test_a_job_that_has_ended_without_a_word_yet_is_asked_about_again() -> None:
    completing = job(state=None, raw_state="COMPLETING", flags=frozenset({"COMPLETING"}))
    plan = plan_for(world(attempt()), snapshot(completing, view=view(launch=launch())))
    assert plan.ask_slurm
    assert attempts_in(plan).get(1, attempt()).state is AttemptState.RUNNING


# ---------------------------------------------------------------- an end, and what follows


def ends(code: int, **parts: Any) -> Plan:
    """One cycle in which the launcher's exit record is there and the job has ended."""
    checkpoints = parts.pop("checkpoints", [])
    views = tuple(checkpoint_view(c.step, c.attempt) for c in checkpoints)
    one = parts.pop("one", attempt())
    of = parts.pop("of", run())
    seen = snapshot(
        job(one.number, state=JobState.FAILED),
        view=view(one.number, exit=exit_record(code, number=one.number), checkpoints=views, **parts),
        ports=SEEN_PORTS,
    )
    return plan_for(world(*(over(n) for n in range(1, one.number)), one, of=of, checkpoints=checkpoints), seen)


def test_a_power_cut_condemns_the_node_cancels_the_job_and_says_why() -> None:
    report = launch(host="n2", unchanged_s=4.5)  # the batch host: no launcher is left to go on without it
    seen = snapshot(job(), view=view(progress=progress(30), launch=report), ports=ports(n1=0, n2=2.0, n3=0))
    plan = plan_for(world(attempt()), seen)
    ended = attempt_in(plan)
    assert (ended.state, ended.end, ended.over_at) == (AttemptState.OVER, AttemptEnd.NODE_SILENT, NOW)
    memory = node_in(plan, "n2")
    assert memory is not None
    assert memory.verdict is Verdict.BROKEN
    assert [i.job_id for i in intents_of(plan, CANCEL)] == [101]
    assert [i.node for i in intents_of(plan, IntentKind.DRAIN)] == ["n2"]
    (interruption,) = records(plan.facts, Interruption)
    assert (interruption.kind, interruption.node, interruption.last_step) == ("node_silent", "n2", 30)
    assert not started_again(plan)


@pytest.mark.parametrize(
    ("code", "state", "interrupted"),
    [
        (0, RunState.FINISHED, False),
        (93, RunState.HELD, True),
        (75, None, True),
        (1, None, True),
    ],
)
def test_an_exit_decides_what_becomes_of_the_run(code: int, state: RunState | None, interrupted: bool) -> None:
    plan = ends(code)
    assert run_state(plan) is state
    assert bool(records(plan.facts, Interruption)) is interrupted
    assert started_again(plan) is (state is None)


def test_a_finished_run_is_told() -> None:
    assert [i.text for i in intents_of(ends(0), IntentKind.NOTIFY)] == ["run gpt is finished: ended"]


def test_a_held_run_is_told_with_its_reason() -> None:
    (told,) = intents_of(ends(93), IntentKind.NOTIFY)
    assert "can't cure" in told.text


def test_a_planned_end_is_no_failure_of_anything() -> None:
    (interruption,) = records(ends(75).facts, Interruption)
    assert interruption.is_planned


def test_what_was_published_before_this_very_look_still_counts() -> None:
    seen = snapshot(
        job(state=JobState.FAILED),
        view=view(exit=exit_record(1), checkpoints=(checkpoint_view(100),)),
        ports=SEEN_PORTS,
    )
    assert checkpoints_in(plan_for(world(attempt()), seen))[100, 1].state is CheckpointState.COMPLETE


def test_an_attempt_that_vanished_while_the_run_directory_hung_loses_nothing_that_it_published() -> None:
    hung = replace(snapshot(), runs={"gpt": Stale(why="hangs", since_at=ago(60))})
    assert attempts_in(plan_for(world(attempt()), hung)) == {}
    back = snapshot(view=view(checkpoints=(checkpoint_view(100),)), ports=SEEN_PORTS)
    plan = plan_for(world(attempt()), back)
    assert attempt_in(plan).end is AttemptEnd.VANISHED
    assert checkpoints_in(plan)[100, 1].state is CheckpointState.COMPLETE


def test_a_rejected_checkpoint_is_counted_and_the_second_time_walked_back_over() -> None:
    resumes = attempt(2, resume_step=200, resume_path=str(checkpoint(200).path))
    once = ends(78, one=resumes, checkpoints=[checkpoint(100), checkpoint(200)])
    assert checkpoints_in(once)[200, 1].load_failures == 1
    twice = ends(78, one=resumes, checkpoints=[checkpoint(100), checkpoint(200, load_failures=1)])
    assert checkpoints_in(twice)[200, 1].state is CheckpointState.CORRUPT
    again = submitted(twice)
    assert again is not None
    assert again.resume_step == 100


def test_a_run_is_held_after_three_attempts_without_progress() -> None:
    plan = ends(1, one=attempt(3))
    changed = run_in(plan)
    assert changed is not None
    assert changed.state is RunState.HELD
    assert "3 attempts without a newer verified checkpoint" in changed.reason


def test_a_released_run_starts_again_from_where_it_was() -> None:
    released = run(released_at=ago(10))
    plan = plan_for(world(over(1), over(2), over(3), of=released), snapshot(view=view(3), ports=SEEN_PORTS))
    assert started_again(plan)
    assert run_state(plan) in (None, RunState.ACTIVE)


def test_a_stop_cancels_the_job_and_waits_for_nothing_else() -> None:
    plan = plan_for(world(attempt(), of=run(state=RunState.STOPPING)), snapshot(job(), view=view(launch=launch())))
    assert attempt_in(plan).end is AttemptEnd.STOPPED
    assert [i.job_id for i in intents_of(plan, CANCEL)] == [101]
    assert run_state(plan) is RunState.STOPPED
    assert records(plan.facts, Interruption) == []


# ---------------------------------------------------------------- the job of an ended attempt


NOT_GONE = over(is_job_gone=False)


def test_no_new_attempt_while_the_job_of_the_last_one_is_live() -> None:
    plan = plan_for(world(NOT_GONE), snapshot(job(), view=view(), ports=SEEN_PORTS))
    assert not started_again(plan)
    assert [i.job_id for i in intents_of(plan, CANCEL)] == [101]


@pytest.mark.parametrize(
    "seen_job",
    [
        job(state=JobState.CANCELLED),
        job(state=None, flags=frozenset({"COMPLETING"})),
        job(comment="sup:other:9", submit_at=ago(300)),
    ],
    ids=["ended", "completing", "another job under the same id"],
)
def test_a_job_that_slurm_runs_no_more_is_gone(seen_job: Any) -> None:
    plan = plan_for(world(NOT_GONE), snapshot(seen_job, view=view(), ports=SEEN_PORTS))
    assert attempt_in(plan).is_job_gone
    assert intents_of(plan, CANCEL) == ()
    assert started_again(plan)


def test_a_job_that_squeue_no_longer_lists_is_gone() -> None:
    assert attempt_in(plan_for(world(NOT_GONE), snapshot(view=view()))).is_job_gone


def test_a_job_is_not_gone_because_squeue_did_not_answer() -> None:
    plan = plan_for(world(NOT_GONE), replace(snapshot(view=view()), jobs=STALE))
    assert attempts_in(plan) == {}


def test_a_job_is_not_gone_in_an_answer_from_before_it_was_submitted() -> None:
    young = over(is_job_gone=False, submitted_at=ago(3))
    assert attempts_in(plan_for(world(young), snapshot(view=view()))) == {}


def test_somebody_elses_job_under_a_wrapped_id_is_not_cancelled() -> None:
    young = over(is_job_gone=False, submitted_at=ago(3))
    plan = plan_for(world(young), snapshot(job(comment="sup:other:9"), view=view()))
    assert (attempts_in(plan), intents_of(plan, CANCEL)) == ({}, ())


def test_an_ended_attempt_without_a_job_has_none_to_wait_for() -> None:
    assert attempt_in(plan_for(world(over(is_job_gone=False, job_id=None)), snapshot(view=view()))).is_job_gone


def test_a_launcher_that_wrote_its_exit_record_gets_time_to_end_by_itself() -> None:
    ending = over(is_job_gone=False, exit_code=75, over_at=ago(5))
    assert intents_of(plan_for(world(ending), snapshot(job(), view=view())), CANCEL) == ()
    hanging = over(is_job_gone=False, exit_code=75, over_at=ago(11))
    assert intents_of(plan_for(world(hanging), snapshot(job(), view=view())), CANCEL) != ()


def cancelled(at: Any) -> Any:
    done = submit_intent(1, kind=CANCEL, key="cancel:101", job_id=101, state=IntentState.DONE)
    return replace(done, settled_at=at)


def test_an_answer_that_may_be_older_than_the_cancel_does_not_repeat_it() -> None:
    known = world(NOT_GONE, settled_intents=(cancelled(ago(2)),))
    assert intents_of(plan_for(known, snapshot(job(), view=view())), CANCEL) == ()
    blind = replace(snapshot(view=view()), jobs=STALE)
    assert intents_of(plan_for(world(NOT_GONE, settled_intents=(cancelled(ago(99)),)), blind), CANCEL) == ()


def test_a_job_that_outlives_its_cancel_is_cancelled_again() -> None:
    known = world(NOT_GONE, settled_intents=(cancelled(ago(60)), replace(cancelled(ago(2)), job_id=7)))
    assert [i.job_id for i in intents_of(plan_for(known, snapshot(job(), view=view())), CANCEL)] == [101]


def test_while_paused_only_what_a_person_stopped_is_cancelled() -> None:
    seen = snapshot(job(), view=view())
    assert intents_of(plan_for(world(NOT_GONE, is_paused=True), seen), CANCEL) == ()
    stopped = over(end=AttemptEnd.STOPPED, is_job_gone=False)
    assert intents_of(plan_for(world(stopped, is_paused=True), seen), CANCEL) != ()


# ---------------------------------------------------------------- a second job of one attempt


TWIN = job(job_id=150)


def test_a_second_job_of_one_attempt_is_cancelled() -> None:
    """A lost sbatch request may arrive long after it was looked up in vain and sent again."""
    plan = plan_for(world(attempt()), snapshot(job(), TWIN, view=view(launch=launch())))
    assert [(i.job_id, i.attempt) for i in intents_of(plan, CANCEL)] == [(150, 1)]


def test_a_late_job_of_an_attempt_that_is_over_is_cancelled() -> None:
    plan = plan_for(world(over(job_id=None), attempt(2)), snapshot(job(2), TWIN, view=view(2, launch=launch(number=2))))
    assert [i.job_id for i in intents_of(plan, CANCEL)] == [150]


@pytest.mark.parametrize(
    "other",
    [
        replace(TWIN, state=JobState.CANCELLED),
        replace(TWIN, comment="sup:other:1"),
        replace(TWIN, name="somebody-elses"),
    ],
    ids=["ended", "another token", "another name"],
)
def test_a_job_that_is_no_live_twin_is_left_alone(other: Any) -> None:
    assert intents_of(plan_for(world(attempt()), snapshot(job(), other, view=view(launch=launch()))), CANCEL) == ()


def test_the_job_of_a_planned_attempt_is_no_twin_but_its_own_to_be_adopted() -> None:
    known = world(PLANNED, open_intents=(submit_intent(tries=1, tried_at=ago(1)),))
    assert intents_of(plan_for(known, snapshot(job())), CANCEL) == ()


def test_a_twin_that_was_cancelled_just_now_is_not_cancelled_again() -> None:
    known = world(attempt(), settled_intents=(replace(cancelled(ago(2)), job_id=150),))
    assert intents_of(plan_for(known, snapshot(job(), TWIN, view=view(launch=launch()))), CANCEL) == ()


@pytest.mark.parametrize(("age_s", "is_tried"), [(60, False), (400, True)])
def test_a_job_that_slurm_would_not_let_the_owner_cancel_is_left_alone_for_minutes(
    age_s: int, *, is_tried: bool
) -> None:
    """Anybody can put our token into the comment of a job of their own."""
    refused = replace(cancelled(ago(age_s)), job_id=150, state=IntentState.REFUSED)
    plan = plan_for(world(attempt(), settled_intents=(refused,)), snapshot(job(), TWIN, view=view(launch=launch())))
    assert bool(intents_of(plan, CANCEL)) is is_tried


# ---------------------------------------------------------------- the next attempt


def restart(*attempts: Attempt, checkpoints: Any = (), nodes: Any = None, **parts: Any) -> Plan:
    of = parts.pop("of", run())
    memories = parts.pop("memories", ())
    views = tuple(checkpoint_view(c.step, c.attempt, size_bytes=c.size_bytes) for c in checkpoints)
    seen = snapshot(view=view(len(attempts), checkpoints=views), nodes=nodes, ports=parts.pop("ports", SEEN_PORTS))
    return plan_for(world(*attempts, of=of, checkpoints=checkpoints, nodes=memories), seen, **parts)


def test_the_next_attempt_resumes_from_the_newest_verified_checkpoint() -> None:
    again = submitted(restart(over(), checkpoints=[checkpoint(100), checkpoint(200)]))
    assert again is not None
    assert (again.number, again.resume_step) == (2, 200)
    assert again.resume_path == "/shared/runs/gpt/checkpoints/step-200.a1"


def test_the_checkpoint_is_read_back_before_the_restart() -> None:
    plan = restart(over(), checkpoints=[checkpoint(100, verified_at=ago(300))])
    assert not started_again(plan)
    assert [(i.step, i.attempt) for i in intents_of(plan, VERIFY)] == [(100, 1)]


def test_a_flipped_byte_found_by_reading_back_leads_to_the_checkpoint_before() -> None:
    bad = Verification(run="gpt", step=200, attempt=1, ok=False, detail="shard 1 differs", started_at=NOW)
    known = world(over(), checkpoints=[checkpoint(100), checkpoint(200, verified_at=ago(300))])
    seen = snapshot(
        view=view(checkpoints=(checkpoint_view(100), checkpoint_view(200))), ports=SEEN_PORTS, verifications=(bad,)
    )
    plan = plan_for(known, seen)
    again = submitted(plan)
    assert again is not None
    assert again.resume_step == 100
    assert checkpoints_in(plan)[200, 1].state is CheckpointState.CORRUPT
    assert [i.run for i in intents_of(plan, IntentKind.NOTIFY)] == ["gpt"]


def test_a_run_whose_checkpoints_are_all_refused_is_held_and_not_started_at_zero() -> None:
    plan = restart(over(), checkpoints=[checkpoint(100, state=CheckpointState.CORRUPT)])
    assert not started_again(plan)
    assert run_state(plan) is RunState.HELD


def test_broken_nodes_are_excluded_and_the_run_goes_on_with_fewer() -> None:
    plan = restart(over(), memories=[broken("n1", is_drained_by_us=True), broken("n2", is_drained_by_us=True)])
    again = submitted(plan)
    assert again is not None
    assert (again.nodes_wanted, again.exclude) == (2, ("n1", "n2"))


def test_the_second_failure_in_a_row_waits_for_its_back_off() -> None:
    failed = [over(1), over(2, over_at=ago(5))]
    assert not started_again(restart(*failed))
    assert started_again(restart(*failed, now=NOW + timedelta(seconds=11)))


def test_the_plan_wakes_when_the_back_off_is_over() -> None:
    plan = restart(over(1), over(2, over_at=ago(5)), now=NOW)
    assert 0 < plan.wake_after_s <= 10


def test_the_ports_of_the_next_nodes_are_looked_at_before_a_restart() -> None:
    failed = over(over_at=ago(1))
    blind = restart(failed, ports={})
    assert not started_again(blind)
    assert blind.probe == {"n1", "n2", "n3", "n4"}


def test_the_look_at_the_ports_is_not_waited_for_long() -> None:
    assert started_again(restart(over(over_at=ago(4)), ports={}))


def test_after_a_planned_end_no_port_needs_a_look() -> None:
    assert started_again(restart(over(end=AttemptEnd.SAVED, over_at=ago(1)), ports={}))


def test_a_node_whose_port_is_silent_is_left_out_of_the_next_attempt() -> None:
    again = submitted(restart(over(), ports=ports(n1=0, n2=3.0, n3=0, n4=0)))
    assert again is not None
    assert (again.nodes_wanted, again.exclude) == (3, ("n2",))


def test_the_nodes_of_the_last_attempt_are_looked_at_first_where_there_are_many() -> None:
    many = cluster(100, *(node(n, NodeBase.ALLOCATED) for n in ("n1", "n2")))
    plan = plan_for(world(over()), snapshot(view=view(), nodes=many))
    assert {"n1", "n2"} <= plan.probe
    assert len(plan.probe) < 70


# ---------------------------------------------------------------- checkpoints beside a running training


def beside(*known: Any, views: Any = None, policy: Policy | None = None, **parts: Any) -> Plan:
    views = (
        tuple(checkpoint_view(c.step, c.attempt, size_bytes=c.size_bytes) for c in known) if views is None else views
    )
    one = parts.pop("one", attempt())
    of = parts.pop("of", run())
    seen = snapshot(job(), view=view(launch=launch(), progress=progress(), checkpoints=views), **parts.pop("seen", {}))
    return plan_for(world(one, of=of, checkpoints=known, **parts), seen, policy)


def test_a_new_checkpoint_is_read_back_beside_the_training() -> None:
    plan = beside(views=(checkpoint_view(100),))
    assert [i.step for i in intents_of(plan, VERIFY)] == [100]


def test_a_checkpoint_too_large_for_the_head_node_is_left_to_the_jobs_nodes() -> None:
    assert intents_of(beside(checkpoint(100, state=CheckpointState.COMPLETE, size_bytes=10**15)), VERIFY) == ()


def test_a_reading_that_has_ended_closes_its_intent() -> None:
    known = checkpoint(100, state=CheckpointState.COMPLETE)
    result = Verification(run="gpt", step=100, attempt=1, ok=True, detail="", started_at=NOW)
    reading = submit_intent(1, kind=VERIFY, key="verify:gpt:100:1", step=100)
    plan = beside(known, open_intents=(reading,), seen={"verifications": (result,)})
    assert [(i.key, i.state) for i in plan.settled] == [("verify:gpt:100:1", IntentState.DONE)]
    assert checkpoints_in(plan)[100, 1].state is CheckpointState.VERIFIED


def test_a_reading_that_nobody_waits_for_any_more_is_still_learnt_from() -> None:
    result = Verification(run="gpt", step=100, attempt=1, ok=True, detail="", started_at=NOW)
    plan = beside(checkpoint(100, state=CheckpointState.COMPLETE), seen={"verifications": (result,)})
    assert (checkpoints_in(plan)[100, 1].state, plan.settled) == (CheckpointState.VERIFIED, ())


def test_a_reading_that_failed_leaves_its_intent_open() -> None:
    result = Verification(run="gpt", step=100, attempt=1, ok=None, detail="ESTALE", started_at=NOW)
    plan = beside(checkpoint(100, state=CheckpointState.COMPLETE), seen={"verifications": (result,)})
    assert (plan.settled, checkpoints_in(plan)) == ((), {})
    assert any("ESTALE" in n for n in plan.notes)


def test_a_reading_of_a_checkpoint_that_the_ledger_does_not_know_is_dropped() -> None:
    result = Verification(run="gpt", step=7, attempt=1, ok=True, detail="", started_at=NOW)
    assert checkpoints_in(beside(seen={"verifications": (result,)})) == {}


FOUR = [checkpoint(s) for s in (100, 200, 300, 400)]


def test_old_checkpoints_are_pruned_beside_the_training() -> None:
    assert [i.step for i in intents_of(beside(*FOUR), PRUNE)] == [100]


def test_the_checkpoint_that_a_live_attempt_is_pointed_at_is_not_pruned() -> None:
    """Case CK-07."""
    resumes = attempt(resume_step=100, resume_path=checkpoint(100).path)
    assert intents_of(beside(*FOUR, one=resumes), PRUNE) == ()


def test_nothing_is_pruned_while_paused_or_only_observing_or_blind() -> None:
    assert intents_of(beside(*FOUR, is_paused=True), PRUNE) == ()
    assert intents_of(beside(*FOUR, policy=Policy(is_observe_only=True)), PRUNE) == ()
    assert intents_of(beside(*FOUR, seen={"runs": {"gpt": STALE}}), PRUNE) == ()


def test_a_checkpoint_that_is_gone_from_disk_alarms_nobody() -> None:
    plan = beside(checkpoint(100), views=())
    assert checkpoints_in(plan)[100, 1].state is CheckpointState.CORRUPT
    assert intents_of(plan, IntentKind.NOTIFY) == ()


def test_a_checkpoint_that_was_refused_already_is_not_told_again() -> None:
    resumes = attempt(2, resume_step=100, resume_path=checkpoint(100).path)
    plan = ends(78, one=resumes, checkpoints=[checkpoint(100, state=CheckpointState.CORRUPT, load_failures=5)])
    assert not [i for i in intents_of(plan, IntentKind.NOTIFY) if i.key.startswith("notify:corrupt")]


# ---------------------------------------------------------------- pace


def test_a_running_attempt_is_looked_at_every_cycle() -> None:
    assert beside(one=attempt(stepped_at=ago(9), last_step=10, phase="step")).wake_after_s == 1.0


def test_a_starting_attempt_is_looked_at_twice_as_often() -> None:
    assert beside(views=(), one=attempt(resume_step=50)).wake_after_s == 0.5


def test_an_idle_service_looks_now_and_then() -> None:
    assert plan_for(World(), snapshot()).wake_after_s == Policy().idle_interval_s


def test_times_pass_only_by_the_given_now() -> None:
    """Case HD-06: an answer's age is compared with instants of the same clock; a later now alone ends nothing."""
    seen = snapshot(job(), view=view(progress=progress(), launch=launch()))
    plan = plan_for(world(attempt()), seen, now=LATER)
    assert attempts_in(plan).get(1, attempt()).state is AttemptState.RUNNING


def test_runs_do_not_disturb_each_other() -> None:
    other = run(spec=replace(spec(), name="bert"))
    known = replace(world(attempt()), runs=(run(), other), attempts={"gpt": (attempt(),)})
    base = snapshot(job(), view=view(progress=progress(), launch=launch()))
    seen = replace(base, runs={**base.runs, "bert": base.runs["gpt"]})
    plan = plan_for(known, seen)
    assert [i.run for i in intents_of(plan, SUBMIT)] == ["bert"]


# ---------------------------------------------------------------- evidence on nodes


def sweep(before: NodeMemory, *results: CheckResult) -> Plan:
    checks = NodeChecks(node=before.node, at=NOW, results=results)
    return plan_for(world(nodes=[before]), replace(snapshot(), sweeps=(checks,)))


def test_the_ledger_keeps_results_that_failed_or_that_passed_again() -> None:
    results = (
        CheckResult(check="disk", ok=False),
        CheckResult(check="shm", ok=True),
        CheckResult(check="clock", ok=True),
    )
    plan = sweep(NodeMemory(node="n1", failing=("shm",), failed_sweeps=1), *results)
    assert [(r.result.check, r.result.ok) for r in records(plan.facts, CheckRow)] == [("disk", False), ("shm", True)]


def test_results_that_do_not_change_are_not_kept_again() -> None:
    before = NodeMemory(node="n1", failing=("disk",), failed_sweeps=1)
    assert records(sweep(before, CheckResult(check="disk", ok=False)).facts, CheckRow) == []


def test_a_change_of_verdict_is_an_event_in_the_nodes_history() -> None:
    plan = sweep(NodeMemory(node="n1"), CheckResult(check="disk", ok=False, detail="full"))
    assert [e.event for e in records(plan.facts, NodeEvent)] == ["node.judged_suspect"]


def test_a_node_that_is_broken_already_is_condemned_no_second_time() -> None:
    report = launch(host="n2", unchanged_s=4.5)  # the batch host: no launcher is left to go on without it
    seen = snapshot(job(), view=view(progress=progress(30), launch=report), ports=ports(n1=0, n2=2.0, n3=0))
    plan = plan_for(world(attempt(), nodes=[broken("n2", is_drained_by_us=True)]), seen)
    assert attempt_in(plan).is_over
    assert records(plan.facts, NodeEvent) == []


def test_a_run_that_is_held_already_is_not_held_again() -> None:
    seen = snapshot(job(state=JobState.FAILED), view=view(exit=exit_record(93)))
    plan = plan_for(world(attempt(), of=run(state=RunState.HELD, reason="by a person")), seen)
    assert attempt_in(plan).end is AttemptEnd.DO_NOT_RESTART
    assert run_in(plan) is None


def test_files_of_a_run_that_cannot_be_used_are_its_reason_until_they_can_and_hide_no_other_reason() -> None:
    odd = view(unreadable=("progress/a1.json: no JSON", "attempts/1/launch.json: too large"))
    seen = run_in(plan_for(world(attempt()), snapshot(job(), view=odd)))
    assert seen is not None
    assert seen.reason == "files of the run can't be used: progress/a1.json: no JSON (and 1 more)"
    assert run_in(plan_for(world(attempt(), of=seen), snapshot(job(), view=odd))) is None  # said once
    mended = run_in(plan_for(world(attempt(), of=seen), snapshot(job(), view=view())))
    assert mended is not None
    assert mended.reason == ""
    waiting = run(reason="waiting: for a person")
    assert run_in(plan_for(world(attempt(), of=waiting), snapshot(job(), view=odd))) is None
