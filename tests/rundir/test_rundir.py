from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import xxhash

from supervisor.model import CheckpointView, RunView
from supervisor.rundir import RunDirReader, RunDirUnreadable
from trainer import contract
from trainer.contract import ExitRecord, LaunchReport, NodeReport, Outcome, Progress, RunPaths, VerificationRecord

Publish = Callable[..., Path]


def read(reader: RunDirReader, paths: RunPaths, *, is_final: bool = False, attempt: int = 1) -> RunView:
    return reader.read("run", paths.run_dir, attempt, is_final=is_final, deadline_s=10.0)


def write_progress(paths: RunPaths, step: int) -> None:
    contract.write_json(paths.progress(1), Progress(attempt=1, step=step, time=1.0))


def only_checkpoint(view: RunView) -> CheckpointView:
    (checkpoint,) = view.checkpoints
    return checkpoint


# ---------------------------------------------------------------- progress and ages


class FakeClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def timed(clock: FakeClock) -> Iterator[RunDirReader]:
    reader = RunDirReader(clock=clock)
    yield reader
    reader.close()


def test_an_age_grows_while_the_content_stays_and_starts_anew_when_it_changes(
    timed: RunDirReader, clock: FakeClock, paths: RunPaths
) -> None:
    write_progress(paths, 3)
    first = read(timed, paths).progress
    clock.now += 7
    second = read(timed, paths).progress
    write_progress(paths, 4)
    third = read(timed, paths).progress
    assert first
    assert second
    assert third
    assert (first.unchanged_s, second.unchanged_s, third.unchanged_s) == (0.0, 7.0, 0.0)
    assert third.value.step == 4


def test_a_file_time_in_the_future_or_the_past_changes_no_age(
    timed: RunDirReader, clock: FakeClock, paths: RunPaths
) -> None:
    write_progress(paths, 3)
    read(timed, paths)
    for jump_s in (90, -3600, 10**6):
        os.utime(paths.progress(1), (time.time() + jump_s, time.time() + jump_s))
        clock.now += 1
        progress = read(timed, paths).progress
        assert progress
        assert progress.unchanged_s == clock.now - 1000.0


@pytest.mark.parametrize("garbage", [b"", b'{"attempt": 1, "st', b"\xff\xfe", b"[]", b"x" * 100_000])
def test_garbage_leaves_the_last_good_progress_and_its_age_growing(
    timed: RunDirReader, clock: FakeClock, paths: RunPaths, garbage: bytes
) -> None:
    write_progress(paths, 3)
    read(timed, paths)
    clock.now += 5
    paths.progress(1).write_bytes(garbage)
    view = read(timed, paths)
    assert view.progress
    assert view.progress.value.step == 3
    assert view.progress.unchanged_s == 5.0
    assert len(view.unreadable) == 1
    assert view.unreadable[0].startswith("progress/a1.json: ")


def test_progress_that_is_gone_is_unknown_not_zero(timed: RunDirReader, clock: FakeClock, paths: RunPaths) -> None:
    write_progress(paths, 3)
    read(timed, paths)
    paths.progress(1).unlink()
    clock.now += 5
    view = read(timed, paths)
    assert view.progress
    assert view.progress.unchanged_s == 5.0
    assert view.unreadable == ("progress/a1.json: gone",)


def test_a_log_is_seen_to_grow_and_to_be_silent(timed: RunDirReader, clock: FakeClock, paths: RunPaths) -> None:
    log = paths.attempt_dir(1) / "job.log"
    log.write_text("step 1\n")
    read(timed, paths)
    clock.now += 40
    silent = read(timed, paths).log
    log.write_text("step 1\nstep 2\n")
    grown = read(timed, paths).log
    assert silent is not None
    assert grown is not None
    assert (silent.unchanged_s, grown.unchanged_s) == (40, 0)


def test_missing_files_are_none_and_nothing_is_unreadable(reader: RunDirReader, paths: RunPaths) -> None:
    assert read(reader, paths, is_final=True) == RunView(attempt=1)


def test_a_new_attempt_does_not_inherit_the_old_progress(reader: RunDirReader, paths: RunPaths) -> None:
    write_progress(paths, 3)
    read(reader, paths)
    assert read(reader, paths, attempt=2).progress is None


def test_a_file_that_names_another_attempt_does_not_count(reader: RunDirReader, paths: RunPaths) -> None:
    contract.write_json(paths.progress(1), Progress(attempt=9, step=3, time=1.0))
    view = read(reader, paths)
    assert view.progress is None
    assert len(view.unreadable) == 1


def test_text_that_is_no_unicode_is_unreadable_and_stops_nothing(reader: RunDirReader, paths: RunPaths) -> None:
    record = b'{"attempt":1,"job_id":5,"exit_code":1,"time":1.0,"reason":"\\ud800"}'
    paths.exit_record(1).write_bytes(record)
    write_progress(paths, 3)
    view = read(reader, paths)
    assert view.exit is None
    assert view.progress is not None
    assert len(view.unreadable) == 1


# ---------------------------------------------------------------- hostile files


