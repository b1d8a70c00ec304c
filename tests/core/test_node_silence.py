"""Which nodes of a running attempt are gone: two signs, a port that answers elsewhere, and never a majority."""

from __future__ import annotations

from typing import Any

import pytest

from slurm.types import JobFlag, JobRecord, JobState, NodeBase
from supervisor.core.nodes import choose_controls, judge_silence, judge_slurm_failure, silent_ports, suspects
from supervisor.core.sight import Silence
from supervisor.model import Attempt, AttemptState, PortProbe
from tests.core.builders import STALE, ago, attempt, cluster, job, launch, node, port, ports, sight, snapshot, view

FOUR = attempt(nodes=("n1", "n2", "n3", "n4"), nodes_wanted=4)
FRESH_BEATS = {"n1": 0.2, "n2": 0.2, "n3": 0.2, "n4": 0.2}


def names(silent: tuple[Silence, ...]) -> list[str]:
    return [s.node for s in silent]


def gone(report: Any, probes: dict[str, PortProbe], *, of: Attempt = FOUR, **parts: Any) -> list[str]:
    jobs = () if "jobs" in parts else (job(nodes=of.nodes),)
    return names(judge_silence(sight(of, *jobs, view=view(launch=report), **parts), probes))


def beats(**ages: float) -> dict[str, float]:
    return FRESH_BEATS | ages


# ---------------------------------------------------------------- two signs


def test_no_heartbeat_and_no_port_means_gone() -> None:
    assert gone(launch(beats(n2=4.0)), ports(n1=0, n2=2.0)) == ["n2"]


def test_a_missing_heartbeat_alone_is_no_proof() -> None:
    assert gone(launch(beats(n2=4.0)), ports(n1=0, n2=0)) == []


def test_a_silent_port_alone_is_no_proof() -> None:
    assert gone(launch(beats()), ports(n1=0, n2=9.0)) == []


def test_a_heartbeat_within_its_time_is_not_missing() -> None:
    assert gone(launch(beats(n2=2.9)), ports(n1=0, n2=9.0)) == []


def test_one_failed_connect_is_no_silence() -> None:
    assert gone(launch(beats(n2=4.0)), {"n1": port("n1"), "n2": port("n2", silent_s=2.0, failures=1)}) == []


def test_a_port_must_be_silent_for_as_long_as_the_run_file_says() -> None:
    assert gone(launch(beats(n2=4.0)), ports(n1=0, n2=1.4)) == []


def test_a_node_whose_port_nobody_watches_is_not_gone() -> None:
    assert gone(launch(beats(n2=4.0)), ports(n1=0)) == []


def test_while_no_port_answers_our_own_network_is_suspected_and_nobody_is_gone() -> None:
    assert gone(launch(beats(n2=9.0, n3=9.0)), ports(n1=9.0, n2=9.0, n3=9.0)) == []


def test_several_nodes_can_go_at_once() -> None:
    assert gone(launch(beats(n2=9.0, n3=9.0, n4=9.0)), ports(n1=0, n2=9.0, n3=9.0, n4=9.0)) == ["n2", "n3", "n4"]


@pytest.mark.parametrize("state", ["spare", "ended"])
def test_a_node_that_does_not_train_is_not_waited_for(state: str) -> None:
    report = launch(beats(n4=60.0), states={"n4": state})
    assert gone(report, ports(n1=0, n4=60.0)) == []


def test_a_node_that_the_launcher_does_not_list_is_not_judged_by_its_beats() -> None:
    report = launch({"n1": 0.2, "n2": 0.2})
    assert gone(report, ports(n1=0, n4=60.0)) == []


# ---------------------------------------------------------------- the batch host


def test_a_silent_batch_host_is_known_by_its_launchers_silence_and_its_port() -> None:
    assert gone(launch(beats(), unchanged_s=5.0), ports(n1=2.0, n2=0)) == ["n1"]


def test_with_a_silent_launcher_another_nodes_port_must_be_silent_twice_as_long() -> None:
    """All ages grow while the launcher is silent: a slow file system must not make all nodes look dead."""
    report = launch(beats(), unchanged_s=5.0)
    assert gone(report, ports(n1=0, n2=2.0)) == []
    assert gone(report, ports(n1=0, n2=3.0)) == ["n2"]


def test_a_late_report_is_no_silence() -> None:
    assert gone(launch(beats(), unchanged_s=3.5), ports(n1=9.0, n2=0)) == []


# ---------------------------------------------------------------- frozen


