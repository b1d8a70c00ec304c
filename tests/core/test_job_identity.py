"""Whose a job is, whatever its comment, its name or its number says: ids come round, comments are anybody's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slurm.types import JobFlag, JobRecord, JobState
from supervisor.core.ends import judge_end
from supervisor.core.identity import fold_submission, is_own
from supervisor.model import Attempt, AttemptEnd, AttemptState, Intent, IntentKind, IntentState, Policy, RunState
from tests.core.builders import RUN, ago, attempt, attempts_in, intents_of, job, over, plan_for, run, snapshot, world
from tests.core.builders import sight as sight_of

SEEN = attempt()
UNSEEN = attempt(state=AttemptState.SUBMITTED, slurm_submit_at=None, slurm_user="ann")
OURS = job(user="ann")


@pytest.mark.parametrize("comment", ["", "a note", "sup:other:1"])
@pytest.mark.parametrize("name", ["gpt", "other"])
@pytest.mark.parametrize("one", [SEEN, UNSEEN], ids=["seen", "not seen yet"])
def test_neither_another_comment_nor_another_name_makes_a_job_anothers(one: Attempt, comment: str, name: str) -> None:
    assert is_own(replace(OURS, comment=comment, name=name), one, RUN)


@pytest.mark.parametrize(
    "theirs",
    [
        replace(OURS, comment="x", submit_at=ago(300)),
        replace(OURS, comment="", submit_at=ago(9 * 365 * 86400)),
        replace(OURS, comment="x", user="bob"),
        replace(OURS, comment="", name="gpt", user="bob"),
        replace(OURS, comment="x", user="bob", submit_at=ago(100), restarts=1),
    ],
    ids=["later", "years ago", "another user", "another user's of our name", "another user's, requeued"],
)
@pytest.mark.parametrize("one", [SEEN, replace(UNSEEN, job_id=101)], ids=["seen", "not seen yet"])
def test_a_number_that_was_given_out_again_is_anothers(one: Attempt, theirs: JobRecord) -> None:
    """Case SB-11."""
    if one is SEEN or theirs.comment:
        assert not is_own(theirs, one, RUN)
    else:  # without a comment the name decides as long as nothing of it was seen
        assert is_own(theirs, one, RUN) == (theirs.user == "ann")


def test_the_clocks_of_the_head_and_of_the_controller_may_differ_a_little() -> None:
    assert is_own(replace(OURS, comment="x", submit_at=ago(700)), UNSEEN, RUN)
    assert not is_own(replace(OURS, comment="x", submit_at=ago(730)), UNSEEN, RUN)


def test_a_job_that_is_seen_is_known_by_its_submission_from_then_on() -> None:
    seen = sight_of(UNSEEN, replace(OURS, submit_at=ago(598))).attempt
    assert (seen.slurm_submit_at, seen.slurm_user) == (ago(598), "ann")
    assert is_own(replace(OURS, submit_at=ago(598), comment="x"), seen, RUN)
    assert fold_submission(seen, None) is seen


@pytest.mark.parametrize("changes", [{"restarts": 1}, {"flags": frozenset({JobFlag.REQUEUED})}])
def test_a_requeue_is_a_new_submission_and_still_ours(changes: dict[str, object]) -> None:
    again = replace(OURS, comment="x", name="other", submit_at=ago(3), state=JobState.PENDING, **changes)  # type: ignore[arg-type]
    seen = sight_of(SEEN, again)
    assert seen.job is again
    ended = judge_end(seen)
    assert ended is not None
    assert ended.end is AttemptEnd.PREEMPTED
    assert seen.attempt.slurm_submit_at == ago(3)


@pytest.mark.parametrize("comment", ["", "x"])
@pytest.mark.parametrize("state", [JobState.PENDING, JobState.RUNNING, JobState.SUSPENDED])
def test_a_token_that_is_gone_is_put_back_and_nothing_else_is_done(state: JobState, comment: str) -> None:
    one = attempt(state=AttemptState.SUBMITTED if state is JobState.PENDING else AttemptState.RUNNING)
    plan = plan_for(world(one), snapshot(job(state=state, comment=comment, name="other")))
    assert [(i.kind, i.job_id) for i in plan.intents] == [(IntentKind.CLAIM, 101)]
    assert not attempts_in(plan).keys() - {1}
    assert plan_for(world(one, open_intents=plan.intents), snapshot(job(state=state, comment=comment))).intents == ()


def claimed(state: IntentState = IntentState.DONE, seconds_ago: float = 60, key: str = "token:sup:gpt:1") -> Intent:
    at = ago(seconds_ago)
    return Intent(
        kind=IntentKind.CLAIM, key=key, reason="r", run="gpt", attempt=1, job_id=101, state=state, settled_at=at
    )


def kinds(*settled: Intent, policy: Policy | None = None) -> list[IntentKind]:
    known = world(SEEN, settled_intents=settled)
    return [i.kind for i in plan_for(known, snapshot(job(comment="x")), policy).intents]


def test_a_comment_that_is_changed_again_is_left_and_told_once() -> None:
    assert kinds(claimed()) == [IntentKind.NOTIFY]
    told = Intent(kind=IntentKind.NOTIFY, key="notify:comment:gpt", reason="r", state=IntentState.DONE)
    assert kinds(claimed(), replace(told, settled_at=ago(30))) == []


def test_an_answer_from_before_the_claim_says_nothing_and_a_refused_one_is_not_tried_again() -> None:
    assert kinds(claimed(seconds_ago=1)) == []
    assert kinds(claimed(IntentState.REFUSED)) == []
    assert kinds(claimed(key="claim:101:gpt")) == [IntentKind.CLAIM]  # that one was of the adoption
    assert kinds(policy=Policy(is_observe_only=True)) == []


def test_a_stop_cancels_the_job_whatever_its_comment_says() -> None:
    stopping = run(state=RunState.STOPPING, reason="uid 0 said so")
    left = over(end=AttemptEnd.STOPPED, is_job_gone=False)
    plan = plan_for(world(left, of=stopping), snapshot(job(comment="x", name="other")))
    assert [i.job_id for i in intents_of(plan, IntentKind.CANCEL)] == [101]


def test_a_job_that_comes_back_after_it_was_gone_is_ended_whatever_its_comment_says() -> None:
    back = snapshot(job(1, comment="x", name="other"), job(2))
    assert [i.job_id for i in intents_of(plan_for(world(over(), attempt(2)), back), IntentKind.CANCEL)] == [101]
    theirs = snapshot(job(1, comment="", submit_at=ago(30), restarts=1), job(2))
    assert intents_of(plan_for(world(over(), attempt(2)), theirs), IntentKind.CANCEL) == ()
