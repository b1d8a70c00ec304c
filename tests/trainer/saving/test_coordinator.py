"""What the writers agree on: a save goes on with all ranks or with none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainer.saving.coordinator import Action, Coordinator, Describe, Discard, Open, Publish, Tell, Vouch

SAVE = "7.1"
REQUEST = {"step": 7}


def _say(coordinator: Coordinator, rank: int, kind: str, **more: Any) -> list[Action]:
    return coordinator.handle(rank, {"kind": kind, "save": SAVE, **more})


def _stage_all(coordinator: Coordinator, world: int) -> list[Action]:
    return [action for rank in range(world) for action in _say(coordinator, rank, "staged", request=REQUEST)]


def _seal_all(coordinator: Coordinator, world: int) -> list[Action]:
    return [
        action for rank in range(world) for action in _say(coordinator, rank, "sealed", files=[{"path": f"f{rank}"}])
    ]


def _check_all(coordinator: Coordinator, world: int, unknown: Sequence[Any] = ()) -> list[Action]:
    return [
        action for rank in range(world) for action in _say(coordinator, rank, "checked", bad=[], unknown=list(unknown))
    ]


def _published(world: int) -> Coordinator:
    coordinator = Coordinator(world=world, node_size=1)
    _stage_all(coordinator, world)
    _say(coordinator, 0, "opened", there=None, path="/c")
    _seal_all(coordinator, world)
    _say(coordinator, 0, "published", manifest="{}")
    return coordinator


def _ends(actions: Sequence[Action]) -> dict[int, dict[str, Any]]:
    return {a.rank: a.message for a in actions if isinstance(a, Tell) and a.message["kind"] == "ended"}


def test_no_folder_is_made_before_every_rank_has_staged_its_bytes() -> None:
    coordinator = Coordinator(world=2, node_size=1)
    assert _say(coordinator, 0, "staged", request=REQUEST) == []
    assert _say(coordinator, 1, "staged", request={}) == [Open(save=SAVE, request=REQUEST)]


def test_everyone_writes_as_soon_as_the_folder_is_there() -> None:
    coordinator = Coordinator(world=2, node_size=1)
    _stage_all(coordinator, 2)
    told = _say(coordinator, 0, "opened", there=None, path="/c")
    assert [(a.rank, a.message["kind"]) for a in told if isinstance(a, Tell)] == [(0, "open"), (1, "open")]


def _compare(*sums: str) -> tuple[Coordinator, list[Action]]:
    """Two ranks save a step that is verified already, and hold files of these checksums."""
    coordinator = Coordinator(world=2, node_size=1)
    _stage_all(coordinator, 2)
    there = [{"path": f"{rank}", "size_bytes": 8, "xxh3_128": f"sum {rank}"} for rank in (0, 1)]
    told = _say(coordinator, 0, "opened", there=there, path="/c")
    assert [(a.rank, a.message["kind"]) for a in told if isinstance(a, Tell)] == [(0, "compare"), (1, "compare")]
    for rank, sum_ in enumerate(sums):
        told = _say(coordinator, rank, "compared", files=[{"path": f"{rank}", "size_bytes": 8, "xxh3_128": sum_}])
    return coordinator, told


def test_a_step_that_is_verified_already_with_the_same_bytes_is_not_written_again() -> None:
    _, told = _compare("sum 0", "sum 1")
    assert [_ends(told)[rank]["is_verified"] for rank in (0, 1)] == [True, True]
    assert not any(isinstance(action, Discard) for action in told)


def test_a_step_that_is_verified_already_with_other_bytes_fails_the_save_and_stays() -> None:
    _, told = _compare("sum 0", "another")
    for rank in (0, 1):
        assert not _ends(told)[rank]["is_complete"]
        assert not _ends(told)[rank]["is_verified"]
        assert "with other contents" in _ends(told)[rank]["error"]
    assert not any(isinstance(action, Discard) for action in told)


def test_a_writer_that_is_lost_while_a_verified_step_is_compared_removes_nothing() -> None:
    coordinator, _ = _compare("sum 0")
    told = coordinator.lose(1)
    assert not _ends(told)[0]["is_verified"]
    assert not any(isinstance(action, Discard) for action in told)


def test_the_manifest_waits_for_the_last_durable_file() -> None:
    coordinator = Coordinator(world=2, node_size=1)
    _stage_all(coordinator, 2)
    _say(coordinator, 0, "opened", there=None, path="/c")
    first = _say(coordinator, 1, "sealed", files=[{"path": "f1"}])
    assert not [a for a in first if isinstance(a, Publish)]
    second = _say(coordinator, 0, "sealed", files=[{"path": "f0"}])
    (publish,) = [a for a in second if isinstance(a, Publish)]
    assert sorted(file["path"] for file in publish.files) == ["f0", "f1"]


def test_files_are_read_back_by_a_rank_of_another_node() -> None:
    coordinator = Coordinator(world=8, node_size=4)
    assert [coordinator.reader_of(rank) for rank in range(8)] == [4, 5, 6, 7, 0, 1, 2, 3]
    assert Coordinator(world=4, node_size=4).reader_of(3) == 0
    assert Coordinator(world=1, node_size=1).reader_of(0) == 0


def test_it_is_vouched_for_when_everyone_has_read_everything_back() -> None:
    coordinator = _published(2)
    (action,) = _check_all(coordinator, 2)
    assert action == Vouch(save=SAVE, request=REQUEST, bad=())
    ended = _ends(_say(coordinator, 0, "vouched", error=""))
    assert ended[1]["is_verified"]


def test_what_was_read_back_before_the_manifest_counts_when_it_is_there() -> None:
    coordinator = Coordinator(world=1, node_size=1)
    _stage_all(coordinator, 1)
    _say(coordinator, 0, "opened", there=None, path="/c")
    _seal_all(coordinator, 1)
    assert _check_all(coordinator, 1) == []
    assert [a for a in _say(coordinator, 0, "published", manifest="{}") if isinstance(a, Vouch)]


def test_a_file_that_could_not_be_read_leaves_the_checkpoint_complete_and_unverified() -> None:
    coordinator = _published(2)
    ended = _ends(_check_all(coordinator, 2, unknown=[{"path": "f0", "reason": "could not be read"}]))
    assert ended[0]["is_complete"]
    assert not ended[0]["is_verified"]
    assert "f0 could not be read" in ended[0]["error"]


def test_the_first_failure_ends_the_save_for_all_with_its_rank_and_reason() -> None:
    coordinator = Coordinator(world=3, node_size=1)
    _stage_all(coordinator, 3)
    _say(coordinator, 0, "opened", there=None, path="/c")
    actions = _say(coordinator, 2, "failed", error="/c/f2: No space left on device")
    assert {rank: told["error"] for rank, told in _ends(actions).items()} == dict.fromkeys(
        range(3), "rank 2: /c/f2: No space left on device"
    )
    assert Discard(save=SAVE, request=REQUEST) in actions


def test_a_failure_before_there_is_a_folder_removes_nothing() -> None:
    coordinator = Coordinator(world=2, node_size=1)
    _say(coordinator, 0, "staged", request=REQUEST)
    assert not [a for a in _say(coordinator, 1, "failed", error="no memory") if isinstance(a, Discard)]


def test_a_failure_after_the_manifest_removes_nothing() -> None:
    coordinator = _published(2)
    actions = coordinator.lose(1)
    assert _ends(actions)[0]["is_complete"]
    assert not [a for a in actions if isinstance(a, Discard)]


def test_a_rank_that_hears_of_a_failed_save_too_late_is_told_how_it_ended() -> None:
    coordinator = Coordinator(world=2, node_size=1)
    _say(coordinator, 0, "failed", error="no memory")
    assert _ends(_say(coordinator, 1, "staged", request={}))[1]["error"] == "rank 0: no memory"


def test_a_lost_writer_ends_the_save_that_needs_it() -> None:
    coordinator = Coordinator(world=2, node_size=1)
    _stage_all(coordinator, 2)
    assert "rank 1" in _ends(coordinator.lose(1))[0]["error"]


def test_a_writer_that_is_lost_before_anything_is_staged_ends_the_save_that_rank_0_has_begun() -> None:
    coordinator = Coordinator(world=2, node_size=1)
    assert _say(coordinator, 0, "begun") == []
    assert "rank 1" in _ends(coordinator.lose(1))[0]["error"]


def test_a_lost_writer_that_had_done_its_part_ends_nothing() -> None:
    coordinator = _published(2)
    _say(coordinator, 1, "checked", bad=[], unknown=[])
    assert coordinator.lose(1) == []


# ---------------------------------------------------------------- held


def _held(world: int) -> Coordinator:
    """A save whose files are durable, and which waits for rank 0's word."""
    coordinator = Coordinator(world=world, node_size=1)
    for rank in range(world):
        _say(coordinator, rank, "staged", request={**REQUEST, "is_held": True})
    _say(coordinator, 0, "opened", there=None, path="/c")
    actions = [a for rank in range(world) for a in _say(coordinator, rank, "nearby", files=[{"path": f"f{rank}"}])]
    assert not any(isinstance(action, Publish | Describe) for action in [*actions, *_seal_all(coordinator, world)])
    return coordinator


def test_a_save_that_is_held_is_published_nowhere_before_it_is_confirmed() -> None:
    coordinator = _held(2)
    assert [type(action) for action in _say(coordinator, 0, "confirm")] == [Describe]
    described = _say(coordinator, 0, "described", manifest="{}")
    assert [type(action) for action in described if not isinstance(action, Tell)] == [Publish]


def test_a_confirmation_may_come_first() -> None:
    coordinator = Coordinator(world=1, node_size=1)
    assert _say(coordinator, 0, "confirm") == []
    _say(coordinator, 0, "staged", request={**REQUEST, "is_held": True})
    _say(coordinator, 0, "opened", there=None, path="/c")
    assert any(isinstance(action, Publish) for action in _seal_all(coordinator, 1))


def test_a_save_that_is_held_when_its_rank_goes_is_given_up() -> None:
    actions = _say(_held(2), 0, "orphaned")
    assert set(_ends(actions)) == {0, 1}
    assert any(isinstance(action, Discard) for action in actions)


def test_a_save_that_is_confirmed_outlives_its_rank() -> None:
    coordinator = _held(2)
    _say(coordinator, 0, "confirm")
    assert _say(coordinator, 0, "orphaned") == []
