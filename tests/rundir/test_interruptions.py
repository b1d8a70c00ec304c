"""The launcher's records of interruptions that the job survived, as the daemon reads them: from anybody's files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from supervisor.model import RunView
from supervisor.rundir import RunDirReader
from supervisor.rundir_child import MAX_INTERRUPTIONS, SMALL_BYTES
from trainer.contract import InterruptionRecord, RunPaths, render_json, write_json


def record(paths: RunPaths, launch: int, *, under: int | None = None, **changes: Any) -> Path:
    values: dict[str, Any] = {"attempt": 1, "launch": launch, "kind": "process", "cause": "x", "detected_at": 1.0}
    path = paths.interruption(1, launch if under is None else under)
    write_json(path, InterruptionRecord(**{**values, **changes}))
    return path


def read(reader: RunDirReader, paths: RunPaths, since: int = 0) -> RunView:
    return reader.read("run", paths.run_dir, 1, is_final=False, deadline_s=5.0, interruptions_from=since)


def launches(view: RunView) -> list[int]:
    return [one.launch for one in view.interruptions]


def test_a_job_that_was_never_interrupted_has_no_records(reader: RunDirReader, paths: RunPaths) -> None:
    view = read(reader, paths)
    assert (view.interruptions, view.unreadable) == ((), ())


def test_records_are_read_by_number_from_the_first_that_is_not_settled(reader: RunDirReader, paths: RunPaths) -> None:
    for launch in (10, 2, 0, 1):
        record(paths, launch)
    assert launches(read(reader, paths)) == [0, 1, 2, 10]
    assert launches(read(reader, paths, since=2)) == [2, 10]


def test_so_many_at_once_are_read_and_the_oldest_first(reader: RunDirReader, paths: RunPaths) -> None:
    for launch in range(MAX_INTERRUPTIONS + 3):
        record(paths, launch)
    assert launches(read(reader, paths)) == list(range(MAX_INTERRUPTIONS))


def test_a_folder_of_records_that_is_a_link_is_not_followed(
    reader: RunDirReader, paths: RunPaths, tmp_path: Path
) -> None:
    record(paths, 0)
    folder = paths.interruption(1, 0).parent
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    view = read(reader, paths)
    assert launches(view) == []
    assert view.unreadable == ("attempts/1/interruptions: is a link",)


@pytest.mark.parametrize("name", ["00.json", "-1.json", "1e3.json", "12345678.json", ".0.json.tmp", "\u0661.json"])
def test_other_names_are_no_records(reader: RunDirReader, paths: RunPaths, name: str) -> None:
    record(paths, 0).rename(paths.interruption(1, 0).with_name(name))
    assert launches(read(reader, paths)) == []


def test_a_record_under_another_number_is_named_and_not_believed(reader: RunDirReader, paths: RunPaths) -> None:
    record(paths, 3, under=0)
    record(paths, 1, attempt=9)
    record(paths, 2)
    view = read(reader, paths)
    assert launches(view) == [2]
    assert [line.partition(":")[0] for line in view.unreadable] == [
        "attempts/1/interruptions/0.json",
        "attempts/1/interruptions/1.json",
    ]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b'{"attempt":1,"launch":0}',
        b"\xff\xfe",
        b'{"attempt":1,"launch":0,"kind":"process","cause":"\\ud800","detected_at":1.0}',
        b'{"attempt":1,"launch":0,"kind":"process","cause":"x","detected_at":1e999}',
        b"x" * (SMALL_BYTES + 1),
    ],
)
def test_a_file_that_is_none_is_unknown_and_the_others_count(
    reader: RunDirReader, paths: RunPaths, data: bytes
) -> None:
    record(paths, 1)
    paths.interruption(1, 0).write_bytes(data)
    view = read(reader, paths)
    assert launches(view) == [1]
    assert len(view.unreadable) == 1


def test_links_and_pipes_are_not_opened(reader: RunDirReader, paths: RunPaths, tmp_path: Path) -> None:
    record(paths, 2)
    outside = tmp_path / "secret"
    outside.write_bytes(render_json(InterruptionRecord(attempt=1, launch=0, kind="x", cause="s", detected_at=1.0)))
    paths.interruption(1, 0).symlink_to(outside)
    os.mkfifo(paths.interruption(1, 1))
    assert launches(read(reader, paths)) == [2]
