"""`supervisor nodes`: what Slurm says of each node beside what is remembered of it. Read-only."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slurm.types import NodeRecord
from supervisor.model import NodeEvent, NodeMemory
from supervisor.reports.table import Table, instant, one_line
from supervisor.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus:
    """One node: Slurm's record (None: Slurm did not say) and ours (None: never noticed)."""

    node: str
    record: NodeRecord | None
    memory: NodeMemory | None
    runs: tuple[str, ...]  # whose live attempt has it


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """All nodes, and why Slurm's side is missing if it is."""

    nodes: tuple[NodeStatus, ...]
    events: tuple[NodeEvent, ...] = ()
    slurm_silence: str = ""


def read_nodes(
    store: Store, records: Sequence[NodeRecord], *, node: str | None = None, slurm_silence: str = "", events: int = 20
) -> Nodes:
    """What the ledger and Slurm's `records` know of all nodes, or of one; with its newest events."""
    with store.reading():
        merged = merge_nodes(records, store.load_nodes(), _read_use(store))
        return Nodes(
            nodes=tuple(status for status in merged if node in {None, status.node}),
            events=store.load_node_events(node, events),
            slurm_silence=slurm_silence,
        )


def _read_use(store: Store) -> dict[str, tuple[str, ...]]:
    """The runs whose live attempt has a node, by node: runs that need a part of a node may share it."""
    use: dict[str, tuple[str, ...]] = {}
    for run in store.load_runs(all=False):
        for attempt in store.load_attempts(run.name)[-1:]:
            for node in () if attempt.is_over else attempt.nodes:
                use[node] = (*use.get(node, ()), run.name)
    return use


def merge_nodes(
    records: Sequence[NodeRecord], memories: Sequence[NodeMemory], use: Mapping[str, tuple[str, ...]]
) -> tuple[NodeStatus, ...]:
    """One status per node that anybody names, by name. `use`: the runs that a node is running."""
    by_record = {record.name: record for record in records}
    by_memory = {memory.node: memory for memory in memories}
    return tuple(
        NodeStatus(
            node=name,
            record=by_record.get(name),
            memory=by_memory.get(name),
            runs=use.get(name, ()),
        )
        for name in sorted({*by_record, *by_memory, *use}, key=natural_key)
    )


def natural_key(name: str) -> tuple[tuple[int, str], ...]:
    """Orders n2 before n10."""
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"([0-9]+)", name))


# ---------------------------------------------------------------- as JSON


def nodes_as_json(report: Nodes) -> dict[str, Any]:
    """The report of `supervisor nodes --json`."""
    return {
        "slurm": {"answering": not report.slurm_silence, "why": report.slurm_silence or None},
        "nodes": [_as_json(status) for status in report.nodes],
        "events": [
            {
                "node": event.node,
                "at": event.at,
                "event": event.event,
                "detail": event.detail,
                "run": event.run or None,
                "attempt": event.attempt,
            }
            for event in report.events
        ],
    }


def _as_json(status: NodeStatus) -> dict[str, Any]:
    record, memory = status.record, status.memory
    return {
        "node": status.node,
        "slurm_state": record.raw_state if record else None,
        "availability": str(record.availability) if record else None,
        "slurm_reason": record.reason or None if record else None,
        "verdict": str(memory.verdict) if memory else "healthy",
        "reason": memory.reason or None if memory else None,
        "since_at": memory.since_at if memory else None,
        "failing": list(memory.failing) if memory else [],
        "checked_at": memory.checked_at if memory else None,
        "drained_by_us": memory.is_drained_by_us if memory else False,
        "drain_reason": memory.drain_reason or None if memory else None,
        "drained_at": memory.drained_at if memory else None,
        "runs": list(status.runs),
    }


# ---------------------------------------------------------------- for people


def nodes_table(report: Nodes) -> Table:
    """One line per node."""
    return Table(
        columns=("node", "slurm", "verdict", "runs", "checked (UTC)", "reason"),
        rows=tuple(_row(status) for status in report.nodes),
    )


def _row(status: NodeStatus) -> tuple[str, ...]:
    record, memory = status.record, status.memory
    drained = " (drained by us)" if memory and memory.is_drained_by_us else ""
    return (
        status.node,
        one_line(record.raw_state, 40) if record else "?",
        f"{memory.verdict if memory else 'healthy'}{drained}",
        ",".join(status.runs) or "-",
        instant(memory.checked_at) if memory else "-",
        one_line(memory.reason if memory and memory.reason else record.reason if record else ""),
    )


def events_table(report: Nodes) -> Table:
    """The newest events, newest last."""
    return Table(
        columns=("at (UTC)", "node", "event", "run", "detail"),
        rows=tuple(
            (instant(event.at), event.node, event.event, event.run or "-", one_line(event.detail))
            for event in report.events
        ),
    )
