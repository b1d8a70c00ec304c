"""The attempt that is queued ahead: when it is submitted, when its turn comes, and when it is not needed."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from slurm.types import JobFlag, JobRecord, JobState
from supervisor.model import (
    Attempt,
    AttemptEnd,
    AttemptState,
    CheckpointState,
    IntentKind,
    Plan,
    Policy,
    Run,
    RunState,
    World,
)
from tests.core.builders import (
    NOW,
    STALE,
    ago,
    attempt,
    attempt_in,
    broken,
    checkpoint,
    cluster,
    intents_of,
    job,
    over,
    plan_for,
    run,
    run_in,
    snapshot,
    spec,
    submit_intent,
    view,
    world,
)
from tests.core.builders import checkpoint_view as shown

AHEAD_RUN = run(spec=spec(restart={"queue_ahead_s": 600.0}))
NEAR, FAR = NOW + timedelta(seconds=300), NOW + timedelta(seconds=900)


def queued(**changes: Any) -> Attempt:
    """Attempt 2, behind attempt 1."""
    return replace(attempt(2, AttemptState.AHEAD), **{"nodes": (), "started_at": None, "stepped_at": None, **changes})


def scene(last: Attempt, *aside: Attempt, of: Run = AHEAD_RUN, **parts: Any) -> World:
    return replace(world(last, of=of), aside={of.name: aside}, **parts)


def behind(state: JobState = JobState.PENDING, **changes: Any) -> JobRecord:
    return job(2, state, **{"reason": "Dependency", "nodes": (), **changes})


def ended() -> Attempt:
    return over(1, AttemptEnd.TIME_LIMIT, is_job_gone=True)


def test_the_next_job_is_queued_when_the_time_limit_is_near() -> None:
    plan = plan_for(scene(attempt()), snapshot(job(limit_at=NEAR)))
    after = attempt_in(plan, 2)
    assert (after.state, after.job_id, after.nodes_wanted) == (AttemptState.AHEAD, None, 3)
    assert [i.key for i in intents_of(plan, IntentKind.SUBMIT)] == ["submit:gpt:2"]


@pytest.mark.parametrize(
    ("of", "one"),
    [
        (AHEAD_RUN, job(limit_at=FAR)),
        (AHEAD_RUN, job(limit_at=None)),
        (AHEAD_RUN, job(state=JobState.SUSPENDED, limit_at=NEAR)),
        (run(), job(limit_at=NEAR)),
        (replace(AHEAD_RUN, is_paused=True), job(limit_at=NEAR)),
        (replace(AHEAD_RUN, state=RunState.HELD), job(limit_at=NEAR)),
    ],
)
def test_nothing_is_queued_ahead_otherwise(of: Run, one: JobRecord) -> None:
    assert intents_of(plan_for(scene(attempt(), of=of), snapshot(one)), IntentKind.SUBMIT) == ()


def test_nothing_is_queued_ahead_while_only_observing() -> None:
    plan = plan_for(scene(attempt()), snapshot(job(limit_at=NEAR)), Policy(is_observe_only=True))
    assert intents_of(plan, IntentKind.SUBMIT) == ()


@pytest.mark.parametrize("other", [queued(), queued(state=AttemptState.OVER, end=AttemptEnd.NOT_NEEDED)])
def test_one_is_queued_ahead_and_no_second_one_behind_the_same_attempt(other: Attempt) -> None:
    plan = plan_for(scene(attempt(), other), snapshot(job(limit_at=NEAR), behind()))
    assert intents_of(plan, IntentKind.SUBMIT) == ()


def test_its_turn_comes_when_the_attempt_before_it_is_over_and_it_resumes_from_the_newest_checkpoint() -> None:
    known = scene(ended(), queued(), checkpoints={"gpt": (checkpoint(200, verified_at=NOW),)})
    plan = plan_for(known, snapshot(behind(), view=view(checkpoints=(shown(200),))))
    after = attempt_in(plan, 2)
    assert (after.state, after.resume_step) == (AttemptState.SUBMITTED, 200)
    assert after.resume_path
    assert [i.attempt for i in intents_of(plan, IntentKind.PROMOTE)] == [2]
    assert intents_of(plan, IntentKind.SUBMIT) == ()


def test_a_reason_to_wait_is_gone_once_its_turn_has_come() -> None:
    waited = replace(AHEAD_RUN, reason="waiting: checkpoint step 200 is read back before the restart")
    after = run_in(plan_for(scene(ended(), queued(), of=waited), snapshot(behind())))
    assert after is not None
    assert after.reason == ""


def test_nothing_is_queued_ahead_while_too_few_nodes_are_healthy() -> None:
    plan = plan_for(scene(attempt()), snapshot(job(limit_at=NEAR), nodes=cluster(1)))
    assert intents_of(plan, IntentKind.SUBMIT) == ()


def test_its_turn_waits_until_the_checkpoint_is_read_back() -> None:
    known = scene(ended(), queued(), checkpoints={"gpt": (checkpoint(200, state=CheckpointState.COMPLETE),)})
    plan = plan_for(known, snapshot(behind(), view=view(checkpoints=(shown(200),))))
    assert intents_of(plan, IntentKind.PROMOTE) == ()
    assert intents_of(plan, IntentKind.VERIFY)


def test_its_turn_waits_until_the_job_before_it_is_gone() -> None:
    known = scene(over(1, AttemptEnd.SAVED, is_job_gone=False), queued())
    assert intents_of(plan_for(known, snapshot(job(), behind())), IntentKind.PROMOTE) == ()


def test_one_whose_submission_is_not_settled_goes_on_as_a_planned_one() -> None:
    known = scene(ended(), queued(job_id=None, submitted_at=None), open_intents=(submit_intent(2, tries=1),))
    plan = plan_for(known, snapshot())
    assert attempt_in(plan, 2).state is AttemptState.PLANNED
    assert plan.withdrawn == ()


@pytest.mark.parametrize("state", [RunState.HELD, RunState.STOPPED, RunState.FINISHED])
def test_it_is_ended_without_a_failure_when_the_run_does_not_go_on(state: RunState) -> None:
    known = scene(ended(), queued(), of=replace(AHEAD_RUN, state=state))
    after = attempt_in(plan_for(known, snapshot(behind())), 2)
    assert (after.end, after.is_job_gone) == (AttemptEnd.NOT_NEEDED, False)


def test_the_job_of_one_that_is_not_needed_is_cancelled_and_holds_the_next_attempt_up_until_it_is_gone() -> None:
    unneeded = queued(state=AttemptState.OVER, end=AttemptEnd.NOT_NEEDED, over_at=ago(1), end_detail="held")
    plan = plan_for(scene(ended(), unneeded), snapshot(behind()))
    assert [i.job_id for i in intents_of(plan, IntentKind.CANCEL)] == [unneeded.job_id]
    assert intents_of(plan, IntentKind.SUBMIT) == ()


def test_a_cancelled_attempt_holds_the_run_and_ends_the_one_behind_it() -> None:
    known = scene(attempt(), queued())
    plan = plan_for(known, snapshot(job(state=JobState.CANCELLED), behind()))
    assert attempt_in(plan, 1).end is AttemptEnd.CANCELLED
    assert attempt_in(plan, 2).end is AttemptEnd.NOT_NEEDED


@pytest.mark.parametrize(
    "one",
    [
        behind(JobState.CANCELLED),
        behind(restarts=1),
        behind(flags=frozenset({JobFlag.REQUEUED})),
    ],
)
def test_it_is_not_needed_any_more_when_its_own_job_does_not_wait_as_it_should(one: JobRecord) -> None:
    plan = plan_for(scene(attempt(), queued()), snapshot(job(limit_at=NEAR), one))
    assert attempt_in(plan, 2).end is AttemptEnd.NOT_NEEDED


def test_it_is_not_needed_any_more_when_slurm_does_not_know_its_job() -> None:
    plan = plan_for(scene(attempt(), queued(submitted_at=ago(60))), snapshot(job(limit_at=NEAR)))
    assert attempt_in(plan, 2).end is AttemptEnd.NOT_NEEDED


def test_a_silent_squeue_ends_nothing() -> None:
    plan = plan_for(scene(attempt(), queued(submitted_at=ago(60))), replace(snapshot(), jobs=STALE))
    assert not [f for f in plan.facts if isinstance(f.record, Attempt) and f.record.number == 2]


def test_a_node_that_was_condemned_since_must_not_be_given_to_it() -> None:
    known = scene(attempt(), queued(), nodes={"n3": broken("n3")})
    assert attempt_in(plan_for(known, snapshot(job(limit_at=NEAR), behind())), 2).end is AttemptEnd.NOT_NEEDED
    excluded = scene(attempt(), queued(exclude=("n3",)), nodes={"n3": broken("n3")})
    plan = plan_for(excluded, snapshot(job(limit_at=NEAR), behind()))
    assert not [f for f in plan.facts if isinstance(f.record, Attempt) and f.record.number == 2]


def test_one_that_wants_more_nodes_than_are_healthy_gives_way_to_a_smaller_one() -> None:
    known = scene(ended(), queued(nodes_wanted=2))
    seen = snapshot(behind(), nodes=cluster(1))
    assert attempt_in(plan_for(known, seen), 2).end is AttemptEnd.NOT_NEEDED


def test_a_submission_that_was_never_tried_is_taken_back() -> None:
    known = scene(
        ended(),
        queued(job_id=None, submitted_at=None),
        of=replace(AHEAD_RUN, state=RunState.HELD),
        open_intents=(submit_intent(2),),
    )
    plan = plan_for(known, snapshot())
    assert [i.key for i in plan.withdrawn] == ["submit:gpt:2"]
    assert attempt_in(plan, 2).is_job_gone


def test_a_submission_that_was_tried_is_settled_before_it_is_ended() -> None:
    known = scene(
        ended(),
        queued(job_id=None, submitted_at=None),
        of=replace(AHEAD_RUN, state=RunState.HELD),
        open_intents=(submit_intent(2, tries=1),),
    )
    plan: Plan = plan_for(known, snapshot())
    assert plan.withdrawn == ()
    assert not [f for f in plan.facts if isinstance(f.record, Attempt) and f.record.number == 2]


def test_what_was_not_needed_is_no_failure_and_its_number_is_not_used_again() -> None:
    unneeded = queued(state=AttemptState.OVER, end=AttemptEnd.NOT_NEEDED, over_at=ago(1), is_job_gone=True)
    plan = plan_for(scene(ended(), unneeded), snapshot())
    assert [i.attempt for i in intents_of(plan, IntentKind.SUBMIT)] == [3]
