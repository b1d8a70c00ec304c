"""Saves that are read back before they count, and loads that refuse what is not as it was written."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.trainer.folders import flip_byte
from trainer.contract import MANIFEST_NAME, VERIFIED_NAME, Manifest, RunPaths, parse, write_json
from trainer.tiers import CheckpointRejected, CheckpointUnreadable, find_checkpoints

if TYPE_CHECKING:
    from trainer.checkpoint import Checkpointer
    from trainer.state import TrainState

pytestmark = pytest.mark.torch


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Checkpointer]:
    from tests.trainer.states import join_alone
    from trainer.checkpoint import Checkpointer

    join_alone()

    def build(**options: int) -> Checkpointer:
        return Checkpointer(tmp_path, "gpt", options.pop("attempt", 1), **options)  # type: ignore[arg-type]

    return build


@pytest.fixture
def state() -> TrainState:
    from tests.trainer.states import advance, small_state

    built = small_state()
    advance(built, 3)
    return built


def _save(checkpointer: Checkpointer, state: TrainState) -> Path:
    checkpointer.save(state)
    result = checkpointer.wait()
    assert result is not None
    assert result.is_verified, result.error
    return result.path


def _shard(path: Path) -> Path:
    return path / "__0_0.distcp"


@contextmanager
def _full_disk(after_bytes: int) -> Iterator[None]:
    """Writing beyond so many bytes of a file fails, as on a full disk or over a quota."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (after_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# ---------------------------------------------------------------- saving


def test_a_save_is_verified_and_its_manifest_covers_every_file(
    make: Callable[..., Checkpointer], state: TrainState
) -> None:
    path = _save(make(), state)
    manifest = parse(Manifest, (path / MANIFEST_NAME).read_bytes())
    assert (manifest.step, manifest.samples, manifest.world_size) == (3, 12, 1)
    covered = {file.path for file in manifest.files}
    assert {entry.name for entry in path.iterdir()} == covered | {MANIFEST_NAME, VERIFIED_NAME}
    assert ".metadata" in covered


def test_training_goes_on_while_the_save_keeps_what_it_was_given(
    make: Callable[..., Checkpointer], state: TrainState
) -> None:
    from tests.trainer.states import advance, small_state, weights

    checkpointer = make()
    saved = weights(state)
    checkpointer.save(state)
    undisturbed = advance(state, 5)
    assert weights(state) != saved
    result = checkpointer.wait()
    assert result is not None
    resumed = small_state(seed=99)
    checkpointer.load(result.path, resumed)
    assert weights(resumed) == saved
    assert advance(resumed, 5) == undisturbed


def test_a_save_asked_for_while_one_is_in_flight_waits_for_it(
    make: Callable[..., Checkpointer], state: TrainState, tmp_path: Path
) -> None:
    from tests.trainer.states import advance

    checkpointer = make()
    for _ in range(4):
        advance(state, 1)
        checkpointer.save(state)
    checkpointer.wait()
    found = find_checkpoints(tmp_path / "checkpoints")
    assert [(f.step, f.is_verified) for f in found] == [(4, True), (5, True), (6, True), (7, True)]


def test_the_leftover_of_a_killed_save_is_replaced(
    make: Callable[..., Checkpointer], state: TrainState, tmp_path: Path
) -> None:
    leftover = RunPaths(tmp_path).checkpoint(3, 1)
    leftover.mkdir(parents=True)
    (leftover / "__7_0.distcp").write_bytes(b"half")
    path = _save(make(), state)
    assert not (path / "__7_0.distcp").exists()


def test_a_step_that_this_attempt_has_verified_already_is_not_written_again(
    make: Callable[..., Checkpointer], state: TrainState
) -> None:
    before = _shard(_save(make(), state)).stat().st_ino
    assert _shard(_save(make(), state)).stat().st_ino == before


def test_a_full_disk_fails_the_save_and_not_the_training(
    make: Callable[..., Checkpointer], state: TrainState, tmp_path: Path
) -> None:
    from tests.trainer.states import advance

    checkpointer = make()
    first = _save(checkpointer, state)
    advance(state, 1)
    with _full_disk(after_bytes=4096):
        checkpointer.save(state)
        result = checkpointer.wait()
    assert result is not None
    assert not result.is_complete
    assert " MB free of " in result.error
    assert not result.path.exists()
    assert first.exists()
    advance(state, 1)
    _save(checkpointer, state)
    assert checkpointer.failures == 0
    assert [f.step for f in find_checkpoints(tmp_path / "checkpoints")] == [3, 5]


def test_a_folder_that_cannot_be_made_fails_the_save_and_not_the_training(
    make: Callable[..., Checkpointer], state: TrainState, tmp_path: Path
) -> None:
    (tmp_path / "checkpoints").touch()
    checkpointer = make()
    checkpointer.save(state)
    result = checkpointer.wait()
    assert result is not None
    assert not result.is_complete
    assert "checkpoints" in result.error


def test_a_copy_that_host_memory_has_no_room_for_fails_the_save_and_not_the_training(
    make: Callable[..., Checkpointer], state: TrainState
) -> None:
    from trainer.state import TrainState

    class TooLarge(TrainState):
        def __init__(self) -> None:
            self.step, self.samples = 4, 16

        def collect(self) -> dict[str, object]:
            raise MemoryError("no room for the copy")

    checkpointer = make()
    before = _save(checkpointer, state)
    checkpointer.save(TooLarge())
    result = checkpointer.wait()
    assert result is not None
    assert "no room for the copy" in result.error
    assert before.exists()


