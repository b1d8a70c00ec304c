"""A person's own script, submitted and submitted again; a job that is claimed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path

import pytest

from slurm.types import JobState, SubmitRequest
from supervisor.config import LedgerSettings, Settings
from supervisor.core.sight import SECOND_LOOK_S
from supervisor.execute import Executor
from supervisor.joblog import find_log_names
from supervisor.model import (
    Attempt,
    AttemptEnd,
    AttemptState,
    Fact,
    Intent,
    IntentKind,
    IntentState,
    Plan,
    Record,
    Run,
)
from supervisor.owners import Owners
from supervisor.rundir import RunDirReader
from supervisor.scripts import Handed, read_script
from supervisor.store import Store
from supervisor.submissions import Submission, Submissions
from supervisor.verify import Verifier
from tests.fakes import FakeClock, FakeSlurm, Fault

TEXT = "#!/bin/bash\n#SBATCH --job-name=train\necho hello\n"


@dataclass
class Bench:
    """An executor over a real ledger, a real folder and a simulated cluster."""

    folder: Path
    store: Store
    clock: FakeClock = field(default_factory=FakeClock)
    words: tuple[str, ...] = ("-N1", "train.sh", "{attempt}")

    def __post_init__(self) -> None:
        settings = Settings(ledger=LedgerSettings(path=self.folder / "ledger.db"))
        self.slurm = FakeSlurm(clock=self.clock, has_accounting=False)
        self.owners = Owners(is_root=False)
        self.submissions = Submissions(settings.ledger.path)
        self.executor = Executor(self.slurm, self.store, settings, self.clock, self.owners, Verifier(lambda: None))
        home = str(self.folder)
        handed = Handed(text=TEXT, path="t", words=self.words, environment={"KEY": "hunter2"}, cwd=home)
        script = read_script(handed)
        self.run = Run(spec=script.spec, script=script.script)
        self.submissions.keep("train", Submission(text=TEXT, environment=script.environment))
        self.store.add_run(self.run, self.clock.now())

    def submit(self, number: int = 1) -> None:
        attempt = Attempt(
            run="train", number=number, token=f"sup:train:{number}", nodes_wanted=1, planned_at=self.clock.now()
        )
        self.mean(
            Intent(kind=IntentKind.SUBMIT, key=f"submit:train:{number}", reason="go", run="train", attempt=number),
            attempt,
        )

    def mean(self, intent: Intent, *records: Record) -> None:
        facts = tuple(Fact(record=r, reason="test") for r in records)
        self.store.commit(Plan(facts=facts, intents=(intent,)), self.clock.now())

    def settle(self) -> None:
        world = self.store.load_world(self.clock.now())
        self.executor.settle(world.open_intents, world, is_slurm_answering=True)

    def request(self) -> SubmitRequest:
        return self.slurm.request_of(self.slurm.jobs()[-1].job_id)

    @property
    def attempt(self) -> Attempt:
        return self.store.load_attempts("train")[-1]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with Store.open(tmp_path / "ledger.db", now=FakeClock().now()) as store:
        made = Bench(tmp_path, store)
        yield made
        made.owners.close()


def test_a_script_is_submitted_with_what_was_handed_in(bench: Bench) -> None:
    bench.submit()
    bench.settle()
    request = bench.request()
    assert (request.job_name, request.nodes, request.arguments) == ("train", 1, ("1",))
    assert (request.environment["KEY"], request.is_own_environment, request.output) == ("hunter2", True, None)
    assert request.submit_dir == bench.folder
    assert (bench.attempt.state, bench.attempt.job_id) == (AttemptState.SUBMITTED, 1)
    assert not request.script.exists()  # Slurm has its own copy
    assert (bench.run.spec.run_dir / "attempts/1").is_dir()


def test_a_submission_whose_answer_is_lost_is_the_same_again(bench: Bench) -> None:
    """SB-05, SB-07."""
    bench.slurm.plan("submit", Fault.LOST_REQUEST)
    bench.submit()
    bench.settle()
    assert bench.slurm.jobs() == ()
    bench.slurm.advance(60)
    bench.settle()
    assert [job.comment for job in bench.slurm.jobs()] == ["sup:train:1"]
    assert bench.request().arguments == ("1",)


@pytest.mark.parametrize("is_gone", [True, False])
def test_what_is_not_there_any_more_is_not_submitted(bench: Bench, *, is_gone: bool) -> None:
    path = bench.folder / "submissions/train.json"
    path.unlink() if is_gone else path.write_text(path.read_text().replace("hello", "HELLO"))
    bench.submit()
    bench.settle()
    assert bench.slurm.jobs() == ()
    assert bench.attempt.end is AttemptEnd.DO_NOT_RESTART
    assert "submit the script again" in bench.attempt.end_detail


def test_lines_of_earlier_attempts_in_a_shared_log_are_not_the_attempts_own(tmp_path: Path) -> None:
    """RR-04."""
    with Store.open(tmp_path / "ledger.db", now=FakeClock().now()) as store:
        bench = Bench(tmp_path, store, words=("-o", "all.log", "train.sh"))
        (tmp_path / "all.log").write_text("of before\n")
        bench.submit()
        bench.settle()
        assert (bench.attempt.job_id, bench.attempt.log_offset) == (1, 10)
        bench.owners.close()


def test_an_adopted_job_gets_our_token_and_a_run_directory(bench: Bench) -> None:
    theirs = SubmitRequest(
        script=Path("/x.sh"), token="mine", job_name="train", nodes=1, output=Path("/x.log"), dependency=""
    )
    job = bench.slurm.submit(theirs)
    attempt = Attempt(
        run="train",
        number=1,
        token="sup:train:1",
        nodes_wanted=1,
        state=AttemptState.SUBMITTED,
        job_id=job.job_id,
        planned_at=bench.clock.now(),
        submitted_at=bench.clock.now() - timedelta(hours=1),
    )
    claim = Intent(kind=IntentKind.CLAIM, key="claim:1", reason="adopted", run="train", attempt=1, job_id=job.job_id)
    bench.mean(claim, attempt)
    bench.settle()
    assert [j.comment for j in bench.slurm.jobs()] == ["sup:train:1"]
    assert bench.store.load_intents()[-1].state is IntentState.DONE
    assert (bench.run.spec.run_dir / "attempts/1").is_dir()


@pytest.mark.parametrize("asks", [True, False])
def test_a_claimed_job_may_be_requeued_where_its_script_asks_slurm_for_it(bench: Bench, asks: bool) -> None:
    text = TEXT + ("scontrol requeue $SLURM_JOB_ID\n" if asks else "")
    made = read_script(Handed(text=text, path="t.sh", words=("t.sh",), environment={}, cwd=str(bench.folder)))
    run = replace(bench.run, spec=replace(bench.run.spec, name="other"), script=made.script)
    bench.store.add_run(run, bench.clock.now())
    theirs = SubmitRequest(script=Path("/x.sh"), token="mine", job_name="t.sh", nodes=1, output=None)
    job_id = bench.slurm.add_job(theirs, user="ann")
    attempt = Attempt(
        run="other",
        number=1,
        token="sup:other:1",
        nodes_wanted=1,
        state=AttemptState.SUBMITTED,
        job_id=job_id,
        planned_at=bench.clock.now(),
    )
    claim = Intent(kind=IntentKind.CLAIM, key="claim:2", reason="adopted", run="other", attempt=1, job_id=job_id)
    bench.mean(claim, attempt)
    bench.settle()
    described = bench.slurm.describe_job(job_id)
    assert (described.comment, described.is_requeue) == ("sup:other:1", asks)


def test_a_job_that_is_over_is_not_claimed(bench: Bench) -> None:
    over = Attempt(run="train", number=1, token="t", nodes_wanted=1, planned_at=bench.clock.now())
    claim = Intent(kind=IntentKind.CLAIM, key="claim:1", reason="adopted", run="train", attempt=1, job_id=1)
    bench.mean(claim, replace(over, state=AttemptState.OVER))
    bench.settle()
    assert (bench.store.load_intents()[-1].state, bench.slurm.calls) == (IntentState.WITHDRAWN, [])


# ---------------------------------------------------------------- a job that was forgotten before its number was known


def lose(bench: Bench) -> None:
    """sbatch's answer is lost, the job runs, and the controller forgets it while the daemon is away."""
    bench.slurm.plan("submit", Fault.LOST_REPLY)
    bench.submit()
    bench.settle()
    job = bench.slurm.jobs()[-1]
    bench.slurm.advance(5)
    bench.slurm.end_job(job.job_id, JobState.FAILED, 1)
    bench.slurm.advance(4000)
    assert bench.slurm.fetch_jobs().jobs == ()


