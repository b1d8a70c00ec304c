"""One interruption from many signs, what it has cost in parts, planned work apart, and clocks that step."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm.types import JobState, NodeBase
from supervisor.core.ends import judge_end
from supervisor.core.reliability import split_gap
from supervisor.core.restarts import find_failures, judge_aftermath, judge_failures
from supervisor.model import AttemptEnd, Cause, Interruption, Plan, RunState, Verdict
from tests.core.builders import (
    NOW,
    RUN,
    ago,
    attempt,
    attempt_in,
    cluster,
    exit_record,
    job,
    launch,
    node,
    node_in,
    over,
    plan_for,
    progress,
    records,
    run_state,
    sight,
    snapshot,
    view,
    world,
)

XID = Cause(kind="gpu", sentence="n1: XID 79, the GPU has fallen off the bus", node="n1", blames_node=True)


def interruptions_in(plan: Plan) -> list[Interruption]:
    return records(plan.facts, Interruption)


def interruption(**changes: Any) -> Interruption:
    one = Interruption(
        run="gpt", attempt=1, kind="crashed", cause="XID 79", node="n1", is_planned=False, detected_at=NOW
    )
    return replace(one, **changes)


# ---------------------------------------------------------------- one fault, many signs


def test_many_signs_of_one_fault_are_one_interruption() -> None:
    """Case AC-02: the kernel's line, the launcher's word, ranks that time out, Slurm's NODE_FAIL, a drain by hand."""
    ended = view(exit=exit_record(1, node="n2"), launch=launch())
    first = plan_for(world(attempt()), snapshot(job(), view=ended, causes={"gpt": XID}))
    (found,) = interruptions_in(first)
    assert (found.kind, found.cause, found.node) == ("node_failed", XID.sentence, "n1")
    known = world(attempt_in(first), interruptions=(found,))
    down = cluster(4, node("n1", NodeBase.DOWN, "DRAIN", reason="alice: XID"))
    later = plan_for(known, snapshot(job(state=JobState.NODE_FAIL), nodes=down, view=ended, causes={"gpt": XID}))
    assert interruptions_in(later) == []


def test_its_down_time_ends_with_the_first_new_step_and_its_cost_when_the_lost_steps_are_done_again() -> None:
    """Case AC-02: the definition that MTBF's and the history's numbers rest on."""
    lost = interruption(last_step=100)
    second = attempt(2, resume_step=60, stepped_at=ago(5), last_step=61)
    stepping = snapshot(job(2), view=view(2, progress=progress(61, attempt=2)))
    (after,) = interruptions_in(plan_for(world(over(), second, interruptions=(lost,)), stepping))
    assert (after.resumed_at, after.resume_step, after.caught_up_at) == (ago(5), 60, None)
    passed = snapshot(job(2), view=view(2, progress=progress(100, attempt=2)))
    (done,) = interruptions_in(plan_for(world(over(), second, interruptions=(after,)), passed))
    assert (done.resumed_at, done.caught_up_at) == (ago(5), NOW)
    assert done.lost_steps == 40


# ---------------------------------------------------------------- parts


def clock(text: str) -> datetime:
    hour, minute, second = map(int, text.split(":"))
    return NOW.replace(hour=hour, minute=minute, second=second)


def test_the_parts_follow_each_other_and_sum_to_the_whole() -> None:
    """Case AC-09: 12:00:00 last progress, 12:05:03 noticed, 12:20:03 first new step, 12:50:03 at the old step."""
    one = interruption(
        detected_at=clock("12:05:03"), resumed_at=clock("12:20:03"), caught_up_at=clock("12:50:03"), last_step=100
    )
    gap = split_gap(one, over(progress_at=clock("12:00:00")), clock("13:00:00"))
    assert (gap.detection_s, gap.restart_s, gap.recompute_s) == (303, 900, 1800)
    assert gap.total_s == (clock("12:50:03") - clock("12:00:00")).total_seconds()
    assert not gap.is_open
    assert not gap.has_clock_step


