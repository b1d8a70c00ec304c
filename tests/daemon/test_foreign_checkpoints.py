"""A training that knows nothing of us, over the loop and the real readers: where it resumes after each crash."""

from __future__ import annotations

import shutil
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from slurm.types import JobState
from supervisor.config import Settings, SweepSettings
from supervisor.daemon import Daemon
from supervisor.model import Attempt, CheckpointSpec, CheckpointState, NodesSpec, Run, RunSpec, RunState
from supervisor.observe import Observer
from supervisor.owners import Owners
from supervisor.store import Store
from supervisor.verify import Verifier
from tests.fakes import EPOCH, FakeClock, FakeSlurm
from tests.layouts.folders import DATA, cut
from tests.sim.standins import SimAnswers, SimPorts

LONG_AGO = EPOCH - timedelta(days=1000)  # what is read back by the real clock is read back after every end


class Bench:
    """A daemon with the real reader and verifier, over a cluster in memory."""

    def __init__(self, folder: Path, layout: str) -> None:
        self.saves = folder / "saves"
        self.clock = FakeClock(LONG_AGO)
        self.slurm = FakeSlurm(clock=self.clock)
        self.store = Store.open(folder / "ledger.db", now=self.clock.now())
        settings = replace(Settings(), sweep=SweepSettings(interval_s=0))
        owners = Owners(is_root=False)
        observer = Observer(
            self.slurm,
            settings,
            self.clock,
            owners,
            None,
            lambda: None,
            slurm=SimAnswers(self.slurm, self.clock),
            verifier=Verifier(),
            ports=SimPorts(self.clock, lambda _n: False),
        )
        self.daemon = Daemon(settings, self.store, self.slurm, self.clock, owners=owners, observer=observer)
        self.owners = owners
        checkpoint = CheckpointSpec(directory=self.saves, layout=layout)  # type: ignore[arg-type]
        spec = RunSpec(
            name="gpt",
            command=("train.sh", "--resume={resume_from}"),
            root=folder / "runs",
            nodes=NodesSpec(min=2, max=3),
            checkpoint=checkpoint,
        )
        self.store.add_run(Run(spec=spec), self.clock.now())

    def until(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not holds():
            assert time.monotonic() < deadline, self.attempts()
            self.daemon.cycle()
            self.slurm.advance(2.0)
            time.sleep(0.01)

    def attempts(self) -> tuple[Attempt, ...]:
        return self.store.load_attempts("gpt")

    def run_attempt(self, number: int) -> Attempt:
        """The loop until this attempt runs."""
        self.until(lambda: any(a.number == number and a.nodes for a in self.attempts()))
        return self.attempts()[number - 1]

    def crash(self) -> None:
        job_id = self.attempts()[-1].job_id
        assert job_id is not None
        self.slurm.end_job(job_id, JobState.FAILED, exit_code=1)

    def save(self, fixture: str, name: str) -> Path:
        """The training writes a checkpoint."""
        return shutil.copytree(DATA / fixture / name, self.saves / name, dirs_exist_ok=True)

    def close(self) -> None:
        self.daemon.close()
        self.owners.close()
        self.daemon.waker.close()
        self.store.close()


@pytest.fixture
def make_bench(tmp_path: Path) -> Iterator[Callable[[str], Bench]]:
    made: list[Bench] = []

    def make(layout: str) -> Bench:
        made.append(Bench(tmp_path, layout))
        return made[-1]

    yield make
    for bench in made:
        bench.close()


def test_a_script_resumes_from_the_newest_whole_checkpoint_and_past_a_broken_one(
    make_bench: Callable[[str], Bench],
) -> None:
    bench = make_bench("auto")
    assert bench.run_attempt(1).resume_path == ""
    bench.save("dcp", "step-2")
    bench.until(lambda: len(bench.store.load_checkpoints("gpt")) == 1)
    bench.crash()
    second = bench.run_attempt(2)
    assert (second.resume_step, second.resume_path) == (2, str(bench.saves / "step-2"))
    cut(bench.save("dcp", "step-4") / "__0_0.distcp")
    bench.crash()
    assert bench.run_attempt(3).resume_step == 2
    bench.save("dcp", "step-4")
    bench.until(lambda: any(c.key == (4, 3) for c in bench.store.load_checkpoints("gpt")))
    bench.crash()
    assert bench.run_attempt(4).resume_step == 4
    assert bench.store.load_checkpoints("gpt")[-1].state is CheckpointState.VERIFIED


def test_what_was_there_before_the_run_is_where_it_starts(make_bench: Callable[[str], Bench]) -> None:
    bench = make_bench("huggingface")
    bench.save("huggingface", "checkpoint-2")
    bench.save("huggingface", "checkpoint-4")
    first = bench.run_attempt(1)
    assert first.resume_path == str(bench.saves / "checkpoint-4")
    states = {c.key: c.state for c in bench.store.load_checkpoints("gpt")}
    assert states == {(2, 0): CheckpointState.COMPLETE, (4, 0): CheckpointState.COMPLETE}  # no checksums in the weights


def test_a_flipped_byte_is_found_before_the_restart(make_bench: Callable[[str], Bench]) -> None:
    bench = make_bench("dcp")
    bench.save("dcp", "step-2")
    file = bench.save("dcp", "step-4") / "__0_0.distcp"
    weights = struct.pack("<16f", *[4.0] * 16)
    file.write_bytes(file.read_bytes().replace(weights, weights[:-1] + b"A", 1))
    assert bench.run_attempt(1).resume_step == 2


def test_a_folder_that_cannot_be_looked_at_starts_nothing_and_ends_nothing(make_bench: Callable[[str], Bench]) -> None:
    bench = make_bench("dcp")
    bench.saves.write_text("not a folder")
    for _ in range(5):
        bench.daemon.cycle()
        bench.slurm.advance(2.0)
    assert bench.attempts() == ()
    (run,) = bench.store.load_runs()
    assert run.state is RunState.ACTIVE
    assert "checkpoint folder" in run.reason
    bench.saves.unlink()
    bench.save("dcp", "step-2")
    assert bench.run_attempt(1).resume_step == 2
