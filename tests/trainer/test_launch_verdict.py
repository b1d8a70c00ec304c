"""Which nodes train, and what the exit code of a step is."""

from __future__ import annotations

import pytest

from trainer.contract import Outcome
from trainer.verdict import Candidate, Go, NodeEnd, Verdict, choose_nodes, describe_failed_check, judge_ends


def healthy(node: str) -> Candidate:
    return Candidate(node=node, is_connected=True, is_checked=True)


def failed(node: str) -> Candidate:
    return Candidate(node=node, is_connected=True, is_checked=True, failed="disk: full")


def pending(node: str) -> Candidate:
    return Candidate(node=node, is_connected=True)


def silent(node: str) -> Candidate:
    return Candidate(node=node, is_connected=True, is_checked=True, is_silent=True)


def choose(*candidates: Candidate, wanted: int = 2, wait: bool = True, late: bool = False) -> Go | Verdict | None:
    return choose_nodes(candidates, wanted, may_wait_for_spares=wait, is_too_late=late)


def test_healthy_nodes_train_in_the_order_of_the_allocation() -> None:
    assert choose(healthy("n1"), healthy("n2"), healthy("n3")) == Go(nodes=("n1", "n2"))


@pytest.mark.parametrize("bad", [failed("n1"), silent("n1")])
def test_a_spare_takes_the_place_of_a_bad_node(bad: Candidate) -> None:
    assert choose(bad, healthy("n2"), healthy("n3")) == Go(nodes=("n2", "n3"))


def test_a_late_node_is_waited_for_only_while_there_is_time() -> None:
    candidates = (pending("n1"), healthy("n2"), healthy("n3"))
    assert choose(*candidates) is None
    assert choose(*candidates, wait=False) == Go(nodes=("n2", "n3"))


def test_training_cannot_start_before_enough_nodes_are_healthy() -> None:
    assert choose(pending("n1"), healthy("n2"), wait=False) is None


def test_a_failed_check_refuses_the_start_without_waiting_for_the_others() -> None:
    verdict = choose(failed("n1"), pending("n2"))
    assert isinstance(verdict, Verdict)
    assert (verdict.exit_code, verdict.node) == (76, "n1")
    assert "disk: full" in verdict.reason


def test_a_node_that_is_late_is_named_as_silent() -> None:
    verdict = choose(healthy("n1"), Candidate(node="n2"), late=True)
    assert isinstance(verdict, Verdict)
    assert (verdict.exit_code, verdict.node) == (77, "n2")


def test_a_silent_node_weighs_more_than_a_failed_check() -> None:
    verdict = choose(failed("n1"), silent("n2"))
    assert isinstance(verdict, Verdict)
    assert (verdict.exit_code, verdict.node) == (77, "n2")


def test_no_node_is_blamed_when_none_reported() -> None:
    verdict = choose(Candidate(node="n1"), Candidate(node="n2"), late=True)
    assert isinstance(verdict, Verdict)
    assert (verdict.exit_code, verdict.node) == (1, None)


def unstartable(node: str) -> Candidate:
    return Candidate(node=node, is_connected=True, failed="no such file", exit_code=127)


def test_what_no_node_can_start_is_nobodys_fault() -> None:
    assert choose(unstartable("n1"), pending("n2")) is None
    verdict = choose(unstartable("n1"), unstartable("n2"))
    assert isinstance(verdict, Verdict)
    assert (verdict.exit_code, verdict.node) == (127, None)


def test_what_only_one_node_cannot_start_is_that_nodes_fault() -> None:
    verdict = choose(unstartable("n1"), healthy("n2"))
    assert isinstance(verdict, Verdict)
    assert (verdict.exit_code, verdict.node) == (76, "n1")


def end(node: str, code: int) -> NodeEnd:
    return NodeEnd(node=node, exit_code=code, reason="it ended")


def judge(*ends: NodeEnd, alive: tuple[str, ...] = (), outcome: Outcome | None = None) -> tuple[int, str | None]:
    verdict = judge_ends(ends, ("n1", "n2"), alive, outcome)
    return verdict.exit_code, verdict.node


def test_zero_needs_every_node() -> None:
    assert judge(end("n1", 0), end("n2", 0)) == (0, None)
    assert judge(end("n1", 0)) == (77, "n2")


def test_the_first_failure_counts_and_the_others_are_its_victims() -> None:
    assert judge(end("n2", 137), end("n1", 1)) == (137, "n2")


def test_who_lost_its_peer_is_not_blamed_though_it_said_so_first() -> None:
    victim = NodeEnd(node="n1", exit_code=1, reason="connection closed by peer", is_victim=True)
    assert judge(victim, end("n2", 42)) == (42, "n2")
    assert judge(victim, end("n2", 0)) == (1, "n1")


def test_a_failure_after_a_success_still_counts() -> None:
    assert judge(end("n1", 0), end("n2", 9)) == (9, "n2")


def test_an_outcome_counts_also_when_the_workers_ended_well() -> None:
    assert judge(end("n1", 0), end("n2", 0), outcome=Outcome(attempt=1, exit_code=75)) == (75, None)


def test_an_outcome_of_success_does_not_hide_a_failure() -> None:
    assert judge(end("n1", 1), outcome=Outcome(attempt=1, exit_code=0)) == (1, "n1")


def test_nodes_that_still_answer_are_not_blamed_for_the_end_of_srun() -> None:
    assert judge(alive=("n1", "n2")) == (1, None)


@pytest.mark.parametrize("checks", [None, 3, [1, None], [{"ok": None}], [{"ok": True}], [{"ok": 0}]])
def test_only_a_plain_no_is_a_failed_check(checks: object) -> None:
    assert describe_failed_check({"type": "checked", "checks": checks}) == ""


def test_a_failed_check_is_described_with_its_detail() -> None:
    assert describe_failed_check({"checks": [{"check": "disk", "ok": False, "detail": "full"}]}) == "disk: full"
