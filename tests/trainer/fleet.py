"""Ranks as threads: the same work on all of them, with a gather that waits for all, as a process group's does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")
Gather = Callable[[Any], list[Any]]


def together(world: int, work: Callable[[int, Gather], T], *, within_s: float = 60.0) -> list[T]:
    """What `work(rank, gather)` returns on each rank; raises the first rank's error once all have ended."""
    told: list[Any] = [None] * world
    met = threading.Barrier(world)

    def gather_as(rank: int) -> Gather:
        def gather(value: Any) -> list[Any]:
            told[rank] = value
            met.wait(within_s)
            seen = list(told)
            met.wait(within_s)
            return seen

        return gather

    with ThreadPoolExecutor(world) as pool:
        futures = [pool.submit(work, rank, gather_as(rank)) for rank in range(world)]
    return [future.result() for future in futures]
