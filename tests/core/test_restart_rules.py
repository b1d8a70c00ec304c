"""What becomes of a run after an end, when it starts again, and with how many nodes."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from slurm.types import NodeBase
from supervisor.core.restarts import (
    Aftermath,
    Size,
    backoff_s,
    choose_count,
    choose_size,
    count_failures,
    find_failures,
    judge_aftermath,
    judge_failures,
    locate,
    next_start_at,
)
from supervisor.model import Attempt, AttemptEnd, CheckpointState, NodesSpec, RestartSpec, RunState
from tests.core.builders import NOW, RUN, ago, attempt, broken, checkpoint, cluster, node, over, run, spec

# ---------------------------------------------------------------- aftermath


def after(end: AttemptEnd, *, of: Any = RUN, failures: int = 1, **changes: Any) -> RunState | None:
    judged = judge_aftermath(Aftermath(run=of, last=over(end=end, **changes), failures=failures))
    return judged[0] if judged else None


_LAST_ENDS = {"finished", "cancelled", "refused", "do_not_restart", "diverged"}


@pytest.mark.parametrize(
    ("end", "state"),
    [
        (AttemptEnd.FINISHED, RunState.FINISHED),
        (AttemptEnd.CANCELLED, RunState.HELD),
        (AttemptEnd.REFUSED, RunState.HELD),
        (AttemptEnd.DO_NOT_RESTART, RunState.HELD),
        (AttemptEnd.DIVERGED, RunState.HELD),  # unless a rollback was decided
        *((end, None) for end in AttemptEnd if end.value not in _LAST_ENDS),
    ],
)
def test_each_end_has_its_aftermath(end: AttemptEnd, state: RunState | None) -> None:
    assert after(end) is state


@pytest.mark.parametrize("end", list(AttemptEnd))
def test_a_run_that_a_person_stops_is_stopped_whatever_its_attempt_came_to(end: AttemptEnd) -> None:
    assert after(end, of=run(state=RunState.STOPPING)) is RunState.STOPPED


def test_an_attempt_that_failed_after_the_final_step_is_not_repeated_for_ever() -> None:
    """Case RR-07."""
    done = run(final_step=10000)
    assert after(AttemptEnd.CRASHED, of=done, resume_step=10000) is RunState.HELD
    assert after(AttemptEnd.CRASHED, of=done, resume_step=9999) is None
    assert after(AttemptEnd.FINISHED, of=done, resume_step=10000) is RunState.FINISHED


def test_a_run_is_held_after_the_last_allowed_restart_without_progress() -> None:
    assert after(AttemptEnd.CRASHED, failures=2) is None
    assert after(AttemptEnd.CRASHED, failures=3) is RunState.HELD


# ---------------------------------------------------------------- counting failures


def test_attempts_since_the_last_fruitful_one_are_counted() -> None:
    ended = [over(1), over(2), over(3), over(4)]
    assert count_failures(RUN, ended, []) == 4
    assert count_failures(RUN, ended, [checkpoint(100, 2)]) == 2
    assert count_failures(RUN, ended, [checkpoint(100, 4)]) == 0


def test_a_fenced_checkpoint_is_no_progress() -> None:
    assert count_failures(RUN, [over(1)], [checkpoint(200, 1, CheckpointState.FENCED, verified_at=NOW)]) == 1


def test_a_checkpoint_that_is_not_read_back_yet_is_progress_of_the_newest_attempt_only() -> None:
    unread = [checkpoint(100, 1, CheckpointState.COMPLETE)]
    assert count_failures(RUN, [over(1)], unread) == 0
    assert count_failures(RUN, [over(1), over(2)], unread) == 2


def test_the_same_step_saved_again_is_no_progress() -> None:
    again = [over(1), over(2, resume_step=100)]
    assert count_failures(RUN, again, [checkpoint(100, 1), checkpoint(100, 2)]) == 1
    assert count_failures(RUN, again, [checkpoint(100, 1), checkpoint(101, 2)]) == 0


@pytest.mark.parametrize(
    "end", [AttemptEnd.PREEMPTED, AttemptEnd.TIME_LIMIT, AttemptEnd.LOST, AttemptEnd.STOPPED], ids=str
)
def test_ends_that_are_nobodys_fault_cost_nothing(end: AttemptEnd) -> None:
    """Cases RR-03, RR-05: five preemptions and one failure are one failure."""
    assert count_failures(RUN, [*(over(n, end) for n in range(1, 6)), over(6)], []) == 1


def test_starts_inside_a_job_are_counted_by_the_budget() -> None:
    """Seen: a program that fails at once was started nine times, in three jobs."""
    ended = [over(n, launch=2) for n in (1, 2)]
    assert after_of(ended[:1]) is None  # other nodes are tried once
    assert next_start_at(RUN.spec.restart, count_failures(RUN, ended[:1], []), ended[0]) == ago(45)
    assert after_of(ended) is RunState.HELD
    assert after_of([replace(a, planned=2) for a in ended]) is None  # drills
    assert after_of([replace(a, end=AttemptEnd.NODE_FAILED) for a in ended]) is None


def after_of(ended: list[Attempt]) -> RunState | None:
    judged = judge_aftermath(judge_failures(RUN, ended[-1], find_failures(RUN, ended, [])))
    return judged[0] if judged else None


def test_failures_of_nodes_and_of_the_code_have_budgets_of_their_own() -> None:
    """Case RR-05: five node failures and two crashes are two crashes."""
    ends = [*[AttemptEnd.NODE_SILENT, AttemptEnd.NODE_FAILED, AttemptEnd.NODE_CHECK] * 3, *[AttemptEnd.CRASHED] * 2]
    ended = [over(number, end) for number, end in enumerate(ends, 1)]
    costs = judge_failures(RUN, ended[-1], find_failures(RUN, ended, []))
    assert (costs.failures, costs.node_failures) == (2, 9)
    assert judge_aftermath(costs) is None
    third = judge_failures(RUN, ended[-1], find_failures(RUN, [*ended, over(12)], []))
    judged = judge_aftermath(third)
    assert judged is not None
    assert judged[1].startswith("3 attempts without a newer verified checkpoint")


def test_nodes_that_fail_again_and_again_without_progress_hold_the_run_too() -> None:
    """Case RR-05."""
    ended = [over(number, AttemptEnd.VANISHED) for number in range(1, 11)]
    assert judge_aftermath(judge_failures(RUN, ended[8], find_failures(RUN, ended[:9], []))) is None
    judged = judge_aftermath(judge_failures(RUN, ended[9], find_failures(RUN, ended, [])))
    assert judged is not None
    assert judged[0] is RunState.HELD
    assert "10 attempts in a row were lost with a node" in judged[1]
    assert not find_failures(RUN, ended, [checkpoint(100, 10)])


def test_saving_again_and_again_without_a_verified_checkpoint_is_counted() -> None:
    assert count_failures(RUN, [over(1, AttemptEnd.SAVED), over(2, AttemptEnd.SAVED)], []) == 2


def test_a_live_attempt_has_not_failed_yet() -> None:
    assert count_failures(RUN, [over(1), attempt(2)], []) == 0


def test_what_a_person_released_is_forgiven() -> None:
    released = run(released_at=ago(30))
    assert count_failures(released, [over(1, over_at=ago(60)), over(2, over_at=ago(20))], []) == 1
    assert count_failures(released, [over(1, over_at=None)], []) == 0


# ---------------------------------------------------------------- back-off


@pytest.mark.parametrize(
    ("failures", "wait_s"), [(0, 0), (1, 0), (2, 15), (3, 30), (4, 60), (7, 480), (8, 600), (9999, 600)]
)
def test_the_pause_doubles_from_the_second_failure_up_to_its_maximum(failures: int, wait_s: float) -> None:
    assert backoff_s(RestartSpec(), failures) == wait_s


def test_the_next_start_is_counted_from_the_end() -> None:
    assert next_start_at(RestartSpec(), 2, over(over_at=NOW)) == NOW + timedelta(seconds=15)
    assert next_start_at(RestartSpec(), 1, over(over_at=NOW)) is None
    assert next_start_at(RestartSpec(), 2, None) is None
    assert next_start_at(RestartSpec(), 2, over(over_at=None)) is None


# ---------------------------------------------------------------- how many nodes


@pytest.mark.parametrize(
    ("low", "high", "multiple", "available", "count"),
    [
        (2, 3, 1, 4, 3),
        (2, 3, 1, 3, 3),
        (2, 3, 1, 2, 2),
        (2, 3, 1, 1, 0),
        (2, 8, 2, 7, 6),
        (2, 8, 4, 7, 4),
        (3, 8, 4, 3, 0),
        (2, 8, 2, 99, 8),
        (2, 7, 2, 99, 6),
        (1, 1, 1, 0, 0),
    ],
)
def test_the_count_is_the_largest_multiple_between_min_and_max(
    low: int, high: int, multiple: int, available: int, count: int
) -> None:
    """Case RR-11: exact, never above max, nothing below min."""
    assert choose_count(NodesSpec(min=low, max=high, multiple_of=multiple), available) == count


def size(nodes: Any, *memories: Any, of: Any = None, **parts: Any) -> Size:
    return choose_size(of or spec(), nodes, {m.node: m for m in memories}, **parts)


def busy(*names: str) -> list[Any]:
    return [node(n, NodeBase.ALLOCATED) for n in names]


def test_all_nodes_that_may_be_used_are_used() -> None:
    assert size(cluster(4)) == Size(nodes=3, fit=4, free=4)


@pytest.mark.parametrize(
    "unfit",
    [
        node("n4", NodeBase.DOWN),
        node("n4", NodeBase.IDLE, "DRAIN"),
        node("n4", NodeBase.IDLE, "NOT_RESPONDING"),
        node("n4", NodeBase.IDLE, "MAINTENANCE"),
    ],
    ids=lambda n: n.raw_state,
)
def test_a_node_that_slurm_would_not_give_is_not_counted_and_need_not_be_excluded(unfit: Any) -> None:
    assert size(cluster(4, node("n3", NodeBase.DOWN), unfit)) == Size(nodes=2, fit=2, free=2)


def test_a_broken_node_is_excluded() -> None:
    found = size(cluster(3), broken("n2"))
    assert (found.nodes, found.exclude) == (2, ("n2",))


def test_a_node_whose_port_is_silent_now_is_left_out_without_a_verdict() -> None:
    found = size(cluster(3), silent=frozenset({"n1"}))
    assert (found.nodes, found.exclude) == (2, ("n1",))


def test_a_drained_node_that_is_not_broken_is_not_named() -> None:
    assert size(cluster(3, node("n1", NodeBase.IDLE, "DRAIN"))).exclude == ()


def test_below_the_minimum_nothing_is_asked_for() -> None:
    found = size(cluster(1))
    assert (found.nodes, found.fit) == (0, 1)


def test_a_smaller_start_now_beats_a_full_one_in_the_queue() -> None:
    assert size(cluster(4, *busy("n3", "n4"))).nodes == 2


def test_with_too_few_free_nodes_the_job_queues_for_what_the_healthy_ones_allow() -> None:
    found = size(cluster(4, *busy("n2", "n3", "n4")))
    assert (found.nodes, found.free) == (3, 1)


def test_the_nodes_of_our_own_ended_attempt_count_as_free() -> None:
    assert size(cluster(4, *busy("n2", "n3", "n4")), ours=frozenset({"n2", "n3"})).nodes == 3


def test_spares_are_taken_from_what_is_left() -> None:
    wanting = spec(nodes={"spares": 2})
    assert size(cluster(6), of=wanting).spares == 2
    assert size(cluster(4), of=wanting).spares == 1
    assert size(cluster(3), of=wanting).spares == 0
    assert size(cluster(1), of=wanting).spares == 0


def test_a_multiple_leaves_room_for_spares() -> None:
    found = size(cluster(5), of=spec(nodes={"max": 8, "multiple_of": 2, "spares": 1}))
    assert (found.nodes, found.spares) == (4, 1)


def test_only_nodes_of_the_runs_partition_are_counted() -> None:
    nodes = cluster(2, *(node(f"g{i}", partitions=("gpu",)) for i in range(3)))
    nodes = {n: replace(r, partitions=r.partitions or ("cpu",)) for n, r in nodes.items()}
    assert size(nodes, of=spec(slurm={"partition": "gpu"})).fit == 3
    assert size(nodes, broken("n1"), of=spec(slurm={"partition": "gpu"})).exclude == ()


def test_of_several_partitions_any_will_do() -> None:
    nodes = {n: replace(r, partitions=("a",)) for n, r in cluster(2).items()}
    assert size(nodes, of=spec(slurm={"partition": "a,b"})).fit == 2


def test_a_run_without_a_partition_counts_the_nodes_of_the_default_one() -> None:
    elsewhere = node("big1", partitions=("big",))
    nodes = cluster(2) | {"big1": elsewhere}
    assert choose_size(locate(spec(), "main"), nodes, {}).fit == 2
