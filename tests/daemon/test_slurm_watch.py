"""Slurm's answers from the thread beside the loop: each Fresh or Stale by itself, and never older than it says."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta

import pytest

from slurm.errors import SlurmUnavailable
from slurm.types import JobListing, JobRecord, JobState, NodeListing, Unreadable
from supervisor.model import Fresh, Stale
from supervisor.slurmwatch import NOT_ASKED, Answers, SlurmWatch
from tests.fakes import EPOCH, FakeClock, FakeSlurm

WatchOf = Callable[[FakeSlurm], SlurmWatch]


class Garbled(FakeSlurm):
    """squeue with one row that cannot be read."""

    def fetch_jobs(self) -> JobListing:
        return replace(super().fetch_jobs(), unreadable=(Unreadable(text="55 gpt ???", why="a field is missing"),))

    def fetch_nodes(self) -> NodeListing:
        return replace(super().fetch_nodes(), unreadable=(Unreadable(text="NodeName=", why="no name"),))


@pytest.fixture
def watch() -> Iterator[WatchOf]:
    watches: list[SlurmWatch] = []

    def build(slurm: FakeSlurm) -> SlurmWatch:
        watches.append(SlurmWatch(slurm, slurm.clock, lambda: None))
        return watches[-1]

    yield build
    for one in watches:
        one.close()


def ask(one: SlurmWatch, **since: object) -> Answers:
    one.ask(**since)  # type: ignore[arg-type]
    assert one.wait(10)
    return one.answers


def test_before_the_first_answer_everything_is_stale(watch: WatchOf) -> None:
    answers = watch(FakeSlurm()).answers
    assert isinstance(answers.jobs, Stale)
    assert isinstance(answers.nodes, Stale)


def test_one_round_asks_for_all_jobs_and_all_nodes_once(watch: WatchOf) -> None:
    slurm = FakeSlurm()
    answers = ask(watch(slurm))
    assert isinstance(answers.jobs, Fresh)
    assert isinstance(answers.nodes, Fresh)
    assert slurm.calls == ["fetch_cluster", "fetch_jobs", "fetch_nodes"]
    assert answers.ended is None


def test_accounting_that_there_was_no_need_to_ask_is_unknown(watch: WatchOf) -> None:
    one = watch(FakeSlurm(has_accounting=True))
    ended = ask(one).ended
    assert isinstance(ended, Stale)
    assert ended.why == NOT_ASKED
    assert isinstance(ask(one, ended_since=EPOCH).ended, Fresh)


def test_an_outage_keeps_the_instant_at_which_it_began(watch: WatchOf) -> None:
    clock = FakeClock()
    slurm = FakeSlurm(clock=clock)
    one = watch(slurm)
    ask(one)
    slurm.outage = True
    ask(one)
    clock.advance(60)
    jobs = ask(one).jobs
    assert isinstance(jobs, Stale)
    assert jobs.since_at == EPOCH
    slurm.outage = False
    fresh = ask(one).jobs
    assert isinstance(fresh, Fresh)
    assert fresh.asked_at == EPOCH + timedelta(seconds=60)


def test_accounting_that_does_not_answer_is_stale_and_the_rest_is_not(watch: WatchOf) -> None:
    """Case CO-03."""
    slurm = FakeSlurm(has_accounting=True)
    slurm.plan("fetch_ended_jobs", "unavailable")
    one = watch(slurm)
    answers = ask(one, ended_since=EPOCH)
    assert isinstance(answers.jobs, Fresh)
    assert isinstance(answers.ended, Stale)
    assert isinstance(ask(one, ended_since=EPOCH).ended, Fresh)


def test_accounting_that_refuses_is_none(watch: WatchOf) -> None:
    slurm = FakeSlurm(has_accounting=True)
    slurm.plan("fetch_ended_jobs", "refused")
    assert ask(watch(slurm), ended_since=EPOCH).ended is None


def test_a_job_that_cannot_be_read_does_not_look_absent(watch: WatchOf) -> None:
    answers = ask(watch(Garbled()))
    assert isinstance(answers.jobs, Stale)
    assert isinstance(answers.nodes, Fresh)
    assert len(answers.unreadable) == 2


def test_while_the_cluster_is_not_known_accounting_is_not_none(watch: WatchOf) -> None:
    slurm = FakeSlurm()
    slurm.plan("fetch_cluster", "unavailable")
    one = watch(slurm)
    assert isinstance(ask(one).ended, Stale)
    assert ask(one).ended is None


def test_a_controller_that_hangs_keeps_nobody_waiting(watch: WatchOf) -> None:
    class Hanging(FakeSlurm):
        def fetch_jobs(self) -> JobListing:
            time.sleep(0.5)
            raise SlurmUnavailable("no answer")

    one = watch(Hanging())
    started = time.monotonic()
    one.ask()
    assert isinstance(one.answers.jobs, Stale)
    assert not one.wait(0.01)
    assert time.monotonic() - started < 0.4


def test_a_silent_controller_is_asked_more_and_more_seldom_and_at_once_after_its_first_answer(watch: WatchOf) -> None:
    """Case CO-06."""
    slurm = FakeSlurm()
    slurm.outage = True
    one = watch(slurm)
    ask(one)
    one.ask()
    assert not one.wait(1.0)  # it rests for about 2 s
    slurm.outage = False
    assert one.wait(10)
    started = time.monotonic()
    ask(one)
    assert time.monotonic() - started < 1.5


def test_of_two_jobs_of_one_number_in_accounting_the_newer_counts(watch: WatchOf) -> None:
    """Case SB-11: job ids come round."""
    old, new = (
        JobRecord(job_id=7, state=state, raw_state=state.value, submit_at=EPOCH + timedelta(days=day))
        for state, day in ((JobState.COMPLETED, 0), (JobState.FAILED, 1))
    )

    class Twice(FakeSlurm):
        def fetch_ended_jobs(self, *, since: object) -> JobListing:
            return JobListing(jobs=(new, old))

    ended = ask(watch(Twice(has_accounting=True)), ended_since=EPOCH).ended
    assert isinstance(ended, Fresh)
    assert ended.value[7].state is JobState.FAILED


def test_no_round_takes_more_than_three_commands_once_the_cluster_is_known(watch: WatchOf) -> None:
    """Case CO-06: none per job and none per node, however many there are."""
    slurm = FakeSlurm(has_accounting=True, nodes=64)
    one = watch(slurm)
    ask(one)
    slurm.calls.clear()
    assert ask(one, ended_since=EPOCH).commands == 3
    assert slurm.calls == ["fetch_jobs", "fetch_nodes", "fetch_ended_jobs"]
