"""A restart reads each file from the nearest tier that has it whole, and mixes tiers after a node was replaced."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.trainer.fleet import Gather, together
from tests.trainer.folders import flip_byte, make_checkpoint
from tests.trainer.objectstore import S3Server
from trainer.contract import MANIFEST_NAME, Manifest, RunPaths, parse_checkpoint_name
from trainer.storage.leases import read_leases
from trainer.storage.objects import ObjectTier
from trainer.storage.sources import Locate, SourcePlace, read_checkpoint
from trainer.storage.stored import (
    CheckpointRejected,
    CheckpointUnreadable,
    Condition,
    check_file,
    read_manifest,
    read_manifest_bytes,
    writer_rank,
)
from trainer.storage.tiers import LocalTier

WORLD, NODE_SIZE = 2, 1  # two nodes, a rank on each; the checkpoint has a file of each


class Cluster:
    """A run directory, a disk for each node, and object storage, with one checkpoint in all of them."""

    def __init__(self, tmp_path: Path) -> None:
        self.tmp_path = tmp_path
        self.run_dir = tmp_path / "gpt"
        self.path = make_checkpoint(RunPaths(self.run_dir).checkpoints(), 5)
        self.name = self.path.name
        self.object_url = ""
        for node in range(WORLD):
            self.fill_disk(node)

    def disk(self, node: int) -> LocalTier:
        return LocalTier(self.tmp_path / f"node{node}" / "gpt")

    def fill_disk(self, node: int) -> None:
        disk = self.disk(node)
        folder = disk.begin(self.name)
        for file in read_manifest(self.path).files:
            if writer_rank(file.path) == node:
                shutil.copy(self.path / file.path, folder / file.path)
        assert disk.publish(self.name, read_manifest_bytes(self.path)) == ""

    def fill_objects(self, url: str) -> None:
        self.object_url = url
        tier = ObjectTier(f"{url}/gpt")
        for file in read_manifest(self.path).files:
            tier.put_file(self.name, file, self.path / file.path)
        tier.put_manifest(self.name, read_manifest_bytes(self.path))

    def restore(self, *, attempt: int = 2) -> list[dict[str, str]]:
        """Where each rank read each file, by the name of the tier; raises what a rank raises."""

        def work(rank: int, gather: Gather) -> dict[str, str]:
            place = SourcePlace(
                run_dir=self.run_dir, run="gpt", attempt=attempt, rank=rank, world=WORLD, node_size=NODE_SIZE,
                local_dir=str(self.tmp_path / f"node{rank}"), object_url=self.object_url,
            )  # fmt: skip
            return read_checkpoint(self.path, self._loader(gather), place=place, gather=gather)

        return together(WORLD, work)

    def _loader(self, gather: Gather) -> Callable[[Manifest, Locate], dict[str, str]]:
        def load(manifest: Manifest, locate: Locate) -> dict[str, str]:
            assert read_leases(self.run_dir, since_attempt=2) == {self.name}
            read: dict[str, Path | None] = {}
            for file in manifest.files:
                copies = (locate(file).parent, self.path)
                read[file.path] = next((c for c in copies if check_file(c, file).condition is Condition.GOOD), None)
            bad = {name for told in gather([name for name, place in read.items() if place is None]) for name in told}
            if bad:
                raise CheckpointRejected(self.path, [f"{name} is bad" for name in sorted(bad)], files=sorted(bad))
            return {name: self._tier(place) for name, place in read.items() if place is not None}

        return load

    def _tier(self, path: Path) -> str:
        top = path.relative_to(self.tmp_path).parts
        return "fetched" if "fetched" in top else "shared" if top[0] == "gpt" else top[0]


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def test_each_node_reads_its_own_files_from_its_disk(cluster: Cluster) -> None:
    assert cluster.restore() == [
        {".metadata": "node0", "__0_0.distcp": "node0", "__1_0.distcp": "shared"},
        {".metadata": "shared", "__0_0.distcp": "shared", "__1_0.distcp": "node1"},
    ]


def test_a_node_that_came_anew_reads_from_the_shared_file_system(cluster: Cluster) -> None:
    shutil.rmtree(cluster.disk(1).root)
    assert [places["__1_0.distcp"] for places in cluster.restore()] == ["shared", "shared"]
    assert [places["__0_0.distcp"] for places in cluster.restore()] == ["node0", "shared"]


def test_a_bad_file_on_a_nodes_disk_is_read_elsewhere(cluster: Cluster) -> None:
    flip_byte(cluster.disk(0).path(cluster.name) / "__0_0.distcp")
    os.truncate(cluster.disk(1).path(cluster.name) / "__1_0.distcp", 5)
    first, second = cluster.restore()
    assert (first["__0_0.distcp"], second["__1_0.distcp"]) == ("shared", "shared")


def test_a_nodes_disk_with_another_try_at_the_same_step_is_not_mixed_in(cluster: Cluster) -> None:
    manifest = cluster.disk(1).path(cluster.name) / MANIFEST_NAME
    manifest.write_bytes(manifest.read_bytes().replace(b'"samples":60', b'"samples":61'))
    assert cluster.restore()[1]["__1_0.distcp"] == "shared"


def test_a_newer_checkpoint_on_a_nodes_disk_does_not_change_what_is_resumed_from(cluster: Cluster) -> None:
    make_checkpoint(cluster.disk(0).root, 9)  # the service went back on purpose
    assert cluster.restore()[0]["__0_0.distcp"] == "node0"
    assert parse_checkpoint_name(cluster.name) == (5, 1)


def test_a_file_that_is_bad_in_the_run_directory_without_another_copy_is_rejected_on_all_ranks(
    cluster: Cluster,
) -> None:
    flip_byte(cluster.path / "__1_0.distcp")
    with pytest.raises(CheckpointRejected, match=r"__1_0\.distcp is bad"):
        cluster.restore()
    assert read_leases(cluster.run_dir, since_attempt=2) == frozenset()


def test_a_run_directory_that_cannot_be_read_proves_nothing(cluster: Cluster) -> None:
    (cluster.path / MANIFEST_NAME).unlink()
    (cluster.path / MANIFEST_NAME).symlink_to(MANIFEST_NAME)  # ELOOP
    with pytest.raises(CheckpointUnreadable):
        cluster.restore()


# ---------------------------------------------------------------- object storage


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    running = S3Server(tmp_path / "server")
    for name, value in running.environment().items():
        monkeypatch.setenv(name, value)
    running.start()
    yield running
    running.kill()


@pytest.mark.s3
def test_a_file_that_is_bad_in_the_run_directory_comes_back_from_object_storage(
    cluster: Cluster, server: S3Server, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.fill_objects(server.url)
    flip_byte(cluster.path / "__1_0.distcp")
    os.truncate(cluster.path / ".metadata", 0)
    shutil.rmtree(cluster.disk(1).root)
    assert cluster.restore() == [
        {".metadata": "fetched", "__0_0.distcp": "node0", "__1_0.distcp": "fetched"},
        {".metadata": "fetched", "__0_0.distcp": "shared", "__1_0.distcp": "fetched"},
    ]
    assert "fetching .metadata, __1_0.distcp from object storage" in caplog.text
    assert not (RunPaths(cluster.run_dir).fetched(2) / cluster.name).exists()


@pytest.mark.s3
def test_a_checkpoint_whose_folder_is_lost_is_read_from_object_storage(cluster: Cluster, server: S3Server) -> None:
    cluster.fill_objects(server.url)
    shutil.rmtree(cluster.path)
    for node in range(WORLD):
        shutil.rmtree(cluster.disk(node).root)
    assert {tier for places in cluster.restore() for tier in places.values()} == {"fetched"}


@pytest.mark.s3
def test_a_flipped_byte_in_object_storage_is_not_taken_for_help(
    cluster: Cluster, server: S3Server, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.fill_objects(server.url)
    flip_byte(cluster.path / "__1_0.distcp")
    flip_byte(server.object(f"gpt/{cluster.name}/__1_0.distcp"))
    with pytest.raises(CheckpointRejected, match=r"__1_0\.distcp is bad"):
        cluster.restore()
    assert "object storage does not help" in caplog.text


@pytest.mark.s3
def test_object_storage_that_is_away_does_not_stop_a_restart_that_does_not_need_it(
    cluster: Cluster, server: S3Server
) -> None:
    cluster.fill_objects(server.url)
    server.kill()
    assert cluster.restore()[0]["__0_0.distcp"] == "node0"
