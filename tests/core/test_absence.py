"""A job that Slurm does not list: is it gone, is it alive all the same, or is accounting only behind?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from slurm.types import JobRecord, JobState, NodeBase
from supervisor.core.ends import ACCOUNTING_LAG_S, judge_end
from supervisor.core.sight import SECOND_LOOK_S
from supervisor.model import Attempt, AttemptEnd, Fresh, IntentKind, RunState, Seen
from tests.core.builders import (
    NOW,
    ago,
    attempt,
    attempt_in,
    attempts_in,
    cluster,
    exit_record,
    intents_of,
    job,
    launch,
    node,
    node_in,
    over,
    plan_for,
    progress,
    run,
    run_state,
    sight,
    snapshot,
    view,
    world,
)

LONG_S = 3600.0


def end(one: Attempt | None = None, *, absent_s: float = LONG_S, **parts: Any) -> AttemptEnd | None:
    ended = judge_end(sight(one or attempt(), absent_s={101: absent_s}, **({"view": view()} | parts)))
    return ended.end if ended else None


def accounted(*jobs: JobRecord) -> Fresh[Mapping[int, JobRecord]]:
    return Fresh(value={j.job_id: j for j in jobs}, asked_at=NOW)


def test_a_job_that_one_answer_does_not_list_is_looked_for_again() -> None:
    """Cases CO-01, CO-02: half a list looks like this, and so does a controller that has just lost its state."""
    assert end(absent_s=0) is None
    assert end(absent_s=SECOND_LOOK_S) is AttemptEnd.VANISHED
    plan = plan_for(world(attempt()), snapshot(view=view(), absent_s={101: 0.0}))
    assert plan.ask_slurm
    assert plan.wake_after_s <= 1


@pytest.mark.parametrize(
    "sign",
    [{"launch": launch()}, {"progress": progress(unchanged_s=1)}, {"log": Seen(value=5, unchanged_s=1)}],
    ids=str,
)
def test_an_attempt_whose_files_still_change_is_alive_though_slurm_does_not_know_its_job(sign: dict[str, Any]) -> None:
    assert end(view=view(**sign)) is None
    plan = plan_for(world(attempt()), snapshot(view=view(**sign), absent_s={101: LONG_S}))
    assert intents_of(plan, IntentKind.SUBMIT) == ()
    assert any("not known to Slurm, but it is alive" in note for note in plan.notes)
    assert "not known to Slurm" in intents_of(plan, IntentKind.NOTIFY)[0].text


def test_an_attempt_that_slurm_forgot_vanishes_once_its_files_are_still() -> None:
    assert end(view=view(launch=launch(unchanged_s=SECOND_LOOK_S), progress=progress(unchanged_s=30))) is (
        AttemptEnd.VANISHED
    )


def test_no_attempt_is_planned_beside_one_that_was_given_up_and_runs_on_unknown_to_slurm() -> None:
    given_up = over(end=AttemptEnd.STALLED, is_job_gone=False)
    alive = plan_for(world(given_up), snapshot(view=view(launch=launch())))
    assert not attempts_in(alive)
    still = plan_for(world(given_up), snapshot(view=view(launch=launch(unchanged_s=SECOND_LOOK_S))))
    assert attempt_in(still).is_job_gone
    assert attempt_in(still, 2).nodes_wanted > 0


def test_an_attempt_may_run_on_while_a_node_of_it_has_not_registered() -> None:
    """Its log may be silent for long; Slurm ends what it does not know when it hears from the node."""
    unheard = cluster(4, node("n2", NodeBase.UNKNOWN))
    assert judge_end(sight(attempt(), view=view(), nodes=unheard)) is None
    given_up = over(end=AttemptEnd.STALLED, is_job_gone=False)
    assert not attempts_in(plan_for(world(given_up), snapshot(nodes=unheard, view=view())))
    down = cluster(4, node("n2", NodeBase.DOWN))
    assert attempt_in(plan_for(world(given_up), snapshot(nodes=down, view=view()))).is_job_gone


def test_the_launchers_exit_record_ends_the_wait() -> None:
    ended = over(end=AttemptEnd.SAVED, is_job_gone=False)
    plan = plan_for(world(ended), snapshot(view=view(exit=exit_record(75), launch=launch())))
    assert attempt_in(plan).is_job_gone


# ---------------------------------------------------------------- accounting


@pytest.mark.parametrize("state", [JobState.RUNNING, JobState.PENDING])
def test_accounting_that_is_behind_is_waited_for_and_not_for_ever(state: JobState) -> None:
    """A slurmdbd that was away still calls a job running that the controller has forgotten: no crash, no loss."""
    behind = accounted(job(state=state))
    assert end(ended=behind, absent_s=ACCOUNTING_LAG_S - 1) is None
    assert end(ended=behind, absent_s=ACCOUNTING_LAG_S) is AttemptEnd.VANISHED
    assert end(ended=accounted(), absent_s=ACCOUNTING_LAG_S - 1) is None


@pytest.mark.parametrize(
    "theirs",
    [
        job(state=JobState.COMPLETED, submit_at=ago(9 * 365 * 86400), comment="", name="old"),
        job(state=JobState.COMPLETED, submit_at=ago(590), comment="sup:other:1"),
        job(state=JobState.COMPLETED, submit_at=ago(590), comment="", name="theirs"),
    ],
    ids=["years ago", "another token", "another name"],
)
def test_a_job_of_the_same_id_that_is_not_ours_says_nothing_of_ours(theirs: JobRecord) -> None:
    """Case SB-11."""
    assert judge_end(sight(attempt(), job(), view=view(), ended=accounted(theirs))) is None
    assert end(ended=accounted(theirs)) is AttemptEnd.VANISHED


# ---------------------------------------------------------------- what comes back


@pytest.mark.parametrize("state", [JobState.RUNNING, JobState.PENDING])
def test_a_job_that_comes_back_after_its_attempt_was_over_is_ended(state: JobState) -> None:
    """Cases RR-01, CO-01: requeued by hand, or left out of an answer that showed half a list."""
    plan = plan_for(world(over(), attempt(2)), snapshot(job(1, state=state), job(2), view=view(2)))
    assert [i.job_id for i in intents_of(plan, IntentKind.CANCEL)] == [101]


@pytest.mark.parametrize("name", ["gpt", "renamed"])
def test_no_attempt_is_planned_beside_a_job_that_came_back(name: str) -> None:
    assert attempts_in(plan_for(world(over()), snapshot(view=view()))).keys() == {2}
    came_back = job(1, state=JobState.PENDING, nodes=(), name=name)
    plan = plan_for(world(over()), snapshot(came_back, view=view()))
    assert attempts_in(plan) == {}
    assert "came back" in intents_of(plan, IntentKind.CANCEL)[0].reason


def test_another_users_job_with_our_token_holds_nothing_up_and_is_not_cancelled() -> None:
    """A comment is anybody's to write, under our number or another."""
    for number in (1, 7):
        theirs = replace(job(number, user="bob", submit_at=ago(30)), comment="sup:gpt:1")
        plan = plan_for(world(over()), snapshot(theirs, view=view()))
        assert attempts_in(plan).keys() == {2}
        assert intents_of(plan, IntentKind.CANCEL) == ()


