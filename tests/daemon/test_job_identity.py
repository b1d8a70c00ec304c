"""A live job whose comment, name or number is changed by others: it is followed on, and no second one begins."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from slurm.types import JobState
from supervisor.model import AttemptEnd, RunState
from tests.daemon.test_daemon import Bench
from tests.fakes import FakeSlurm


class Changeable(FakeSlurm):
    """A cluster on which somebody changes what a job says of itself."""

    def change(self, job_id: int, **changes: Any) -> None:
        job = self._jobs[job_id]
        job.record = replace(job.record, **changes)

    def requeue(self, job_id: int) -> None:
        """As `scontrol requeue` does it: the same number, submitted anew."""
        job = self._jobs[job_id]
        at = self.clock.now().replace(microsecond=0)
        pending = replace(job.record, state=JobState.PENDING, raw_state="PENDING", nodes=(), start_at=None)
        job.record = replace(pending, submit_at=at, restarts=job.record.restarts + 1)
        job.eligible_at = at + timedelta(hours=1)
        job.allocated = ()


class Changed(Bench):
    """A daemon that has submitted one job, and that job."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.daemon.close()
        self.daemon.waker.close()
        self.cluster = Changeable(clock=self.clock)
        self.slurm = self.cluster
        self.daemon = self._build()
        self.add_run()

    @property
    def numbers(self) -> list[int]:
        return [j.job_id for j in self.slurm.jobs()]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Changed]:
    one = Changed(tmp_path / "ledger.db")
    yield one
    one.close()


@pytest.mark.parametrize("changes", [{"comment": "x"}, {"comment": ""}, {"comment": "x", "name": "y"}, {"name": "y"}])
@pytest.mark.parametrize("cycles", [1, 3], ids=["pending and not seen yet", "running"])
def test_a_changed_job_is_followed_on_and_gets_its_token_back(
    bench: Changed, cycles: int, changes: dict[str, str]
) -> None:
    bench.cycles(cycles, every_s=0.4 if cycles == 1 else 2.0)
    bench.cluster.change(1, **changes)
    bench.cycles(12, every_s=5)
    (attempt,) = bench.store.load_attempts("gpt")
    assert (bench.numbers, attempt.is_over) == ([1], False)
    assert bench.slurm.job(1).comment == attempt.token


def test_a_comment_that_is_changed_again_and_again_is_put_back_once(bench: Changed) -> None:
    bench.cycles(3)
    for _ in range(6):
        bench.cluster.change(1, comment="x", name="y")
        bench.cycles(4, every_s=5)
    assert (bench.numbers, bench.slurm.calls.count("claim")) == ([1], 1)
    run = bench.store.load_run("gpt")
    assert run is not None
    bench.store.set_run(replace(run, state=RunState.STOPPING, reason="ann"), bench.clock.now(), "stop")
    bench.cycles(6)
    assert bench.slurm.job(1).state is JobState.CANCELLED
    assert [a.end for a in bench.store.load_attempts("gpt")] == [AttemptEnd.STOPPED]


def test_a_changed_job_that_is_requeued_ends_before_the_next_begins(bench: Changed) -> None:
    bench.cycles(3)
    bench.cluster.plan("claim", "refused")
    bench.cluster.change(1, comment="x", name="y")
    bench.cycles(2)
    bench.cluster.requeue(1)
    bench.cycles(12, every_s=5)
    assert [a.job_id for a in bench.store.load_attempts("gpt")] == [1, 2]
    assert [j.job_id for j in bench.slurm.jobs() if j.is_live] == [2]


def test_a_number_that_a_stranger_has_got_is_let_alone(bench: Changed) -> None:
    """Case SB-11."""
    bench.cycles(3)
    later = bench.clock.now().replace(microsecond=0)
    bench.cluster.change(1, comment="", name="gpt", user="bob", submit_at=later)
    bench.cycles(12, every_s=5)
    first, second = bench.store.load_attempts("gpt")
    assert (first.end, second.job_id) == (AttemptEnd.VANISHED, 2)
    assert bench.slurm.job(1).is_live
    assert {"cancel", "claim"} & set(bench.slurm.calls) == set()
