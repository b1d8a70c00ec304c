"""What is held of a node: sweeps with hysteresis, mass failure, and drains that others lift or take over."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slurm.types import NodeBase
from supervisor.core.nodes import condemn, fold_checks, is_fit, is_mass_failure, judge_drift, render_failing
from supervisor.model import DrainPolicy, NodeChecks, NodeMemory, Verdict
from tests.core.builders import LATER, NOW, ago, broken, failed_check, node, passed_check
from trainer.contract import CheckResult

POLICY = DrainPolicy()
NEW = NodeMemory(node="n1")


def after(*sweeps: NodeChecks, before: NodeMemory = NEW, is_mass: bool = False) -> NodeMemory:
    for checks in sweeps:
        before = fold_checks(before, checks, POLICY, is_mass=is_mass)
    return before


# ---------------------------------------------------------------- sweeps


def test_one_failed_sweep_makes_a_node_suspect() -> None:
    seen = after(failed_check("n1"))
    assert (seen.verdict, seen.failing, seen.failed_sweeps) == (Verdict.SUSPECT, ("disk",), 1)


def test_two_failed_sweeps_in_a_row_break_a_node() -> None:
    seen = after(failed_check("n1"), failed_check("n1"))
    assert (seen.verdict, seen.reason) == (Verdict.BROKEN, "disk: 1 % free")


def test_a_passed_sweep_in_between_starts_the_count_again() -> None:
    seen = after(failed_check("n1"), passed_check("n1"), failed_check("n1"))
    assert seen.verdict is Verdict.SUSPECT


def test_a_broken_node_heals_once_its_checks_pass() -> None:
    seen = after(failed_check("n1"), failed_check("n1"), passed_check("n1", at=LATER))
    assert (seen.verdict, seen.reason, seen.since_at, seen.failing) == (Verdict.HEALTHY, "", LATER, ())


def test_a_node_that_we_drained_stays_broken_until_a_person_returns_it() -> None:
    seen = after(passed_check("n1"), before=broken("n1", is_drained_by_us=True, failed_sweeps=2, failing=("disk",)))
    assert (seen.verdict, seen.failing) == (Verdict.BROKEN, ())


def test_a_sweep_that_a_node_did_not_answer_changes_nothing() -> None:
    unanswered = replace(failed_check("n1"), is_complete=False)
    assert after(unanswered) == NEW
    assert after(unanswered, before=broken("n1")) == broken("n1")


def test_a_check_that_could_not_tell_is_no_failure() -> None:
    unknown = NodeChecks(node="n1", at=NOW, results=(CheckResult(check="gpu", ok=None, detail="time-out"),))
    assert after(unknown).verdict is Verdict.HEALTHY


def test_a_healthy_node_that_passes_again_keeps_since_when_and_shows_when_it_was_looked_at() -> None:
    first = after(passed_check("n1", at=ago(300)))
    again = after(passed_check("n1"), before=first)
    assert (again.since_at, again.checked_at) == (first.since_at, NOW)


def test_while_many_nodes_fail_at_once_nobody_breaks() -> None:
    assert after(*[failed_check("n1")] * 5, is_mass=True).verdict is Verdict.SUSPECT


def test_what_was_broken_before_a_mass_failure_stays_broken() -> None:
    seen = after(failed_check("n1"), before=broken("n1"), is_mass=True)
    assert (seen.verdict, seen.reason, seen.since_at) == (Verdict.BROKEN, "n1: disk full", ago(30))


def test_the_reason_names_every_failed_check_and_no_other() -> None:
    results = (
        CheckResult(check="disk", ok=False, detail="full"),
        CheckResult(check="clock", ok=True, detail="fine"),
        CheckResult(check="shm", ok=False, detail="small"),
    )
    assert render_failing(NodeChecks(node="n1", at=NOW, results=results)) == "disk: full; shm: small"


@pytest.mark.parametrize(("count", "is_mass"), [(2, False), (3, True)])
def test_one_check_that_fails_on_more_nodes_than_may_be_drained_is_suspected(count: int, is_mass: bool) -> None:
    sweeps = [failed_check(f"n{i}") for i in range(count)]
    assert is_mass_failure(sweeps, 2) is is_mass


def test_different_checks_on_many_nodes_are_no_mass_failure() -> None:
    assert not is_mass_failure([failed_check(f"n{i}", f"check{i}") for i in range(9)], 2)


def test_hard_evidence_condemns_a_node_at_once_and_the_first_evidence_stays() -> None:
    first = condemn(NEW, "power cut", NOW)
    assert (first.verdict, first.reason, first.since_at) == (Verdict.BROKEN, "power cut", NOW)
    assert condemn(first, "later", LATER) is first


# ---------------------------------------------------------------- drift (cases DP-01, DP-07)


OURS = broken("n1", is_drained_by_us=True, drain_reason="supervisor: disk full", drained_at=NOW)


def test_our_drain_stands_while_it_shows_as_we_set_it() -> None:
    assert judge_drift(OURS, node("n1", NodeBase.IDLE, "DRAIN", reason="supervisor: disk full"), LATER) is None


def test_an_answer_from_before_our_drain_says_nothing_about_it() -> None:
    assert judge_drift(OURS, node("n1"), NOW) is None


def test_a_drain_of_ours_that_another_lifted_takes_the_old_evidence_with_it() -> None:
    """Case DP-07: not drained again for the same old evidence; the next sweep decides."""
    assert judge_drift(OURS, node("n1"), LATER) == NodeMemory(node="n1", since_at=LATER)


def test_a_drain_whose_reason_another_changed_is_theirs_from_now_on() -> None:
    """Case DP-01."""
    seen = judge_drift(OURS, node("n1", NodeBase.IDLE, "DRAIN", reason="alice: bad PSU"), LATER)
    assert seen is not None
    assert (seen.verdict, seen.is_drained_by_us, seen.drain_reason) == (Verdict.BROKEN, False, "alice: bad PSU")


def test_a_node_that_another_took_over_and_returned_is_not_drained_for_the_old_evidence() -> None:
    """Case DP-07: the person has repaired it under a drain of their own."""
    theirs = judge_drift(OURS, node("n1", NodeBase.IDLE, "DRAIN", reason="alice: bad PSU"), LATER)
    assert theirs is not None
    returned = judge_drift(theirs, node("n1"), LATER.replace(minute=30))
    assert returned is not None
    assert returned.verdict is Verdict.HEALTHY


def test_a_broken_node_that_another_drained_first_is_healthy_once_they_return_it() -> None:
    by_alice = node("n1", NodeBase.DOWN, "DRAIN", reason="ADMIN SHUTDOWN bad PSU", reason_user="alice")
    seen = judge_drift(broken("n1"), by_alice, NOW)
    assert seen is not None
    assert not seen.is_drained_by_us
    assert judge_drift(seen, by_alice, LATER) is None
    returned = judge_drift(seen, node("n1"), LATER)
    assert returned is not None
    assert returned.verdict is Verdict.HEALTHY


def test_a_broken_node_that_nobody_drained_stays_broken() -> None:
    assert judge_drift(broken("n1"), node("n1"), LATER) is None


def test_drains_of_healthy_nodes_are_none_of_our_business() -> None:
    assert judge_drift(NEW, node("n1", NodeBase.IDLE, "DRAIN", reason="alice"), LATER) is None


# ---------------------------------------------------------------- use


@pytest.mark.parametrize(
    ("base", "flags", "fit"),
    [
        (NodeBase.IDLE, (), True),
        (NodeBase.MIXED, (), True),
        (NodeBase.ALLOCATED, (), True),
        (NodeBase.IDLE, ("COMPLETING",), True),
        (NodeBase.IDLE, ("DRAIN",), False),
        (NodeBase.IDLE, ("FAIL",), False),
        (NodeBase.IDLE, ("NOT_RESPONDING",), False),
        (NodeBase.DOWN, (), False),
        (NodeBase.DOWN, ("COMPLETING",), False),
        (NodeBase.IDLE, ("MAINTENANCE",), False),
        (NodeBase.IDLE, ("COMPLETING", "MAINTENANCE"), False),
        (NodeBase.UNKNOWN, (), False),
        (NodeBase.FUTURE, (), False),
    ],
)
def test_a_job_of_ours_may_run_only_where_slurm_sees_a_healthy_node(
    base: NodeBase, flags: tuple[str, ...], fit: bool
) -> None:
    assert is_fit(node("n1", base, *flags), None) is fit


@pytest.mark.parametrize(
    ("verdict", "fit"), [(Verdict.HEALTHY, True), (Verdict.SUSPECT, True), (Verdict.BROKEN, False)]
)
def test_a_broken_node_is_not_used_whatever_slurm_says(verdict: Verdict, fit: bool) -> None:
    assert is_fit(node("n1"), NodeMemory(node="n1", verdict=verdict)) is fit
