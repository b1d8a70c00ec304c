"""A person's script whose next job is queued ahead: what it is told, and what its link points at."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slurm.types import JobState
from supervisor.model import Attempt, AttemptEnd, AttemptState, Intent, IntentKind
from supervisor.scripts import NotSupervised
from supervisor.store import Store
from tests.execute.test_script_runs import Bench
from tests.execute.test_scripts import TEXT, read, submission
from tests.fakes import FakeClock, Fault

WORDS = ("-N1", "--output=all.log", "train.sh", "{resume_from}", "{resume_step}")


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """Its first attempt runs in job 1."""
    with Store.open(tmp_path / "ledger.db", now=FakeClock().now()) as store:
        made = Bench(tmp_path, store, words=WORDS)
        made.submit()
        made.settle()
        made.slurm.advance(5)
        yield made
        made.owners.close()


def queue(bench: Bench, **changes: Any) -> None:
    one = Attempt(
        run="train",
        number=2,
        token="sup:train:2",
        state=AttemptState.AHEAD,
        nodes_wanted=1,
        planned_at=bench.clock.now(),
    )
    intent = Intent(kind=IntentKind.SUBMIT, key="submit:train:2", reason="near", run="train", attempt=2)
    bench.mean(intent, replace(one, **changes))
    bench.settle()


def move(bench: Bench, path: str, step: int, **changes: Any) -> None:
    intent = Intent(
        kind=IntentKind.PROMOTE, key="link:train:2", reason="new", run="train", attempt=2, text=path, step=step
    )
    bench.mean(intent, replace(second(bench), **changes))
    bench.settle()


def second(bench: Bench) -> Attempt:
    return bench.store.load_aside("train")[-1]


def link(bench: Bench) -> Path:
    return bench.run.spec.paths.resume_link(2)


def test_it_waits_behind_the_running_job_and_is_told_a_link_that_points_at_the_newest_checkpoint(bench: Bench) -> None:
    queue(bench, resume_path="/c/step-7", resume_step=7)
    request = bench.request()
    assert (request.dependency, request.arguments) == ("afterany:1,singleton", (str(link(bench)), ""))
    assert request.environment["SUPERVISOR_RESUME_FROM"] == str(link(bench))
    assert request.environment["SUPERVISOR_RESUME_STEP"] == ""
    assert link(bench).readlink() == Path("/c/step-7")
    assert (second(bench).state, second(bench).job_id) == (AttemptState.AHEAD, 2)
    assert bench.slurm.job(2).state is JobState.PENDING


def test_before_there_is_a_checkpoint_the_link_is_named_and_not_there(bench: Bench) -> None:
    queue(bench)
    assert bench.request().environment["SUPERVISOR_RESUME_FROM"] == str(link(bench))
    assert not os.path.lexists(link(bench))


def test_the_link_is_moved_and_the_ledger_says_where_it_points(bench: Bench) -> None:
    """What the log that all attempts share has by then is not of this one."""
    queue(bench)
    (bench.folder / "all.log").write_text("step 8\n")
    move(bench, "/c/step-8", 8)
    assert link(bench).readlink() == Path("/c/step-8")
    assert (second(bench).resume_path, second(bench).resume_step, second(bench).log_offset) == ("/c/step-8", 8, 7)


def test_the_link_of_a_job_that_has_begun_is_not_moved(bench: Bench) -> None:
    queue(bench, resume_path="/c/step-7", resume_step=7)
    move(bench, "/c/step-8", 8, started_at=bench.clock.now())
    assert link(bench).readlink() == Path("/c/step-7")
    assert second(bench).resume_step == 7
    assert bench.store.load_world(bench.clock.now()).open_intents == ()


def test_a_request_that_was_lost_is_not_repeated(bench: Bench) -> None:
    """Nobody knows by then whether it will be needed."""
    bench.slurm.plan("submit", Fault.LOST_REQUEST)
    queue(bench)
    bench.clock.advance(60)
    bench.settle()
    assert (second(bench).end, second(bench).is_job_gone) == (AttemptEnd.NOT_NEEDED, True)
    assert len(bench.slurm.jobs()) == 1


def test_it_asks_to_be_queued_ahead_by_an_option_or_a_line() -> None:
    text = TEXT.replace("echo", "#SUPERVISE --queue-ahead-s=600\necho")
    assert read("train.sh").spec.restart.queue_ahead_s == 0
    assert read("train.sh", text=text).spec.restart.queue_ahead_s == 600
    assert read("--supervise-queue-ahead-s=60", "train.sh", text=text).spec.restart.queue_ahead_s == 60


def test_a_script_that_asks_for_the_step_is_told_that_there_is_none() -> None:
    ahead = "--supervise-queue-ahead-s=60"
    notes = [read(*words).notes for words in ((ahead, *WORDS), (ahead, "train.sh", "{resume_from}"), WORDS)]
    assert [[note for note in each if "{resume_step}" in note] != [] for each in notes] == [True, False, False]


def test_a_warning_is_asked_for_where_no_signal_is() -> None:
    signals = [
        [o for o in submission(read(*words, "train.sh")).options if o.startswith("--signal")]
        for words in (
            [],
            ["--supervise-warn-s=90"],
            ["--supervise-warn-s=0"],
            ["--supervise-warn-s=9", "--signal=TERM@5"],
        )
    ]
    assert signals == [[], ["--signal=B:USR1@90"], [], ["--signal=TERM@5"]]


def test_a_warning_leaves_the_scripts_own_signal_alone_and_says_so() -> None:
    script = read("--supervise-warn-s=9", "train.sh", text=TEXT.replace("echo", "#SBATCH --signal=B:TERM@5\necho"))
    assert not [o for o in submission(script).options if o.startswith("--signal")]
    assert [note for note in script.notes if "--supervise-warn-s" in note]


@pytest.mark.parametrize("value", ["65536", "-1", "1.5", "x"])
def test_a_warning_that_slurm_can_not_give_is_refused(value: str) -> None:
    with pytest.raises(NotSupervised, match="warn-s"):
        read(f"--supervise-warn-s={value}", "train.sh")
