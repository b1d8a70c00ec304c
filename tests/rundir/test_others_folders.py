"""What somebody else puts in the place of a run's folders is neither read nor written to with the owner's rights."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from supervisor.jobfiles import NotAFile, open_own_folder
from supervisor.rundir import RunDirReader, RunDirUnreadable
from trainer.contract import RunPaths

OWNER, OTHER = 54321, 54322

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of others")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The owner's own folder, closed to others."""
    for parent in (tmp_path, *tmp_path.parents[:2]):
        parent.chmod(0o755)
    return make(tmp_path / "home", OWNER, mode=0o700)


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    """A run in a root that everybody may write to."""
    root = make(tmp_path / "root", 0, mode=0o777)
    return RunPaths(root / "run")


@pytest.fixture
def reader() -> Iterator[RunDirReader]:
    reader = RunDirReader(OWNER, OWNER)
    yield reader
    reader.close()


def make(folder: Path, uid: int, *, mode: int = 0o755) -> Path:
    folder.mkdir()
    folder.chmod(mode)
    os.chown(folder, uid, uid)
    return folder


def link(path: Path, target: Path, uid: int) -> None:
    path.symlink_to(target)
    os.lchown(path, uid, uid)


def plant_link(paths: RunPaths, home: Path) -> None:
    link(paths.run_dir, home, OTHER)


def plant_folder(paths: RunPaths, home: Path) -> None:
    make(paths.run_dir, OTHER)
    link(paths.run_dir / "attempts", home, OTHER)


def plant_inside(paths: RunPaths, home: Path) -> None:
    make(paths.run_dir, OWNER, mode=0o777)
    link(paths.run_dir / "attempts", home, OTHER)


@pytest.mark.parametrize("plant", [plant_link, plant_folder, plant_inside])
def test_an_attempt_is_not_written_through_what_another_has_put_there(
    reader: RunDirReader, paths: RunPaths, home: Path, plant: object
) -> None:
    assert callable(plant)
    plant(paths, home)
    with pytest.raises(RunDirUnreadable, match=f"belongs to uid {OTHER}, not to uid {OWNER}"):
        reader.write_attempt(paths.run_dir, 1, {"attempt.json": b"{}"}, deadline_s=30)
    with pytest.raises(RunDirUnreadable, match=f"belongs to uid {OTHER}, not to uid {OWNER}"):
        reader.link_resume(paths.run_dir, 1, "/c/step-1", deadline_s=30)
    assert list(home.iterdir()) == []


@pytest.mark.parametrize("plant", [plant_link, plant_folder])
def test_a_run_directory_of_another_is_not_read(
    reader: RunDirReader, paths: RunPaths, home: Path, plant: object
) -> None:
    assert callable(plant)
    plant(paths, home)
    with pytest.raises(RunDirUnreadable, match=f"belongs to uid {OTHER}"):
        reader.read("run", paths.run_dir, 1, is_final=True, deadline_s=30)
    with pytest.raises(RunDirUnreadable, match=f"belongs to uid {OTHER}"):
        reader.prune(paths.run_dir, 1, 1, deadline_s=30)


def test_a_link_of_the_owners_own_is_followed(reader: RunDirReader, paths: RunPaths, home: Path) -> None:
    """Somebody has moved a run to another disk."""
    link(paths.run_dir, home, OWNER)
    reader.write_attempt(paths.run_dir, 1, {"attempt.json": b"{}"}, deadline_s=30)
    assert (home / "attempts/1/attempt.json").read_bytes() == b"{}"
    assert reader.read("run", paths.run_dir, 1, is_final=False, deadline_s=30).attempt == 1


def test_a_link_of_ones_own_to_anothers_folder_leads_nowhere(tmp_path: Path) -> None:
    theirs = make(tmp_path / "theirs", OTHER)
    (tmp_path / "link").symlink_to(theirs)
    with pytest.raises(NotAFile, match=f"belongs to uid {OTHER}"), open_own_folder(tmp_path / "link"):
        pass


@pytest.mark.parametrize("name", ["file", "gone", "link-to-link"])
def test_what_is_no_folder_is_none(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "first").symlink_to(tmp_path)
    (tmp_path / "link-to-link").symlink_to(tmp_path / "first")
    with pytest.raises((NotAFile, FileNotFoundError)), open_own_folder(tmp_path / name):
        pass
