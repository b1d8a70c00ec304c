"""A restore from a checkpoint that is not as recorded, or can't be read: refused with a reason, on all ranks alike."""

from __future__ import annotations

import errno
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.trainer.saving.files import describe_folder, write_files
from tests.trainer.saving.groups import run_ranks
from trainer.contract import Manifest, ManifestFile
from trainer.format.metadata import read_metadata
from trainer.saving.planning import plan_state
from trainer.saving.reading import load_state
from trainer.storage.stored import CheckpointRejected, CheckpointUnreadable

pytestmark = pytest.mark.torch

DATA = "__0_0.distcp"
SIZE = 300


def state(*, is_filled: bool = True) -> dict[str, Any]:
    large = torch.arange(SIZE * SIZE, dtype=torch.float32).reshape(SIZE, SIZE)
    made = {"large": large, "small": torch.arange(5.0), "step": torch.tensor(7)}
    if not is_filled:
        made = {key: torch.zeros_like(tensor) for key, tensor in made.items()}
    return {"model": made}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint"
    path.mkdir()
    saved = state() | {"shared": b"opaque"}
    write_files(path, plan_state(saved), saved)
    return path


@pytest.fixture
def manifest(folder: Path) -> Manifest:
    return describe_folder(folder)


def load(folder: Path, manifest: Manifest, **options: Any) -> dict[str, Any]:
    loaded = state(is_filled=False)
    items = load_state(folder, loaded, manifest=manifest, **options)
    assert items == {"shared": b"opaque"}
    for key, tensor in state()["model"].items():
        assert torch.equal(loaded["model"][key], tensor)
    return loaded


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def test_what_is_as_recorded_is_loaded(folder: Path, manifest: Manifest) -> None:
    load(folder, manifest)


@pytest.mark.parametrize("part", ["first byte", "opaque bytes", "small tensor", "large tensor", "padding", "last byte"])
def test_a_flipped_bit_is_found_wherever_it_is(part: str, folder: Path, manifest: Manifest) -> None:
    entries = {entry.key: entry for entry in read_metadata((folder / ".metadata").read_bytes()).entries}
    large = entries["model.large"]
    places = {
        "first byte": 0,
        "opaque bytes": (folder / DATA).read_bytes().index(b"opaque"),
        "small tensor": entries["model.small"].offset + entries["model.small"].length - 300,
        "large tensor": large.offset + large.length // 2,
        "padding": large.offset + 1500,
        "last byte": large.offset + large.length - 1,
    }
    flip(folder / DATA, places[part])
    with pytest.raises(CheckpointRejected, match=DATA) as caught:
        load(folder, manifest)
    assert caught.value.files == (DATA,)


def put(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a flipped bit": lambda path: flip(path, path.stat().st_size // 2),
    "a missing file": lambda path: path.unlink(),
    "an empty file": lambda path: path.write_bytes(b""),
    "a cut file": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "a longer file": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "a folder": lambda path: put(path, Path.mkdir),
    "a pipe": lambda path: put(path, os.mkfifo),
}


