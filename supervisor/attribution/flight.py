"""What the Flight Recorder dumps of a start say, as signs beside those of logs and exit codes. Pure.

That ranks called different collectives is a fault of the program, whatever broke afterwards; it may come with the data,
so a restart isn't ruled out (restarts without progress are counted anyway). A rank that is missing from a collective is
told with its node, and that is no proof against the node: a program that sleeps looks the same. What the dumps only
guess stands behind what logs say of a time-out.
"""

from __future__ import annotations

from supervisor.attribution.signs import Sign, Weight
from supervisor.observed import FlightView

_KINDS = {
    "mismatch": "desync",
    "order": "desync",
    "circle": "desync",
    "absent": "hang",
    "blocked": "hang",
}
_BEYOND = 10_000_000  # position behind every line of a log


def read_flight(view: FlightView | None) -> tuple[Sign, ...]:
    """The sign in a finding of the dumps; none when no rank waits in them, or nobody can be named."""
    if view is None or view.kind not in _KINDS:
        return ()
    kind = _KINDS[view.kind]
    is_sure = view.confidence != "low"
    weight = Weight.TIMEOUT if not is_sure else Weight.DESYNC if kind == "desync" else Weight.HANG
    return (
        Sign(
            kind=kind if is_sure else "collective_timeout",
            weight=weight,
            text=f"Flight Recorder: {view.sentence}",
            node=view.nodes[0] if len(view.nodes) == 1 and kind == "hang" else None,
            rank=view.ranks[0] if len(view.ranks) == 1 else None,
            position=0 if is_sure else _BEYOND,
        ),
    )
