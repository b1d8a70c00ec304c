"""How the end of a start is told, and how long the other ranks of a node have after the first one's. Pure."""

from __future__ import annotations

from trainer import contract
from trainer.agent.words import is_port_taken, is_victim
from trainer.agent.workers import WorkersEnd
from trainer.beats import Message

PEER_GRACE_S = 5.0  # for the other ranks of a node, one of which ended on purpose: they are about to do the same
BROKEN_GRACE_S = 0.3  # ... one of which failed: they wait for it in vain
# What a training says on purpose, on every rank.
_ON_PURPOSE = frozenset(
    {
        contract.EXIT_RESUBMIT,
        contract.EXIT_CHECKPOINT_REJECTED,
        contract.EXIT_DIVERGED,
        contract.EXIT_DO_NOT_RESTART,
    }
)


def grace_s(code: int) -> float:
    """How long the other ranks of a node may still take to end by themselves, when one ended with this code."""
    return PEER_GRACE_S if code in _ON_PURPOSE else BROKEN_GRACE_S


def describe_failure(launch: int, end: WorkersEnd) -> Message:
    """The first failure of a start, told before anything is done about it."""
    return {
        "type": "failed",
        "launch": launch,
        "rank": end.rank,
        "local_rank": end.local_rank,
        "exit_code": end.exit_code,
        "reason": end.reason,
    }


def describe_end(launch: int, code: int, reason: str, end: WorkersEnd | None, words: str) -> Message:
    """The end of a start on one node. `end`: of its ranks, None when they were ended; `words`: the last ones."""
    return {
        "type": "ended",
        "launch": launch,
        "exit_code": code,
        "reason": reason,
        "victim": is_victim(words),
        "rank": end.rank if end is not None else None,
        "port_taken": (end is not None and end.is_port_taken) or is_port_taken(words),
    }
