from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from supervisor import rundir_child
from supervisor.rundir_child import CheckpointCache, Notes
from trainer.contract import RunPaths

FAR = time.monotonic() + 3600


def test_an_unchanged_checkpoint_is_not_opened_again(
    paths: RunPaths, publish: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, cache, notes = publish(10), CheckpointCache(), Notes(paths.run_dir)
    before = cache.look(paths, FAR, notes)
    monkeypatch.setattr(rundir_child, "inspect_checkpoint", lambda *_: pytest.fail("opened"))
    (folder / "a.distcp").write_bytes(b"")
    assert cache.look(paths, FAR, notes) == before


def test_sizes_are_looked_at_again_after_a_while(paths: RunPaths, publish: Callable[..., Path]) -> None:
    folder, cache, notes = publish(10), CheckpointCache(recheck_s=0.0), Notes(paths.run_dir)
    cache.look(paths, FAR, notes)
    (folder / "a.distcp").write_bytes(b"")
    (view,), _ = cache.look(paths, FAR, notes)
    assert not view.is_complete


def test_what_the_budget_does_not_reach_is_unknown_and_newest_comes_first(
    paths: RunPaths, publish: Callable[..., Path]
) -> None:
    publish(10), publish(20)
    cache, notes = CheckpointCache(), Notes(paths.run_dir)
    assert cache.look(paths, time.monotonic() - 1, notes) == ((), ((10, 1), (20, 1)))
    views, unknown = cache.look(paths, FAR, notes)
    assert [view.step for view in views] == [10, 20]
    assert unknown == ()


def test_a_look_that_fails_keeps_what_was_known_and_never_says_gone(
    paths: RunPaths, publish: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(10)
    cache, notes = CheckpointCache(recheck_s=0.0), Notes(paths.run_dir)
    before = cache.look(paths, FAR, notes)
    publish(20)

    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(rundir_child, "inspect_checkpoint", fail)
    assert cache.look(paths, FAR, notes) == (before[0], ((20, 1),))


def test_a_removed_checkpoint_is_gone(paths: RunPaths, publish: Callable[..., Path]) -> None:
    folder, cache, notes = publish(10), CheckpointCache(), Notes(paths.run_dir)
    cache.look(paths, FAR, notes)
    folder.rename(paths.run_dir / "elsewhere")
    assert cache.look(paths, FAR, notes) == ((), ())
