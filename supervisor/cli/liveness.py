"""Ask the daemon whether it is there."""

from __future__ import annotations

from supervisor.cli.options import start_hint
from supervisor.config import Settings
from supervisor.control import DaemonDown, DaemonSilent, Refused, ask
from supervisor.reports.liveness import Liveness

PING_TIMEOUT_S = 0.5


def fetch_liveness(settings: Settings) -> Liveness:
    """Whether the daemon answers, within half a second."""
    try:
        ask(settings.control.socket, {"verb": "ping"}, timeout_s=PING_TIMEOUT_S)
    except DaemonSilent as error:
        return Liveness(is_there=True, is_answering=False, why=str(error))
    except DaemonDown:
        return Liveness(
            is_there=False, is_answering=False, why=f"no answer at {settings.control.socket}; {start_hint()}"
        )
    except Refused as error:  # "busy": it is there, and said so
        return Liveness(is_there=True, is_answering=True, why=error.message)
    return Liveness(is_there=True, is_answering=True)
