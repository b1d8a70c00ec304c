"""Checkpoints in object storage: what is put there, what comes back, and what is told when storage misbehaves."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.trainer.folders import flip_byte, make_checkpoint
from tests.trainer.objectstore import S3Server
from trainer.contract import MANIFEST_NAME, ManifestFile
from trainer.storage.bandwidth import ByteBudget
from trainer.storage.objectcli import fetch_checkpoint, main
from trainer.storage.objects import ObjectStorageFailed, ObjectTier
from trainer.storage.stored import CheckpointRejected, describe_file, find_checkpoints, read_manifest, verify_checkpoint

MIB = 1024 * 1024


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    running = S3Server(tmp_path_factory.mktemp("s3"))
    running.start()
    yield running
    running.kill()


@pytest.fixture
def s3(server: S3Server, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> S3Server:
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    return server


def put(tier: ObjectTier, path: Path) -> None:
    for file in read_manifest(path).files:
        tier.put_file(path.name, file, path / file.path)
    tier.put_manifest(path.name, (path / MANIFEST_NAME).read_bytes())


def big_file(tmp_path: Path, size: int = 20 * MIB) -> tuple[Path, ManifestFile]:
    path = tmp_path / "__0_0.distcp"
    path.write_bytes(os.urandom(size))
    return path, describe_file(tmp_path, path.name)


@pytest.fixture(params=["file", pytest.param("s3", marks=pytest.mark.s3)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "file":
        return f"file://{tmp_path}/objects/run"
    found: S3Server = request.getfixturevalue("s3")
    return f"{found.url}/{tmp_path.name}"


def test_a_checkpoint_goes_there_and_comes_back_whole(url: str, tmp_path: Path) -> None:
    tier, source = ObjectTier(url), make_checkpoint(tmp_path / "here", 5)
    put(tier, source)
    assert tier.names() == {"step-5.a1": True}
    fetch_checkpoint(tier, "step-5.a1", tmp_path / "back" / "step-5.a1")
    assert verify_checkpoint(tmp_path / "back" / "step-5.a1") == read_manifest(source)


def test_a_checkpoint_without_its_manifest_is_not_whole_and_does_not_come_back(url: str, tmp_path: Path) -> None:
    tier, source = ObjectTier(url), make_checkpoint(tmp_path / "here", 5)
    for file in read_manifest(source).files:
        tier.put_file(source.name, file, source / file.path)
    assert tier.names() == {"step-5.a1": False}
    with pytest.raises(CheckpointRejected, match="never finished"):
        fetch_checkpoint(tier, "step-5.a1", tmp_path / "back")


def test_a_removed_checkpoint_is_gone_and_removing_it_again_is_no_error(url: str, tmp_path: Path) -> None:
    tier = ObjectTier(url)
    put(tier, make_checkpoint(tmp_path / "here", 5))
    tier.remove("step-5.a1")
    tier.remove("step-5.a1")
    assert tier.names() == {}
    assert ObjectTier(f"{url}-nothing").names() == {}


def test_a_file_that_is_not_what_its_manifest_says_leaves_nothing_there(url: str, tmp_path: Path) -> None:
    tier, source = ObjectTier(url), make_checkpoint(tmp_path / "here", 5)
    (file,) = (f for f in read_manifest(source).files if f.path == "__0_0.distcp")
    flip_byte(source / file.path)
    with pytest.raises(CheckpointRejected) as caught:
        tier.put_file(source.name, file, source / file.path)
    assert caught.value.files == ("__0_0.distcp",)
    assert not tier.has(source.name, file)


def test_a_source_that_cannot_be_read_is_an_error_of_this_side(url: str, tmp_path: Path) -> None:
    file = ManifestFile(path="__0_0.distcp", size_bytes=1, xxh3_128="0" * 32)
    with pytest.raises(FileNotFoundError):
        ObjectTier(url).put_file("step-5.a1", file, tmp_path / "absent")


def test_a_fetch_that_was_cut_short_goes_on_where_it_ended(url: str, tmp_path: Path) -> None:
    tier = ObjectTier(url)
    path, file = big_file(tmp_path)
    tier.put_file("step-5.a1", file, path)
    target = tmp_path / "back" / path.name
    target.parent.mkdir()
    target.with_name(f".{target.name}.part").write_bytes(path.read_bytes()[: 17 * MIB])
    fetched: list[int] = []
    tier.get_file("step-5.a1", file, target, told=fetched.append)
    assert target.read_bytes() == path.read_bytes()
    assert max(fetched[-1:]) == 3 * MIB


def test_a_damaged_leftover_of_an_earlier_fetch_is_fetched_anew(url: str, tmp_path: Path) -> None:
    tier = ObjectTier(url)
    path, file = big_file(tmp_path, MIB)
    tier.put_file("step-5.a1", file, path)
    target = tmp_path / "back" / path.name
    target.parent.mkdir()
    target.with_name(f".{target.name}.part").write_bytes(b"x" * 1000)
    tier.get_file("step-5.a1", file, target)
    assert target.read_bytes() == path.read_bytes()


@pytest.mark.s3
def test_a_flipped_byte_in_an_object_is_found_when_it_comes_back(s3: S3Server, tmp_path: Path) -> None:
    tier, source = ObjectTier(f"{s3.url}/flipped"), make_checkpoint(tmp_path / "here", 5)
    put(tier, source)
    flip_byte(s3.object("flipped/step-5.a1/__1_0.distcp"))
    with pytest.raises(CheckpointRejected, match=r"__1_0\.distcp does not match its checksum"):
        fetch_checkpoint(tier, "step-5.a1", tmp_path / "back" / "step-5.a1")
    assert find_checkpoints(tmp_path / "back")[0].is_complete is False


@pytest.mark.s3
def test_what_an_earlier_try_brought_there_is_not_sent_again(s3: S3Server, tmp_path: Path) -> None:
    path, file = big_file(tmp_path, 6 * MIB)
    ObjectTier(f"{s3.url}/again").put_file("step-5.a1", file, path)
    sent: list[int] = []

    class Counting(ByteBudget):
        def take(self, count: int) -> None:
            sent.append(count)

    ObjectTier(f"{s3.url}/again", budget=Counting(0)).put_file("step-5.a1", file, path)
    assert sent == []
    s3.object(f"again/step-5.a1/{path.name}").write_bytes(b"\0" * file.size_bytes)
    ObjectTier(f"{s3.url}/again", budget=Counting(0)).put_file("step-5.a1", file, path)
    assert sum(sent) >= file.size_bytes
    assert s3.object(f"again/step-5.a1/{path.name}").read_bytes() == path.read_bytes()


@pytest.mark.s3
def test_an_upload_keeps_below_its_bandwidth(s3: S3Server, tmp_path: Path) -> None:
    rate = 6 * MIB
    path, file = big_file(tmp_path)
    began = time.monotonic()
    ObjectTier(f"{s3.url}/slow", budget=ByteBudget(rate)).put_file("step-5.a1", file, path)
    took = time.monotonic() - began
    assert file.size_bytes / took <= rate * 1.6  # a second's worth goes at once


@pytest.mark.s3
def test_wrong_credentials_are_told_as_such(s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    path, file = big_file(tmp_path, 100)
    with pytest.raises(ObjectStorageFailed, match="credentials") as caught:
        ObjectTier(f"{s3.url}/refused").put_file("step-5.a1", file, path)
    assert caught.value.is_refused


@pytest.mark.s3
def test_an_upload_whose_server_dies_is_an_error_and_publishes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = S3Server(tmp_path / "server")
    server.start()
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    path, file = big_file(tmp_path)
    tier = ObjectTier(f"{server.url}/run", budget=ByteBudget(8 * MIB))
    killer = threading.Timer(0.5, server.kill)
    killer.start()
    try:
        with pytest.raises(ObjectStorageFailed):
            tier.put_file("step-5.a1", file, path)
        assert server.objects() == []
        server.start()
        ObjectTier(f"{server.url}/run").put_file("step-5.a1", file, path)
        assert server.objects() == [f"run/step-5.a1/{path.name}"]
    finally:
        killer.join()
        server.kill()


def test_storage_that_no_package_is_there_for_is_told_with_what_to_install() -> None:
    with pytest.raises(ObjectStorageFailed, match="nosuchprotocol") as caught:
        ObjectTier("nosuchprotocol://bucket/run")
    assert caught.value.is_refused


# ---------------------------------------------------------------- by hand


def test_a_lost_checkpoint_is_brought_back_and_verified_by_one_command(url: str, tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "here", 5)
    assert main(["put", str(source), url]) == 0
    command = [sys.executable, "-m", "trainer.storage.objects", "get", f"{url}/step-5.a1", str(tmp_path / "back")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "step-5.a1 is verified" in done.stdout
    assert [found.is_verified for found in find_checkpoints(tmp_path / "back")] == [True]


def test_only_damaged_files_are_fetched_and_another_checkpoint_is_never_overwritten(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/objects/run"
    source = make_checkpoint(tmp_path / "here", 5)
    assert main(["put", str(source), url]) == 0
    flip_byte(source / "__1_0.distcp")
    before = (source / "__0_0.distcp").stat().st_ino
    fetch_checkpoint(ObjectTier(url), "step-5.a1", source)
    assert verify_checkpoint(source).step == 5
    assert (source / "__0_0.distcp").stat().st_ino == before
    manifest = (source / MANIFEST_NAME).read_bytes()
    (source / MANIFEST_NAME).write_bytes(manifest.replace(b'"samples":60', b'"samples":61'))
    assert main(["get", f"{url}/step-5.a1", str(tmp_path / "here")]) == 1


def test_storage_that_is_away_is_told_apart_from_a_bad_checkpoint(tmp_path: Path) -> None:
    assert main(["get", f"file://{tmp_path}/objects/run/step-5.a1", str(tmp_path / "back")]) == 1
    assert main(["list", "nosuchprotocol://bucket/run"]) == 75


def test_the_list_of_a_folder_that_is_not_there_says_so(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["list", url]) == 1
    assert f"{url} is not there" in capsys.readouterr().err
    assert main(["put", str(make_checkpoint(tmp_path / "here", 5)), url]) == 0
    assert main(["list", url]) == 0


def test_a_budget_bounds_the_rate_over_time() -> None:
    now = [0.0]
    budget = ByteBudget(100.0, clock=lambda: now[0], sleep=lambda s: now.__setitem__(0, now[0] + s))
    for _ in range(50):
        budget.take(25)
    assert 100 * (now[0] + 1.0) + 1e-6 >= 50 * 25
    assert now[0] > 10
