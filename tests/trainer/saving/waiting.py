"""Waits for a condition with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable

DEADLINE_S = 30.0


def await_that(condition: Callable[[], object], within_s: float = DEADLINE_S) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "in vain"
        time.sleep(0.005)
