"""What the daemon tells the service manager that started it: ready, alive, stopping, and one line of status.

The protocol is one datagram to the socket that systemd names (sd_notify(3)); without such a socket nothing happens.
"""

import os
import socket
from collections.abc import Mapping


def notify(state: str, env: Mapping[str, str] = os.environ) -> bool:
    """Whether the service manager was told `state`, which is lines such as `READY=1` or `WATCHDOG=1`.

    False where no service manager asked for it, or where it no longer listens: the daemon's work does not hang on
    the words about it, and a watchdog that is not fed restarts the daemon by itself.
    """
    address = env.get("NOTIFY_SOCKET", "")
    if address[:1] not in {"/", "@"}:
        return False
    if address.startswith("@"):  # the abstract namespace: a leading zero byte in place of the @
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
        channel.setblocking(False)  # a service manager that doesn't read must not stop the loop
        try:
            channel.sendto(state.encode(), address)
        except OSError:
            return False
    return True


def watchdog_interval_s(env: Mapping[str, str] = os.environ) -> float | None:
    """Seconds within which `WATCHDOG=1` must be sent each time, or None where nobody watches this process."""
    usec, pid = env.get("WATCHDOG_USEC", ""), env.get("WATCHDOG_PID", "")
    if not usec.isdecimal() or int(usec) == 0 or pid not in {"", str(os.getpid())}:
        return None
    return int(usec) / 1e6
