"""The launcher's records where they can't be written for a while, or would be written through a link."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.trainer.ranks import await_true
from trainer.contract import ExitRecord, InterruptionRecord, LaunchReport
from trainer.launching.writer import Writer

RECORD = InterruptionRecord(attempt=1, launch=0, kind="process", cause="x", detected_at=1.0)
REPORT = LaunchReport(attempt=1, job_id=7, seq=1, time=1.0, host="n1", phase="running", nodes={})
ENDED = ExitRecord(attempt=1, job_id=7, exit_code=0, reason="finished", time=2.0)


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Writer]:
    started = Writer(tmp_path)
    started.start()
    yield started
    started.close(ENDED, 10.0)


def test_a_record_that_could_not_be_written_is_written_when_there_is_room(writer: Writer, tmp_path: Path) -> None:
    folder = tmp_path / "interruptions"
    folder.write_text("in the way")
    writer.record(RECORD)
    writer.offer(REPORT)
    await_true((tmp_path / "launch.json").exists)
    folder.unlink()
    writer.offer(REPORT)
    await_true((folder / "0.json").exists)


def test_a_record_is_not_written_through_a_link(writer: Writer, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "interruptions").symlink_to(elsewhere)
    writer.record(RECORD)
    writer.offer(REPORT)
    await_true((tmp_path / "launch.json").exists)
    assert not list(elsewhere.iterdir())
