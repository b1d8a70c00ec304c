"""A position in the data that no other number of ranks can take over keeps the number of nodes, or asks a person."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from slurm.types import JobState, NodeBase
from supervisor.core.elastic import FixedSize, find_fixed_size, find_next_size, fix_size, judge_size
from supervisor.model import Attempt, AttemptEnd, AttemptState, Checkpoint, IntentKind, Run, RunState
from tests.core.builders import (
    NOW,
    ago,
    attempt,
    attempt_in,
    attempts_in,
    checkpoint,
    checkpoints_in,
    cluster,
    intents_of,
    job,
    node,
    over,
    plan_for,
    progress,
    run,
    run_in,
    run_state,
    snapshot,
    spec,
    view,
    world,
)
from tests.core.builders import checkpoint_view as shown


def of(**nodes: Any) -> Run:
    return run(spec=spec(nodes={"min": 1, "max": 4, **nodes}))


def titan(**nodes: Any) -> Run:
    return run(spec=spec(nodes={"min": 1, "max": 4, **nodes}, checkpoint={"layout": "torchtitan"}))


FOUR = replace(over(1, nodes_wanted=4), nodes=("n1", "n2", "n3", "n4"))
PER_RANK = checkpoint(200, world_size=4, is_elastic=False)
WHOLE = checkpoint(200, world_size=4)
NEAR = NOW + timedelta(seconds=300)


def after(one: Run, saved: Checkpoint, count: int, last: Attempt = FOUR) -> Any:
    """The plan after an attempt's end, with so many healthy nodes."""
    seen = shown(saved.step, saved.attempt, world_size=saved.world_size, is_elastic=saved.is_elastic)
    known = world(last, of=one, checkpoints=[saved])
    return plan_for(known, snapshot(nodes=cluster(count), view=view(checkpoints=(seen,))))


def test_what_a_manifest_says_of_its_ranks_and_its_data_is_kept() -> None:
    seen = view(checkpoints=(shown(200, world_size=8, is_elastic=False),))
    known = checkpoints_in(plan_for(world(attempt()), snapshot(job(), view=seen)))
    assert (known[200, 1].world_size, known[200, 1].is_elastic) == (8, False)


@pytest.mark.parametrize("one", [of(), of(elastic=True)])
def test_a_checkpoint_that_any_number_of_ranks_can_use_is_resumed_on_the_nodes_that_there_are(one: Run) -> None:
    assert attempt_in(after(one, WHOLE, 3), 2).nodes_wanted == 3


@pytest.mark.parametrize(("one", "saved"), [(of(), PER_RANK), (of(elastic=False), WHOLE), (titan(), PER_RANK)])
def test_a_position_for_each_rank_waits_for_as_many_nodes_again(one: Run, saved: Checkpoint) -> None:
    """CK-11: three nodes would resume, and drop a position without a word."""
    plan = after(one, saved, 3)
    waiting = run_in(plan)
    assert intents_of(plan, IntentKind.SUBMIT) == ()
    assert waiting is not None
    assert waiting.reason.startswith("waiting: 3 healthy nodes, 4 are needed again: ")
    assert attempt_in(after(one, saved, 4), 2).nodes_wanted == 4


def test_a_position_for_each_rank_is_not_given_more_nodes_either() -> None:
    """CK-11: growing has no position for the new ranks."""
    two = over(1, nodes_wanted=2)
    assert attempt_in(after(of(), checkpoint(200, world_size=2, is_elastic=False), 4, two), 2).nodes_wanted == 2


def test_the_reason_says_of_how_many_ranks_the_position_is() -> None:
    waiting = run_in(after(of(), PER_RANK, 3))
    assert waiting is not None
    assert "step 200 holds a position in the data for each rank of 4, which no other number" in waiting.reason


def test_the_run_file_can_say_that_a_foreign_loader_changes_size_but_not_what_our_own_manifest_denies() -> None:
    """CK-11: allowed only if the run's config says that its data loader can do it."""
    assert attempt_in(after(titan(elastic=True), PER_RANK, 3), 2).nodes_wanted == 3
    assert intents_of(after(of(elastic=True), PER_RANK, 3), IntentKind.SUBMIT) == ()


def test_busy_nodes_are_queued_for_in_place_of_a_smaller_start() -> None:
    one, busy = of(), {f"n{i}": node(f"n{i}", NodeBase.ALLOCATED) for i in (3, 4)}
    known = world(replace(FOUR, nodes=("n1", "n2")), of=one, checkpoints=[PER_RANK])
    seen = view(checkpoints=(shown(200, world_size=4, is_elastic=False),))
    plan = plan_for(known, snapshot(nodes=cluster(4) | busy, view=seen))
    assert attempt_in(plan, 2).nodes_wanted == 4


