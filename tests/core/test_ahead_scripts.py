"""The job of a person's script that is queued ahead: its link, its turn, and what it publishes when it has none."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from slurm.types import JobRecord, JobState
from supervisor.model import (
    Attempt,
    AttemptEnd,
    AttemptState,
    Checkpoint,
    CheckpointState,
    Intent,
    IntentKind,
    LossFault,
    RunState,
    SkippedSamples,
    World,
)
from tests.core.builders import (
    NOW,
    ago,
    attempt,
    attempt_in,
    broken,
    checkpoint,
    checkpoint_view,
    checkpoints_in,
    intents_of,
    job,
    over,
    plan_for,
    snapshot,
    spec,
    view,
    world,
)
from tests.core.test_script_runs import OF

SPEC = replace(spec(checkpoint={"layout": "dcp", "resume_from_complete": True}, restart={"queue_ahead_s": 600}))
RUN = replace(OF, spec=replace(SPEC, command=()))
NEAR = NOW + timedelta(seconds=300)
COMPLETE, FENCED = CheckpointState.COMPLETE, CheckpointState.FENCED


def saved(step: int, **changes: Any) -> Checkpoint:
    return checkpoint(
        step, **{"state": COMPLETE, "path": f"/c/{step}", "stamp": "s", "verified_at": NOW, "attempt": 1, **changes}
    )


def queued(**changes: Any) -> Attempt:
    one = attempt(2, AttemptState.AHEAD, submitted_at=ago(60))
    return replace(one, **{"nodes": (), "started_at": None, "stepped_at": None, **changes})


def begun(**changes: Any) -> Attempt:
    return queued(started_at=ago(20), resume_path="/c/100", resume_step=100, **changes)


def scene(last: Attempt, *aside: Attempt, known: tuple[Checkpoint, ...] = (), **parts: Any) -> World:
    of = parts.pop("of", RUN)
    return replace(world(last, of=of), aside={of.name: aside}, checkpoints={of.name: known}, **parts)


def seen(*jobs: JobRecord, known: tuple[Checkpoint, ...] = (), **parts: Any) -> Any:
    shown = tuple(checkpoint_view(c.step, path=c.path, stamp=c.stamp) for c in known)
    return snapshot(*jobs, view=view(checkpoints=shown), **parts)


def behind(state: JobState = JobState.PENDING, **changes: Any) -> JobRecord:
    return job(2, state, **{"reason": "Dependency", "nodes": (), **changes})


RUNS = behind(JobState.RUNNING, nodes=("n1", "n2", "n3"), start_at=ago(20))
ENDED = over(1, AttemptEnd.TIME_LIMIT, is_job_gone=True)


def links(plan: Any) -> tuple[Intent, ...]:
    return tuple(i for i in intents_of(plan, IntentKind.PROMOTE) if i.key == "link:gpt:2")


def test_it_is_queued_with_the_newest_checkpoint_that_is_read_back() -> None:
    known = (saved(100), saved(200, verified_at=None))
    after = attempt_in(plan_for(scene(attempt(), known=known), seen(job(limit_at=NEAR), known=known)), 2)
    assert (after.state, after.resume_step, after.resume_path) == (AttemptState.AHEAD, 100, "/c/100")


def test_it_is_queued_before_there_is_a_checkpoint() -> None:
    after = attempt_in(plan_for(scene(attempt()), seen(job(limit_at=NEAR))), 2)
    assert (after.state, after.resume_path) == (AttemptState.AHEAD, "")


def test_nothing_is_queued_behind_one_whose_checkpoints_are_all_lost() -> None:
    known = (saved(100, state=CheckpointState.CORRUPT),)
    plan = plan_for(scene(attempt(), known=known), seen(job(limit_at=NEAR)))
    assert intents_of(plan, IntentKind.SUBMIT) == ()


def test_its_link_follows_the_newest_checkpoint_while_it_waits() -> None:
    known = (saved(100), saved(200))
    waiting = queued(resume_path="/c/100", resume_step=100)
    plan = plan_for(scene(attempt(), waiting, known=known), seen(job(limit_at=NEAR), behind(), known=known))
    assert [(i.text, i.step) for i in links(plan)] == [("/c/200", 200)]


def test_its_link_does_not_move_to_what_its_job_may_have_made_since_slurm_last_said_that_it_waits() -> None:
    known = (saved(100), saved(200, first_seen_at=NOW + timedelta(seconds=1)))
    waiting = queued(resume_path="/c/100", resume_step=100)
    plan = plan_for(scene(ENDED, waiting, known=known), seen(behind(), known=known))
    assert links(plan) == ()
    assert {f.record.state for f in plan.facts if isinstance(f.record, Attempt)} <= {AttemptState.AHEAD}


def test_its_link_stays_as_it_is_once_its_job_has_begun() -> None:
    """It may have read the link already."""
    known = (saved(100), saved(200))
    plan = plan_for(scene(attempt(), begun(), known=known), seen(job(limit_at=NEAR), RUNS, known=known))
    assert links(plan) == ()


def test_its_turn_waits_until_the_link_points_at_what_it_is_to_begin_from() -> None:
    known = (saved(100), saved(200))
    moved, old = (queued(resume_path=f"/c/{step}", resume_step=step) for step in (200, 100))
    looks = seen(behind(), known=known)
    early = plan_for(scene(ENDED, old, known=known), looks)
    assert len(links(early)) == 1
    assert {f.record.state for f in early.facts if isinstance(f.record, Attempt)} <= {AttemptState.AHEAD}
    after = attempt_in(plan_for(scene(ENDED, moved, known=known), looks), 2)
    assert (after.state, after.resume_step) == (AttemptState.SUBMITTED, 200)


def test_one_that_has_begun_goes_on_from_what_the_link_pointed_at_then() -> None:
    known = (saved(100), saved(200))
    plan = plan_for(scene(ENDED, begun(), known=known), seen(RUNS, known=known))
    after = attempt_in(plan, 2)
    assert (after.state, after.resume_step, after.started_at) == (AttemptState.RUNNING, 100, ago(20))
    assert intents_of(plan, IntentKind.PROMOTE) == ()


def test_one_whose_job_has_ended_before_anybody_looked_has_been_the_runs_next_attempt() -> None:
    ended = behind(JobState.COMPLETED, nodes=("n1", "n2", "n3"), start_at=ago(20), end_at=ago(5))
    after = attempt_in(plan_for(scene(ENDED, queued()), seen(ended)), 2)
    assert (after.state, after.end) == (AttemptState.RUNNING, None)


def test_a_job_that_never_began_is_not_needed() -> None:
    after = attempt_in(plan_for(scene(attempt(), queued()), seen(job(), behind(JobState.CANCELLED))), 2)
    assert after.end is AttemptEnd.NOT_NEEDED


def test_it_is_not_left_to_begin_at_0_when_the_checkpoint_it_was_to_begin_from_is_gone() -> None:
    lost = (saved(100, state=CheckpointState.CORRUPT),)
    waiting = queued(resume_path="/c/100", resume_step=100)
    plan = plan_for(scene(attempt(), waiting, known=lost), seen(job(limit_at=NEAR), behind()))
    assert attempt_in(plan, 2).end is AttemptEnd.NOT_NEEDED


@pytest.mark.parametrize(
    "parts", [{"nodes": {"n3": broken("n3")}}, {"of": replace(RUN, state=RunState.HELD, reason="why")}]
)
def test_what_one_that_has_begun_in_vain_has_published_does_not_count(parts: dict[str, Any]) -> None:
    """Also what was first seen after it began, before anybody knew of that."""
    before, after = saved(100, first_seen_at=ago(60)), saved(200, first_seen_at=ago(10))
    own = saved(300, attempt=2, first_seen_at=ago(5))
    known = (before, after, own)
    plan = plan_for(scene(ENDED, begun(), known=known, **parts), seen(RUNS, known=known))
    assert attempt_in(plan, 2).end is AttemptEnd.NOT_NEEDED
    states = {c.step: c.state for c in checkpoints_in(plan).values()}
    assert (states.get(100, COMPLETE), states[200], states[300]) == (COMPLETE, FENCED, FENCED)


def test_what_it_publishes_once_it_has_begun_is_its_own_and_fenced_when_it_is_given_up() -> None:
    shown = seen(RUNS, known=(saved(300),))
    assert checkpoints_in(plan_for(scene(attempt(), begun()), shown))[300, 2].state is COMPLETE
    given_up = begun(state=AttemptState.OVER, end=AttemptEnd.NOT_NEEDED, over_at=ago(1), end_detail="held")
    plan = plan_for(scene(attempt(), given_up), shown)
    assert checkpoints_in(plan)[300, 2].state is FENCED
    assert [i.job_id for i in intents_of(plan, IntentKind.CANCEL)] == [given_up.job_id]


def test_one_that_was_given_up_before_it_began_takes_nothing_from_the_running_attempt() -> None:
    given_up = queued(state=AttemptState.OVER, end=AttemptEnd.NOT_NEEDED, over_at=ago(1), is_job_gone=True)
    plan = plan_for(scene(attempt(), given_up), seen(job(), known=(saved(300),)))
    assert checkpoints_in(plan)[300, 1].state is COMPLETE


# ---------------------------------------------------------------- a loss that went wrong meanwhile


def faulty(**changes: Any) -> Attempt:
    fault = LossFault(kind="nan", onset_step=90, step=90, first_sample=10, end_sample=20, is_rolled_back=True)
    return replace(over(1, AttemptEnd.DIVERGED, is_job_gone=True), loss_fault=fault, **changes)


def test_a_job_that_was_submitted_with_other_batches_to_leave_out_is_not_needed() -> None:
    """Its environment was fixed when it was submitted."""
    known = (saved(50), saved(100, state=CheckpointState.SUSPECT))
    plan = plan_for(scene(faulty(), queued(), known=known), seen(behind(), known=known))
    assert attempt_in(plan, 2).end is AttemptEnd.NOT_NEEDED
    told = queued(skip_samples=(SkippedSamples(first=10, end=20),), resume_path="/c/50", resume_step=50)
    plan = plan_for(scene(faulty(), told, known=known), seen(behind(), known=known))
    assert not [f for f in plan.facts if getattr(f.record, "end", None) is AttemptEnd.NOT_NEEDED]


def test_a_job_that_has_begun_from_what_is_suspect_now_is_not_needed() -> None:
    known = (saved(50), saved(100, state=CheckpointState.SUSPECT))
    one = begun(skip_samples=(SkippedSamples(first=10, end=20),))
    plan = plan_for(scene(faulty(), one, known=known), seen(RUNS, known=known))
    assert attempt_in(plan, 2).end is AttemptEnd.NOT_NEEDED
