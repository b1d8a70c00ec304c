"""Signs of life of a training that tells no steps: its logs grow. Pure.

Its silence is judged widely, by the longest pause that it made: such a program may print once in an hour. CPU time
proves little (a process that waits for a GPU spins), but buys time. Who sets `progress.start_max_s` has the last word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MIN_GROWTHS = 10  # so often it must have printed before its pauses say anything
FACTOR = 10.0  # times its longest pause
FLOOR_S = 1800.0
BUSY_FACTOR = 3.0  # while its processes compute
BUSY_CORES = 0.1
SAME_MOMENT_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Silence:
    """Nothing was printed for longer than is usual."""

    silent_s: float
    limit_s: float
    ranks: tuple[int, ...] = ()  # suspects
    why: str = ""
    places: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sign:
    node: str
    cpu_s: float
    cores: float  # since the look before
    state: str
    at: float


class SignsOfLife:
    """Of one start of the training. Times are the caller's clock."""

    def __init__(self) -> None:
        self._bytes: dict[str, int] = {}  # of logs, by node
        self._signs: dict[int, _Sign] = {}
        self._grown_at: float | None = None
        self._growths = 0
        self._longest_s = 0.0

    def feed(self, node: str, ranks: Sequence[Mapping[str, Any]], now: float) -> None:
        """A node's beat; items that tell no signs are passed over."""
        for entry in ranks:
            rank, size, cpu_s = entry.get("rank"), entry.get("log_bytes"), entry.get("cpu_s")
            if not isinstance(rank, int) or not isinstance(size, int) or not isinstance(cpu_s, int | float):
                continue
            self._take_size(node, size, now)
            self._take_cpu(rank, node, float(cpu_s), str(entry.get("state") or ""), now)

    def _take_size(self, node: str, size: int, now: float) -> None:
        if self._bytes.get(node) == size:
            return
        self._bytes[node] = size
        pause_s = now - self._grown_at if self._grown_at is not None else SAME_MOMENT_S
        self._grown_at = now
        if pause_s >= SAME_MOMENT_S:  # nodes that print together print once
            self._longest_s = max(self._longest_s, pause_s)
            self._growths += 1

    def _take_cpu(self, rank: int, node: str, cpu_s: float, state: str, now: float) -> None:
        before = self._signs.get(rank)
        if before is None or (cpu_s, state) != (before.cpu_s, before.state) or now - before.at > 10.0:
            elapsed = now - before.at if before is not None else 0.0
            cores = (cpu_s - before.cpu_s) / elapsed if before is not None and elapsed > 0 else 0.0
            self._signs[rank] = _Sign(node=node, cpu_s=cpu_s, cores=cores, state=state, at=now)

    def judge(self, now: float, *, most_s: float, scale: float = 1.0, patience: float = 1.0) -> Silence | None:
        """The silence that is too long, or None. `most_s`: the longest limit; `patience`: times what was learnt."""
        if self._grown_at is None or most_s <= 0:
            return None
        is_busy = any(sign.cores >= BUSY_CORES for sign in self._signs.values())
        learnt_s = max(FLOOR_S, FACTOR * self._longest_s) * (BUSY_FACTOR if is_busy else 1.0) * patience
        limit_s = (min(learnt_s, most_s) if self._growths >= MIN_GROWTHS else most_s) * scale
        silent_s = now - self._grown_at
        if silent_s <= limit_s:
            return None
        ranks, why = self._choose_suspects()
        places = {rank: sign.node for rank, sign in self._signs.items()}
        return Silence(silent_s=silent_s, limit_s=limit_s, ranks=ranks, why=why, places=places)

    def _choose_suspects(self) -> tuple[tuple[int, ...], str]:
        stopped = tuple(rank for rank, sign in sorted(self._signs.items()) if sign.state in ("T", "D"))
        if stopped and len(stopped) < len(self._signs):
            return stopped, f"the processes of ranks {', '.join(map(str, stopped))} are stopped or wait in the kernel"
        idle = tuple(rank for rank, sign in sorted(self._signs.items()) if sign.cores < BUSY_CORES)
        if idle and 2 * len(idle) < len(self._signs):
            return idle, f"ranks {', '.join(map(str, idle))} use no CPU time, the others do"
        return (), ""
