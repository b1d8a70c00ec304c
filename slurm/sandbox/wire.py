"""Two looks at a daemon that is starting: does it take connections, and what did it say last."""

from __future__ import annotations

import socket
from pathlib import Path

_TAIL_BYTES = 1500


def accepts(address: tuple[str, int]) -> bool:
    """True when somebody listens there."""
    try:
        socket.create_connection(address, timeout=1).close()
    except OSError:
        return False
    return True


def read_tail(path: Path) -> str:
    """The last lines of a log, or why there are none."""
    try:
        return path.read_bytes()[-_TAIL_BYTES:].decode(errors="replace").strip() or f"{path} is empty"
    except OSError as error:
        return str(error)