def test_a_job_that_is_still_completing_did_not_come_back() -> None:
    plan = plan_for(world(over(), attempt(2)), snapshot(job(1, state=JobState.NODE_FAIL), job(2), view=view(2)))
    assert intents_of(plan, IntentKind.CANCEL) == ()


def test_a_number_that_slurm_has_given_to_somebody_else_is_not_cancelled() -> None:
    """A controller without its state begins at job 1 again."""
    theirs = job(1, comment="", name="theirs", user="bob")
    stopping = run(state=RunState.STOPPING, reason="uid 0 said so")
    plan = plan_for(world(over(is_job_gone=False), of=stopping), snapshot(theirs, view=view(launch=launch())))
    assert intents_of(plan, IntentKind.CANCEL) == ()


# ---------------------------------------------------------------- what slurmd would not launch


def test_a_job_that_slurm_cancelled_because_it_could_not_launch_it_was_not_cancelled_by_a_person() -> None:
    """A number that a slurmd still knows from before the controller lost its state."""
    never = job(state=JobState.CANCELLED, start_at=ago(10), end_at=ago(9))
    plan = plan_for(world(attempt()), snapshot(never, view=view()))
    assert attempt_in(plan).end is AttemptEnd.NODE_FAILED
    assert run_state(plan) is None
    assert node_in(plan, "n1") is None


@pytest.mark.parametrize(
    ("changes", "seen"),
    [
        ({"end_at": ago(5)}, {}),
        ({"nodes": ()}, {}),
        ({"start_at": None}, {}),
        ({}, {"launch": launch(unchanged_s=30)}),
        ({}, {"log": Seen(value=7, unchanged_s=30)}),
    ],
    ids=["ran", "was pending", "never started", "launched", "has spoken"],
)
def test_a_job_that_a_person_cancelled_is_not_taken_for_one_that_could_not_be_launched(
    changes: dict[str, Any], seen: dict[str, Any]
) -> None:
    cancelled = job(state=JobState.CANCELLED, **({"start_at": ago(10), "end_at": ago(9)} | changes))
    assert attempt_in(plan_for(world(attempt()), snapshot(cancelled, view=view(**seen)))).end is AttemptEnd.CANCELLED


@pytest.mark.parametrize(
    ("reason", "end"),
    [
        ("Prolog error", AttemptEnd.NODE_FAILED),
        ("batch job complete failure", AttemptEnd.NODE_FAILED),
        ("alice: memory is exchanged tonight", AttemptEnd.CANCELLED),
    ],
)
def test_a_prolog_that_fails_after_a_while_and_a_node_that_slurm_drains_for_it_are_no_persons_doing(
    reason: str, end: AttemptEnd
) -> None:
    """Without requeueing Slurm cancels the job, and says why at the node alone (seen on 22.05)."""
    never = job(state=JobState.CANCELLED, start_at=ago(60), end_at=ago(9))
    nodes = cluster(4, node("n2", NodeBase.IDLE, "DRAIN", reason=reason))
    slurmds = view(log=Seen(value=len("Error running slurm prolog: 1\n"), unchanged_s=9))
    found = attempt_in(plan_for(world(attempt()), snapshot(never, view=slurmds, nodes=nodes)))
    assert (found.end, "launched on n2" in found.end_detail) == (end, end is AttemptEnd.NODE_FAILED)
    for lived in (view(launch=launch(unchanged_s=30)), view(log=Seen(value=4096, unchanged_s=9))):
        ran = attempt_in(plan_for(world(attempt()), snapshot(never, view=lived, nodes=nodes)))
        assert ran.end is AttemptEnd.CANCELLED