def test_one_that_is_not_over_counts_up_to_now_and_says_so() -> None:
    """Case AC-12."""
    gap = split_gap(interruption(), over(progress_at=ago(60)), NOW + timedelta(seconds=30))
    assert (gap.detection_s, gap.restart_s, gap.recompute_s, gap.is_open) == (60, 30, 0, True)
    resumed = interruption(resumed_at=NOW + timedelta(seconds=10))
    gap = split_gap(resumed, over(progress_at=ago(60)), NOW + timedelta(seconds=30))
    assert (gap.restart_s, gap.recompute_s, gap.is_open) == (10, 20, True)


def test_a_clock_that_was_set_back_makes_no_negative_part_and_is_said() -> None:
    """Case AC-12."""
    one = interruption(resumed_at=ago(100), caught_up_at=NOW + timedelta(seconds=5))
    gap = split_gap(one, over(progress_at=ago(60)), NOW)
    assert (gap.detection_s, gap.restart_s, gap.recompute_s, gap.has_clock_step) == (60, 0, 5, True)
    assert one.recovery_s == 0


_instants = st.none() | st.integers(-(10**6), 10**6).map(lambda s: NOW + timedelta(seconds=s))


@given(_instants, _instants, _instants)
def test_no_part_is_ever_negative(seen: datetime | None, resumed: datetime | None, caught_up: datetime | None) -> None:
    gap = split_gap(interruption(resumed_at=resumed, caught_up_at=caught_up), over(progress_at=seen), NOW)
    assert min(gap.detection_s, gap.restart_s, gap.recompute_s) >= 0


# ---------------------------------------------------------------- planned work


@pytest.mark.parametrize("flag", ["MAINTENANCE", "REBOOT_ISSUED"])
@pytest.mark.parametrize("state", [JobState.CANCELLED, JobState.NODE_FAIL])
def test_an_end_by_planned_work_is_no_failure_holds_nothing_and_blames_no_node(flag: str, state: JobState) -> None:
    """Case AC-08: out of MTBF, and the run goes on when the nodes are back."""
    taken = cluster(4, node("n1", NodeBase.IDLE, flag), node("n2", NodeBase.IDLE, flag))
    plan = plan_for(world(attempt()), snapshot(job(state=state), nodes=taken, view=view()))
    (found,) = interruptions_in(plan)
    assert (found.kind, found.is_planned, found.node) == ("maintenance", True, None)
    assert run_state(plan) is None
    assert node_in(plan, "n1") is None
    ended = attempt_in(plan)
    assert judge_aftermath(judge_failures(RUN, ended, find_failures(RUN, [ended], []))) is None
    assert find_failures(RUN, [ended], []) == ()


def test_a_failure_of_another_node_during_planned_work_is_a_failure() -> None:
    """Case AC-08."""
    taken = cluster(4, node("n1", NodeBase.IDLE, "MAINTENANCE"), node("n2", NodeBase.DOWN, reason="Not responding"))
    plan = plan_for(world(attempt()), snapshot(job(), nodes=taken, view=view()))
    (found,) = interruptions_in(plan)
    assert (found.kind, found.is_planned, found.node) == ("node_failed", False, "n2")


def test_a_job_that_a_person_cancels_without_planned_work_is_held() -> None:
    ended = judge_end(sight(attempt(), job(state=JobState.CANCELLED), view=view()))
    assert ended is not None
    assert ended.end is AttemptEnd.CANCELLED
    assert judge_aftermath(judge_failures(RUN, over(end=ended.end), ())) == (
        RunState.HELD,
        "job 101 was cancelled through Slurm by a person",
    )


def test_a_node_that_comes_back_late_from_planned_work_is_a_failed_one_then() -> None:
    """Case AC-08: after ResumeTimeout Slurm calls it DOWN, without the reboot's flag."""
    late = cluster(4, node("n1", NodeBase.DOWN, reason="reboot timed out"))
    plan = plan_for(world(attempt()), snapshot(job(), nodes=late, view=view()))
    (found,) = interruptions_in(plan)
    assert (found.kind, found.is_planned) == ("node_failed", False)
    failed = node_in(plan, "n1")
    assert failed is not None
    assert failed.verdict is Verdict.BROKEN


# ---------------------------------------------------------------- Slurm's count


def test_restarts_that_slurm_counts_are_kept_beside_ours() -> None:
    """Case AC-10."""
    assert attempt_in(plan_for(world(attempt()), snapshot(job(restarts=3), view=view()))).slurm_restarts == 3