def test_a_node_without_heartbeats_whose_port_answers_is_frozen_in_the_end() -> None:
    assert gone(launch(beats(n2=9.0)), ports(n1=0, n2=0)) == []
    assert gone(launch(beats(n2=21.0)), ports(n1=0, n2=0)) == ["n2"]


def test_a_frozen_half_is_no_minority_of_more_than_half() -> None:
    assert gone(launch(beats(n2=30, n3=30)), ports(n1=0, n2=0, n3=0)) == ["n2", "n3"]
    assert gone(launch(beats(n2=30, n3=30, n4=30)), ports(n1=0, n2=0, n3=0, n4=0)) == []


def test_of_two_nodes_one_may_be_frozen() -> None:
    assert gone(launch({"n1": 0.2, "n2": 30}), ports(n1=0, n2=0), of=attempt()) == ["n2"]


def test_a_silent_launcher_on_a_host_that_answers_means_that_the_host_is_frozen() -> None:
    assert gone(launch(beats(), unchanged_s=25.0), ports(n1=0, n2=0)) == ["n1"]


def test_a_launcher_host_outside_the_allocation_is_not_judged() -> None:
    assert gone(launch(beats(), unchanged_s=25.0, host="login"), ports(n1=0, n2=0)) == []


def test_a_frozen_node_must_be_watched_to_be_judged() -> None:
    assert gone(launch(beats(n2=30)), ports(n1=0)) == []


def test_a_suspended_job_is_silent_and_its_nodes_are_not_frozen() -> None:
    report = launch(beats(), unchanged_s=500.0)
    for stopped in (job(state=JobState.SUSPENDED), job(state=None, flags=frozenset({JobFlag.STOPPED}))):
        assert judge_silence(sight(FOUR, stopped, view=view(launch=report)), ports(n1=0, n2=0)) == ()


def test_no_node_is_called_frozen_while_squeue_does_not_answer() -> None:
    """A suspended job looks the same."""
    assert gone(launch(beats(), unchanged_s=500.0), ports(n1=0, n2=0), jobs=STALE) == []


@pytest.mark.parametrize("jobs", [(), (job(state=JobState.TIMEOUT),)], ids=["gone", "ended"])
def test_the_batch_host_of_a_job_that_has_ended_is_silent_and_not_frozen(jobs: tuple[JobRecord, ...]) -> None:
    seen = sight(FOUR, *jobs, view=view(launch=launch(beats(), unchanged_s=400.0)))
    assert judge_silence(seen, ports(n1=0, n2=0)) == ()


def test_a_batch_host_is_frozen_only_by_an_answer_of_squeue_from_after_its_silence_began() -> None:
    """The job may have ended just after the last answer."""
    report = view(launch=launch(beats(), unchanged_s=25.0))
    old = sight(FOUR, job(), view=report, asked_at=ago(30))
    new = sight(FOUR, job(), view=report, asked_at=ago(10))
    assert names(judge_silence(old, ports(n1=0, n2=0))) == []
    assert names(judge_silence(new, ports(n1=0, n2=0))) == ["n1"]


def test_a_node_that_is_gone_is_noticed_though_squeue_does_not_answer() -> None:
    assert gone(launch(beats(n2=4.0)), ports(n1=0, n2=2.0), jobs=STALE) == ["n2"]


# ---------------------------------------------------------------- before the launcher speaks


def test_a_node_that_is_dead_before_the_launcher_speaks_is_noticed_by_its_port() -> None:
    waiting = attempt(state=AttemptState.SUBMITTED)
    seen = sight(waiting, job(), view=view())
    assert names(judge_silence(seen, ports(n1=0, n2=3.0))) == ["n2"]
    assert names(judge_silence(seen, ports(n1=0, n2=2.9))) == []


@pytest.mark.parametrize("state", [JobState.PENDING, JobState.FAILED])
def test_before_the_launcher_speaks_only_a_job_that_has_its_nodes_is_looked_at(state: JobState) -> None:
    waiting = attempt(state=AttemptState.SUBMITTED, nodes=("n1", "n2"))
    assert judge_silence(sight(waiting, job(state=state), view=view()), ports(n1=0, n2=9.0)) == ()


def test_before_the_launcher_speaks_nothing_is_judged_without_squeue() -> None:
    waiting = attempt(state=AttemptState.SUBMITTED, nodes=("n1", "n2"))
    assert judge_silence(sight(waiting, view=view(), jobs=STALE), ports(n1=0, n2=9.0)) == ()


