"""Output of `scontrol -o show node` to records. Pure, and total: a row that can't be read is reported and dropped.

A row is found by its keys, not split into fields: some values hold blanks (OS, Reason). Keys come in Slurm's order in
every release, so each is looked for behind the one before; that makes one pass over a row.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache

from slurm.states import parse_node_state
from slurm.types import NodeListing, NodeRecord, Unreadable
from slurm.values import is_number, unreadable_row

_KEYS = (  # in the order printed
    "CPUTot",
    "Gres",
    "NodeAddr",
    "NodeHostName",
    "Port",
    "Version",
    "RealMemory",
    "State",
    "Partitions",
    "BootTime",
)
_FIELD_AFTER_REASON = r" (?:Comment|Extra|InstanceId|InstanceType|ReservationName|ResumeAfterTime)="
_AFTER_REASON = re.compile(_FIELD_AFTER_REASON)
_DRAINED_BY = re.compile(rf" \[([^\s@\[\]]+)@([^\s\[\]]+)\](?=\s*$|\s\s|{_FIELD_AFTER_REASON})")
_START = "NodeName="


def parse_nodes(text: str) -> NodeListing:
    """Nodes of `scontrol -o show node`. A node that is listed twice counts once; the second row is reported."""
    nodes: dict[str, NodeRecord] = {}
    unreadable: list[Unreadable] = []
    for row in _rows(text):
        try:
            node = _node(row)
        except ValueError as error:
            unreadable.append(unreadable_row(row, error))
            continue
        if node.name in nodes:
            unreadable.append(unreadable_row(row, f"node {node.name} is listed twice"))
        else:
            nodes[node.name] = node
    return NodeListing(nodes=tuple(nodes.values()), unreadable=tuple(unreadable))


def _rows(text: str) -> Iterator[str]:
    """One node each; a line that does not start a node goes on with the one before (reasons may have line breaks)."""
    parts: list[str] = []
    for line in text.split("\n"):
        if line.startswith(_START) and parts:
            yield "  ".join(parts)
            parts = [line]
        elif line or parts:
            parts.append(line)
    row = "  ".join(parts)
    if row.strip():
        yield row


def _node(row: str) -> NodeRecord:
    head, _, tail = row.partition(" Reason=")
    name = head[len(_START) :].partition(" ")[0] if head.startswith(_START) else ""
    cpus, gres, address, host_name, port, version, memory_mb, state, partitions, boot_at = _find_values(head)
    if not name or not state:
        raise ValueError("no NodeName= or no State=")
    base, flags = parse_node_state(state)
    reason, reason_user, reason_at = _parse_reason(tail) if tail else ("", "", "")
    return NodeRecord(
        name=name,
        base=base,
        flags=flags,
        raw_state=state,
        address=_text(address),
        host_name=_text(host_name),
        port=int(port) if is_number(port) else None,
        partitions=_split_names(partitions),
        reason=reason,
        reason_user=reason_user,
        reason_at=reason_at,
        cpus=int(cpus) if is_number(cpus) else 0,
        memory_mb=int(memory_mb) if is_number(memory_mb) else 0,
        gres=_text(gres),
        boot_at=_text(boot_at),
        version=_text(version),
    )


def _find_values(head: str) -> list[str]:
    """The values of `_KEYS`, none of which holds a blank; empty where there is none."""
    values: list[str] = []
    reached = 0
    for marker, length in _MARKERS:
        at = head.find(marker, reached)
        if at < 0 and reached:  # not there, or in another order than in the releases known
            at = head.find(marker)
        if at < 0:
            values.append("")
            continue
        start = at + length
        reached = head.find(" ", start)
        if reached < 0:
            reached = len(head)
        values.append(head[start:reached])
    return values


_MARKERS = tuple((f" {key}=", len(key) + 2) for key in _KEYS)


@lru_cache(maxsize=1024)
def _split_names(text: str) -> tuple[str, ...]:
    return tuple(name for name in _text(text).split(",") if name)


def _text(value: str) -> str:
    return "" if value in {"(null)", "N/A"} else value


def _parse_reason(tail: str) -> tuple[str, str, str]:
    """(reason, user, time) of what follows `Reason=`.

    Slurm puts ` [user@time]` behind the first line of a reason; its further lines follow after eight blanks, then other
    fields. So of several such brackets the one that ends a line is Slurm's, and another is part of the text.
    """
    by = _DRAINED_BY.search(tail)
    if by is None:
        return " ".join(tail.split()), "", ""
    following = _AFTER_REASON.search(tail, by.end())
    end = following.start() if following else len(tail)
    return " ".join((tail[: by.start()] + " " + tail[by.end() : end]).split()), by[1], by[2]
