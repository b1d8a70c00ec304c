"""Our own layout, read back: what is as recorded, what is not, and what could not be read."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from supervisor import jobfiles
from supervisor.layouts.bulk import PORTION_BYTES, read_portions, run_readers
from supervisor.layouts.own import Identity, Readback, inspect_own, verify_checkpoint
from supervisor.layouts.tree import Broken, Unfinished
from supervisor.rundir_child import inspect_checkpoint
from tests.trainer.hostile import exploits
from tests.verify.folders import SHARDS, described, flip, publish, reseal
from trainer.contract import MANIFEST_NAME, ContractError, Manifest, ManifestFile
from trainer.format import stale
from trainer.format.manifest import parse_manifest, seal_manifest


def verify(folder: Path, **options: Any) -> Readback:
    return verify_checkpoint(folder, expect_run="gpt", expect_step=10, expect_attempt=1, **options)


@pytest.mark.parametrize("readers", [1, 2, 5])
@pytest.mark.parametrize("is_cached", [False, True])
def test_a_whole_one_is_read_once_whoever_reads(readers: int, is_cached: bool, tmp_path: Path) -> None:
    folder = publish(tmp_path / "gpt")
    portions: list[int] = []
    result = verify(folder, on_bytes=portions.append, readers=readers, is_cached=is_cached)
    assert result.ok is True
    size = sum(file.stat().st_size for file in folder.iterdir() if file.name != MANIFEST_NAME)
    assert result.bytes_read == sum(portions) == size


def test_all_bad_files_are_named_and_not_only_the_first(tmp_path: Path) -> None:
    folder = publish(tmp_path / "gpt")
    flip(folder / SHARDS[0])
    (folder / SHARDS[1]).unlink()
    detail = verify(folder, readers=2).detail
    assert SHARDS[0] in detail
    assert f"{SHARDS[1]} is missing" in detail


# ---------------------------------------------------------------- the seal


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(bit=st.integers(0, 10**6))
def test_no_bit_of_a_sealed_manifest_can_change(bit: int, tmp_path: Path) -> None:
    folder = tmp_path / "gpt/checkpoints/step-10.a1"
    if not folder.exists():
        publish(tmp_path / "gpt")
    whole = (folder / MANIFEST_NAME).read_bytes()
    data = bytearray(whole)
    data[bit // 8 % len(data)] ^= 1 << bit % 8
    (folder / MANIFEST_NAME).write_bytes(bytes(data))
    try:
        assert verify(folder).ok is False
        assert not inspect_checkpoint(folder, 10, 1).is_complete
        with pytest.raises(Broken):
            inspect_own(folder, Identity())
    finally:
        (folder / MANIFEST_NAME).write_bytes(whole)


@settings(max_examples=200, deadline=None)
@given(bits=st.tuples(st.integers(0, 8 * len("self_xxh3_128") - 1), st.integers(0, 8 * len("libraries") - 1)))
def test_the_names_of_seal_and_libraries_can_not_both_change(bits: tuple[int, int]) -> None:
    file = ManifestFile(path="a", size_bytes=1, xxh3_128="0" * 32)
    manifest = Manifest(
        run="gpt", attempt=1, step=10, samples=80, world_size=1, time=1.0, libraries={"torch": "2"}, files=(file,)
    )
    data = bytearray(seal_manifest(manifest))
    for name, bit in zip((b"self_xxh3_128", b"libraries"), bits, strict=True):
        data[data.index(b'"' + name + b'"') + 1 + bit // 8] ^= 1 << bit % 8
    with pytest.raises(ContractError):
        parse_manifest(bytes(data))


def test_a_manifest_of_another_writer_needs_no_seal(tmp_path: Path) -> None:
    folder = publish(tmp_path / "gpt", is_sealed=False)
    assert verify(folder).ok is True
    assert inspect_checkpoint(folder, 10, 1).is_complete


# ---------------------------------------------------------------- what the metadata describes


@pytest.mark.parametrize(
    ("meta", "word"),
    [(described(length=3999), "has 3999 bytes of 4000"), (described(length=9001), "9001 are needed"), (b"", "empty")],
)
def test_what_is_described_and_not_there_is_refused_though_all_checksums_match(
    meta: bytes, word: str, tmp_path: Path
) -> None:
    folder = publish(tmp_path / "gpt", meta=meta)
    result = verify(folder)
    assert result.ok is False
    assert word in result.detail
    with pytest.raises(Broken, match=word):
        inspect_own(folder, Identity())


def test_a_file_that_the_manifest_does_not_guard_counts_as_missing(tmp_path: Path) -> None:
    folder = publish(tmp_path / "gpt")
    manifest, _ = inspect_own(folder, Identity())
    files = tuple(file for file in manifest.files if file.path != SHARDS[1])
    (folder / MANIFEST_NAME).write_bytes(seal_manifest(replace(manifest, files=files)))
    assert f"{SHARDS[1]} is missing" in verify(folder).detail


@pytest.mark.parametrize("name", ["protocol 4", "inside of real metadata", "BUILD with __setstate__"])
def test_hostile_metadata_with_matching_checksums_is_refused_and_runs_nothing(name: str, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    folder = publish(tmp_path / "gpt", meta=exploits(mark)[name])
    assert verify(folder).ok is False
    assert not mark.exists()


# ---------------------------------------------------------------- what could not be read


def failing(code: int, times: int, name: str) -> Callable[..., AbstractContextManager[int]]:
    """`open_regular`, which fails so often for one file."""
    left = Counter({name: times})

    def open_regular(path: str | Path, *, dir_fd: int | None = None) -> AbstractContextManager[int]:
        if left[str(path)] > 0:
            left[str(path)] -= 1
            raise OSError(code, os.strerror(code), str(path))
        return jobfiles.open_regular(path, dir_fd=dir_fd)

    return open_regular


@pytest.mark.parametrize(("times", "ok"), [(1, True), (3, True), (99, None)])
def test_a_stale_handle_is_opened_again_and_if_it_lasts_nothing_is_known(
    times: int, ok: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CK-13."""
    folder = publish(tmp_path / "gpt")
    monkeypatch.setattr(stale, "WAIT_S", 0.0)
    monkeypatch.setattr("supervisor.layouts.own.open_regular", failing(errno.ESTALE, times, SHARDS[1]))
    assert verify(folder).ok is ok


