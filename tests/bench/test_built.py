"""The built cluster is what it says: otherwise a benchmark would measure an empty cycle."""

from __future__ import annotations

from pathlib import Path

from bench.built import NODES, NOW, RUNS, build_nodes, build_snapshot, fill_ledger
from bench.report import median, render_table, show
from supervisor.core.reconcile import reconcile
from supervisor.model import Policy
from supervisor.store import Store


def test_every_node_of_the_built_listing_is_read() -> None:
    nodes = build_nodes()
    assert len(nodes) == NODES
    assert any(node.is_drain_set for node in nodes.values())
    assert not any(node.is_idle for name, node in nodes.items() if name < "n2000")


def test_a_cycle_over_the_built_world_learns_the_progress_and_then_nothing(tmp_path: Path) -> None:
    snapshot = build_snapshot(build_nodes())
    with Store.open(tmp_path / "ledger.db", now=NOW) as store:
        fill_ledger(store)
        world = store.load_world(NOW)
        assert len(world.runs) == RUNS
        assert len(world.nodes) == NODES
        store.commit(reconcile(world, snapshot, Policy(), NOW), NOW)
        plan = reconcile(store.load_world(NOW), snapshot, Policy(), NOW)
    assert plan.facts == ()
    assert plan.intents == ()


def test_a_table_is_aligned_markdown() -> None:
    assert render_table(("a", "long"), [("wide", 1)]) == "| a    | long |\n|------|------|\n| wide | 1    |"


def test_nothing_measured_is_a_dash_not_a_zero() -> None:
    assert show(median([])) == "-"
    assert show(median([3.0, 1.0, 2.0])) == "2.0"
