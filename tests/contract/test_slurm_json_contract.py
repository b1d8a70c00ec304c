"""The contract again, on a real Slurm that is asked for JSON: those of its tests that read, and need no broken node."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path

import pytest

from slurm.client import CliClient, SlurmClient
from slurm.sandbox import Sandbox
from slurm.types import JobRecord, JobState, NodeRecord
from tests.contract.subjects import Cluster, RealSubject
from tests.contract.test_slurm_contract import (  # noqa: F401 - collected here, with the cluster below
    test_a_drained_node_says_why_and_who_and_takes_no_job,
    test_a_job_is_listed_under_its_token_and_runs_on_as_many_nodes_as_asked,
    test_a_job_that_fails_keeps_its_exit_status,
    test_a_job_that_its_exclusions_make_impossible_is_refused_and_leaves_a_record_that_never_ran,
    test_a_submission_whose_answer_was_lost_is_found_by_its_token,
    test_a_waiting_job_that_is_cancelled_never_started,
    test_without_accounting_ended_jobs_are_refused_and_tokens_still_found,
)

pytestmark = pytest.mark.slurm


@dataclass
class JsonSubject(RealSubject):
    """The same cluster, asked for JSON; `notices` is what the client had to say."""

    notices: list[str] = field(default_factory=list)

    def make_client(self, cli: CliClient, *, timeout_s: float) -> SlurmClient:
        return CliClient(
            run=self._run, parent=self.parent, timeout_s=timeout_s, form="json", on_notice=self.notices.append
        )


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox.start(nodes=4, mode="loopback", gpus_per_node=2) as started:
        yield started


@pytest.fixture
def cluster(sandbox: Sandbox, tmp_path: Path) -> Iterator[Cluster]:
    subject = JsonSubject(tmp_path, sandbox)
    real = Cluster(subject)
    yield real
    for job_id in real.submitted:
        real.client.cancel(job_id)
    real.until_idle()
    assert subject.notices == []  # it was JSON to the end


def test_json_and_text_of_a_real_slurm_say_the_same(cluster: Cluster) -> None:
    job_id = cluster.submit("both", nodes=2)
    waiting = cluster.submit("waits", name="both")
    failed = cluster.submit("failed", body="exit 137")
    cluster.until_state(job_id, JobState.RUNNING)
    cluster.until_state(failed, JobState.FAILED)
    cluster.until(lambda: cluster.job(waiting).reason == "Dependency")
    assert isinstance(cluster.subject, JsonSubject)
    by_text = CliClient(parent=cluster.subject.parent)
    cluster.until(lambda: _jobs(cluster.client) == _jobs(by_text))  # two questions are two moments
    cluster.until(lambda: _nodes(cluster.client) == _nodes(by_text))
    assert {job_id, waiting, failed} <= _jobs(by_text).keys()
    assert {node.gpus for node in _nodes(cluster.client)} == {2}


def _jobs(client: SlurmClient) -> dict[int, JobRecord]:
    return {job.job_id: _without_a_year(job) for job in client.fetch_jobs().jobs}


def _without_a_year(job: JobRecord) -> JobRecord:
    """Of a job without a time limit the text of 24.11 tells no end, its JSON and 22.05 one in a year."""
    if job.limit_at is None or job.start_at is None or job.limit_at - job.start_at < timedelta(days=364):
        return job
    return replace(job, limit_at=None)


def _nodes(client: SlurmClient) -> list[NodeRecord]:
    # scontrol leaves out the port that is the cluster's own.
    return [replace(node, port=None) for node in client.fetch_nodes().nodes]
