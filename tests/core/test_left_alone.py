"""What nobody heals or says by itself: nodes left out without a drain, directories that can't be read, forged proof."""

from __future__ import annotations

import pytest

from slurm.types import NodeBase
from supervisor.core.checkpoints import choose_prunable
from supervisor.model import CheckpointState, DrainPolicy, IntentKind, NodeMemory, Policy, Stale, Verdict
from tests.core.builders import (
    ago,
    attempt,
    broken,
    checkpoint,
    cluster,
    intents_of,
    job,
    node,
    node_in,
    plan_for,
    run_in,
    snapshot,
    spec,
    world,
)

POLICY = Policy(drain=DrainPolicy(is_enabled=False, window_s=3600))


def verdict_of(memory: NodeMemory, *flags: str) -> Verdict:
    plan = plan_for(world(nodes=(memory,)), snapshot(nodes=cluster(4, node("n1", NodeBase.IDLE, *flags))), POLICY)
    after = node_in(plan, "n1") or memory
    return after.verdict


def test_a_broken_node_that_nobody_drained_is_trusted_again_after_a_window() -> None:
    assert verdict_of(broken("n1", since_at=ago(3601))) is Verdict.HEALTHY


@pytest.mark.parametrize(
    ("memory", "flags"),
    [
        (broken("n1", since_at=ago(60)), ()),
        (broken("n1", since_at=ago(9999)), ("NOT_RESPONDING",)),
        (broken("n1", since_at=ago(9999), failing=("disk",)), ()),
    ],
    ids=["too soon", "does not respond", "its last sweep failed"],
)
def test_a_broken_node_stays_left_out_otherwise(memory: NodeMemory, flags: tuple[str, ...]) -> None:
    assert verdict_of(memory, *flags) is Verdict.BROKEN


def test_a_run_directory_that_can_t_be_read_for_minutes_is_told_once_and_is_the_reason() -> None:
    blind = Stale(why="no answer for 200 s", since_at=ago(200))
    plan = plan_for(world(attempt(nodes=("n1",))), snapshot(job(1, nodes=("n1",)), runs={"gpt": blind}))
    changed = run_in(plan)
    assert changed is not None
    assert "no answer for 200 s" in changed.reason
    assert len(intents_of(plan, IntentKind.NOTIFY)) == 1


def test_a_short_hiccup_of_the_file_system_is_not_told() -> None:
    blind = Stale(why="no answer for 2 s", since_at=ago(2))
    plan = plan_for(world(attempt(nodes=("n1",))), snapshot(job(1, nodes=("n1",)), runs={"gpt": blind}))
    assert intents_of(plan, IntentKind.NOTIFY) == ()


def test_what_the_head_node_has_read_back_is_kept_below_newer_ones_that_only_the_job_vouches_for() -> None:
    proven = checkpoint(10, verified_by="head", state=CheckpointState.VERIFIED)
    claimed = [checkpoint(s, verified_by="nodes", state=CheckpointState.VERIFIED) for s in (20, 30, 40, 50)]
    pruned = choose_prunable([proven, *claimed], spec().checkpoint)
    assert [c.step for c in pruned] == [20]
