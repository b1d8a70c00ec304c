"""Faults and hooks of FakeSlurm that a real Slurm can't be asked for; the rest is in tests/contract."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from slurm.errors import SlurmRefused, SlurmUnavailable, SubmitUnconfirmed
from slurm.types import JobState, SubmitRequest
from tests.fakes import VERBS, FakeClock, FakeSlurm, Fault


def request(token: str, nodes: int = 1, name: str = "run") -> SubmitRequest:
    return SubmitRequest(script=Path("/b.sh"), token=token, job_name=name, nodes=nodes, output=Path("/log"))


def test_a_lost_reply_leaves_a_job_and_a_lost_request_leaves_none() -> None:
    fake = FakeSlurm()
    fake.plan("submit", Fault.LOST_REPLY, Fault.LOST_REQUEST)
    for token in ("kept", "lost"):
        with pytest.raises(SubmitUnconfirmed):
            fake.submit(request(token))
    assert [job.comment for job in fake.jobs()] == ["kept"]


def test_a_late_submission_appears_after_the_caller_was_told_that_nobody_answered() -> None:
    fake = FakeSlurm(late_s=5)
    fake.plan("submit", "late")
    with pytest.raises(SubmitUnconfirmed):
        fake.submit(request("late"))
    assert fake.find_by_token("late", since=fake.clock.now()) == ()
    fake.advance(6)
    assert len(fake.find_by_token("late", since=fake.clock.now())) == 1


@pytest.mark.parametrize("fault", ["lost_reply", "lost_request"])
def test_a_change_whose_answer_is_lost_may_or_may_not_have_been_made(fault: str) -> None:
    fake = FakeSlurm()
    fake.plan("drain", fault)
    with pytest.raises(SlurmUnavailable):
        fake.drain("n1", "sup: bad")
    assert fake.node("n1").is_drain_set == (fault == "lost_reply")


def test_a_refused_call_changes_nothing() -> None:
    fake = FakeSlurm()
    fake.plan("submit", "refused")
    with pytest.raises(SlurmRefused):
        fake.submit(request("no"))
    assert fake.jobs() == ()


def test_each_fault_counts_once() -> None:
    fake = FakeSlurm()
    fake.plan("fetch_jobs", "unavailable", "none", "unavailable")
    seen = []
    for _ in range(4):
        try:
            fake.fetch_jobs()
            seen.append("ok")
        except SlurmUnavailable:
            seen.append("unavailable")
    assert seen == ["unavailable", "ok", "unavailable", "ok"]


def test_in_an_outage_every_verb_is_unavailable_and_jobs_go_on() -> None:
    fake = FakeSlurm()
    job_id = fake.submit(request("a")).job_id
    fake.outage = True
    fake.advance(5)
    calls: dict[str, Callable[[], object]] = {
        "fetch_cluster": fake.fetch_cluster,
        "fetch_jobs": fake.fetch_jobs,
        "fetch_nodes": fake.fetch_nodes,
        "fetch_ended_jobs": lambda: fake.fetch_ended_jobs(since=fake.clock.now()),
        "find_by_token": lambda: fake.find_by_token("a", since=fake.clock.now()),
        "submit": lambda: fake.submit(request("b")),
        "cancel": lambda: fake.cancel(job_id),
        "claim": lambda: fake.claim(job_id, "x"),
        "describe_job": lambda: fake.describe_job(job_id),
        "fetch_script": lambda: fake.fetch_script(job_id),
        "drain": lambda: fake.drain("n1", "x"),
        "undrain": lambda: fake.undrain("n1"),
    }
    for verb, call in calls.items():
        with pytest.raises(SlurmUnavailable):
            call()
        assert fake.calls[-1] == verb
    assert fake.job(job_id).state is JobState.RUNNING
    assert set(VERBS) == set(fake.calls)


def test_an_ended_job_is_forgotten_by_the_controller_and_kept_by_accounting() -> None:
    fake = FakeSlurm(min_job_age_s=300, has_accounting=True)
    since = fake.clock.now()
    job_id = fake.submit(request("a")).job_id
    fake.advance(2)
    fake.end_job(job_id, JobState.FAILED, exit_code=1)
    fake.advance(400)
    assert fake.fetch_jobs().jobs == ()
    assert [job.job_id for job in fake.fetch_ended_jobs(since=since).jobs] == [job_id]
    assert fake.find_by_token("a", since=since)[0].exit_code == 1


def test_another_users_drain_is_told_as_theirs() -> None:
    fake = FakeSlurm()
    fake.set_drain("n2", "swap the DIMM", user="ada")
    assert (fake.node("n2").reason, fake.node("n2").reason_user) == ("swap the DIMM", "ada")


def test_time_may_be_moved_on_the_clock_alone_and_in_any_steps() -> None:
    def run(steps: list[float]) -> list[object]:
        fake = FakeSlurm(clock=FakeClock())
        fake.submit(request("a", nodes=2))
        fake.submit(request("b", nodes=2))
        fake.power_cut("n1")
        for step in steps:
            fake.clock.advance(timedelta(seconds=step))
            fake.fetch_nodes()
        return [fake.jobs(), fake.fetch_nodes()]

    assert run([30]) == run([0.5] * 60) == run([29.5, 0.5])


def test_hours_of_cluster_time_take_a_moment() -> None:
    fake = FakeSlurm(nodes=16)
    for attempt in range(100):
        job_id = fake.submit(request(f"a{attempt}", nodes=8)).job_id
        for _ in range(20):
            fake.advance(30)
            fake.fetch_jobs()
            fake.fetch_nodes()
        fake.end_job(job_id)
    assert all(job.state is JobState.COMPLETED for job in fake.jobs())
