"""Leases in a run directory: what the reader sees of them, whoever wrote what."""

from __future__ import annotations

from pathlib import Path

from supervisor.model import RunView
from supervisor.rundir import RunDirReader
from trainer.contract import ReadLease, RunPaths, write_json
from trainer.storage.leases import hold_lease


def read(reader: RunDirReader, paths: RunPaths) -> RunView:
    return reader.read("run", paths.run_dir, 1, is_final=False, deadline_s=10.0)


def lease(path: Path, *names: str, attempt: int = 1) -> None:
    write_json(path, ReadLease(attempt=attempt, checkpoints=names, time=0.0))


def test_what_is_read_and_what_is_copied_are_both_leased(reader: RunDirReader, paths: RunPaths) -> None:
    assert (read(reader, paths).leased, read(reader, paths).is_lease_unreadable) == ((), False)
    lease(paths.read_lease(1), "step-5.a1")
    lease(paths.upload_lease(1), "step-6.a1")
    assert read(reader, paths).leased == ("step-5.a1", "step-6.a1")


def test_a_lease_is_gone_once_its_holder_has_read(reader: RunDirReader, paths: RunPaths) -> None:
    with hold_lease(paths.read_lease(1), attempt=1, names=["step-5.a1"]):
        assert read(reader, paths).leased == ("step-5.a1",)
    assert read(reader, paths).leased == ()


def test_a_lease_that_cannot_be_understood_is_there_all_the_same(reader: RunDirReader, paths: RunPaths) -> None:
    paths.read_lease(1).write_bytes(b'{"version":1,"attem')
    seen = read(reader, paths)
    assert (seen.leased, seen.is_lease_unreadable) == ((), True)
    assert any("reading.json" in line for line in seen.unreadable)


def test_a_lease_that_is_of_another_attempt_or_no_file_is_not_understood(reader: RunDirReader, paths: RunPaths) -> None:
    lease(paths.read_lease(1), "step-5.a1", attempt=2)
    assert read(reader, paths).is_lease_unreadable
    paths.read_lease(1).unlink()
    paths.upload_lease(1).mkdir()
    assert read(reader, paths).is_lease_unreadable
