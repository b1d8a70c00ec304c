"""The loop around the core: one turn, what it tells, and what a new daemon makes of an old ledger."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from slurm.types import JobState
from supervisor.config import Settings, SweepSettings
from supervisor.daemon import Daemon
from supervisor.model import AttemptState, IntentState, NodesSpec, Run, RunSpec
from supervisor.observe import Observer
from supervisor.store import Store
from tests.fakes import FakeClock, FakeSlurm
from tests.sim.standins import Disk, SimAnswers, SimOwners, SimPorts, SimReadbacks, SimReader

SPEC = RunSpec(name="gpt", command=("train.py",), root=Path("/shared/runs"), nodes=NodesSpec(min=2, max=3))


class Bench:
    """A daemon over a real ledger and a simulated cluster; `restart` makes a new one of the same ledger."""

    def __init__(self, path: Path, settings: Settings | None = None) -> None:
        self.path = path
        self.settings = settings or replace(Settings(), sweep=SweepSettings(interval_s=0))
        self.clock = FakeClock()
        self.slurm = FakeSlurm(clock=self.clock)
        self.disk = Disk(run_dir=SPEC.run_dir)
        self.store = Store.open(path, now=self.clock.now())
        self.daemon = self._build()

    def _build(self) -> Daemon:
        owners = SimOwners(SimReader(self.disk, self.clock, lambda _what: None))
        observer = Observer(
            self.slurm,
            self.settings,
            self.clock,
            owners,
            None,
            lambda: None,
            slurm=SimAnswers(self.slurm, self.clock),
            verifier=SimReadbacks(self.disk, self.clock),
            ports=SimPorts(self.clock, lambda _n: False),
        )
        return Daemon(self.settings, self.store, self.slurm, self.clock, owners=owners, observer=observer)

    def restart(self) -> None:
        self.close()
        self.store = Store.open(self.path, now=self.clock.now())
        self.daemon = self._build()

    def add_run(self) -> None:
        self.store.add_run(Run(spec=SPEC), self.clock.now())

    def cycles(self, count: int = 1, *, every_s: float = 2.0) -> None:
        for _ in range(count):
            self.daemon.cycle()
            self.slurm.advance(every_s)

    def status(self) -> str:
        row = self.store.load_daemon()
        assert row is not None
        return row.summary

    def close(self) -> None:
        self.daemon.close()
        self.daemon.waker.close()
        self.store.close()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    one = Bench(tmp_path / "ledger.db")
    yield one
    one.close()


def test_one_turn_takes_a_run_from_the_ledger_to_a_job(bench: Bench) -> None:
    bench.add_run()
    bench.cycles()
    (job,) = bench.slurm.jobs()
    assert job.name == "gpt"
    assert bench.store.load_attempts("gpt")[0].job_id == job.job_id


def test_an_idle_turn_writes_nothing_and_asks_nothing(bench: Bench) -> None:
    bench.cycles()
    calls = len(bench.slurm.calls)
    cycle = bench.daemon.cycle()
    assert (cycle.plan.facts, cycle.plan.intents, cycle.acts) == ((), (), 0)
    assert len(bench.slurm.calls) == calls


def test_a_new_daemon_adopts_what_the_old_one_started(bench: Bench) -> None:
    bench.add_run()
    bench.cycles(2)
    bench.restart()
    bench.cycles(3)
    assert len(bench.slurm.jobs()) == 1
    assert bench.store.load_attempts("gpt")[-1].state is AttemptState.RUNNING


def test_a_daemon_that_only_observes_means_nothing_and_does_nothing(tmp_path: Path) -> None:
    settings = replace(Settings(), observe_only=True, sweep=SweepSettings(interval_s=0))
    bench = Bench(tmp_path / "ledger.db", settings)
    bench.add_run()
    bench.cycles(3)
    assert (bench.slurm.jobs(), bench.store.load_intents(IntentState.OPEN)) == ((), ())
    bench.close()


def test_while_slurm_does_not_answer_the_daemon_waits_and_says_so(bench: Bench) -> None:
    bench.add_run()
    bench.slurm.outage = True
    bench.cycles(2, every_s=20)
    assert "Slurm does not answer" in bench.status()
    bench.slurm.outage = False
    bench.cycles(2, every_s=20)
    assert "Slurm does not answer" not in bench.status()
    assert len(bench.slurm.jobs()) == 1


def test_accounting_that_there_is_no_need_to_ask_is_no_silence(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "ledger.db")
    bench.slurm.has_accounting = True
    bench.cycles(2, every_s=20)
    assert "Slurm does not answer" not in bench.status()
    bench.close()


def test_a_controller_outage_in_the_middle_of_a_job_changes_nothing(bench: Bench) -> None:
    """Case CO-01: the same job is followed on."""
    bench.add_run()
    bench.cycles(3)
    bench.slurm.outage = True
    bench.cycles(10, every_s=20)
    bench.slurm.outage = False
    bench.cycles(2, every_s=20)
    (job,) = bench.slurm.jobs()
    assert job.state is JobState.RUNNING
    assert [a.job_id for a in bench.store.load_attempts("gpt")] == [job.job_id]


def test_a_job_that_was_forgotten_without_accounting_is_resumed(bench: Bench) -> None:
    """Case CO-04: ended, cause unknown, resumable."""
    bench.slurm.min_job_age_s = 5
    bench.add_run()
    bench.cycles(3)
    bench.slurm.end_job(1, JobState.FAILED)
    bench.slurm.advance(60)
    bench.cycles(6, every_s=4)
    ends = [a.end for a in bench.store.load_attempts("gpt")]
    assert ends == ["vanished", None]


def test_a_wait_ends_when_there_is_news(bench: Bench) -> None:
    threading.Timer(0.1, bench.daemon.waker.wake).start()
    started = time.monotonic()
    bench.daemon._wait(30)
    assert time.monotonic() - started < 10


def test_a_wait_ends_when_its_time_is_up(bench: Bench) -> None:
    started = time.monotonic()
    bench.daemon._wait(0.05)
    assert time.monotonic() - started >= 0.05


def test_the_loop_ends_after_the_turn_in_which_it_is_told_to(bench: Bench) -> None:
    bench.add_run()
    threading.Timer(0.2, bench.daemon.stop).start()
    bench.daemon.run()
    assert len(bench.slurm.jobs()) == 1
