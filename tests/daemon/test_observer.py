"""One picture a cycle: who is asked when, and what an answer that does not come means."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from supervisor.config import Settings, SlurmSettings, SweepSettings
from supervisor.model import (
    Attempt,
    AttemptState,
    Fresh,
    NodesSpec,
    Plan,
    Run,
    RunSpec,
    RunState,
    Snapshot,
    Stale,
    World,
)
from supervisor.observe import Observer
from tests.fakes import EPOCH, FakeClock, FakeSlurm
from tests.sim.standins import Disk, SimAnswers, SimOwners, SimPorts, SimReadbacks, SimReader, SimSweeps
from trainer.contract import ExitRecord, LaunchReport, Progress

RUN = Run(spec=RunSpec(name="gpt", command=("train.py",), root=Path("/shared"), nodes=NodesSpec(min=2, max=3)))
SETTINGS = replace(Settings(), slurm=SlurmSettings(poll_interval_s=15.0), sweep=SweepSettings(interval_s=300.0))


class Bench:
    """An observer over a simulated cluster, one run and its newest attempt."""

    def __init__(self, *, has_accounting: bool = False) -> None:
        self.clock = FakeClock()
        self.slurm = FakeSlurm(clock=self.clock, has_accounting=has_accounting)
        self.disk = Disk(run_dir=RUN.spec.run_dir)
        self.sweeps = SimSweeps(self.clock, lambda _n: False, lambda _n: False)
        self.run = RUN
        self.attempt: Attempt | None = Attempt(
            run="gpt",
            number=1,
            token="t",
            state=AttemptState.RUNNING,
            nodes_wanted=2,
            planned_at=EPOCH,
            submitted_at=EPOCH,
            job_id=1,
        )
        self.is_paused = False
        owners = SimOwners(SimReader(self.disk, self.clock, lambda _what: None))
        self.observer = Observer(
            self.slurm,
            SETTINGS,
            self.clock,
            owners,
            self.sweeps,
            lambda: None,
            slurm=SimAnswers(self.slurm, self.clock),
            verifier=SimReadbacks(self.disk, self.clock),
            ports=SimPorts(self.clock, lambda n: n == "n1"),
        )

    def look(self, after_s: float = 0.0, plan: Plan | None = None) -> Snapshot:
        self.slurm.advance(after_s)
        attempts = {"gpt": (self.attempt,) if self.attempt else ()}
        seen = self.observer.take_snapshot(World(runs=(self.run,), attempts=attempts, is_paused=self.is_paused))
        self.observer.follow(plan or Plan())
        return seen

    def asked(self) -> int:
        return self.slurm.calls.count("fetch_jobs")

    def write(self) -> None:
        self.disk.progress[1] = Progress(attempt=1, step=5, phase="step", time=0.0)
        self.disk.launches[1] = LaunchReport(attempt=1, job_id=1, seq=1, time=0.0, host="n1", phase="running", nodes={})


def ages(seen: Snapshot) -> tuple[float, float]:
    view = seen.runs["gpt"]
    assert isinstance(view, Fresh)
    assert view.value.progress is not None
    assert view.value.launch is not None
    return view.value.progress.unchanged_s, view.value.launch.unchanged_s


# ---------------------------------------------------------------- Slurm


def test_slurm_is_asked_at_the_first_look_and_then_at_its_interval() -> None:
    """Case CO-06: one squeue and one scontrol for everything."""
    bench = Bench()
    bench.look()
    for _ in range(14):
        bench.look(1)
    assert bench.asked() == 1
    bench.look(1)
    assert (bench.asked(), bench.slurm.calls.count("fetch_nodes")) == (2, 2)


def test_slurm_is_asked_at_once_where_the_plan_wants_an_answer() -> None:
    bench = Bench()
    bench.look(plan=Plan(ask_slurm=True))
    bench.look(1)
    assert bench.asked() == 2


def test_an_outage_is_stale_and_not_empty() -> None:
    """Case CO-01."""
    bench = Bench()
    bench.look()
    bench.slurm.outage = True
    seen = bench.look(20)
    assert isinstance(seen.jobs, Stale)
    assert isinstance(seen.nodes, Stale)
    bench.slurm.outage = False
    assert isinstance(bench.look(20).jobs, Fresh)


def test_accounting_is_asked_only_for_a_job_that_has_left_the_controllers_memory() -> None:
    """Case CO-02."""
    bench = Bench(has_accounting=True)
    bench.look()
    bench.look(5, Plan(ask_slurm=True))
    assert "fetch_ended_jobs" not in bench.slurm.calls
    bench.look(15)
    assert isinstance(bench.look(16).ended, Fresh)


def test_accounting_that_was_not_asked_is_unknown_and_not_absent() -> None:
    assert isinstance(Bench(has_accounting=True).look().ended, Stale)
    assert Bench().look().ended is None


def test_an_address_outlives_a_controller_that_stops_answering() -> None:
    bench = Bench()
    bench.look()
    bench.slurm.outage = True
    bench.look(20, Plan(probe=frozenset({"n1", "n2"})))
    assert {n: p.failures > 0 for n, p in bench.look(1).ports.items()} == {"n1": True, "n2": False}


# ---------------------------------------------------------------- run directories


def test_a_run_that_was_never_started_has_nothing_to_read() -> None:
    bench = Bench()
    bench.attempt = None
    bench.disk.is_hanging = True
    view = bench.look().runs["gpt"]
    assert isinstance(view, Fresh)
    assert view.value.attempt == 0


def test_a_run_directory_that_hangs_is_stale_since_it_began() -> None:
    bench = Bench()
    bench.disk.is_hanging = True
    bench.look()
    view = bench.look(30).runs["gpt"]
    assert isinstance(view, Stale)
    assert view.since_at == EPOCH


def test_what_could_not_be_read_has_not_been_silent() -> None:
    """Who writes to a file system that hangs is held up by it as well."""
    bench = Bench()
    bench.write()
    bench.look()
    assert ages(bench.look(10)) == (10, 10)
    bench.disk.is_hanging = True
    bench.look(60)
    bench.disk.is_hanging = False
    assert ages(bench.look(60)) == (0, 0)
    assert ages(bench.look(7)) == (7, 7)


def test_ages_do_not_depend_on_what_the_writer_calls_the_time() -> None:
    """Case HD-06."""
    bench = Bench()
    bench.write()
    bench.look()
    bench.disk.progress[1] = replace(bench.disk.progress[1], step=6, time=-1e9)
    assert ages(bench.look(3)) == (0, 3)


@pytest.mark.parametrize(
    ("state", "is_over", "is_read"),
    [
        (RunState.ACTIVE, True, True),
        (RunState.STOPPING, True, True),
        (RunState.HELD, True, False),
        (RunState.HELD, False, True),
    ],
)
def test_a_run_directory_is_read_while_something_can_still_come_of_it(
    state: RunState, is_over: bool, is_read: bool
) -> None:
    bench = Bench()
    bench.run = replace(RUN, state=state)
    assert bench.attempt is not None
    state_now = AttemptState.OVER if is_over else AttemptState.RUNNING
    bench.attempt = replace(bench.attempt, state=state_now, is_job_gone=is_over)
    assert ("gpt" in bench.look().runs) is is_read


def test_the_cause_of_an_end_is_looked_for_once_it_is_seen() -> None:
    bench = Bench()
    assert bench.look().causes == {}
    bench.disk.exits[1] = ExitRecord(attempt=1, job_id=1, exit_code=1, reason="exit 1", time=0.0)
    assert set(bench.look(1).causes) == {"gpt"}
    assert bench.attempt is not None
    bench.attempt = replace(bench.attempt, state=AttemptState.OVER)
    assert bench.look(1).causes == {}


# ---------------------------------------------------------------- sweeps


def test_idle_nodes_are_swept_at_the_interval_of_the_services_clock() -> None:
    bench = Bench()
    running = []
    for wait_s in (0, 5, 200, 100):
        seen = bench.look(wait_s)
        running.append(bench.sweeps.is_running)
        assert [c.node for c in seen.sweeps] == (["n1", "n2", "n3", "n4"] if wait_s == 5 else [])
    assert running == [True, False, False, True]


def test_while_paused_or_blind_nothing_is_swept() -> None:
    paused, blind = Bench(), Bench()
    paused.is_paused = True
    paused.look()
    blind.slurm.outage = True
    blind.look()
    assert (paused.sweeps.is_running, blind.sweeps.is_running) == (False, False)


def test_a_node_that_is_busy_or_drained_is_not_swept() -> None:
    bench = Bench()
    bench.attempt = None
    bench.slurm.set_drain("n2", "alice", user="alice")
    bench.look()
    assert [c.node for c in bench.look(5).sweeps] == ["n1", "n3", "n4"]


def test_an_attempts_own_nodes_are_swept_once_after_its_first_step() -> None:
    bench = Bench()
    bench.look()
    bench.look(5)
    assert bench.attempt is not None
    bench.attempt = replace(bench.attempt, stepped_at=EPOCH, nodes=("n1", "n2"))
    bench.look(5)
    assert [c.node for c in bench.look(5).sweeps] == ["n1", "n2"]
    bench.look(5)
    assert not bench.sweeps.is_running


def test_all_nodes_gone_is_nothing_to_sweep() -> None:
    bench = Bench()
    for number in range(1, 5):
        bench.slurm.set_drain(f"n{number}", "alice", user="alice")
    bench.look()
    assert not bench.sweeps.is_running


def test_the_absence_of_a_job_counts_from_its_submission() -> None:
    """A job that was submitted just now may be missing from an answer that was under way."""
    bench = Bench(has_accounting=True)
    assert bench.attempt is not None
    bench.attempt = replace(bench.attempt, submitted_at=EPOCH + timedelta(seconds=12))
    bench.look()
    bench.look(16)
    assert "fetch_ended_jobs" not in bench.slurm.calls
