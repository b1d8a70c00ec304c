"""What the service relies on, held to FakeSlurm and to a real Slurm, by its commands and by pyslurm: none may drift.

All jobs take whole nodes. A body that is not `exit N` runs until it is cancelled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from functools import cache
from pathlib import Path

import pytest

from slurm.errors import SlurmRefused, SlurmUnavailable, SubmitUnconfirmed
from slurm.sandbox import Sandbox
from slurm.types import JobState, NodeAvailability, NodeRecord
from tests.contract.subjects import Cluster, FakeSubject, PyslurmSubject, RealSubject


@pytest.fixture(scope="module")
def sandbox_of() -> Iterator[Callable[[str], Sandbox]]:
    """One for each subject: they use the same tokens."""
    with ExitStack() as stack:
        # SlurmdTimeout stays above MessageTimeout: a slurmd whose port is closed is tried that long again, meanwhile
        # the others are not asked, and a shorter time-out turns every node DOWN together.
        yield cache(lambda _: stack.enter_context(Sandbox.start(nodes=4, mode="loopback")))


REAL = {"real": RealSubject, "pyslurm": PyslurmSubject}


@pytest.fixture(
    params=[
        "fake",
        pytest.param("real", marks=pytest.mark.slurm),
        pytest.param("pyslurm", marks=[pytest.mark.slurm, pytest.mark.pyslurm]),
    ]
)
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    if request.param == "fake":
        yield Cluster(FakeSubject(tmp_path))
        return
    real = Cluster(REAL[request.param](tmp_path, request.getfixturevalue("sandbox_of")(request.param)))
    yield real
    for job_id in real.submitted:
        real.client.cancel(job_id)
    real.until_idle()
    real.subject.close()


def node(cluster: Cluster, name: str) -> NodeRecord:
    return next(node for node in cluster.client.fetch_nodes().nodes if node.name == name)


# ---------------------------------------------------------------- jobs


def test_a_job_is_listed_under_its_token_and_runs_on_as_many_nodes_as_asked(cluster: Cluster) -> None:
    before = cluster.subject.now() - timedelta(seconds=2)
    job_id = cluster.submit("runs", nodes=2)
    job = cluster.until_state(job_id, JobState.RUNNING)
    assert (job.comment, job.name, len(job.nodes)) == ("runs", "runs", 2)
    assert job.submit_at is not None
    assert job.start_at is not None
    assert before < job.submit_at <= job.start_at <= cluster.subject.now()
    assert (job.end_at, job.exit_code, job.restarts) == (None, None, 0)
    assert {name for name in job.nodes if node(cluster, name).is_idle} == set()


def test_a_job_that_ends_well_is_completed(cluster: Cluster) -> None:
    job = cluster.until_state(cluster.submit("good", body="exit 0"), JobState.COMPLETED)
    assert (job.exit_code, job.exit_signal, job.is_ended) == (0, 0, True)
    assert job.end_at is not None


def test_a_job_that_fails_keeps_its_exit_status(cluster: Cluster) -> None:
    job = cluster.until_state(cluster.submit("bad", body="exit 137"), JobState.FAILED)
    assert (job.exit_code, job.exit_signal) == (137, 0)


def test_a_running_job_can_be_cancelled_and_frees_its_nodes(cluster: Cluster) -> None:
    job_id = cluster.submit("cancel", nodes=2)
    cluster.until_state(job_id, JobState.RUNNING)
    cluster.client.cancel(job_id)
    cluster.until(lambda: cluster.job(job_id).is_ended, within_s=3)
    assert len(cluster.until_state(job_id, JobState.CANCELLED).nodes) == 2
    cluster.until_idle()


def test_a_waiting_job_that_is_cancelled_never_started(cluster: Cluster) -> None:
    first = cluster.submit("first", name="same")
    cluster.until_state(first, JobState.RUNNING)
    waiting = cluster.submit("waiting", name="same")
    cluster.client.cancel(waiting)
    job = cluster.until_state(waiting, JobState.CANCELLED)
    assert (job.nodes, job.start_at) == ((), None)


def test_cancelling_twice_or_what_never_was_is_no_error(cluster: Cluster) -> None:
    job_id = cluster.submit("twice")
    cluster.client.cancel(job_id)
    cluster.client.cancel(job_id)
    cluster.client.cancel(4_000_000)


def test_a_second_job_of_the_same_name_waits_for_the_first(cluster: Cluster) -> None:
    first = cluster.submit("attempt-1", name="run")
    cluster.until_state(first, JobState.RUNNING)
    second = cluster.submit("attempt-2", name="run")
    cluster.until(lambda: cluster.job(second).reason == "Dependency")
    job = cluster.job(second)
    assert (job.is_pending, job.start_at, job.nodes) == (True, None, ())
    cluster.client.cancel(first)
    cluster.until_state(second, JobState.RUNNING)


def test_a_job_that_is_too_large_for_now_waits(cluster: Cluster) -> None:
    cluster.until_state(cluster.submit("large", nodes=3), JobState.RUNNING)
    waiting = cluster.submit("waiting", nodes=2)
    cluster.until(lambda: cluster.job(waiting).reason == "Resources")
    assert cluster.job(waiting).is_pending


def test_a_job_that_is_larger_than_the_cluster_is_refused_or_waits_for_ever(cluster: Cluster) -> None:
    try:
        job_id = cluster.submit("huge", nodes=5)
    except SlurmRefused:
        return  # 24.11
    cluster.until(lambda: cluster.job(job_id).reason == "PartitionNodeLimit")
    assert cluster.job(job_id).is_pending


def test_excluded_nodes_are_not_used(cluster: Cluster) -> None:
    job = cluster.until_state(cluster.submit("exclude", nodes=2, exclude=("n1", "n3")), JobState.RUNNING)
    assert set(job.nodes) == {"n2", "n4"}


@pytest.mark.parametrize("wrong", [{"exclude": ("n77",)}, {"partition": "nowhere"}])
def test_what_can_never_run_is_refused_and_leaves_no_job(cluster: Cluster, wrong: dict[str, object]) -> None:
    with pytest.raises(SlurmRefused):
        cluster.submit("never", **wrong)
    assert cluster.client.find_by_token("never", since=cluster.subject.now() - timedelta(minutes=1)) == ()


def test_a_job_that_its_exclusions_make_impossible_is_refused_and_leaves_a_record_that_never_ran(
    cluster: Cluster,
) -> None:
    since = cluster.subject.now() - timedelta(seconds=2)
    with pytest.raises(SlurmRefused):
        cluster.submit("impossible", nodes=4, exclude=("n1",))
    (job,) = cluster.client.find_by_token("impossible", since=since)
    assert (job.state, job.is_live, job.nodes, job.start_at) == (JobState.FAILED, False, (), None)


# ---------------------------------------------------------------- tokens and lost answers


def test_a_submission_whose_answer_was_lost_is_found_by_its_token(cluster: Cluster) -> None:
    since = cluster.subject.now() - timedelta(seconds=2)
    cluster.subject.lose_next_reply()
    with pytest.raises(SubmitUnconfirmed):
        cluster.submit("lost")
    (job,) = cluster.client.find_by_token("lost", since=since)
    cluster.submitted.append(job.job_id)
    assert job.is_live
    assert cluster.client.find_by_token("los", since=since) == ()


def test_without_accounting_ended_jobs_are_refused_and_tokens_still_found(cluster: Cluster) -> None:
    since = cluster.subject.now() - timedelta(seconds=2)
    assert not cluster.client.fetch_cluster().has_accounting
    with pytest.raises(SlurmRefused):
        cluster.client.fetch_ended_jobs(since=since)
    job_id = cluster.submit("known", body="exit 0")
    cluster.until_state(job_id, JobState.COMPLETED)
    assert [job.job_id for job in cluster.client.find_by_token("known", since=since)] == [job_id]


def test_a_controller_that_is_down_is_unavailable_and_keeps_its_jobs(cluster: Cluster) -> None:
    job_id = cluster.submit("survivor")
    cluster.until_state(job_id, JobState.RUNNING)
    with cluster.subject.outage():
        with pytest.raises(SlurmUnavailable):
            cluster.client.fetch_jobs()
        with pytest.raises(SlurmUnavailable):
            cluster.client.fetch_nodes()
        with pytest.raises(SlurmUnavailable):
            cluster.submit("during")
        with pytest.raises(SlurmUnavailable):
            cluster.client.cancel(job_id)
    assert cluster.until_state(job_id, JobState.RUNNING).comment == "survivor"


# ---------------------------------------------------------------- nodes


def test_a_drained_node_says_why_and_who_and_takes_no_job(cluster: Cluster) -> None:
    cluster.client.drain("n1", "sup#41 xid48: memory = bad")
    drained = node(cluster, "n1")
    assert (drained.availability, drained.reason) == (NodeAvailability.DRAINED, "sup#41 xid48: memory = bad")
    assert drained.reason_user == "root"
    job = cluster.until_state(cluster.submit("avoid", nodes=3), JobState.RUNNING)
    assert "n1" not in job.nodes
    cluster.client.undrain("n1")
    assert not node(cluster, "n1").is_drain_set
    assert node(cluster, "n1").reason in ("", "sup#41 xid48: memory = bad")  # 24.11 keeps the text


def test_a_later_drain_replaces_the_reason_of_an_earlier_one(cluster: Cluster) -> None:
    cluster.client.drain("n1", "first")
    cluster.client.drain("n1", "second")
    assert node(cluster, "n1").reason == "second"
    cluster.client.undrain("n1")


def test_draining_a_busy_node_leaves_its_job_alone(cluster: Cluster) -> None:
    job_id = cluster.submit("busy")
    (name,) = cluster.until_state(job_id, JobState.RUNNING).nodes
    cluster.client.drain(name, "sup: later")
    assert node(cluster, name).availability is NodeAvailability.DRAINING
    assert cluster.job(job_id).state is JobState.RUNNING
    cluster.client.cancel(job_id)
    cluster.until(lambda: node(cluster, name).availability is NodeAvailability.DRAINED)
    cluster.client.undrain(name)


def test_lifting_a_drain_that_is_not_there_is_no_error(cluster: Cluster) -> None:
    cluster.client.undrain("n2")
    cluster.until(lambda: node(cluster, "n2").is_idle)


def test_a_node_that_is_not_there_cannot_be_drained(cluster: Cluster) -> None:
    with pytest.raises(SlurmRefused):
        cluster.client.drain("n77", "sup: nobody")
    with pytest.raises(SlurmRefused):
        cluster.client.undrain("n77")


# ---------------------------------------------------------------- power cuts


def test_after_a_power_cut_a_job_goes_on_without_its_batch_host_and_another_dies_with_its_last_node(
    cluster: Cluster,
) -> None:
    wide = cluster.submit("headless", nodes=2)
    batch_host, kept = cluster.until_state(wide, JobState.RUNNING).nodes
    narrow = cluster.submit("narrow")
    (only,) = cluster.until_state(narrow, JobState.RUNNING).nodes
    cluster.subject.power_cut(batch_host)
    cluster.subject.power_cut(only)
    cluster.until(lambda: node(cluster, only).availability is NodeAvailability.DOWN, within_s=60)
    assert cluster.until_state(narrow, JobState.NODE_FAIL, within_s=60).is_ended
    cluster.until(lambda: cluster.job(wide).nodes == (kept,), within_s=60)
    # Nothing runs in it any more, and Slurm does not say so: only the launcher's silence does.
    assert cluster.job(wide).state is JobState.RUNNING
    cluster.client.cancel(wide)
    cluster.until_state(wide, JobState.CANCELLED)
    cluster.subject.revive(batch_host)
    cluster.subject.revive(only)


def test_a_successor_starts_while_its_predecessor_completes_on_a_node_that_is_cut_off(cluster: Cluster) -> None:
    first = cluster.submit("a1", name="run", nodes=2)
    lost = cluster.until_state(first, JobState.RUNNING).nodes[1]
    second = cluster.submit("a2", name="run", nodes=2)
    cluster.subject.power_cut(lost)
    cluster.client.drain(lost, "sup: silent")
    cluster.client.cancel(first)
    cluster.until_state(second, JobState.RUNNING, within_s=8)
    assert cluster.job(first).is_completing
    assert cluster.job(first).is_ended
    assert not node(cluster, lost).is_idle
    cluster.until_state(first, JobState.CANCELLED, within_s=60)  # when Slurm turns the node DOWN
    cluster.subject.revive(lost)
    cluster.until(lambda: node(cluster, lost).availability is NodeAvailability.DRAINED)
    cluster.client.undrain(lost)
