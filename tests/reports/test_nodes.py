"""`supervisor nodes`: a broken node says why it is not drained."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from slurm.types import NodeBase, NodeRecord
from supervisor.model import DRAIN_WITHHELD, NodeEvent, NodeMemory, Verdict
from supervisor.reports.nodes import Nodes, NodeStatus, find_withheld, nodes_as_json, nodes_table

NOW = datetime(2026, 11, 30, 3, 0, tzinfo=UTC)
BROKEN = NodeStatus(
    node="n3",
    record=NodeRecord(name="n3", base=NodeBase.IDLE, raw_state="IDLE"),
    memory=NodeMemory(node="n3", verdict=Verdict.BROKEN, reason="n3: disk full", since_at=NOW),
    runs=(),
)
WITHHELD = NodeEvent(node="n3", at=NOW, event=DRAIN_WITHHELD, detail="the drain budget of the window is used up")


def test_a_broken_node_that_is_not_drained_says_why() -> None:
    status = replace(BROKEN, withheld=find_withheld(BROKEN, [WITHHELD]))
    ((_, _, verdict, _, _, reason),) = nodes_table(Nodes(nodes=(status,))).rows
    assert verdict == "broken (not drained)"
    assert reason == "n3: disk full; not drained: the drain budget of the window is used up"
    assert nodes_as_json(Nodes(nodes=(status,)))["nodes"][0]["not_drained"] == WITHHELD.detail


def test_what_held_a_drain_up_is_past_once_the_node_is_drained_or_was_broken_anew() -> None:
    assert BROKEN.memory is not None
    drained = replace(BROKEN, memory=replace(BROKEN.memory, is_drained_by_us=True))
    anew = replace(BROKEN, memory=replace(BROKEN.memory, since_at=NOW + timedelta(seconds=1)))
    assert [find_withheld(status, [WITHHELD]) for status in (drained, anew)] == ["", ""]
