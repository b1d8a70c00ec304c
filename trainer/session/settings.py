"""What a Checkpointer is given, held against what makes sense before anything is begun."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

RESERVED_EXTRA = "loss watch"  # the Checkpointer's own
WHEN_BUSY = ("skip", "wait")
ON_FAILURE = ("go_on", "raise")
STAGING = ("auto", "copy", "protect")


def check_settings(
    *,
    every_s: float | None,
    every_steps: int,
    when_busy: str,
    on_failure: str,
    staging: str,
    max_failures: int | None,
    keep_last: int,
    final_wait_s: float,
    extra: Iterable[str],
) -> None:
    """Raises ValueError for the first setting that makes no sense, with its name and what is allowed."""
    if every_s is not None and not (math.isfinite(every_s) and every_s >= 0):
        raise ValueError(f"every_s must be 0 (never by time) or more seconds, not {every_s}")
    if every_steps < 0:
        raise ValueError(f"every_steps must be 0 (never by steps) or more, not {every_steps}")
    _check_word("when_busy", when_busy, WHEN_BUSY)
    _check_word("on_failure", on_failure, ON_FAILURE)
    _check_word("staging", staging, STAGING)
    if max_failures is not None and max_failures < 0:
        raise ValueError(f"max_failures must be 0 (never give up) or more, not {max_failures}")
    if keep_last < 1:
        raise ValueError(f"keep_last must be at least 1, not {keep_last}; two are kept in any case")
    if not final_wait_s > 0:
        raise ValueError(f"final_wait_s must be above 0, not {final_wait_s}")
    if RESERVED_EXTRA in extra:
        raise ValueError(f'extra: the name "{RESERVED_EXTRA}" is taken by the Checkpointer itself; choose another')


def _check_word(name: str, given: str, allowed: Collection[str]) -> None:
    if given not in allowed:
        raise ValueError(f'{name} must be one of {", ".join(allowed)}, not "{given}"')
