"""The mark that a node leaves in a folder that the training saves in."""

from __future__ import annotations

import time
from pathlib import Path

from supervisor.layouts.survey import Survey
from supervisor.model import MARK_PREFIX
from supervisor.probes.runner import main
from supervisor.probes.shared_path import leave_mark


def test_a_node_leaves_one_mark_and_takes_away_its_older_ones(tmp_path: Path) -> None:
    for attempt in (1, 2):
        assert leave_mark(str(tmp_path / f"{MARK_PREFIX}{attempt}"), "n1").ok
    leave_mark(str(tmp_path / f"{MARK_PREFIX}1"), "n2")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".supervisor-a1-n2", ".supervisor-a2-n1"]


def test_the_folder_is_made_as_the_training_would(tmp_path: Path) -> None:
    assert leave_mark(str(tmp_path / "new" / f"{MARK_PREFIX}1"), "n1").ok
    assert (tmp_path / "new" / ".supervisor-a1-n1").exists()


def test_a_folder_that_can_not_be_written_to_is_unknown_and_no_failure_of_the_node(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert leave_mark(str(tmp_path / "file" / f"{MARK_PREFIX}1"), "n1").ok is None


def test_marks_are_seen_by_a_look_at_the_folder_and_are_no_checkpoints(tmp_path: Path) -> None:
    """CK-20: written in the job, read by the service."""
    leave_mark(str(tmp_path / f"{MARK_PREFIX}3"), "n1")
    seen = Survey().look(tmp_path, "dcp", time.monotonic() + 10)
    assert (seen.marks, seen.entries, seen.views) == (("3-n1",), 0, ())


def test_the_start_checks_leave_it(tmp_path: Path) -> None:
    assert main(["--limits", '{"disk_paths": []}', "--mark", str(tmp_path / f"{MARK_PREFIX}7")]) == 0
    assert [path for path in tmp_path.iterdir() if path.name.startswith(".supervisor-a7-")]