def test_saves_that_keep_failing_end_the_training_at_last(make: Callable[..., Checkpointer], state: TrainState) -> None:
    from trainer.checkpoint import SavesKeepFailing

    checkpointer = make(max_failures=3)
    with _full_disk(after_bytes=64):
        for _ in range(3):
            checkpointer.save(state)
        with pytest.raises(SavesKeepFailing, match="last 3 saves failed"):
            checkpointer.save(state)


def test_without_a_service_the_last_two_verified_ones_are_kept(
    make: Callable[..., Checkpointer], state: TrainState, tmp_path: Path
) -> None:
    from tests.trainer.states import advance

    checkpointer = make(keep_last=1)
    for _ in range(4):
        advance(state, 1)
        _save(checkpointer, state)
    assert [f.step for f in find_checkpoints(tmp_path / "checkpoints")] == [6, 7]


def test_with_a_service_nothing_is_pruned_here(
    make: Callable[..., Checkpointer], state: TrainState, tmp_path: Path
) -> None:
    from tests.trainer.states import advance

    checkpointer = make()
    for _ in range(4):
        advance(state, 1)
        _save(checkpointer, state)
    assert len(find_checkpoints(tmp_path / "checkpoints")) == 4


def test_a_folder_that_only_rank_0_sees_is_an_error_that_says_what_is_needed(tmp_path: Path) -> None:
    from trainer.checkpoint import await_visible

    with pytest.raises(FileNotFoundError, match="a file system that all nodes share"):
        await_visible(tmp_path / "elsewhere", within_s=0)


# ---------------------------------------------------------------- loading


def _flip(path: Path) -> None:
    flip_byte(_shard(path), offset=_shard(path).stat().st_size // 2)


def _flip_metadata(path: Path) -> None:
    flip_byte(path / ".metadata")


def _truncate(path: Path) -> None:
    os.truncate(_shard(path), _shard(path).stat().st_size - 1)


def _empty(path: Path) -> None:
    os.truncate(_shard(path), 0)


def _lose(path: Path) -> None:
    _shard(path).unlink()


def _lose_metadata(path: Path) -> None:
    (path / ".metadata").rename(path / ".metadata.tmp")


def _lose_manifest(path: Path) -> None:
    (path / MANIFEST_NAME).unlink()


def _uncover_shard(path: Path) -> None:
    manifest = parse(Manifest, (path / MANIFEST_NAME).read_bytes())
    _rewrite(path, manifest, keep=lambda name: name == ".metadata")


def _uncover_metadata(path: Path) -> None:
    manifest = parse(Manifest, (path / MANIFEST_NAME).read_bytes())
    _rewrite(path, manifest, keep=lambda name: name != ".metadata")


def _rewrite(path: Path, manifest: Manifest, keep: Callable[[str], bool]) -> None:
    from dataclasses import replace

    files = tuple(file for file in manifest.files if keep(file.path))
    write_json(path / MANIFEST_NAME, replace(manifest, files=files))


@pytest.mark.parametrize(
    "damage",
    [
        _flip,
        _flip_metadata,
        _truncate,
        _empty,
        _lose,
        _lose_metadata,
        _lose_manifest,
        _uncover_shard,
        _uncover_metadata,
    ],
)
def test_a_damaged_checkpoint_is_refused_before_it_touches_the_state(
    make: Callable[..., Checkpointer], state: TrainState, damage: Callable[[Path], None]
) -> None:
    from tests.trainer.states import small_state, weights

    path = _save(make(), state)
    damage(path)
    other = small_state(seed=99)
    before = weights(other)
    with pytest.raises(CheckpointRejected) as caught:
        make().load(path, other)
    assert caught.value.path == path
    assert weights(other) == before


def test_a_checkpoint_that_cannot_be_read_is_not_called_damaged(
    make: Callable[..., Checkpointer], state: TrainState
) -> None:
    path = _save(make(), state)
    _shard(path).unlink()
    _shard(path).symlink_to(_shard(path).name)
    with pytest.raises(CheckpointUnreadable):
        make().load(path, state)


def test_a_checkpoint_of_another_model_is_refused(make: Callable[..., Checkpointer], state: TrainState) -> None:
    from tests.trainer.states import small_state

    path = _save(make(), state)
    with pytest.raises(CheckpointRejected, match=r"does not load: .*[Ss]ize mismatch"):
        make().load(path, small_state(width=32))


def test_leftover_shards_are_not_read(make: Callable[..., Checkpointer], state: TrainState) -> None:
    path = _save(make(), state)
    (path / "__5_0.distcp").write_bytes(b"of a larger world")
    assert make().load(path, state).step == 3


# ---------------------------------------------------------------- when


def test_saves_by_steps_follow_the_step_and_saves_by_time_the_clock() -> None:
    from trainer.checkpoint import SaveSchedule

    by_steps = SaveSchedule(every_steps=20)
    assert [step for step in range(1, 61) if by_steps.is_due(step)] == [20, 40, 60]
    now = [0.0]
    by_time = SaveSchedule(every_s=100, clock=lambda: now[0])
    now[0] = 49
    assert not by_time.is_due(1)
    now[0] = 50  # the first one early: failures gather just after a restart
    assert by_time.is_due(1)
    by_time.saved()
    now[0] = 149
    assert not by_time.is_due(2)
    assert not SaveSchedule().is_due(1)
