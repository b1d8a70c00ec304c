"""A job that waits for more nodes than are healthy; and start checks that fail on most nodes at once."""

from __future__ import annotations

from slurm.types import JobFlag, JobState, NodeBase, NodeRecord
from supervisor.core.ends import judge_end
from supervisor.core.nodes import judge_silence
from supervisor.model import AttemptEnd, AttemptState, Policy
from tests.core.builders import (
    ago,
    attempt,
    attempts_in,
    cluster,
    exit_record,
    job,
    node,
    plan_for,
    ports,
    progress,
    sight,
    snapshot,
    view,
    world,
)
from trainer import contract
from trainer.contract import CheckResult, NodeReport

WAITING = attempt(1, AttemptState.SUBMITTED, nodes=(), nodes_wanted=3, submitted_at=ago(60))
PENDING = job(1, JobState.PENDING, nodes=())


def end_with(*nodes: NodeRecord) -> AttemptEnd | None:
    plan = plan_for(world(WAITING), snapshot(PENDING, nodes=cluster(4, *nodes)))
    after = attempts_in(plan).get(1, WAITING)
    return after.end


def test_a_waiting_job_is_made_smaller_when_its_nodes_are_drained_or_down() -> None:
    assert end_with(node("n1", NodeBase.DOWN), node("n2", NodeBase.IDLE, "DRAIN")) is AttemptEnd.RESIZED


def test_a_waiting_job_keeps_its_place_while_enough_nodes_are_healthy() -> None:
    assert end_with(node("n1", NodeBase.DOWN), node("n2", NodeBase.ALLOCATED)) is None


def test_a_node_that_answers_late_costs_no_place_in_the_queue() -> None:
    assert end_with(node("n1", NodeBase.IDLE, "NOT_RESPONDING"), node("n2", NodeBase.IDLE, "NOT_RESPONDING")) is None


def test_a_waiting_job_stays_when_a_smaller_one_would_be_below_the_minimum() -> None:
    down = [node(n, NodeBase.DOWN) for n in ("n1", "n2", "n3")]
    assert end_with(*down) is None


def test_a_dead_port_says_nothing_while_slurm_still_boots_the_nodes() -> None:
    booting = job(1, JobState.RUNNING, nodes=("n1", "n2"), flags=frozenset({JobFlag.CONFIGURING}))
    one = attempt(1, AttemptState.SUBMITTED, nodes=("n1", "n2"))
    assert judge_silence(sight(one, booting), ports(n1=9.0, n2=0)) == ()


def checked(*failing: str) -> tuple[str, ...]:
    reports = tuple(
        NodeReport(attempt=1, node=n, host=n, time=0.0, checks=(CheckResult(check="shared_path", ok=n not in failing),))
        for n in ("n1", "n2", "n3")
    )
    record = exit_record(contract.EXIT_NODE_CHECK_FAILED, node=failing[0])
    ended = judge_end(sight(attempt(nodes=("n1", "n2", "n3")), view=view(exit=record, node_reports=reports)))
    assert ended is not None
    return ended.nodes


def test_one_node_of_three_that_fails_its_start_check_is_named() -> None:
    assert checked("n2") == ("n2",)


def test_start_checks_that_fail_on_most_nodes_name_none() -> None:
    assert checked("n1", "n2") == ()


def test_observing_only_gives_nothing_up() -> None:
    stalled = view(progress=progress(unchanged_s=10_000))
    known, seen = world(attempt(nodes=("n1",))), snapshot(job(1, nodes=("n1",)), view=stalled)
    ends = [
        attempts_in(plan_for(known, seen, Policy(is_observe_only=only))).get(1, WAITING).end for only in (False, True)
    ]
    assert ends == [AttemptEnd.STALLED, None]