def test_one_failed_connect_before_the_launcher_speaks_is_no_silence() -> None:
    waiting = attempt(state=AttemptState.SUBMITTED, nodes=("n1", "n2"))
    probes = {"n1": port("n1"), "n2": port("n2", silent_s=9.0, failures=1)}
    assert judge_silence(sight(waiting, job(), view=view()), probes) == ()


def test_an_attempt_that_is_over_is_not_judged() -> None:
    ended = attempt(state=AttemptState.OVER)
    assert judge_silence(sight(ended, job(), view=view(launch=launch({"n1": 9, "n2": 9}))), ports(n1=0, n2=9)) == ()


# ---------------------------------------------------------------- Slurm's word on nodes


DOWN = node("n2", NodeBase.DOWN, reason="Not responding")


def down(one: Attempt = FOUR, *, report: Any = None, **parts: Any) -> list[str]:
    seen = snapshot(nodes=cluster(4, DOWN), **parts)
    return names(judge_slurm_failure(sight(one, view=view(launch=report)), seen))


def test_a_node_of_the_attempt_that_slurm_turned_down_has_failed() -> None:
    assert down() == ["n2"]


def test_a_node_of_another_job_is_none_of_ours() -> None:
    assert down(attempt(nodes=("n1", "n3"))) == []


def test_an_answer_from_before_the_start_says_nothing_about_this_attempt() -> None:
    assert down(attempt(started_at=ago(1)), asked_at=ago(5)) == []


def test_a_job_that_has_not_started_has_no_failed_node() -> None:
    assert down(attempt(state=AttemptState.SUBMITTED, nodes=("n2",))) == []
    assert down(attempt(started_at=None)) == []


def test_no_node_has_failed_while_scontrol_does_not_answer() -> None:
    assert judge_slurm_failure(sight(FOUR), snapshot(nodes=None, jobs=STALE)) == ()
    blind = snapshot()
    assert judge_slurm_failure(sight(FOUR), type(blind)(jobs=blind.jobs, nodes=STALE)) == ()


def test_a_spare_that_slurm_turned_down_does_not_end_the_training() -> None:
    assert down(report=launch(beats(), states={"n2": "spare"})) == []


def test_the_batch_host_is_needed_even_where_it_does_not_train() -> None:
    assert down(report=launch(beats(), states={"n2": "spare"}, host="n2")) == ["n2"]


# ---------------------------------------------------------------- where to look


def watched(one: Attempt, report: Any, nodes: Any = None) -> set[str]:
    return set(suspects(sight(one, job(), view=view(launch=report)), nodes))


def test_nothing_is_watched_while_all_heartbeats_come() -> None:
    assert watched(FOUR, launch(beats())) == set()


def test_a_node_whose_heartbeat_is_half_late_is_watched() -> None:
    assert watched(FOUR, launch(beats(n3=1.6))) == {"n3"}


def test_a_node_that_slurm_calls_not_responding_is_watched() -> None:
    assert watched(FOUR, launch(beats()), cluster(4, node("n4", NodeBase.MIXED, "NOT_RESPONDING"))) == {"n4"}


def test_all_nodes_are_watched_while_the_launcher_is_silent() -> None:
    assert watched(FOUR, launch(beats(), unchanged_s=2.1)) == {"n1", "n2", "n3", "n4"}
    assert watched(FOUR, None) == {"n1", "n2", "n3", "n4"}


def test_a_spare_is_not_watched() -> None:
    assert watched(FOUR, launch(beats(n4=60), states={"n4": "spare"})) == set()


def test_an_attempt_without_nodes_has_nothing_to_watch() -> None:
    assert suspects(sight(attempt(state=AttemptState.PLANNED), view=view()), None) == frozenset()


def test_a_suspect_is_compared_with_its_neighbours_and_then_with_others() -> None:
    nodes = cluster(6, node("n5", NodeBase.DOWN))
    assert choose_controls(frozenset({"n2"}), attempt(), nodes) == {"n1", "n3", "n4"}
    assert choose_controls(frozenset({"n1", "n2"}), attempt(), nodes) == {"n3", "n4", "n6"}


def test_nothing_is_compared_where_nothing_is_suspected_or_known() -> None:
    assert choose_controls(frozenset(), FOUR, cluster()) == frozenset()
    assert choose_controls(frozenset({"n1"}), FOUR, None) == frozenset()


def test_silent_ports_count_only_while_another_answers() -> None:
    assert silent_ports(ports(n1=0, n2=3.0)) == {"n2"}
    assert silent_ports(ports(n1=3.0, n2=3.0)) == frozenset()
