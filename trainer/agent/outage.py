"""When a node stops its ranks because it has lost the launcher, and the word that it leaves for the others.

The fence: nobody may write in the place of ranks that still run. The launcher counts a silent node as lost no sooner
than `suspect_after_s` after the last beat that it heard, and then only if nothing of the node answers either. Whatever
its host has acknowledged it has heard by then, so its time begins no earlier than ours. From its decision to the first
write of a rank that is started instead, at least `RESTART_FLOOR_S` pass: the ranks of the others are stopped, nodes are
checked, ranks start and restore. So a node that reaches nobody stops its ranks within

    suspect_after_s + RESTART_FLOOR_S

of the last thing that was acknowledged, less `STOP_S`, the time that noticing and stopping take. A launcher that is
merely stopped (its host acknowledges) can start nobody in our place; only the service can, and it takes 15 s at least.
The claims of the trainer (each start of a training claims its attempt before it publishes) are the second line.
"""

from __future__ import annotations

import time
from pathlib import Path

from trainer.agent.client import BeatClient, Patience
from trainer.contract import AttemptSpec, CutOff

RESTART_FLOOR_S = 1.0  # a launcher is no faster from its decision to another rank's first write
STOP_S = 0.5  # until this node notices, and its ranks are gone
SHORTEST_S = 1.0  # a busy machine needs that much
LAUNCHER_SILENT_S = 10.0  # stopped for a while is no loss; below the 15 s in which the service replaces a batch host
RECONNECT_S = 60.0  # a cable that comes back by then yields a node that can be used again
REFUSED_S = 3.0  # its host lives and nobody listens there: the launcher is gone for good
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def derive_patience(spec: AttemptSpec) -> Patience:
    """How long a node of this attempt trains on without its launcher."""
    earliest_s = min(spec.suspect_after_s, spec.liveness_timeout_s)
    unreachable_s = max(earliest_s + RESTART_FLOOR_S - STOP_S, SHORTEST_S)
    return Patience(unreachable_s=unreachable_s, silent_s=max(LAUNCHER_SILENT_S, unreachable_s))


def read_boot_id() -> str:
    """This boot of this host; empty where it cannot be read."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""


def cut_off(spec: AttemptSpec, node: str, since_s: float) -> CutOff:
    """The word of a node that lives, has not heard the launcher for `since_s`, and has stopped its ranks."""
    return CutOff(attempt=spec.attempt, node=node, boot_id=read_boot_id(), since_s=round(since_s, 3), time=time.time())


class Outage:
    """Whether this node is without its launcher, and for how long it was."""

    def __init__(self, client: BeatClient) -> None:
        self._client = client
        self._lost_at: float | None = None
        self._cut_s = 0.0

    def is_on(self) -> bool:
        """True while the launcher is lost."""
        return self._lost_at is not None

    def begin(self) -> float:
        """The launcher is lost; for how long it has not been heard."""
        self._lost_at = time.monotonic()
        self._cut_s = self._client.silence_s()
        return self._cut_s

    def end(self) -> float:
        """The launcher is back; for how long it was away."""
        if self._lost_at is not None:
            self._cut_s += time.monotonic() - self._lost_at
        self._lost_at = None
        return self._cut_s

    def forget(self) -> None:
        """What was is over: the launcher uses this node again."""
        self._cut_s = 0.0

    def cut_s(self) -> float:
        """For how long the launcher is or was away, if this node was used no more since; else 0."""
        if self._client.is_lost():
            return self._client.silence_s()
        return self._cut_s

    def is_final(self) -> bool:
        """True when nobody will come back."""
        if self._lost_at is None:
            return False
        return time.monotonic() - self._lost_at > RECONNECT_S or self._client.refused_s() > REFUSED_S