def test_a_job_that_waits_is_not_made_smaller() -> None:
    resumed = attempt(2, AttemptState.SUBMITTED, nodes_wanted=4, resume_step=200, resume_path=PER_RANK.path)
    down = cluster(4, node("n4", NodeBase.DOWN))

    def ends(saved: Checkpoint) -> AttemptEnd | None:
        known = world(FOUR, resumed, of=of(), checkpoints=[saved])
        waiting = job(2, JobState.PENDING, nodes=(), reason="Resources")
        found = attempts_in(plan_for(known, snapshot(waiting, nodes=down)))
        return found[2].end if 2 in found else None

    assert ends(WHOLE) is AttemptEnd.RESIZED
    assert ends(PER_RANK) is None


# ---------------------------------------------------------------- what nobody knows


STRANGE = checkpoint(200, 0, world_size=4, is_elastic=False, stamp="1")


def foreign_after(one: Run, saved: Checkpoint, count: int) -> Any:
    seen = replace(shown(200), attempt=0, path=saved.path, stamp=saved.stamp, world_size=4, is_elastic=False)
    known = world(of=one, checkpoints=[saved])
    return plan_for(known, snapshot(nodes=cluster(count), view=view(0, checkpoints=(seen,))))


def test_a_person_is_asked_where_it_is_not_known_how_many_nodes_made_it() -> None:
    """CK-11: otherwise the same size is waited for or a human is asked."""
    plan = foreign_after(titan(), STRANGE, 4)
    held = run_in(plan)
    assert run_state(plan) is RunState.HELD
    assert held is not None
    assert "how many nodes that were is not known: the run allows 1 to 4. Release the run" in held.reason
    assert intents_of(plan, IntentKind.SUBMIT) == ()


@pytest.mark.parametrize(
    "one", [replace(titan(), released_at=ago(1)), titan(min=4), titan(elastic=True)], ids=["released", "fixed", "said"]
)
def test_it_goes_on_where_a_person_has_said_so(one: Run) -> None:
    assert attempt_in(foreign_after(one, STRANGE, 4), 1).nodes_wanted == 4


def test_a_checkpoint_of_more_nodes_than_the_run_allows_is_no_silent_start() -> None:
    fixed = find_fixed_size(of(max=3), [FOUR], PER_RANK)
    assert judge_size(of(max=3).spec, fixed).endswith("it was made on 4 nodes, and the run allows 1 to 3")
    assert judge_size(of().spec, fixed) == ""


# ---------------------------------------------------------------- queued ahead


AHEAD = {"restart": {"queue_ahead_s": 600.0}}


def ahead_of(saved: tuple[Checkpoint, ...], **parts: Any) -> Attempt:
    one = run(spec=spec(nodes={"min": 1, "max": 4, **parts.pop("nodes", {})}, **AHEAD))
    running = attempt(nodes_wanted=2)
    seen = tuple(shown(c.step, world_size=c.world_size, is_elastic=c.is_elastic) for c in saved)
    known = world(running, of=one, checkpoints=saved)
    return attempt_in(plan_for(known, snapshot(job(limit_at=NEAR), view=view(checkpoints=seen, **parts))), 2)


def test_what_is_queued_ahead_has_the_size_that_the_running_attempts_checkpoints_will_need() -> None:
    assert ahead_of((WHOLE,)).nodes_wanted == 4
    assert ahead_of((PER_RANK,)).nodes_wanted == 2
    assert ahead_of((), nodes={"elastic": False}).nodes_wanted == 2
    assert ahead_of((), progress=progress(is_elastic=False)).nodes_wanted == 2


def test_what_was_queued_ahead_at_another_size_is_not_needed() -> None:
    one = run(spec=spec(nodes={"min": 1, "max": 4}, **AHEAD))
    queued = replace(attempt(2, AttemptState.AHEAD, nodes_wanted=3), nodes=(), started_at=None)
    known = replace(world(over(1, AttemptEnd.TIME_LIMIT, nodes_wanted=2), of=one), aside={"gpt": (queued,)})
    known = replace(known, checkpoints={"gpt": (PER_RANK,)})
    seen = view(checkpoints=(shown(200, world_size=4, is_elastic=False),))
    plan = plan_for(known, snapshot(job(2, JobState.PENDING, nodes=(), reason="Dependency"), view=seen))
    assert attempt_in(plan, 2).end is AttemptEnd.NOT_NEEDED
    assert "it wants 3 nodes, and 2 are needed" in attempt_in(plan, 2).end_detail


# ---------------------------------------------------------------- rules by themselves


def test_a_script_that_resumes_by_itself_keeps_its_size_where_its_run_says_so() -> None:
    from tests.core.test_script_runs import OF

    fixed = replace(OF, spec=replace(OF.spec, nodes=replace(OF.spec.nodes, elastic=False)))
    assert find_fixed_size(fixed, [FOUR], None) == FixedSize(nodes=4, why="the run file says elastic = false")
    assert find_fixed_size(fixed, [], None) is None
    assert find_fixed_size(OF, [FOUR], None) is None
    assert find_fixed_size(of(elastic=False), [FOUR], None) is None


def test_a_free_size_leaves_the_run_file_as_it_is() -> None:
    one = of(multiple_of=2).spec
    assert fix_size(one, None) == fix_size(one, FixedSize(nodes=0, why="")) == one
    assert judge_size(one, None) == ""
    assert find_next_size(of(), attempt(), [WHOLE]) is None
