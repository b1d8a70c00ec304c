"""`supervisor nodes`: what Slurm says of each node beside what is remembered of it. Read-only."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from slurm.types import NodeRecord
from supervisor.model import DRAIN_WITHHELD, NodeEvent, NodeMemory, Verdict
from supervisor.reports.table import Table, duration, instant, one_line
from supervisor.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus:
    """One node: Slurm's record (None: Slurm did not say) and ours (None: never noticed)."""

    node: str
    record: NodeRecord | None
    memory: NodeMemory | None
    runs: tuple[str, ...]  # whose live attempt has it
    withheld: str = ""  # why it is not drained though it is broken; empty: it is, or nothing is in the way


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """One time that a node was out of service: drained, and returned."""

    node: str
    since_at: datetime
    until_at: datetime | None  # None: it still is
    spent_s: float  # an open one counts up to now
    has_clock_step: bool = False  # the end lay before the beginning, and counts as 0


def fold_repairs(events: Sequence[NodeEvent], now: datetime) -> tuple[Repair, ...]:
    """The times out of service that a node's events tell of, oldest first; `events` oldest first."""
    out_since: dict[str, datetime] = {}
    repairs = []
    for event in events:
        if event.event in _GOES_OUT:
            out_since.setdefault(event.node, event.at)
        elif event.event in _COMES_BACK and event.node in out_since:
            repairs.append(_repair(event.node, out_since.pop(event.node), event.at, now))
    repairs += [_repair(node, since, None, now) for node, since in out_since.items()]
    return tuple(repairs)


def _repair(node: str, since_at: datetime, until_at: datetime | None, now: datetime) -> Repair:
    spent_s = ((until_at or now) - since_at).total_seconds()
    return Repair(
        node=node, since_at=since_at, until_at=until_at, spent_s=max(0.0, spent_s), has_clock_step=spent_s < 0
    )


_GOES_OUT = frozenset({"node.drained", "drain.found"})
_COMES_BACK = frozenset({"drain.lifted_by_other", "node.trusted_again", "node.judged_healthy"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """All nodes, and why Slurm's side is missing if it is."""

    nodes: tuple[NodeStatus, ...]
    events: tuple[NodeEvent, ...] = ()
    repairs: tuple[Repair, ...] = ()
    slurm_silence: str = ""


def read_nodes(
    store: Store,
    records: Sequence[NodeRecord],
    now: datetime,
    *,
    node: str | None = None,
    slurm_silence: str = "",
    events: int = 20,
) -> Nodes:
    """What the ledger and Slurm's `records` know of all nodes, or of one; with its newest events and repairs."""
    with store.reading():
        merged = merge_nodes(records, store.load_nodes(), _read_use(store))
        past = store.load_node_events(node, _PAST)
        merged = tuple(replace(status, withheld=find_withheld(status, past)) for status in merged)
        return Nodes(
            nodes=tuple(status for status in merged if node in {None, status.node}),
            events=past[-events:],
            repairs=fold_repairs(past, now),
            slurm_silence=slurm_silence,
        )


_PAST = 2000  # events that repairs are told from


def find_withheld(status: NodeStatus, events: Sequence[NodeEvent]) -> str:
    """Why a broken node is not drained, as its events tell; empty where it is. `events` oldest first."""
    memory, record = status.memory, status.record
    if memory is None or memory.verdict is not Verdict.BROKEN or memory.is_drained_by_us:
        return ""
    if record is not None and record.is_withdrawn:
        return ""
    found = (e for e in events if e.node == status.node and e.event == DRAIN_WITHHELD and e.at >= memory.since_at)
    return next((event.detail for event in list(found)[::-1]), "")


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
        "repairs": [
            {
                "node": repair.node,
                "since_at": repair.since_at,
                "until_at": repair.until_at,
                "spent_s": repair.spent_s,
                "open": repair.until_at is None,
                "clock_stepped": repair.has_clock_step,
            }
            for repair in report.repairs
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
        "not_drained": status.withheld or None,  # why, of a broken node
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
    drained = " (not drained)" if status.withheld else drained
    reason = memory.reason if memory and memory.reason else record.reason if record else ""
    why = f"; not drained: {status.withheld}" if status.withheld else ""
    return (
        status.node,
        one_line(record.raw_state, 40) if record else "?",
        f"{memory.verdict if memory else 'healthy'}{drained}",
        ",".join(status.runs) or "-",
        instant(memory.checked_at) if memory else "-",
        f"{one_line(reason)}{why}",
    )


def repairs_table(report: Nodes) -> Table:
    """The times out of service, oldest first."""
    return Table(
        columns=("out of service (UTC)", "node", "for", "until (UTC)"),
        rows=tuple(
            (
                instant(repair.since_at),
                repair.node,
                duration(repair.spent_s),
                (instant(repair.until_at) if repair.until_at else "still out")
                + (" (the clock was set back)" if repair.has_clock_step else ""),
            )
            for repair in report.repairs
        ),
        numeric=frozenset({"for"}),
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
