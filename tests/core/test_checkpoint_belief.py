"""Which checkpoints may be believed, which one is resumed from, which ones are kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from supervisor.core.checkpoints import (
    choose_prunable,
    choose_resume,
    fold_load_failure,
    fold_verification,
    fold_view,
    newest_verified,
)
from supervisor.model import Checkpoint, CheckpointSpec, CheckpointState, CheckpointView, Verification
from tests.core.builders import LATER, NOW, ago, attempt, checkpoint, checkpoint_view, over

COMPLETE, VERIFIED = CheckpointState.COMPLETE, CheckpointState.VERIFIED
CORRUPT, FENCED, PRUNED = CheckpointState.CORRUPT, CheckpointState.FENCED, CheckpointState.PRUNED
SPEC = CheckpointSpec()
BIG = 10**15


def learnt(
    views: Sequence[CheckpointView], *known: Checkpoint, attempts: Any = None, unknown: Any = ()
) -> dict[tuple[int, int], CheckpointState]:
    found = fold_view(
        {c.key: c for c in known},
        views,
        (attempt(),) if attempts is None else attempts,
        run="gpt",
        now=NOW,
        unknown=unknown,
    )
    return {c.key: c.state for c, _ in found}


# ---------------------------------------------------------------- first sight


def test_a_manifest_with_all_its_files_is_complete() -> None:
    assert learnt([checkpoint_view(100)]) == {(100, 1): COMPLETE}


@pytest.mark.parametrize("detail", ["shard 3 has 0 bytes instead of 1.2 GB", "MANIFEST.json: not JSON"])
def test_a_folder_whose_files_are_not_all_there_is_no_checkpoint(detail: str) -> None:
    """Cases CK-04 and CK-06: empty files after a power cut, a manifest that cannot be read."""
    assert learnt([checkpoint_view(420, is_complete=False, detail=detail)]) == {}


def test_a_checkpoint_of_an_attempt_that_is_not_made_yet_is_fenced_before_it_could_pass_for_its_work() -> None:
    assert learnt([checkpoint_view(100, 7)]) == {(100, 7): FENCED}
    assert learnt([checkpoint_view(100, 7)], checkpoint(100, 7, state=FENCED)) == {}


def test_what_is_published_after_its_attempt_was_over_is_fenced() -> None:
    assert learnt([checkpoint_view(100)], attempts=(over(),)) == {(100, 1): FENCED}


def test_a_fenced_checkpoint_stays_fenced_though_its_nodes_verify_it() -> None:
    assert learnt([checkpoint_view(100, is_verified_by_nodes=True)], attempts=(over(),)) == {(100, 1): FENCED}
    assert learnt([checkpoint_view(100, is_verified_by_nodes=True)], checkpoint(100, state=FENCED)) == {}


def test_a_checkpoint_that_the_nodes_have_read_back_is_verified() -> None:
    ((seen, _),) = fold_view({}, [checkpoint_view(100, is_verified_by_nodes=True)], (attempt(),), run="gpt", now=NOW)
    assert (seen.state, seen.verified_by, seen.verified_at) == (VERIFIED, "nodes", NOW)


def test_a_checkpoint_that_the_nodes_reject_is_corrupt() -> None:
    assert learnt([checkpoint_view(100, is_rejected_by_nodes=True, detail="shard 3")]) == {(100, 1): CORRUPT}


# ---------------------------------------------------------------- seen again


def test_nothing_new_is_learnt_from_the_same_look() -> None:
    assert learnt([checkpoint_view(100)], checkpoint(100, state=COMPLETE)) == {}
    assert learnt([checkpoint_view(100, is_verified_by_nodes=True)], checkpoint(100)) == {}


@pytest.mark.parametrize("before", [COMPLETE, VERIFIED])
@pytest.mark.parametrize("change", [{"is_complete": False}, {"is_rejected_by_nodes": True}])
def test_a_checkpoint_that_lost_a_file_or_is_rejected_turns_corrupt(
    before: CheckpointState, change: dict[str, bool]
) -> None:
    assert learnt([checkpoint_view(100, **change)], checkpoint(100, state=before)) == {(100, 1): CORRUPT}


def test_a_complete_checkpoint_is_verified_once_the_nodes_have_read_it_back() -> None:
    known = checkpoint(100, state=COMPLETE)
    assert learnt([checkpoint_view(100, is_verified_by_nodes=True)], known) == {(100, 1): VERIFIED}


@pytest.mark.parametrize("state", [CORRUPT, FENCED, PRUNED])
def test_what_was_refused_once_is_never_believed_again(state: CheckpointState) -> None:
    assert learnt([checkpoint_view(100, is_verified_by_nodes=True)], checkpoint(100, state=state)) == {}


@pytest.mark.parametrize("state", [COMPLETE, VERIFIED])
def test_a_checkpoint_that_is_gone_from_disk_cannot_be_used(state: CheckpointState) -> None:
    assert learnt([], checkpoint(100, state=state)) == {(100, 1): CORRUPT}


@pytest.mark.parametrize("state", [CORRUPT, FENCED, PRUNED])
def test_a_refused_checkpoint_may_go_without_a_word(state: CheckpointState) -> None:
    assert learnt([], checkpoint(100, state=state)) == {}


def test_a_checkpoint_that_could_not_be_looked_at_is_not_gone() -> None:
    """Case CK-13: ESTALE is no proof of damage."""
    assert learnt([], checkpoint(100), unknown=[(100, 1)]) == {}


# ---------------------------------------------------------------- read back by the head node


def read_back(ok: bool | None, before: Checkpoint) -> Checkpoint | None:
    result = Verification(run="gpt", step=100, attempt=1, ok=ok, detail="shard 3", started_at=ago(5))
    found = fold_verification(before, result)
    return found[0] if found else None


@pytest.mark.parametrize("before", [COMPLETE, VERIFIED])
def test_every_byte_read_back_is_verified_as_of_the_start_of_the_reading(before: CheckpointState) -> None:
    seen = read_back(True, checkpoint(100, state=before))
    assert seen is not None
    assert (seen.state, seen.verified_by, seen.verified_at) == (VERIFIED, "head", ago(5))


@pytest.mark.parametrize("before", [COMPLETE, VERIFIED])
def test_a_byte_that_differs_makes_it_corrupt_whatever_was_found_before(before: CheckpointState) -> None:
    seen = read_back(False, checkpoint(100, state=before))
    assert seen is not None
    assert (seen.state, seen.detail) == (CORRUPT, "shard 3")


def test_a_checkpoint_that_could_not_be_read_stays_what_it_was() -> None:
    assert read_back(None, checkpoint(100, state=COMPLETE)) is None


@pytest.mark.parametrize("state", [CORRUPT, FENCED, PRUNED])
def test_reading_back_does_not_redeem_what_was_refused(state: CheckpointState) -> None:
    assert read_back(True, checkpoint(100, state=state)) is None


def test_a_checkpoint_that_fails_to_load_twice_is_rejected() -> None:
    once, _ = fold_load_failure(checkpoint(100), "missing key")
    twice, _ = fold_load_failure(once, "missing key")
    assert (once.state, once.load_failures) == (VERIFIED, 1)
    assert (twice.state, twice.load_failures) == (CORRUPT, 2)


# ---------------------------------------------------------------- where to resume


def resumed(*known: Checkpoint, spec: CheckpointSpec = SPEC, since: Any = None) -> int | None:
    point = choose_resume(known, spec, since=since).checkpoint
    return point.step if point else None


def to_read(*known: Checkpoint, spec: CheckpointSpec = SPEC, since: Any = None) -> list[int]:
    return [c.step for c in choose_resume(known, spec, since=since).read_back]


def test_a_run_without_checkpoints_starts_at_the_beginning() -> None:
    point = choose_resume([], SPEC, since=None)
    assert (point.checkpoint, point.read_back, point.is_lost) == (None, (), False)


def test_the_newest_verified_step_is_resumed_from() -> None:
    """Cases CK-02, CK-15: by step, not by link or file time."""
    older = checkpoint(100, verified_at=LATER, first_seen_at=LATER)
    assert resumed(checkpoint(200), older) == 200


def test_of_one_step_the_later_attempts_checkpoint_is_newer() -> None:
    point = choose_resume([checkpoint(200, 2), checkpoint(200, 1)], SPEC, since=None)
    assert point.checkpoint is not None
    assert point.checkpoint.attempt == 2


@pytest.mark.parametrize("state", [CORRUPT, FENCED, PRUNED])
def test_what_is_refused_is_walked_back_over(state: CheckpointState) -> None:
    assert resumed(checkpoint(200, state=state), checkpoint(100)) == 100


def test_a_newer_complete_checkpoint_is_read_back_before_the_choice() -> None:
    assert to_read(checkpoint(200, state=COMPLETE), checkpoint(100)) == [200]


def test_only_those_newer_than_the_newest_verified_one_are_read_back() -> None:
    known = [checkpoint(300, state=COMPLETE), checkpoint(200), checkpoint(100, state=COMPLETE)]
    assert to_read(*known) == [300]


def test_a_verified_checkpoint_is_read_back_once_more_after_the_attempt_has_ended() -> None:
    """Bytes rot between the first verification and the restart."""
    known = checkpoint(100, verified_at=ago(100))
    assert to_read(known, since=ago(60)) == [100]
    assert to_read(replace(known, verified_at=ago(50)), since=ago(60)) == []
    assert to_read(replace(known, verified_at=None), since=ago(60)) == [100]


def test_what_is_too_large_for_the_head_node_is_not_read_back_by_it() -> None:
    large = checkpoint(100, verified_at=ago(100), size_bytes=BIG)
    assert to_read(large, since=ago(60)) == []
    assert resumed(large, since=ago(60)) == 100


def test_a_large_checkpoint_that_nobody_has_verified_is_walked_back_over() -> None:
    assert resumed(checkpoint(200, state=COMPLETE, size_bytes=BIG), checkpoint(100)) == 100


def test_a_complete_checkpoint_is_resumed_from_only_where_the_run_file_allows_it() -> None:
    large = checkpoint(200, state=COMPLETE, size_bytes=BIG)
    assert choose_resume([large], SPEC, since=None).is_lost
    allowed = replace(SPEC, resume_from_complete=True)
    assert resumed(large, checkpoint(100, state=COMPLETE, size_bytes=BIG), spec=allowed) == 200


def test_a_verified_checkpoint_goes_before_a_newer_complete_one_whatever_the_run_file_allows() -> None:
    allowed = replace(SPEC, resume_from_complete=True)
    assert resumed(checkpoint(200, state=COMPLETE, size_bytes=BIG), checkpoint(100), spec=allowed) == 100


def test_with_every_checkpoint_refused_the_work_is_lost_and_nothing_starts_at_zero() -> None:
    point = choose_resume([checkpoint(100, state=CORRUPT), checkpoint(200, state=CORRUPT)], SPEC, since=None)
    assert point.is_lost
    assert point.checkpoint is None


def test_fenced_and_pruned_checkpoints_are_no_lost_work() -> None:
    assert not choose_resume([checkpoint(1, state=FENCED), checkpoint(2, state=PRUNED)], SPEC, since=None).is_lost


# ---------------------------------------------------------------- what is kept


def pruned(*known: Checkpoint, keep_last: int = 2) -> list[int]:
    return [c.step for c in choose_prunable(known, replace(SPEC, keep_last=keep_last))]


def test_the_last_verified_checkpoints_are_kept() -> None:
    assert pruned(*[checkpoint(s) for s in (100, 200, 300, 400)], keep_last=3) == [100]


@pytest.mark.parametrize("keep_last", [0, 1, 2])
def test_two_verified_checkpoints_are_kept_whatever_is_asked(keep_last: int) -> None:
    assert pruned(*[checkpoint(s) for s in (100, 200, 300)], keep_last=keep_last) == [100]


def test_retention_counts_verified_checkpoints_only() -> None:
    """Case CK-07: the only good one survives two broken ones and one that is being written."""
    broken = [checkpoint(2000, state=CORRUPT), checkpoint(3000, state=CORRUPT), checkpoint(4000, state=COMPLETE)]
    assert pruned(checkpoint(1000), *broken) == []


def test_everything_older_than_the_kept_ones_goes_whatever_its_state() -> None:
    older = [checkpoint(1, state=CORRUPT), checkpoint(2, state=FENCED), checkpoint(3, state=COMPLETE)]
    assert pruned(*older, checkpoint(4, state=PRUNED), checkpoint(100), checkpoint(200)) == [1, 2, 3]


def test_the_newest_verified_checkpoint_is_found_among_others() -> None:
    assert newest_verified([checkpoint(100), checkpoint(200), checkpoint(300, state=CORRUPT)]) == checkpoint(200)
    assert newest_verified([]) is None