@pytest.mark.parametrize("name", [DATA, ".metadata"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_refused_by_its_name(damage: str, name: str, folder: Path, manifest: Manifest) -> None:
    DAMAGES[damage](folder / name)
    with pytest.raises(CheckpointRejected) as caught:
        load(folder, manifest)
    assert caught.value.files == (name,)


def test_a_file_that_nobody_needs_is_checked_too(folder: Path) -> None:
    (folder / "__1_0.distcp").write_bytes(b"of a rank whose bytes are not wanted")
    manifest = describe_folder(folder)
    flip(folder / "__1_0.distcp", 3)
    with pytest.raises(CheckpointRejected, match=r"__1_0\.distcp does not match its checksum"):
        load(folder, manifest)


@pytest.mark.parametrize("name", [DATA, ".metadata"])
def test_what_the_manifest_does_not_cover_is_not_read(name: str, folder: Path, manifest: Manifest) -> None:
    covered = replace(manifest, files=tuple(file for file in manifest.files if file.path != name))
    with pytest.raises(CheckpointRejected, match=f"does not cover {name}"):
        load(folder, covered)


class Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(Path.cwd() / "hostile was here"),)


def test_a_hostile_metadata_is_refused_and_runs_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (folder / ".metadata").write_bytes(pickle.dumps(Hostile()))
    with pytest.raises(CheckpointRejected, match="refused"):
        load(folder, describe_folder(folder))
    assert not (tmp_path / "hostile was here").exists()


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"model": {"other": torch.zeros(3)}}, "model.other: it holds no such tensor"),
        ({"model": {"small": torch.zeros(6)}}, r"model.small: its shape is \[5\], here it is \[6\]"),
        ({"model": {"small": torch.zeros(5, 1)}}, r"model.small: its shape is \[5\], here it is \[5, 1\]"),
        (
            {"model": {"small": torch.zeros(5, dtype=torch.bfloat16)}},
            "model.small: its type is float32, here it is bfloat16",
        ),
        ({"model": {"small": b""}}, "model.small: it holds no such bytes"),
        ({"shared": torch.zeros(3)}, "shared: it holds no such tensor"),
        ({"model": {"small": torch.zeros(5, device="meta")}}, "model.small: a meta tensor can't be loaded"),
        ({"model": {"small": torch.zeros(5).to_sparse()}}, "model.small: a sparse_coo tensor can't be loaded"),
        ({"model": {"small": 3}}, "model.small: a int can't be loaded"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_by_its_key(
    changed: dict[str, Any], problem: str, folder: Path, manifest: Manifest
) -> None:
    with pytest.raises(CheckpointRejected, match=problem) as caught:
        load_state(folder, changed, manifest=manifest)
    assert caught.value.files == ()


def test_a_template_is_made_from_the_wanted_bytes(folder: Path, manifest: Manifest) -> None:
    loaded = state(is_filled=False)
    seen: list[dict[str, bytes]] = []

    def make(items: dict[str, bytes]) -> dict[str, Any]:
        seen.append(items)
        return loaded

    assert load_state(folder, make, manifest=manifest, wanted=lambda key: key != "shared") == {}
    assert load_state(folder, make, manifest=manifest) == {"shared": b"opaque"}
    assert seen == [{}, {"shared": b"opaque"}]
    assert torch.equal(loaded["model"]["large"], state()["model"]["large"])


def test_an_error_of_the_template_comes_out_as_it_is(folder: Path, manifest: Manifest) -> None:
    def refuse(_items: dict[str, bytes]) -> dict[str, Any]:
        raise LookupError("other data")

    with pytest.raises(LookupError, match="other data"):
        load_state(folder, refuse, manifest=manifest)


def test_bytes_that_are_read_are_counted(folder: Path, manifest: Manifest) -> None:
    counts: list[int] = []
    load(folder, manifest, on_bytes=counts.append)
    assert sum(counts) == (folder / DATA).stat().st_size


# ---------------------------------------------------------------- what can't be read now


@contextmanager
def failing_reads(monkeypatch: pytest.MonkeyPatch, number: int, *, times: int = 10**9) -> Iterator[None]:
    """Let the first reads of data fail with an error of the file system."""
    left = [times]

    def fail(fd: int, buffers: Any, offset: int) -> int:
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(number, os.strerror(number))
        return real(fd, buffers, offset)

    real = os.preadv
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fail)
        yield


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_what_cannot_be_read_now_is_unreadable_and_never_rejected(
    number: int, folder: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    with failing_reads(monkeypatch, number), pytest.raises(CheckpointUnreadable, match="could not be read") as caught:
        load(folder, manifest)
    assert caught.value.errno == number


def test_a_stale_handle_is_read_again(folder: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    with failing_reads(monkeypatch, errno.ESTALE, times=1):
        load(folder, manifest)


# ---------------------------------------------------------------- other copies


@pytest.fixture
def nearer(folder: Path, tmp_path: Path) -> Path:
    """A copy of all files."""
    copy = tmp_path / "node-local"
    copy.mkdir()
    for path in folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    return copy


def test_the_located_copy_is_read(folder: Path, nearer: Path, manifest: Manifest) -> None:
    for path in folder.iterdir():
        path.unlink()
    load(folder, manifest, locate=lambda file: nearer / file.path)


@pytest.mark.parametrize("name", [DATA, ".metadata"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_where_the_located_copy_is_damaged_the_own_file_is_read(
    damage: str, name: str, folder: Path, nearer: Path, manifest: Manifest
) -> None:
    DAMAGES[damage](nearer / name)
    load(folder, manifest, locate=lambda file: nearer / file.path)


def test_where_the_located_copy_cannot_be_read_the_own_file_is(
    folder: Path, nearer: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    with failing_reads(monkeypatch, errno.EIO, times=1):
        load(folder, manifest, locate=lambda file: nearer / file.path)


def test_where_both_are_damaged_it_is_refused(folder: Path, nearer: Path, manifest: Manifest) -> None:
    flip(folder / DATA, 20_000)
    flip(nearer / DATA, 30_000)
    with pytest.raises(CheckpointRejected) as caught:
        load(folder, manifest, locate=lambda file: nearer / file.path)
    assert caught.value.files == (DATA,)


# ---------------------------------------------------------------- on several ranks


def save_alone(rank: int, folder: Path) -> None:
    saved = state() | {"own": {f"rank{rank}": b"x"}}
    write_files(folder, plan_state(saved), saved)


def expect_alike(rank: int, folder: Path, manifest: Manifest) -> None:
    """Each rank meets each fault; all raise the same."""
    problems = [
        _catch(lambda: load_state(folder, _state_of(rank, odd_rank=1), manifest=manifest)),
        _catch(lambda: load_state(folder, _failing_on(rank, {1}), manifest=manifest)),
        _catch(lambda: load_state(folder, _failing_on(rank, {0, 1}), manifest=manifest)),
    ]
    dist.barrier()
    if rank == 0:
        flip(folder / "__1_0.distcp", 1_500)
    dist.barrier()
    problems.append(_catch(lambda: load_state(folder, state(is_filled=False), manifest=manifest)))
    problems.append(_catch(lambda: _load_with_bad_disk(rank, folder, manifest)))
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, problems)
    assert gathered[0] == gathered[1]
    assert problems == [
        ("CheckpointRejected", ["model.small: its shape is [5], here it is [9]"], ()),
        ("CheckpointRejected", ["LookupError: on rank 1"], ()),
        ("LookupError", ["failed"], ()),
        ("CheckpointRejected", ["__1_0.distcp does not match its checksum"], ("__1_0.distcp",)),
        ("CheckpointRejected", ["__1_0.distcp does not match its checksum"], ("__1_0.distcp",)),
    ]


def _state_of(rank: int, *, odd_rank: int) -> dict[str, Any]:
    made = state(is_filled=False)
    if rank == odd_rank:
        made["model"]["small"] = torch.zeros(9)
    return made


def _failing_on(rank: int, ranks: set[int]) -> Callable[[dict[str, bytes]], dict[str, Any]]:
    def make(_items: dict[str, bytes]) -> dict[str, Any]:
        if rank in ranks:
            raise LookupError("failed" if len(ranks) > 1 else f"on rank {rank}")
        return state(is_filled=False)

    return make


def _load_with_bad_disk(rank: int, folder: Path, manifest: Manifest) -> None:
    """One rank has a copy on its own disk that is damaged: both come to the checkpoint's own files, which are, too."""
    copy = folder.parent / f"disk{rank}"

    def locate(file: ManifestFile) -> Path:
        return copy / file.path if rank == 1 else folder / file.path

    if rank == 1:
        copy.mkdir()
        (copy / DATA).write_bytes(b"damaged")
    load_state(folder, state(is_filled=False), manifest=manifest, locate=locate)


def _catch(work: Callable[[], object]) -> tuple[str, list[str], tuple[str, ...]]:
    try:
        work()
    except CheckpointRejected as error:
        return "CheckpointRejected", list(error.problems), error.files
    except LookupError as error:
        return "LookupError", [str(error)], ()
    return "loaded", [], ()


def test_all_ranks_hear_the_same_of_what_any_of_them_found(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    run_ranks(2, save_alone, folder)
    run_ranks(2, expect_alike, folder, describe_folder(folder))


def test_a_damaged_item_is_told_by_what_it_is_for(folder: Path, manifest: Manifest) -> None:
    data = bytearray((folder / DATA).read_bytes())
    data[data.index(b"opaque")] ^= 1
    (folder / DATA).write_bytes(data)
    with pytest.raises(CheckpointRejected, match=f"{DATA} holds damaged bytes as what all ranks share"):
        load(folder, manifest)