def test_a_fifo_a_link_and_a_folder_in_place_of_files_are_named_and_do_not_block(
    reader: RunDirReader, paths: RunPaths, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    contract.write_json(secret, ExitRecord(attempt=1, job_id=1, exit_code=0, reason="", time=1.0))
    os.mkfifo(paths.progress(1))
    paths.exit_record(1).symlink_to(secret)
    paths.launch_report(1).mkdir()
    view = read(reader, paths)
    assert (view.progress, view.exit, view.launch) == (None, None, None)
    assert {line.partition(":")[0] for line in view.unreadable} == {
        "progress/a1.json",
        "attempts/1/exit.json",
        "attempts/1/launch.json",
    }


def test_a_run_directory_that_is_not_there_is_unreadable(reader: RunDirReader, tmp_path: Path) -> None:
    with pytest.raises(RunDirUnreadable):
        reader.read("run", tmp_path / "unmounted", 1, is_final=False, deadline_s=10.0)


def test_a_missing_checkpoint_folder_is_no_answer(reader: RunDirReader, paths: RunPaths) -> None:
    paths.checkpoints().rmdir()
    with pytest.raises(RunDirUnreadable):
        read(reader, paths)


# ---------------------------------------------------------------- the end of an attempt


def test_last_words_are_read_when_asked_for(reader: RunDirReader, paths: RunPaths) -> None:
    contract.write_json(paths.exit_record(1), ExitRecord(attempt=1, job_id=7, exit_code=1, reason="r", time=1.0))
    contract.write_json(paths.outcome(1), Outcome(attempt=1, exit_code=75))
    contract.write_json(paths.node_report(1, "n1"), NodeReport(attempt=1, node="n1", host="n1", time=1.0, exit_code=1))
    (paths.attempt_dir(1) / "job.log").write_bytes(b"a" * 1_000_000 + b"\xffend")
    early, late = read(reader, paths), read(reader, paths, is_final=True)
    assert early.exit
    assert early.outcome is None
    assert early.node_reports == ()
    assert early.log_tail == ""
    assert late.outcome
    assert late.outcome.exit_code == 75
    assert [report.node for report in late.node_reports] == ["n1"]
    assert late.log_tail.endswith("\ufffdend")
    assert len(late.log_tail) <= 256 * 1024


def test_a_node_report_that_names_another_node_does_not_count(reader: RunDirReader, paths: RunPaths) -> None:
    contract.write_json(paths.node_report(1, "n1"), NodeReport(attempt=1, node="n2", host="n2", time=1.0))
    view = read(reader, paths, is_final=True)
    assert view.node_reports == ()
    assert len(view.unreadable) == 1


def test_the_launcher_s_report_carries_its_age(timed: RunDirReader, clock: FakeClock, paths: RunPaths) -> None:
    report = LaunchReport(attempt=1, job_id=5, seq=1, time=1.0, host="n1", phase="running", nodes={})
    contract.write_json(paths.launch_report(1), report)
    read(timed, paths)
    clock.now += 4
    launch = read(timed, paths).launch
    assert launch
    assert (launch.value.host, launch.unchanged_s) == ("n1", 4.0)


# ---------------------------------------------------------------- checkpoints


def test_a_checkpoint_is_complete_when_every_file_has_its_size(
    reader: RunDirReader, paths: RunPaths, publish: Publish
) -> None:
    folder = publish(10)
    (folder / "left-over").write_bytes(b"of a larger world")
    view = only_checkpoint(read(reader, paths))
    assert (view.step, view.attempt, view.is_complete) == (10, 1, True)
    assert (view.size_bytes, view.files, view.samples, view.path) == (1010, 2, 80, str(folder))
    assert not view.is_verified_by_nodes


def test_folders_without_a_manifest_and_names_that_no_writer_gives_are_not_checkpoints(
    reader: RunDirReader, paths: RunPaths, publish: Publish
) -> None:
    paths.checkpoint(5, 1).mkdir()
    publish(7).rename(paths.checkpoints() / "step-007.a1")
    assert read(reader, paths).checkpoints == ()


@pytest.mark.parametrize("damage", ["missing", "short", "link", "fifo"])
def test_a_damaged_file_makes_a_checkpoint_incomplete_and_is_named(
    reader: RunDirReader, paths: RunPaths, publish: Publish, damage: str, tmp_path: Path
) -> None:
    file = publish(10) / "sub" / "b.distcp"
    outside = tmp_path / "outside"
    outside.write_bytes(b"y" * 10)
    file.unlink()
    if damage == "short":
        file.write_bytes(b"y" * 9)
    elif damage == "link":
        file.symlink_to(outside)
    elif damage == "fifo":
        os.mkfifo(file)
    view = only_checkpoint(read(reader, paths))
    assert not view.is_complete
    assert "sub/b.distcp" in view.detail


def test_a_folder_of_a_checkpoint_that_is_a_link_leads_nowhere(
    reader: RunDirReader, paths: RunPaths, publish: Publish, tmp_path: Path
) -> None:
    folder = publish(10)
    (folder / "sub").rename(tmp_path / "moved")
    (folder / "sub").symlink_to(tmp_path / "moved")
    assert not only_checkpoint(read(reader, paths)).is_complete


def test_a_manifest_of_another_step_makes_it_incomplete(
    reader: RunDirReader, paths: RunPaths, publish: Publish
) -> None:
    publish(10).rename(paths.checkpoint(11, 1))
    view = only_checkpoint(read(reader, paths))
    assert (view.step, view.is_complete) == (11, False)


def test_a_checkpoint_of_another_run_is_none_of_this_one_whatever_says_that_it_is_verified(
    reader: RunDirReader, paths: RunPaths, publish: Publish
) -> None:
    write_verification(publish(10), ok=True)
    renamed = RunPaths(paths.run_dir.with_name("other"))
    paths.run_dir.rename(renamed.run_dir)
    view = only_checkpoint(read(reader, renamed))
    assert (view.is_complete, view.is_verified_by_nodes) == (False, False)
    assert "run run" in view.detail


def write_verification(folder: Path, *, ok: bool, manifest: bytes | None = None) -> None:
    data = (folder / contract.MANIFEST_NAME).read_bytes() if manifest is None else manifest
    record = VerificationRecord(
        attempt=1, step=10, ok=ok, manifest_xxh3_128=xxhash.xxh3_128_hexdigest(data), bad_files=("a",), time=1.0
    )
    contract.write_json(folder / contract.VERIFIED_NAME, record)


def test_a_verification_counts_only_for_the_manifest_that_it_names(
    reader: RunDirReader, paths: RunPaths, publish: Publish
) -> None:
    folder = publish(10)
    write_verification(folder, ok=True, manifest=b"another")
    assert not only_checkpoint(read(reader, paths)).is_verified_by_nodes
    write_verification(folder, ok=True)
    assert only_checkpoint(read(reader, paths)).is_verified_by_nodes
    write_verification(folder, ok=False)
    view = only_checkpoint(read(reader, paths))
    assert (view.is_verified_by_nodes, view.is_rejected_by_nodes) == (False, True)


# ---------------------------------------------------------------- writing and pruning


def test_an_attempt_is_written_with_its_folders(reader: RunDirReader, tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "root" / "run")
    reader.write_attempt(paths.run_dir, 2, {"attempt.json": b"{}", "batch.sh": b"#!/bin/sh\n\xff"})
    assert (paths.attempt_dir(2) / "batch.sh").read_bytes() == b"#!/bin/sh\n\xff"
    assert all(folder.is_dir() for folder in (paths.logs(2), paths.attempt_dir(2) / "nodes", paths.checkpoints()))


def test_a_name_that_leaves_the_attempt_is_refused(reader: RunDirReader, paths: RunPaths) -> None:
    with pytest.raises(RunDirUnreadable):
        reader.write_attempt(paths.run_dir, 2, {"../1/exit.json": b"{}"})
    assert not paths.exit_record(1).exists()


def test_pruning_removes_one_checkpoint_and_follows_no_link(
    reader: RunDirReader, paths: RunPaths, publish: Publish, tmp_path: Path
) -> None:
    kept, removed, precious = publish(10), publish(20), tmp_path / "precious"
    precious.mkdir()
    (precious / "data").write_bytes(b"1")
    (removed / "link").symlink_to(precious)
    reader.prune(paths.run_dir, 20, 1)
    reader.prune(paths.run_dir, 20, 1)
    assert not removed.exists()
    assert kept.exists()
    assert (precious / "data").exists()


def test_a_checkpoint_that_is_itself_a_link_is_not_pruned(
    reader: RunDirReader, paths: RunPaths, publish: Publish, tmp_path: Path
) -> None:
    moved = publish(20).rename(tmp_path / "moved")
    paths.checkpoint(20, 1).symlink_to(moved)
    with pytest.raises(RunDirUnreadable):
        reader.prune(paths.run_dir, 20, 1)
    assert (moved / contract.MANIFEST_NAME).exists()


def test_the_end_of_a_log_can_be_read(reader: RunDirReader, tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text("one\ntwo\n")
    assert reader.read_tail(tmp_path / "job.log", max_bytes=4) == "two\n"
    with pytest.raises(RunDirUnreadable):
        reader.read_tail(tmp_path / "none")


def test_a_manifest_that_a_shell_script_writes_by_the_contracts_page_counts(
    reader: RunDirReader, paths: RunPaths
) -> None:
    folder = paths.checkpoint(5, 1)
    folder.mkdir(parents=True)
    (folder / "state.txt").write_text("state")
    digest = xxhash.xxh3_128_hexdigest(b"state")
    file = f'{{"path": "state.txt", "size_bytes": 5, "xxh3_128": "{digest}"}}'
    keys = '"run": "run", "attempt": 1, "step": 5, "samples": 0, "world_size": 1, "time": 1e9'
    (folder / "MANIFEST.json").write_text(f'{{{keys}, "files": [{file}]}}\n')
    view = read(reader, paths)
    assert [(c.step, c.is_complete, c.detail) for c in view.checkpoints] == [(5, True, "")]
