"""What counts against a run, and what is no evidence against a node."""

from __future__ import annotations

import pytest

from supervisor.core.ends import judge_end
from supervisor.core.restarts import count_failures
from supervisor.model import CheckpointState
from tests.core.builders import RUN, attempt, checkpoint, exit_record, job, over, sight, view


def test_a_verified_checkpoint_beyond_the_resume_point_ends_the_count() -> None:
    assert count_failures(RUN, [over(1), over(2)], [checkpoint(20, 1)]) == 1


def test_saving_the_step_that_was_resumed_from_again_is_no_progress() -> None:
    again = over(2, resume_step=20)
    assert count_failures(RUN, [over(1), again], [checkpoint(20, 1), checkpoint(20, 2)]) == 1


def test_a_checkpoint_that_is_not_read_back_yet_counts_for_the_newest_attempt_only() -> None:
    unread = checkpoint(20, 1, CheckpointState.COMPLETE)
    assert count_failures(RUN, [over(1)], [unread]) == 0
    assert count_failures(RUN, [over(1), over(2)], [unread]) == 2


def test_a_checkpoint_that_turned_out_corrupt_counts_for_nothing() -> None:
    assert count_failures(RUN, [over(1)], [checkpoint(20, 1, CheckpointState.CORRUPT)]) == 1


@pytest.mark.parametrize("code", [0, 75, 78, 93])
def test_a_rank_that_ends_with_a_word_of_its_own_says_nothing_against_its_node(code: int) -> None:
    ended = judge_end(sight(attempt(), job(), view=view(exit=exit_record(code, node="n1"))))
    assert ended is not None
    assert ended.nodes == ()
