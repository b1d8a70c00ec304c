"""Whether the daemon is there, as whoever asked it tells a report."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Liveness:
    """What the control socket says of the daemon."""

    is_there: bool  # something takes connections
    is_answering: bool
    why: str = ""
