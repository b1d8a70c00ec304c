"""A store that stands before fresh ranks look for it, served by a process that has torch imported.

Rank 0 would open it only after its imports, and a rank that looks for it sooner tries again after half a second.
torchrun's agent has torch at hand and so has its store ready; this node's agent has not, and keeps a process for it.
"""

from __future__ import annotations

from collections.abc import Mapping

from trainer.agent.zygote import Zygote

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

    def serve(self, port: int) -> int | None:
        """Serve a store at this port of all addresses; the process that does, or None where that can't be.

        With None, whatever was begun is below this process still, and to be killed.
        """
        self._listen(0.0)
        if self._zygote is None or not self._zygote.is_ready:
            return None
        self._zygote.fork((), port)
        return self._listen(_ANSWER_LIMIT_S)

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
                if message["type"] == "started":
                    return int(message["store"]) if message["store"] else None
                if message["type"] in ("gone", "refused", "failed"):
                    self._is_refused = message["type"] == "refused"
                    self.close()
                    return None
            if not messages:
                if wait_s:
                    self.close()
                return None
        return None
