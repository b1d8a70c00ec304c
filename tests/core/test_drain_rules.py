"""Which broken nodes are drained: every row of the table, the budget, and others' drains."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from slurm.types import NodeBase
from supervisor.core.drains import Candidate, drain_limit, find_refusals, judge_drain, render_drain_reason
from supervisor.model import DrainPolicy, Intent, IntentKind, IntentState, NodeEvent, NodeMemory, Policy, Verdict
from tests.core.builders import (
    LATER,
    NOW,
    STALE,
    ago,
    attempt,
    broken,
    cluster,
    drain_intent,
    failed_check,
    intents_of,
    job,
    node,
    node_in,
    plan_for,
    records,
    snapshot,
    view,
    world,
)

CANDIDATE = Candidate(
    memory=broken("n1"),
    record=node("n1"),
    policy=Policy(),
    is_paused=False,
    used=0,
    limit=2,
    waiting=1,
    refusals=(),
)
REFUSED = drain_intent("n1", IntentState.REFUSED)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"record": None}, "does not know this node"),
        ({"memory": broken("n1", is_drained_by_us=True)}, "by us already"),
        ({"record": node("n1", NodeBase.IDLE, "DRAIN")}, "someone else"),
        ({"record": node("n1", NodeBase.IDLE, "FAIL")}, "someone else"),
        ({"policy": Policy(drain=DrainPolicy(is_enabled=False))}, "switched off"),
        ({"policy": Policy(is_observe_only=True)}, "observe only"),
        ({"is_paused": True}, "paused"),
        ({"refusals": (REFUSED,)}, "refused"),
        ({"waiting": 3}, "many nodes"),
        ({"used": 2}, "budget"),
    ],
)
def test_each_row_of_the_table_keeps_a_node_from_being_drained(changes: dict[str, Any], why: str) -> None:
    kept = judge_drain(replace(CANDIDATE, **changes))
    assert kept is not None
    assert why in kept


def test_a_broken_node_that_no_row_keeps_is_drained() -> None:
    assert judge_drain(CANDIDATE) is None
    assert judge_drain(replace(CANDIDATE, waiting=2, used=1)) is None


@pytest.mark.parametrize(
    ("max_nodes", "fraction", "nodes", "limit"),
    [
        (5, 0.05, 288, 5),
        (20, 0.05, 288, 14),
        (5, 0.5, 4, 2),
        (5, 0.5, 3, 1),
        (5, 0.5, 2, 1),
        (5, 0.5, 1, 1),
        (5, 0.1, 4, 1),
        (5, 0.1, 0, 1),
        (0, 0.5, 4, 0),
        (5, 0.0, 100, 1),
        (5, 1.0, 3, 3),
    ],
)
def test_the_limit_is_the_smaller_bound_rounded_down_and_at_least_one_node(
    max_nodes: int, fraction: float, nodes: int, limit: int
) -> None:
    """Case DP-02."""
    assert drain_limit(Policy(drain=DrainPolicy(max_nodes=max_nodes, max_fraction=fraction)), nodes) == limit


def test_a_refusal_counts_only_since_the_node_is_broken_and_only_for_this_node() -> None:
    memory = broken("n1", since_at=ago(100))
    fresh = drain_intent("n1", IntentState.REFUSED, ago(50))
    old = drain_intent("n1", IntentState.REFUSED, ago(200))
    done = drain_intent("n1", IntentState.DONE, ago(50))
    other = drain_intent("n2", IntentState.REFUSED, ago(50))
    unsettled = replace(fresh, settled_at=None)
    assert find_refusals((old, fresh, done, other, unsettled), memory) == (fresh,)


@pytest.mark.parametrize(
    ("wanted", "shown"),
    [
        ("disk full", "supervisor: disk full [2026-11-30T03:00:00Z]"),
        (
            "XID 48 'DBE' on 0000:52:00\nsee run=a",
            "supervisor: XID 48 'DBE' on 0000:52:00 see run=a [2026-11-30T03:00:00Z]",
        ),
        ("Temperatur über 90 °C", "supervisor: Temperatur ?ber 90 ?C [2026-11-30T03:00:00Z]"),
    ],
)
def test_a_reason_is_one_line_of_printable_ascii_with_our_tag_first(wanted: str, shown: str) -> None:
    """Case DP-12."""
    assert render_drain_reason("supervisor", broken("n1", reason=wanted), NOW) == shown


def test_a_long_reason_is_cut_and_keeps_its_tag_and_time() -> None:
    shown = render_drain_reason("supervisor", broken("n1", reason="x" * 999), NOW)
    assert len(shown) == 200
    assert shown.startswith("supervisor: xxx")
    assert shown.endswith("x [2026-11-30T03:00:00Z]")


# ---------------------------------------------------------------- the whole rule


def drained(*memories: NodeMemory, count: int = 4, policy: Policy | None = None, **parts: Any) -> list[str]:
    """Names of the nodes that one cycle means to drain."""
    nodes = parts.pop("nodes_seen", None) or cluster(count)
    known = world(nodes=memories, **parts)
    return [i.node for i in intents_of(plan_for(known, snapshot(nodes=nodes), policy), IntentKind.DRAIN)]


HALF = Policy(drain=DrainPolicy(max_fraction=0.5))


def test_a_broken_node_is_drained_with_the_evidence_as_its_reason() -> None:
    plan = plan_for(world(nodes=[broken("n1")]), snapshot())
    (meant,) = intents_of(plan, IntentKind.DRAIN)
    assert (meant.node, meant.reason) == ("n1", "n1: disk full")
    assert meant.text.startswith("supervisor: n1: disk full")


@pytest.mark.parametrize("verdict", [Verdict.HEALTHY, Verdict.SUSPECT])
def test_a_node_that_is_not_broken_is_not_drained(verdict: Verdict) -> None:
    assert drained(broken("n1", verdict=verdict)) == []


def test_nothing_is_drained_while_scontrol_does_not_answer() -> None:
    seen = replace(snapshot(), nodes=STALE)
    assert intents_of(plan_for(world(nodes=[broken("n1")]), seen), IntentKind.DRAIN) == ()


def test_a_drain_of_another_is_left_alone() -> None:
    theirs = cluster(4, node("n1", NodeBase.DOWN, "DRAIN", reason="ADMIN SHUTDOWN bad PSU", reason_user="alice"))
    assert drained(broken("n1"), nodes_seen=theirs) == []


def test_a_drain_that_is_meant_already_is_not_meant_twice() -> None:
    assert drained(broken("n1"), open_intents=(drain_intent("n1", IntentState.OPEN, settled_at=None),)) == []


def test_two_of_four_nodes_are_the_most_at_50_percent() -> None:
    """Case DP-02."""
    assert drained(broken("n1"), broken("n2"), policy=HALF) == ["n1", "n2"]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_on_a_tiny_cluster_one_node_may_be_drained(count: int) -> None:
    """Case DP-02: rounding down, and at least one."""
    assert drained(broken("n1"), count=count, policy=HALF) == ["n1"]


@pytest.mark.parametrize(("count", "bad"), [(2, 2), (3, 2), (4, 3), (288, 6), (288, 288)])
def test_when_more_nodes_look_bad_than_may_be_drained_the_check_is_suspected_and_none_is(count: int, bad: int) -> None:
    """Case DP-02, by this project's rule: not five of them at random, but none and an alarm."""
    sick = [broken(f"n{i}") for i in range(1, bad + 1)]
    plan = plan_for(world(nodes=sick), snapshot(nodes=cluster(count)), HALF)
    assert intents_of(plan, IntentKind.DRAIN) == ()
    assert intents_of(plan, IntentKind.NOTIFY)


