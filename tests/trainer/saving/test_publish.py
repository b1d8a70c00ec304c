"""What is done to the folders of checkpoints when somebody else has made one of the same name meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainer.contract import MANIFEST_NAME, VERIFIED_NAME
from trainer.saving.disk import write_small
from trainer.saving.publish import Destination, Folder, describe, discard, open_folder, publish, vouch
from trainer.session.claims import ClaimLost
from trainer.storage.stored import find_checkpoints, remove_checkpoint, verify_checkpoint

REQUEST: dict[str, Any] = {"step": 2, "samples": 8, "tokens": None, "is_elastic": True, "libraries": {}}


def _open(root: Path) -> tuple[Destination, Folder]:
    destination = Destination(checkpoints=root, run="gpt", attempt=1, world=1)
    folder = open_folder(destination, 2)
    assert isinstance(folder, Folder)
    return destination, folder


def _manifest(destination: Destination, folder: Folder, data: bytes) -> bytes:
    file = write_small(folder.path / "__0_0.distcp", data)
    return describe(
        destination, REQUEST, [{"path": file.path, "size_bytes": file.size_bytes, "xxh3_128": file.xxh3_128}]
    )


def _save_anew(root: Path) -> None:
    """What restarted workers do that come to the same step."""
    destination, folder = _open(root)
    publish(destination, folder, _manifest(destination, folder, b"new"))
    vouch(destination, folder, REQUEST, [])


def _check_new(root: Path) -> None:
    assert [(found.step, found.is_verified) for found in find_checkpoints(root)] == [(2, True)]
    verify_checkpoint(root / "step-2.a1")
    assert (root / "step-2.a1" / "__0_0.distcp").read_bytes() == b"new"


def test_a_failed_save_removes_the_folder_that_it_made(tmp_path: Path) -> None:
    _, folder = _open(tmp_path)
    (folder.path / "__0_0.distcp").write_bytes(b"half")
    discard(folder)
    assert not folder.path.exists()


def test_a_failed_save_leaves_a_folder_of_the_same_name_alone(tmp_path: Path) -> None:
    _, old = _open(tmp_path)
    _save_anew(tmp_path)
    discard(old)
    _check_new(tmp_path)


def test_a_failed_save_whose_manifest_got_there_after_all_stays(tmp_path: Path) -> None:
    destination, folder = _open(tmp_path)
    publish(destination, folder, _manifest(destination, folder, b"whole"))
    discard(folder)
    verify_checkpoint(folder.path)


def test_nothing_is_published_into_a_folder_of_the_same_name(tmp_path: Path) -> None:
    destination, old = _open(tmp_path)
    manifest = _manifest(destination, old, b"old")
    _save_anew(tmp_path)
    with pytest.raises(ClaimLost, match=r"step-2\.a1 was removed or made anew by somebody else"):
        publish(destination, old, manifest)
    _check_new(tmp_path)


def test_a_folder_that_is_gone_is_not_made_again_for_a_manifest(tmp_path: Path) -> None:
    destination, old = _open(tmp_path)
    manifest = _manifest(destination, old, b"old")
    remove_checkpoint(old.path)
    with pytest.raises((ClaimLost, FileNotFoundError)):
        publish(destination, old, manifest)
    assert not old.path.exists()


def test_only_what_was_published_is_vouched_for(tmp_path: Path) -> None:
    destination, folder = _open(tmp_path)
    publish(destination, folder, _manifest(destination, folder, b"ours"))
    other = (folder.path / MANIFEST_NAME).read_bytes().replace(b'"samples":8', b'"samples":9')
    (folder.path / MANIFEST_NAME).write_bytes(other)
    with pytest.raises(ClaimLost, match="is not the one that was published"):
        vouch(destination, folder, REQUEST, [])
    assert not (folder.path / VERIFIED_NAME).exists()
    destination, old = _open(tmp_path)
    publish(destination, old, _manifest(destination, old, b"old"))
    remove_checkpoint(old.path)
    _save_anew(tmp_path)
    with pytest.raises(ClaimLost):
        vouch(destination, old, REQUEST, ["__0_0.distcp"])
    _check_new(tmp_path)


def test_a_verified_step_stays_and_its_files_are_told(tmp_path: Path) -> None:
    _save_anew(tmp_path)
    found = open_folder(Destination(checkpoints=tmp_path, run="gpt", attempt=1, world=1), 2)
    assert isinstance(found, list)
    assert [(file["path"], file["size_bytes"]) for file in found] == [("__0_0.distcp", 3)]
    _check_new(tmp_path)
