"""The reader over a training that knows nothing of the contract: its checkpoints, its log, what stands in the way."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from supervisor.model import RunView
from supervisor.rundir import ReaderDied, RunDirReader, RunDirUnreadable
from supervisor.rundir_child import Question
from tests.layouts.folders import DATA
from trainer.contract import Progress, RunPaths, write_json

Read = Callable[..., RunView]


@pytest.fixture
def read(reader: RunDirReader, paths: RunPaths) -> Read:
    def once(attempt: int = 1, **sources: Any) -> RunView:
        return reader.read("run", paths.run_dir, attempt, is_final=False, deadline_s=10.0, **sources)

    return once


@pytest.fixture
def saves(tmp_path: Path) -> Path:
    return shutil.copytree(DATA / "dcp", tmp_path / "saves")


def test_checkpoints_come_from_the_trainings_own_folder(read: Read, saves: Path) -> None:
    view = read(checkpoint_directory=saves, layout="auto")
    assert [(c.step, c.is_complete, c.path) for c in view.checkpoints] == [
        (2, True, str(saves / "step-2")),
        (4, True, str(saves / "step-4")),
    ]
    assert all(c.stamp for c in view.checkpoints)


def test_without_a_folder_of_its_own_the_run_directorys_is_looked_at(read: Read, paths: RunPaths) -> None:
    shutil.copytree(DATA / "dcp" / "step-4", paths.checkpoints() / "step-4")
    assert [c.step for c in read(layout="dcp").checkpoints] == [4]


def test_before_the_first_attempt_there_is_no_run_directory_yet(reader: RunDirReader, saves: Path) -> None:
    view = reader.read(
        "run",
        saves / "absent",
        0,
        is_final=False,
        deadline_s=10.0,
        checkpoint_directory=saves,
        layout="dcp",
    )
    assert (view.attempt, [c.step for c in view.checkpoints]) == (0, [2, 4])


def test_no_folder_yet_is_told_from_one_that_cannot_be_read(read: Read, tmp_path: Path) -> None:
    view = read(checkpoint_directory=tmp_path / "absent", layout="dcp")
    assert (view.has_checkpoint_folder, view.checkpoints_unknown) == (False, "")
    (tmp_path / "file").write_text("")
    view = read(checkpoint_directory=tmp_path / "file", layout="dcp")
    assert "Not a directory" in view.checkpoints_unknown


def test_a_folder_with_too_many_names_is_told_in_words(read: Read, tmp_path: Path) -> None:
    folder = tmp_path / "many"
    folder.mkdir()
    for number in range(20_001):
        (folder / str(number)).touch()
    why = read(checkpoint_directory=folder, layout="dcp").checkpoints_unknown
    assert "more than 20,000 names" in why
    assert "Errno" not in why


def test_a_folder_with_a_name_that_is_not_utf8_is_read(read: Read, saves: Path) -> None:
    Path(os.fsdecode(os.fsencode(saves) + b"/step-\xff1")).mkdir()
    view = read(checkpoint_directory=saves, layout="auto")
    assert [c.step for c in view.checkpoints] == [2, 4]
    assert any("not UTF-8" in note for note in view.warnings)


def test_a_link_in_place_of_a_file_is_told_as_one(read: Read, paths: RunPaths) -> None:
    paths.progress(1).symlink_to(paths.run_dir / "elsewhere")
    assert "a symbolic link" in " ".join(read().unreadable)


def test_a_report_whose_name_is_not_utf8_does_not_hide_the_rest(reader: RunDirReader, paths: RunPaths) -> None:
    Path(os.fsdecode(os.fsencode(paths.attempt_dir(1)) + b"/nodes/\xff.json")).write_text("{}")
    view = reader.read("run", paths.run_dir, 1, is_final=True, deadline_s=10.0)
    assert "nodes/?.json" in " ".join(view.unreadable)


def test_a_folder_that_the_owner_may_not_read_is_unknown_for_as_long_as_that_lasts(saves: Path) -> None:
    clock = [0.0]
    reader = RunDirReader(4242, 4343, clock=lambda: clock[0])
    saves.chmod(0)
    view = RunView(attempt=0)
    for now in (0.0, 70.0):
        clock[0] = now
        view = reader.read("run", saves, 0, is_final=False, deadline_s=10.0, checkpoint_directory=saves, layout="dcp")
    reader.close()
    saves.chmod(0o700)
    assert "Permission denied" in view.checkpoints_unknown
    assert (view.checkpoints_unknown_s, view.checkpoints) == (70.0, ())


def test_a_log_elsewhere_is_read_from_where_this_attempt_began(read: Read, tmp_path: Path) -> None:
    log = tmp_path / "slurm-7.out"
    log.write_text("step 90\n" * 3)
    view = read(log_path=log, log_offset=24, pattern=r"step (\d+)")
    assert (view.log and view.log.value, view.progress) == (0, None)
    log.write_text("step 90\n" * 3 + "step 4\nstep 5\n")
    view = read(log_path=log, log_offset=24, pattern=r"step (\d+)")
    assert view.log is not None
    assert view.progress is not None
    assert (view.log.value, view.progress.value.step, view.progress.value.phase) == (14, 5, "step")


def test_the_steps_that_were_seen_stay_known(read: Read, paths: RunPaths) -> None:
    log = paths.attempt_dir(1) / "job.log"
    log.write_text("step 4\n")
    assert read(pattern=r"step (\d+)").progress is not None
    with log.open("a") as stream:
        stream.write("evaluating\n")
    view = read(pattern=r"step (\d+)")
    assert view.progress is not None
    assert view.progress.value.step == 4


def test_a_training_that_prints_its_step_rarely_is_alive_while_its_log_grows(paths: RunPaths) -> None:
    clock = [0.0]
    reader = RunDirReader(clock=lambda: clock[0])
    log = paths.attempt_dir(1) / "job.log"
    ages = []
    for now, line in ((0.0, "step 4\n"), (50.0, ""), (100.0, "a progress bar\n")):
        clock[0] = now
        with log.open("a") as stream:
            stream.write(line)
        view = reader.read("run", paths.run_dir, 1, is_final=False, deadline_s=10.0, pattern=r"step (\d+)")
        assert view.progress is not None
        ages.append(view.progress.unchanged_s)
    reader.close()
    assert ages == [0.0, 50.0, 0.0]


def test_a_progress_file_goes_before_the_log(read: Read, paths: RunPaths) -> None:
    (paths.attempt_dir(1) / "job.log").write_text("step 4\n")
    write_json(paths.progress(1), Progress(attempt=1, step=9, time=0.0))
    view = read(pattern=r"step (\d+)")
    assert view.progress is not None
    assert view.progress.value.step == 9


def test_a_bad_pattern_costs_the_steps_and_nothing_else(read: Read, paths: RunPaths, saves: Path) -> None:
    (paths.attempt_dir(1) / "job.log").write_text("a" * 60 + "\n")
    for _ in range(2):
        view = read(pattern=r"(a+)+b(\d)", checkpoint_directory=saves, layout="dcp")
        assert (view.progress, len(view.checkpoints)) == (None, 2)
        assert "takes too long" in view.warnings[0]


def test_the_growth_of_a_save_is_a_sign_of_life(reader: RunDirReader, paths: RunPaths, saves: Path) -> None:
    clock = [0.0]
    aged = RunDirReader(clock=lambda: clock[0])

    def unchanged_s() -> float:
        view = aged.read(
            "run",
            paths.run_dir,
            1,
            is_final=False,
            deadline_s=10.0,
            checkpoint_directory=saves,
            layout="dcp",
        )
        assert view.log is not None
        return view.log.unchanged_s

    unchanged_s(), unchanged_s()
    clock[0] = 100.0
    assert unchanged_s() == 100.0
    (saves / "step-6").mkdir()
    assert unchanged_s() == 0.0
    aged.close()


def test_the_last_words_come_from_the_log_of_this_attempt(
    reader: RunDirReader, paths: RunPaths, tmp_path: Path
) -> None:
    log = tmp_path / "slurm-7.out"
    log.write_text("first attempt\nsecond attempt\n")
    view = reader.read("run", paths.run_dir, 1, is_final=True, deadline_s=10.0, log_path=log, log_offset=14)
    assert view.log_tail == "second attempt\n"


class Deaf:
    """The reader's processes, of which those that look at a folder of checkpoints do not answer."""

    def __init__(self, inner: Any, error: RunDirUnreadable) -> None:
        self._inner, self._error, self.asked = inner, error, 0

    def ask(self, key: str, question: Question, deadline_s: float) -> bytes:
        if question.do != "survey":
            return cast("bytes", self._inner.ask(key, question, deadline_s))
        self.asked += 1
        raise self._error

    def close(self) -> None:
        self._inner.close()