def test_drains_of_the_window_count_and_older_ones_do_not() -> None:
    inside = drain_intent("n3", IntentState.DONE, ago(3599))
    outside = drain_intent("n3", IntentState.DONE, ago(3601))
    assert drained(broken("n1"), settled_intents=(inside,)) == []
    assert drained(broken("n1"), settled_intents=(outside,)) == ["n1"]


def test_a_drain_that_is_under_way_counts() -> None:
    under_way = drain_intent("n2", IntentState.OPEN, settled_at=None)
    assert drained(broken("n1"), broken("n2"), open_intents=(under_way,)) == []


def test_a_drain_that_slurm_refused_does_not_use_up_the_budget() -> None:
    refused = drain_intent("n2", IntentState.REFUSED, ago(10))
    gone = replace(broken("n2"), verdict=Verdict.HEALTHY)
    assert drained(broken("n1"), gone, settled_intents=(refused,)) == ["n1"]


def test_a_node_whose_drain_was_refused_is_not_tried_again_for_the_same_evidence() -> None:
    assert drained(broken("n1"), settled_intents=(drain_intent("n1", IntentState.REFUSED, ago(10)),)) == []


def test_a_node_that_left_the_cluster_is_not_drained() -> None:
    assert drained(broken("n9")) == []


def test_while_the_service_is_paused_nothing_is_drained() -> None:
    assert drained(broken("n1"), is_paused=True) == []


