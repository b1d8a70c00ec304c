"""Which broken nodes are drained: bounded, owned, never over another's drain. Pure.

`judge_drain` is an ordered table: the first row that matches says why a node is not drained; none matching, it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from slurm.types import NodeRecord
from supervisor.model import Intent, IntentState, NodeMemory, Policy

REASON_CHARS = 200  # slurmdbd keeps 255 bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One broken node and all that the decision needs."""

    memory: NodeMemory
    record: NodeRecord | None
    policy: Policy
    is_paused: bool
    used: int  # drains of the window, done or meant
    limit: int
    waiting: int  # broken nodes that wait for a drain, this one included
    refusals: tuple[Intent, ...]  # refused drains of this node since it is broken


def drain_limit(policy: Policy, cluster_nodes: int) -> int:
    """How many drains the window allows: the smaller of max_nodes and max_fraction, rounded down, at least one."""
    return min(policy.drain.max_nodes, max(1, math.floor(policy.drain.max_fraction * cluster_nodes)))


_KEEP_ROWS: tuple[tuple[Callable[[Candidate], bool], str], ...] = (
    (lambda c: c.record is None, "Slurm does not know this node"),
    (lambda c: c.memory.is_drained_by_us, "drained by us already"),
    (
        lambda c: c.record is not None and c.record.is_withdrawn,
        "drained by someone else; their reason stands",
    ),
    (lambda c: not c.policy.drain.is_enabled, "draining is switched off; the node is only excluded from our jobs"),
    (lambda c: c.policy.is_observe_only, "observe only"),
    (lambda c: c.is_paused, "paused"),
    (lambda c: bool(c.refusals), "Slurm refused the drain; the node is only excluded from our jobs"),
    (lambda c: c.waiting > c.limit, "many nodes look bad at once: the check or the fabric is suspected"),
    (lambda c: c.used >= c.limit, "the drain budget of the window is used up"),
)


def judge_drain(candidate: Candidate) -> str | None:
    """Why the node is not drained, or None: drain it."""
    return next((why for matches, why in _KEEP_ROWS if matches(candidate)), None)


def find_refusals(settled: tuple[Intent, ...], memory: NodeMemory) -> tuple[Intent, ...]:
    """Refused drains of this node since it is broken."""
    return tuple(
        i
        for i in settled
        if i.node == memory.node
        and i.state is IntentState.REFUSED
        and i.settled_at is not None
        and i.settled_at >= memory.since_at
    )


def render_drain_reason(tag: str, memory: NodeMemory, now: datetime) -> str:
    """`supervisor: <evidence> [2026-11-30T04:00:00Z]`: one line of printable ASCII, owner tag first."""
    stamp = now.strftime(" [%Y-%m-%dT%H:%M:%SZ]")
    text = f"{tag}: {memory.reason}".encode("ascii", "replace").decode()
    clean = "".join(c if c.isprintable() else " " for c in text)
    return clean[: REASON_CHARS - len(stamp)] + stamp