def test_an_error_of_the_medium_is_unknown_and_beside_a_bad_file_it_is_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = publish(tmp_path / "gpt")
    monkeypatch.setattr("supervisor.layouts.own.open_regular", failing(errno.EIO, 99, SHARDS[1]))
    result = verify(folder)
    assert result.ok is None
    assert f"{SHARDS[1]}: Input/output error" in result.detail
    flip(folder / SHARDS[0])
    assert verify(folder).ok is False


def test_one_that_is_published_again_while_it_is_read_is_not_called_bad(tmp_path: Path) -> None:
    folder = publish(tmp_path / "gpt")
    flip(folder / SHARDS[0])

    def rewrite(_count: int) -> None:
        reseal(folder, time=time.time())

    assert verify(folder, on_bytes=rewrite).ok is None


def test_a_manifest_that_is_not_there_is_an_unfinished_save_for_who_looks(tmp_path: Path) -> None:
    folder = publish(tmp_path / "gpt")
    (folder / MANIFEST_NAME).unlink()
    with pytest.raises(Unfinished, match=MANIFEST_NAME):
        inspect_own(folder, Identity())


# ---------------------------------------------------------------- many bytes


def test_portions_are_the_bytes_in_order_and_end_with_the_file(tmp_path: Path) -> None:
    data = os.urandom(3 * PORTION_BYTES + 17)
    (tmp_path / "x").write_bytes(data)
    with (tmp_path / "x").open("rb") as file:
        for offset, length in ((0, None), (5, 100), (PORTION_BYTES, PORTION_BYTES * 2), (len(data) - 3, 99)):
            got = bytearray()
            count = read_portions(file.fileno(), offset, length, got.extend)
            assert bytes(got) == data[offset : None if length is None else offset + length]
            assert count == len(got)


def test_readers_work_side_by_side_and_keep_the_order() -> None:
    both = threading.Barrier(2, timeout=20)

    def read(piece: int) -> int:
        if piece < 2:
            both.wait()
        return piece * 10

    assert run_readers(range(7), read, 2) == [piece * 10 for piece in range(7)]


def test_the_first_error_of_a_reader_ends_all_and_is_raised() -> None:
    seen: list[int] = []

    def read(piece: int) -> int:
        seen.append(piece)
        raise ValueError(str(piece))

    with pytest.raises(ValueError, match=r"[01]"):
        run_readers(range(1000), read, 2)
    assert len(seen) <= 2


def test_metadata_larger_than_is_read_leaves_the_verdict_to_the_manifest_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = publish(tmp_path / "gpt")
    monkeypatch.setattr("supervisor.layouts.metadata.MAX_METADATA_BYTES", 100)
    result = verify(folder)
    assert (result.ok, "was not checked" in result.detail) == (True, True)
    assert "was not checked" in inspect_own(folder, Identity())[1]
    (folder / SHARDS[0]).write_bytes(b"\0" * 9000)
    assert verify(folder).ok is False
