"""Why a job waits: Slurm's reason word as one of the few things that a caller can do about it. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from slurm.hostlist import HostlistUnreadable, expand_nodes


class PendingKind(StrEnum):
    """What becomes of a waiting job if nobody does anything."""

    WAITS = "waits"  # it starts when its turn comes
    NODES = "nodes"  # the nodes it needs are down, drained or reserved: fewer nodes, or others, may do
    HELD = "held"  # it waits until someone releases it; after a failed launch Slurm holds it by itself
    BLOCKED = "blocked"  # it never starts as it was submitted


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingReason:
    """A kind, and the nodes that Slurm names as unavailable."""

    kind: PendingKind
    nodes: tuple[str, ...] = ()


# First hit wins. Words are compared without blanks, underscores and case: squeue prints some of them both ways.
_RULES: tuple[tuple[re.Pattern[str], PendingKind], ...] = (
    (re.compile(r"held|jobholdmaxrequeue|reservationdeleted"), PendingKind.HELD),
    (re.compile(r"reqnodenotavail|unavailablenodes|nodedown|nodesrequired"), PendingKind.NODES),
    # Limits on the size of one job do not pass; limits on how much runs at a time do.
    (re.compile(r"neversatisfied|perjoblimit|perjob$|pernode$|qosmin|maxmemperlimit"), PendingKind.BLOCKED),
    (re.compile(r"badconstraints|invalid|notallowed|deadline|partition(node|time)limit"), PendingKind.BLOCKED),
)

_UNAVAILABLE = re.compile(r"UnavailableNodes:\s*([^\s()]+)")


def classify_pending(reason: str) -> PendingReason:
    """What a pending job's reason means; a word that is not known means that it waits."""
    plain = _plain(reason)
    kind = next((kind for pattern, kind in _RULES if pattern.search(plain)), PendingKind.WAITS)
    return PendingReason(kind=kind, nodes=_named_nodes(reason) if kind is PendingKind.NODES else ())


def is_launch_failure(reason: str) -> bool:
    """True when Slurm could not launch the job, and has requeued it on hold by itself."""
    return "launchfailedrequeuedheld" in _plain(reason)


def explain_start_failure(reason: str) -> str:
    """What to look at when a node could not start a batch script, as an ended job's reason says; empty: it did."""
    if _plain(reason) != "joblaunchfailure":
        return ""
    return ": the node could not start it; is there the folder of its log, and its working directory?"


def _plain(reason: str) -> str:
    return re.sub(r"[\s_]", "", reason).lower()


def _named_nodes(reason: str) -> tuple[str, ...]:
    found = _UNAVAILABLE.search(reason)
    try:
        return expand_nodes(found[1]) if found else ()
    except HostlistUnreadable:
        return ()