@pytest.mark.parametrize(("error", "asked"), [(RunDirUnreadable("no answer"), 3), (ReaderDied("ended"), 1)])
def test_a_folder_that_does_not_answer_takes_nothing_else_with_it(
    paths: RunPaths, error: RunDirUnreadable, asked: int
) -> None:
    """And one that kills its reader is left alone for a while."""
    reader = RunDirReader()
    deaf = Deaf(reader._pool, error)
    reader._pool = cast("Any", deaf)
    write_json(paths.progress(1), Progress(attempt=1, step=9, time=0.0))
    for _ in range(3):
        view = reader.read("run", paths.run_dir, 1, is_final=False, deadline_s=10.0, layout="dcp")
        assert view.progress is not None
        assert view.checkpoints_unknown == str(error)
    reader.close()
    assert deaf.asked == asked


def test_what_lies_there_and_is_no_checkpoint_is_told_with_what_one_needs(paths: RunPaths, tmp_path: Path) -> None:
    clock = [0.0]
    reader = RunDirReader(clock=lambda: clock[0])
    saves = tmp_path / "ckpt"
    for step in (5, 10):
        (saves / f"step-{step}").mkdir(parents=True)
        (saves / f"step-{step}" / "state.txt").write_text("state")

    def look(layout: str) -> RunView:
        clock[0] += 70.0
        return reader.read(
            "run", paths.run_dir, 1, is_final=False, deadline_s=10.0, checkpoint_directory=saves, layout=layout
        )

    first, second = look("dcp"), look("dcp")
    shutil.copytree(DATA / "dcp" / "step-4", saves / "step-4")
    whole = look("dcp")
    reader.close()
    assert f"2 entries lie in {saves}, none is a whole checkpoint of layout dcp" in first.unrecognised
    assert ".metadata" in first.unrecognised
    assert (first.unrecognised_s, second.unrecognised_s) == (0.0, 70.0)
    assert whole.unrecognised == ""