def test_an_exhausted_budget_is_told_once() -> None:
    full = drain_intent("n3", IntentState.DONE, ago(10))
    plan = plan_for(world(nodes=[broken("n1")], settled_intents=(full,)), snapshot())
    (told,) = intents_of(plan, IntentKind.NOTIFY)
    (event,) = records(plan.facts, NodeEvent)
    assert (event.node, event.event, "budget" in event.detail) == ("n1", "drain.withheld", True)
    again = plan_for(world(nodes=[broken("n1")], settled_intents=(full, settled(told))), snapshot())
    assert intents_of(again, IntentKind.NOTIFY) == ()
    assert records(again.facts, NodeEvent) == []


def settled(told: Intent) -> Intent:
    return replace(told, state=IntentState.DONE, settled_at=NOW)


# ---------------------------------------------------------------- sweeps and drift, whole


def test_a_failing_check_leads_to_a_drain_after_two_sweeps() -> None:
    """Case DP-11."""
    once = plan_for(world(), replace(snapshot(), sweeps=(failed_check("n1"),)))
    assert intents_of(once, IntentKind.DRAIN) == ()
    memory = node_in(once, "n1")
    assert memory is not None
    twice = plan_for(world(nodes=[memory]), replace(snapshot(), sweeps=(failed_check("n1", at=LATER),)))
    assert [i.node for i in intents_of(twice, IntentKind.DRAIN)] == ["n1"]


def test_a_check_that_fails_everywhere_breaks_nobody_and_is_told() -> None:
    seen = replace(snapshot(), sweeps=tuple(failed_check(f"n{i}") for i in range(1, 5)))
    before = [NodeMemory(node=f"n{i}", failed_sweeps=5, verdict=Verdict.SUSPECT) for i in range(1, 5)]
    plan = plan_for(world(nodes=before), seen)
    assert intents_of(plan, IntentKind.DRAIN) == ()
    assert [i.key for i in intents_of(plan, IntentKind.NOTIFY)] == ["notify:mass-check-failure"]


def test_after_a_mass_failure_one_passed_sweep_clears_a_node() -> None:
    """Case DP-03: old findings are not played back."""
    before = NodeMemory(node="n1", failed_sweeps=5, verdict=Verdict.SUSPECT, failing=("disk",))
    passed = replace(failed_check("n1"), results=())
    memory = node_in(plan_for(world(nodes=[before]), replace(snapshot(), sweeps=(passed,))), "n1")
    assert memory is not None
    assert memory.verdict is Verdict.HEALTHY


OURS = broken("n1", is_drained_by_us=True, drain_reason="supervisor: disk full", drained_at=ago(60))


def test_a_drain_that_another_lifted_is_not_set_again() -> None:
    """Case DP-07."""
    plan = plan_for(world(nodes=[OURS]), snapshot())
    assert intents_of(plan, IntentKind.DRAIN) == ()
    memory = node_in(plan, "n1")
    assert memory is not None
    assert memory.verdict is Verdict.HEALTHY


def test_a_lifted_drain_is_set_again_only_on_new_evidence() -> None:
    memory = node_in(plan_for(world(nodes=[OURS]), snapshot()), "n1")
    assert memory is not None
    sweeps = (failed_check("n1", at=LATER), failed_check("n1", at=LATER + timedelta(minutes=5)))
    plan = plan_for(world(nodes=[memory]), replace(snapshot(), sweeps=sweeps))
    assert [i.node for i in intents_of(plan, IntentKind.DRAIN)] == ["n1"]


def test_a_drain_of_ours_under_way_is_not_mistaken_for_anothers() -> None:
    reason = "supervisor: n1: disk full [now]"
    under_way = drain_intent("n1", IntentState.OPEN, settled_at=None, tries=1, text=reason)
    shown = cluster(4, node("n1", NodeBase.IDLE, "DRAIN", reason=reason))
    plan = plan_for(world(nodes=[broken("n1")], open_intents=(under_way,)), snapshot(nodes=shown))
    assert node_in(plan, "n1") is None


def test_a_node_that_left_the_cluster_keeps_what_is_known_of_it() -> None:
    assert node_in(plan_for(world(nodes=[replace(OURS, node="n9")]), snapshot()), "n9") is None


def test_a_drain_waits_for_no_run() -> None:
    """A node of a training that goes on is drained too: Slurm lets the job end first."""
    plan = plan_for(world(attempt(), nodes=[broken("n1")]), snapshot(job(), view=view()))
    assert [i.node for i in intents_of(plan, IntentKind.DRAIN)] == ["n1"]
