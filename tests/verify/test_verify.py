from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import xxhash

from supervisor.layouts.own import Readback, verify_checkpoint
from supervisor.model import Verification
from supervisor.verify import Verifier
from trainer import contract
from trainer.contract import Manifest, ManifestFile, RunPaths


def publish(run_dir: Path, step: int, *, size_bytes: int = 100_000) -> Path:
    folder = RunPaths(run_dir).checkpoint(step, 1)
    files = []
    for name in ("a.distcp", "sub/b.distcp"):
        data = os.urandom(size_bytes)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
        files.append(ManifestFile(path=name, size_bytes=size_bytes, xxh3_128=xxhash.xxh3_128_hexdigest(data)))
    manifest = Manifest(run="run", attempt=1, step=step, samples=0, world_size=1, time=1.0, files=tuple(files))
    contract.write_json(folder / contract.MANIFEST_NAME, manifest)
    return folder


def publish_large(run_dir: Path, step: int) -> None:
    """Takes long enough to read that something can be done to the reader meanwhile; holes take no disk."""
    folder = RunPaths(run_dir).checkpoint(step, 1)
    folder.mkdir(parents=True, exist_ok=True)
    size_bytes = 40 * 1024**3
    with (folder / "a").open("wb") as stream:
        stream.truncate(size_bytes)
    files = (ManifestFile(path="a", size_bytes=size_bytes, xxh3_128="0" * 32),)
    manifest = Manifest(run="run", attempt=1, step=step, samples=0, world_size=1, time=1.0, files=files)
    contract.write_json(folder / contract.MANIFEST_NAME, manifest)


def verify(folder: Path, *, step: int = 10, run: str = "run") -> Readback:
    return verify_checkpoint(folder, expect_run=run, expect_step=step, expect_attempt=1)


def flip_byte(file: Path, offset: int = 4321) -> None:
    with file.open("r+b") as stream:
        stream.seek(offset)
        byte = stream.read(1)
        stream.seek(offset)
        stream.write(bytes([byte[0] ^ 1]))


def test_a_checkpoint_as_it_was_written_is_ok_and_every_byte_was_read(tmp_path: Path) -> None:
    folder = publish(tmp_path, 10)
    portions: list[int] = []
    result = verify_checkpoint(folder, expect_run="run", expect_step=10, expect_attempt=1, on_bytes=portions.append)
    assert result.ok is True
    assert result.bytes_read == sum(portions) == 200_000


def test_one_flipped_bit_is_found_and_the_file_named(tmp_path: Path) -> None:
    folder = publish(tmp_path, 10)
    flip_byte(folder / "sub/b.distcp")
    result = verify(folder)
    assert result.ok is False
    assert "sub/b.distcp" in result.detail


@pytest.mark.parametrize("damage", ["missing", "short", "link", "fifo", "folder"])
def test_what_is_not_the_file_of_the_manifest_fails_and_is_named(tmp_path: Path, damage: str) -> None:
    folder = publish(tmp_path, 10)
    file = folder / "a.distcp"
    data = file.read_bytes()
    file.unlink()
    if damage == "short":
        file.write_bytes(data[:-1])
    elif damage == "link":
        (tmp_path / "same").write_bytes(data)
        file.symlink_to(tmp_path / "same")
    elif damage == "fifo":
        os.mkfifo(file)
    elif damage == "folder":
        file.mkdir()
    result = verify(folder)
    assert result.ok is False
    assert "a.distcp" in result.detail


def test_a_manifest_of_another_run_or_step_or_none_at_all_fails(tmp_path: Path) -> None:
    folder = publish(tmp_path, 10)
    assert verify(folder, run="other").ok is False
    assert verify(folder, step=11).ok is False
    (folder / contract.MANIFEST_NAME).write_bytes(b"{}")
    assert verify(folder).ok is False


def test_a_checkpoint_that_was_removed_or_can_t_be_read_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = publish(tmp_path, 10)
    assert verify(tmp_path / "gone").ok is None

    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fail)
        assert verify(folder).ok is None
    (folder / contract.MANIFEST_NAME).unlink()
    assert verify(folder).ok is None


# ---------------------------------------------------------------- beside the loop


@pytest.fixture
def done() -> threading.Event:
    return threading.Event()


@pytest.fixture
def verifier(done: threading.Event) -> Iterator[Verifier]:
    verifier = Verifier(done.set)
    yield verifier
    verifier.close()


def collect(verifier: Verifier, count: int, deadline_s: float = 20.0) -> list[Verification]:
    found: list[Verification] = []
    until = time.monotonic() + deadline_s
    while len(found) < count:
        assert time.monotonic() < until
        found += verifier.collect()
        time.sleep(0.01)
    return found


def wait_until(condition: Callable[[], bool], deadline_s: float = 20.0) -> None:
    until = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_verification_runs_beside_the_caller_and_wakes_it(
    verifier: Verifier, done: threading.Event, tmp_path: Path
) -> None:
    publish(tmp_path, 10)
    verifier.start("run", tmp_path, 10, 1)
    verifier.start("run", tmp_path, 10, 1)
    assert verifier.is_busy("run", 10, 1)
    assert done.wait(20)
    assert verifier.is_busy("run", 10, 1)  # until it is collected: nobody starts it a second time
    (result,) = verifier.collect()
    assert (result.run, result.step, result.attempt, result.ok) == ("run", 10, 1, True)
    assert not verifier.is_busy("run", 10, 1)
    assert verifier.collect() == ()


def test_one_of_a_run_and_two_in_all_are_read_at_the_same_time(verifier: Verifier, tmp_path: Path) -> None:
    for name in ("one", "two", "three"):
        for step in (10, 20):
            publish(tmp_path / name, step, size_bytes=10)
            verifier.start(name, tmp_path / name, step, 1)
    most: list[list[str]] = []
    found: list[Verification] = []
    until = time.monotonic() + 30
    while len(found) < 6:
        assert time.monotonic() < until
        most.append([job.waiting.order.run for job in list(verifier._jobs)])
        found += verifier.collect()
        time.sleep(0.002)
    assert max(map(len, most)) == 2
    assert all(len(set(runs)) == len(runs) for runs in most)


def test_a_verifying_process_that_dies_or_hangs_leaves_it_unknown(tmp_path: Path, done: threading.Event) -> None:
    verifier = Verifier(done.set, silent_after_s=0.2, retry_after_s=0.0)
    try:
        for send in (signal.SIGKILL, signal.SIGSTOP):
            publish_large(tmp_path, 10)
            verifier.start("run", tmp_path, 10, 1)
            wait_until(lambda: bool(verifier._jobs))
            os.kill(verifier._jobs[0].child.pid, send)
            (result,) = collect(verifier, 1)
            assert result.ok is None
    finally:
        verifier.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_as_root_a_checkpoint_is_read_as_its_owner(verifier: Verifier, tmp_path: Path) -> None:
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    folder = publish(tmp_path, 10)
    verifier.start("run", tmp_path, 10, 1, 4242, 4343)
    (readable,) = collect(verifier, 1)
    folder.chmod(0o700)
    verifier.start("run", tmp_path, 10, 1, 4242, 4343)
    (private,) = collect(verifier, 1)
    assert (readable.ok, private.ok) == (True, None)


def test_closing_ends_the_children(tmp_path: Path) -> None:
    verifier = Verifier()
    publish_large(tmp_path, 10)
    verifier.start("run", tmp_path, 10, 1)
    wait_until(lambda: bool(verifier._jobs))
    pid = verifier._jobs[0].child.pid
    verifier.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
