"""After a restart of the workers, a step that is on the nodes' disks alone is finished in the run directory, or not."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.trainer.fleet import Gather, together
from tests.trainer.folders import flip_byte, make_checkpoint
from trainer.contract import RunPaths
from trainer.storage.recovery import recover_own
from trainer.storage.sources import SourcePlace
from trainer.storage.stored import find_checkpoints, read_manifest, read_manifest_bytes, verify_checkpoint, writer_rank
from trainer.storage.tiers import LocalTier


class Nodes:
    """A run directory with step 5 of attempt 1 verified, and the disks of two nodes with a rank on each."""

    def __init__(self, tmp_path: Path) -> None:
        self.tmp_path = tmp_path
        self.run_dir = tmp_path / "gpt"
        make_checkpoint(RunPaths(self.run_dir).checkpoints(), 5)

    def disk(self, node: int) -> LocalTier:
        return LocalTier(self.tmp_path / f"node{node}" / "gpt")

    def save_on_disks(self, step: int, attempt: int = 1) -> str:
        """A save whose shared part was cut short: half a file in the run directory, no manifest."""
        source = make_checkpoint(self.tmp_path / "elsewhere", step, attempt)
        for node in range(2):
            folder = self.disk(node).begin(source.name)
            for file in read_manifest(source).files:
                if writer_rank(file.path) == node:
                    shutil.copy(source / file.path, folder / file.path)
            assert self.disk(node).publish(source.name, read_manifest_bytes(source)) == ""
        unfinished = RunPaths(self.run_dir).checkpoints() / source.name
        unfinished.mkdir()
        (unfinished / "__0_0.distcp").write_bytes(b"half")
        return source.name

    def recover(self, attempt: int = 1) -> Path | None:
        def work(rank: int, gather: Gather) -> Path | None:
            place = SourcePlace(
                run_dir=self.run_dir, run="gpt", attempt=attempt, rank=rank, world=2, node_size=1,
                local_dir=str(self.tmp_path / f"node{rank}"),
            )  # fmt: skip
            return recover_own(place, gather)

        first, second = together(2, work)
        assert first == second
        return first

    def verified(self) -> list[int]:
        return [f.step for f in find_checkpoints(RunPaths(self.run_dir).checkpoints()) if f.is_verified]


@pytest.fixture
def nodes(tmp_path: Path) -> Nodes:
    return Nodes(tmp_path)


def test_the_newest_step_that_all_nodes_have_is_finished_and_verified(nodes: Nodes) -> None:
    nodes.save_on_disks(7)
    name = nodes.save_on_disks(9)
    path = nodes.recover()
    assert path is not None
    assert path.name == name
    assert verify_checkpoint(path).step == 9
    assert nodes.verified() == [5, 9]


def test_a_step_that_a_replaced_node_took_with_it_is_let_go(nodes: Nodes) -> None:
    nodes.save_on_disks(9)
    shutil.rmtree(nodes.disk(1).root)
    assert nodes.recover() is None
    assert nodes.verified() == [5]


def test_a_step_that_is_damaged_on_a_disk_is_let_go_for_the_one_before(nodes: Nodes) -> None:
    older, newer = nodes.save_on_disks(7), nodes.save_on_disks(9)
    flip_byte(nodes.disk(1).path(newer) / "__1_0.distcp")
    path = nodes.recover()
    assert path is not None
    assert path.name == older
    assert nodes.verified() == [5, 7]


def test_steps_of_other_attempts_are_the_services_business(nodes: Nodes) -> None:
    nodes.save_on_disks(9)
    assert nodes.recover(attempt=2) is None


def test_what_an_earlier_run_of_the_same_name_left_on_the_disks_is_not_taken_for_ours(nodes: Nodes) -> None:
    name = nodes.save_on_disks(9)
    shutil.rmtree(RunPaths(nodes.run_dir).checkpoints() / name)  # this run never began to save that step
    assert nodes.recover() is None


def test_a_step_that_the_run_directory_has_is_not_touched(nodes: Nodes) -> None:
    name = nodes.save_on_disks(4)
    assert nodes.recover() is None
    assert not (RunPaths(nodes.run_dir).checkpoints() / name / "MANIFEST.json").exists()


# ---------------------------------------------------------------- room on a node's disk


def test_a_nodes_disk_keeps_the_newest_two(tmp_path: Path) -> None:
    disk = LocalTier(tmp_path)
    for step in (1, 2, 3):
        name = f"step-{step}.a1"
        (disk.begin(name) / "__0_0.distcp").write_bytes(b"x")
        assert disk.publish(name, read_manifest_bytes(make_checkpoint(tmp_path / "other", step))) == ""
    assert disk.names() == ["step-2.a1", "step-3.a1"]


def test_after_the_service_went_back_the_higher_steps_of_older_attempts_make_room(tmp_path: Path) -> None:
    disk = LocalTier(tmp_path)
    for step, attempt in ((80, 1), (90, 1), (60, 2), (61, 2)):
        name = f"step-{step}.a{attempt}"
        disk.begin(name)
        assert disk.publish(name, read_manifest_bytes(make_checkpoint(tmp_path / "other", step, attempt))) == ""
    assert disk.names() == ["step-60.a2", "step-61.a2"]


def test_a_nodes_disk_that_cannot_be_written_is_told_and_fails_nothing(tmp_path: Path) -> None:
    (tmp_path / "full").write_bytes(b"a file where the folder should be")
    assert "full" in LocalTier(tmp_path / "full").publish("step-1.a1", b"{}")
