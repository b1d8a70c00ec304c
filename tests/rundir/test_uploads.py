"""What nodes say of their copying to object storage, as the daemon reads it."""

from __future__ import annotations

from supervisor.rundir import RunDirReader
from tests.rundir.test_rundir import read
from trainer.contract import RunPaths, UploadReport, write_json


def report(paths: RunPaths, node: int, failures: int = 0, attempt: int = 1) -> None:
    record = UploadReport(attempt=attempt, node=node, failures=failures, error="no" if failures else "", time=1.0)
    write_json(paths.upload_report(1, node), record)


def seen(reader: RunDirReader, paths: RunPaths) -> list[tuple[int, int]]:
    return [(one.node, one.failures) for one in read(reader, paths).uploads]


def test_a_run_that_copies_nothing_has_no_reports(reader: RunDirReader, paths: RunPaths) -> None:
    view = read(reader, paths)
    assert (view.uploads, view.unreadable) == ((), ())


def test_the_first_nodes_report_tells_of_all_while_copying_works(reader: RunDirReader, paths: RunPaths) -> None:
    for node in range(3):
        report(paths, node)
    assert seen(reader, paths) == [(0, 0)]


def test_when_copying_fails_those_nodes_that_fail_are_read(reader: RunDirReader, paths: RunPaths) -> None:
    report(paths, 0, failures=1)
    report(paths, 1)
    report(paths, 2, failures=7)
    assert seen(reader, paths) == [(0, 1), (2, 7)]


def test_a_report_that_is_none_is_named(reader: RunDirReader, paths: RunPaths) -> None:
    report(paths, 0, attempt=9)
    view = read(reader, paths)
    assert view.uploads == ()
    assert "uploads/0.json" in view.unreadable[0]
