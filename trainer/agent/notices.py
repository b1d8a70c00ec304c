"""What signals mean to a node's agent: put where its other orders come from, in the order of their arrival."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable

from trainer.beats import Message


def install_signals(put: Callable[[Message], None], terminated: Callable[[int], None]) -> None:
    """Turn signals into orders. `put` and `terminated` are called from handlers, the latter with SIGTERM or SIGINT."""
    counts = itertools.count(-1, -1)  # requests that are sent to this node alone: not among the launcher's numbers

    def stop(number: int, _frame: object) -> None:
        terminated(number)
        put({"type": "kill", "exit_code": 128 + number, "reason": f"signal {signal.Signals(number).name}"})

    def forward(number: int, _frame: object) -> None:
        put({"type": "signal", "number": number, "count": next(counts)})

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGUSR1, forward)
    signal.signal(signal.SIGUSR2, forward)
    signal.signal(signal.SIGCHLD, lambda _number, _frame: put({"type": "tick"}))  # a look at the ranks
