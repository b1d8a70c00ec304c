"""What makes a checkpoint trustworthy, which one to resume from, which ones may go."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.folders import flip_byte, make_checkpoint
from trainer.contract import MANIFEST_NAME, VERIFIED_NAME, ManifestFile, VerificationRecord, checkpoint_name, parse
from trainer.format.stale import retry_stale
from trainer.storage.stored import (
    CheckpointRejected,
    CheckpointUnreadable,
    Condition,
    Found,
    check_file,
    choose_resume,
    describe_file,
    find_checkpoints,
    next_attempt,
    publish_verification,
    remove_checkpoint,
    share_files,
    verify_checkpoint,
)
from trainer.storage.tiers import choose_prunable, prune


def _flip(path: Path) -> None:
    flip_byte(path / "__0_0.distcp")


def _truncate(path: Path) -> None:
    os.truncate(path / "__1_0.distcp", 6999)


def _empty(path: Path) -> None:
    for shard in path.glob("__*"):
        os.truncate(shard, 0)


def _grow(path: Path) -> None:
    with (path / "__0_0.distcp").open("ab") as stream:
        stream.write(b"x")


def _lose_shard(path: Path) -> None:
    (path / "__0_0.distcp").unlink()


def _tear_metadata(path: Path) -> None:
    (path / ".metadata").write_bytes(b"x" * 12)


def _keep_only_temporary_metadata(path: Path) -> None:
    (path / ".metadata").rename(path / ".metadata.tmp")


def _tear_manifest(path: Path) -> None:
    (path / MANIFEST_NAME).write_bytes((path / MANIFEST_NAME).read_bytes()[:-20])


def _empty_manifest(path: Path) -> None:
    (path / MANIFEST_NAME).write_bytes(b"")


def _lose_manifest(path: Path) -> None:
    (path / MANIFEST_NAME).unlink()


DAMAGES: tuple[Callable[[Path], None], ...] = (
    _flip,
    _truncate,
    _empty,
    _grow,
    _lose_shard,
    _tear_metadata,
    _keep_only_temporary_metadata,
    _tear_manifest,
    _empty_manifest,
    _lose_manifest,
)


def test_a_whole_checkpoint_is_verified(tmp_path: Path) -> None:
    assert verify_checkpoint(make_checkpoint(tmp_path, 5)).step == 5


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_rejected_by_name(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    path = make_checkpoint(tmp_path, 5)
    damage(path)
    with pytest.raises(CheckpointRejected) as caught:
        verify_checkpoint(path)
    assert caught.value.path == path
    assert caught.value.problems


def test_an_empty_folder_given_by_hand_is_refused_saying_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointRejected, match=r"has no MANIFEST\.json: it was never finished"):
        verify_checkpoint(tmp_path)
    with pytest.raises(CheckpointRejected, match="is not a folder"):
        verify_checkpoint(tmp_path / "absent")


def test_a_manifest_copied_from_another_checkpoint_is_refused(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, 5)
    path = path.rename(tmp_path / checkpoint_name(6, 1))
    with pytest.raises(CheckpointRejected, match=r"holds the manifest of step-5\.a1"):
        verify_checkpoint(path)


def test_leftover_shards_of_a_larger_world_are_ignored(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, 5)
    (path / "__4_0.distcp").write_bytes(b"left over")
    assert verify_checkpoint(path).world_size == 2


def test_file_times_prove_nothing(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, 5)
    os.utime(path / "__0_0.distcp", (4e9, 4e9))  # the file server's clock runs ahead
    assert verify_checkpoint(path).step == 5


def test_a_stale_handle_is_looked_at_again() -> None:
    answers: Iterator[int | OSError] = iter([OSError(errno.ESTALE, "Stale file handle"), 5])

    def look() -> int:
        answer = next(answers)
        if isinstance(answer, OSError):
            raise answer
        return answer

    assert retry_stale(look, wait_s=0) == 5


def test_a_handle_that_stays_stale_is_given_up() -> None:
    def look() -> int:
        raise OSError(errno.ESTALE, "Stale file handle")

    with pytest.raises(OSError, match="Stale"):
        retry_stale(look, wait_s=0)


def test_a_file_that_cannot_be_read_is_unknown_and_not_damaged(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, 5)
    file = describe_file(path, "__0_0.distcp")
    (path / "__0_0.distcp").unlink()
    (path / "__0_0.distcp").symlink_to("__0_0.distcp")  # ELOOP: an answer that says nothing about the content
    assert check_file(path, file).condition is Condition.UNKNOWN
    with pytest.raises(CheckpointUnreadable):
        verify_checkpoint(path)


@pytest.mark.parametrize("name", [MANIFEST_NAME, VERIFIED_NAME, "__0_0.distcp"])
def test_a_pipe_in_the_place_of_a_file_is_refused_and_not_waited_for(tmp_path: Path, name: str) -> None:
    path = make_checkpoint(tmp_path, 5)
    (path / name).unlink()
    os.mkfifo(path / name)
    assert find_checkpoints(tmp_path)[0].is_verified is (name == "__0_0.distcp")
    if name != VERIFIED_NAME:
        with pytest.raises(CheckpointRejected, match=r"regular file|0 bytes"):
            verify_checkpoint(path)


def test_verification_belongs_to_one_manifest(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, 5)
    assert [found.is_verified for found in find_checkpoints(tmp_path)] == [True]
    manifest = (path / MANIFEST_NAME).read_bytes()
    (path / MANIFEST_NAME).write_bytes(manifest.replace(b'"samples":60', b'"samples":72'))
    assert [found.is_verified for found in find_checkpoints(tmp_path)] == [False]


def test_a_checkpoint_found_damaged_is_not_verified_any_more(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, 5)
    publish_verification(path, ok=False, bad_files=["__0_0.distcp"], now=1.0)
    assert parse(VerificationRecord, (path / VERIFIED_NAME).read_bytes()).bad_files == ("__0_0.distcp",)
    assert not find_checkpoints(tmp_path)[0].is_verified


def test_only_folders_with_a_name_of_ours_are_found_in_order_of_steps(tmp_path: Path) -> None:
    for step in (1000, 200, 30):
        make_checkpoint(tmp_path, step)
    (tmp_path / "latest").symlink_to(checkpoint_name(30, 1))
    (tmp_path / "step-9.a1").write_bytes(b"a file")
    (tmp_path / "step-2000-unfinished").mkdir()
    assert [found.step for found in find_checkpoints(tmp_path)] == [30, 200, 1000]
    assert find_checkpoints(tmp_path / "absent") == []


# ---------------------------------------------------------------- what to resume from


def test_the_link_latest_is_a_hint_that_nobody_follows(tmp_path: Path) -> None:
    """Case CK-02: it points at what is not finished, and what it pointed at before is gone."""
    make_checkpoint(tmp_path, 500)
    make_checkpoint(tmp_path, 2000, complete=False)
    (tmp_path / "latest").symlink_to("step-2000.a1")
    chosen = choose_resume(find_checkpoints(tmp_path), attempt=2, given=None, is_supervised=False)
    assert [path.name for path in chosen] == ["step-500.a1"]
    assert prune(tmp_path, keep_last=2, attempt=1) == []


def test_without_a_service_the_newest_complete_checkpoint_comes_first(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 500)
    make_checkpoint(tmp_path, 1000, verified=False)
    make_checkpoint(tmp_path, 2000, complete=False)
    chosen = choose_resume(find_checkpoints(tmp_path), attempt=2, given=None, is_supervised=False)
    assert [path.name for path in chosen] == ["step-1000.a1", "step-500.a1"]


def test_restarted_workers_go_on_from_what_their_own_attempt_has_verified(tmp_path: Path) -> None:
    given = make_checkpoint(tmp_path, 500, attempt=1)
    make_checkpoint(tmp_path, 600, attempt=1)  # the service did not choose it, whatever its reason
    make_checkpoint(tmp_path, 550, attempt=2)
    make_checkpoint(tmp_path, 560, attempt=2, verified=False)
    chosen = choose_resume(find_checkpoints(tmp_path), attempt=2, given=given, is_supervised=True)
    assert [path.name for path in chosen] == ["step-550.a2", "step-500.a1"]


def test_a_fresh_attempt_of_a_service_starts_at_the_beginning(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 500, attempt=1)
    assert choose_resume(find_checkpoints(tmp_path), attempt=2, given=None, is_supervised=True) == []


def test_the_next_attempt_is_above_all_that_left_anything(tmp_path: Path) -> None:
    assert next_attempt(tmp_path) == 1
    (tmp_path / "attempts" / "4").mkdir(parents=True)
    make_checkpoint(tmp_path / "checkpoints", 10, attempt=2)
    assert next_attempt(tmp_path) == 5


# ---------------------------------------------------------------- what may go


def _found(step: int, *, verified: bool, attempt: int = 1) -> Found:
    path = Path("/c") / checkpoint_name(step, attempt)
    return Found(path=path, step=step, attempt=attempt, is_complete=verified, is_verified=verified)


def _pruned(found: list[Found], keep_last: int, **options: frozenset[Path]) -> list[int]:
    return [f.step for f in choose_prunable(found, keep_last=keep_last, attempt=1, **options)]


def test_unfinished_and_broken_saves_do_not_push_the_only_good_one_out() -> None:
    """Case CK-07."""
    found = [_found(1000, verified=True), *(_found(step, verified=False) for step in (2000, 3000, 4000))]
    assert _pruned(found, 2) == []


def test_all_that_is_older_than_the_last_verified_ones_goes() -> None:
    found = [_found(step, verified=step != 2) for step in (1, 2, 3, 4, 5)]
    assert _pruned(found, 2) == [1, 2, 3]
    assert _pruned(found, 3) == [1, 2]


def test_what_is_in_use_or_of_a_newer_attempt_stays() -> None:
    found = [_found(1, verified=True), _found(2, verified=True, attempt=2)]
    found += [_found(step, verified=True) for step in (3, 4, 5)]
    assert _pruned(found, 2, in_use=frozenset({found[0].path})) == [3]


@given(
    verified=st.lists(st.booleans(), max_size=12),
    keep_last=st.integers(min_value=0, max_value=5),
)
def test_the_last_two_verified_ones_always_stay(verified: list[bool], keep_last: int) -> None:
    found = [_found(step, verified=good) for step, good in enumerate(verified)]
    pruned = _pruned(found, keep_last)
    kept = [f.step for f in found if f.is_verified and f.step not in pruned]
    good = [f.step for f in found if f.is_verified]
    assert kept[-2:] == good[-2:]
    assert len(kept) >= min(len(good), max(2, keep_last))


def test_removing_a_folder_that_was_never_made_is_no_error(tmp_path: Path) -> None:
    """Case CK-08."""
    remove_checkpoint(tmp_path / "absent")
    path = make_checkpoint(tmp_path, 5)
    remove_checkpoint(path)
    assert not path.exists()


# ---------------------------------------------------------------- sharing and copying


@given(sizes=st.lists(st.integers(min_value=0, max_value=10**6), max_size=20), shares=st.integers(1, 8))
def test_files_are_shared_without_loss_and_about_evenly(sizes: list[int], shares: int) -> None:
    files = [ManifestFile(path=f"f{i}", size_bytes=size, xxh3_128="0" * 32) for i, size in enumerate(sizes)]
    dealt = share_files(files, shares)
    assert sorted(f.path for part in dealt for f in part) == sorted(f.path for f in files)
    loads = [sum(f.size_bytes for f in part) for part in dealt]
    assert max(loads) - min(loads) <= max(sizes, default=0)