def log_at(path: Path, bench: Bench, text: str = "step 1\n") -> None:
    path.write_text(text)
    at = bench.attempt.planned_at.timestamp() + 60
    os.utime(path, (at, at))


def test_a_script_that_ran_and_was_forgotten_is_not_submitted_again_as_if_nothing_had_been(bench: Bench) -> None:
    lose(bench)
    log_at(bench.folder / "slurm-1.out", bench)
    bench.settle()
    assert bench.attempt.state is AttemptState.PLANNED  # it may go on where Slurm does not see it
    log_at(bench.folder / "slurm-1.out", bench, "step 1\nstep 2\n")
    bench.clock.advance(SECOND_LOOK_S + 1)
    bench.settle()
    assert bench.attempt.state is AttemptState.PLANNED
    bench.clock.advance(SECOND_LOOK_S + 1)
    bench.settle()
    assert (bench.attempt.end, bench.attempt.is_job_gone) == (AttemptEnd.VANISHED, True)
    assert "slurm-1.out" in bench.attempt.end_detail
    assert [i.kind for i in bench.store.load_interruptions("train")] == ["vanished"]
    assert bench.slurm.fetch_jobs().jobs == ()


def test_a_script_that_left_nothing_is_submitted_again(bench: Bench) -> None:
    log_before = bench.folder / "slurm-0.out"
    log_before.write_text("of another job\n")
    os.utime(log_before, (0, 0))
    lose(bench)
    bench.settle()
    assert [job.comment for job in bench.slurm.fetch_jobs().jobs] == ["sup:train:1"]


