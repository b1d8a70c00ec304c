"""A store that stands before fresh ranks look for it, served by a process that has torch imported.

Rank 0 would open it only after its imports, and a rank that looks for it sooner tries again after half a second.
torchrun's agent has torch at hand and so has its store ready; this node's agent has not, and keeps a process for it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from trainer.agent.zygote import Zygote
from trainer.descendants import kill_descendants

_ANSWER_LIMIT_S = 1.0  # it takes some milliseconds
_OWN = {"WARM_IMPORTS": "", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}  # no more than a store needs


class PreparedStore:
    """One prepared interpreter that serves stores. Where there can't be one, rank 0 serves, and nobody need know."""

    def __init__(self) -> None:
        self._zygote: Zygote | None = None
        self._is_refused = False

    def prepare(self, python: str, environment: Mapping[str, str]) -> None:
        """Begin to import torch, unless that is done or under way. Returns at once."""
        self._listen(0.0)
        if self._zygote is not None or self._is_refused:
            return
        try:
            self._zygote = Zygote(python, {**environment, **_OWN})
        except OSError:
            self._is_refused = True

    def serve(self, port: int, kept: Collection[int]) -> int | None:
        """Serve a store at this port of all addresses; the process that does, or None where that can't be.

        `kept`: children of this process that go on when one that came too late has to be found and killed.
        """
        self._listen(0.0)
        if self._zygote is None or not self._zygote.is_ready:
            return None
        self._zygote.fork((), port)
        store = self._listen(_ANSWER_LIMIT_S)
        if store is None:  # it would be in the way of rank 0
            kill_descendants(kept={*kept, *self.pids()})
        return store

    def pids(self) -> frozenset[int]:
        """What outlives the ranks."""
        return frozenset() if self._zygote is None else frozenset({self._zygote.pid})

    def close(self) -> None:
        """End the prepared interpreter; a store that it began goes on."""
        if self._zygote is not None:
            self._zygote.end()
            self._zygote = None

    def _listen(self, wait_s: float) -> int | None:
        """The store that it tells of within this time, where an answer is due; it ends when none comes."""
        while self._zygote is not None:
            messages = self._zygote.read(wait_s)
            for message in messages:
                if message["type"] == "started" and message["store"]:
                    return int(message["store"])
                if message["type"] in ("started", "refused"):  # nothing started: this torch's store is another one
                    self._is_refused = True
                    self.close()
                    return None
                if message["type"] in ("gone", "failed"):
                    self.close()
                    return None
            if not messages:
                if wait_s:
                    self.close()
                return None
        return None
