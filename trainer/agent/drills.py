"""Failures made on purpose on one node, as a drill asks for them."""

from __future__ import annotations

import contextlib
import math
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass

from trainer.beats import Message

KINDS = ("process", "hang", "network", "node")


@dataclass(frozen=True, slots=True, kw_only=True)
class Drill:
    """One failure to be made: `for_s` is how long a network is cut, `rank` whose process is meant."""

    id: str
    kind: str
    rank: int | None = None  # None: this node's first
    for_s: float = math.inf


def parse_drill(message: Message) -> Drill | None:
    """The drill that an order asks for, or None when it asks for none that we know."""
    identity, kind, rank, for_s = (message.get(name) for name in ("id", "kind", "rank", "for_s"))
    if not isinstance(identity, str) or kind not in KINDS:
        return None
    is_bounded = isinstance(for_s, int | float) and for_s > 0
    return Drill(
        id=identity,
        kind=str(kind),
        rank=rank if type(rank) is int else None,
        for_s=float(for_s) if is_bounded and for_s is not None else math.inf,
    )


def hit_rank(drill: Drill, pids: Mapping[int, int]) -> str:
    """Kill or stop one rank of this node, and say which; empty when there is none to be hit."""
    rank = drill.rank if drill.rank is not None else min(pids, default=None)
    pid = None if rank is None else pids.get(rank)
    if pid is None:
        return ""
    number = signal.SIGKILL if drill.kind == "process" else signal.SIGSTOP
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
        return f"{number.name} to rank {rank}, process {pid}"
    return ""