def test_what_a_shared_log_holds_since_is_a_trace(tmp_path: Path) -> None:
    with Store.open(tmp_path / "ledger.db", now=FakeClock().now()) as store:
        bench = Bench(tmp_path, store, words=("-o", "all.log", "train.sh"))
        (tmp_path / "all.log").write_text("of before\n")
        lose(bench)
        log_at(tmp_path / "all.log", bench, "of before\nof this one\n")
        bench.settle()
        bench.clock.advance(SECOND_LOOK_S + 1)
        bench.settle()
        assert bench.attempt.end is AttemptEnd.VANISHED
        bench.owners.close()


@pytest.mark.parametrize(
    ("output", "name", "job_id"),
    [
        ("slurm-%j.out", "slurm-17.out", 17),
        ("logs/%x-%6A.%N", "train-000017.n3", 17),
        ("%j.%j", "17.17", 17),
        ("all.log", "all.log", None),
        ("%N.log", "n3.log", None),
    ],
)
def test_logs_of_a_script_are_known_by_their_names(tmp_path: Path, output: str, name: str, job_id: int | None) -> None:
    handed = Handed(text=TEXT, path="t", words=("-o", output, "t"), environment={}, cwd=str(tmp_path))
    script = read_script(handed)
    names = find_log_names(Run(spec=script.spec, script=script.script), user="ann")
    assert names is not None
    names.folder.mkdir(exist_ok=True)
    for one in (name, "other.txt", "slurm-.out", "all.log.old"):
        (names.folder / one).write_text("x")
    (names.folder / "slurm-99.out").symlink_to(names.folder / name)
    with closing(RunDirReader()) as reader:
        found = reader.find_logs(names.folder, names.pattern)
        assert [(log.name, log.job_id, log.size_bytes) for log in found] == [(name, job_id, 1)]
        assert reader.find_logs(tmp_path / "nowhere", names.pattern) == ()


@pytest.mark.parametrize("output", ["%j/log", "/dev/null", "%q", "a\\\\b%j"])
def test_logs_whose_names_cannot_be_known_are_not_looked_for(tmp_path: Path, output: str) -> None:
    handed = Handed(text=TEXT, path="t", words=("-o", output, "t"), environment={}, cwd=str(tmp_path))
    script = read_script(handed)
    assert find_log_names(Run(spec=script.spec, script=script.script), user="ann") is None
