"""The training's own pruning stands back while somebody reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer.folders import make_checkpoint
from trainer.contract import RunPaths
from trainer.storage.leases import LeaseUnreadable, hold_lease, read_leases
from trainer.storage.stored import find_checkpoints
from trainer.storage.tiers import prune


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    paths = RunPaths(tmp_path)
    for step in (1, 2, 3, 4):
        make_checkpoint(paths.checkpoints(), step)
    return paths


def left(paths: RunPaths, attempt: int = 1) -> list[int]:
    prune(paths.checkpoints(), keep_last=2, attempt=attempt)
    return [found.step for found in find_checkpoints(paths.checkpoints())]


def test_a_checkpoint_that_is_being_read_stays_until_it_was_read(paths: RunPaths) -> None:
    with hold_lease(paths.read_lease(1), attempt=1, names=["step-1.a1"]):
        assert left(paths) == [1, 3, 4]
    assert left(paths) == [3, 4]


def test_a_newer_attempts_lease_counts_and_an_older_ones_does_not(paths: RunPaths) -> None:
    with (
        hold_lease(paths.read_lease(3), attempt=3, names=["step-1.a1"]),
        hold_lease(paths.upload_lease(1), attempt=1, names=["step-2.a1"]),
    ):
        assert left(paths, attempt=2) == [1, 3, 4]


def test_nothing_goes_while_a_lease_cannot_be_read(paths: RunPaths) -> None:
    paths.read_lease(1).parent.mkdir(parents=True)
    paths.read_lease(1).write_bytes(b"")
    with pytest.raises(LeaseUnreadable):
        read_leases(paths.run_dir, since_attempt=1)
    assert left(paths) == [1, 2, 3, 4]


def test_a_run_directory_that_takes_no_lease_does_not_stop_whoever_reads(tmp_path: Path) -> None:
    (tmp_path / "attempts").write_bytes(b"a file where the folder should be")
    done = []
    with hold_lease(RunPaths(tmp_path).read_lease(1), attempt=1, names=["step-1.a1"]):
        done.append(True)
    assert done
