"""Where the writers of all ranks meet: rank 0 listens, and everyone is told where, and the secret that admits them."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """`addresses`: (host, port) to try in turn. `listener` is rank 0's."""

    addresses: tuple[tuple[str, int], ...]
    secret: str
    listener: socket.socket | None = None


def meet(gather: Callable[[Any], list[Any]], *, rank: int, world: int) -> Meeting:
    """Agree on the place; every rank calls it."""
    listener, offer = None, None
    boot = _read_boot_id()
    if rank == 0:
        # Kept by the rank, so that a new writer of it is found where the old one was.
        listener = socket.socket()
        listener.bind(("0.0.0.0", 0))
        listener.listen(max(world, 16))
        offer = (_names_of_this_host(), listener.getsockname()[1], secrets.token_hex(32), boot)
    names, port, secret, boot_of_rank_0 = gather(offer)[0]
    hosts = ["127.0.0.1", *names] if boot == boot_of_rank_0 else names
    return Meeting(addresses=tuple((host, port) for host in hosts), secret=secret, listener=listener)


def _names_of_this_host() -> list[str]:
    names = [os.environ.get("SLURMD_NODENAME", ""), socket.gethostname(), os.environ.get("MASTER_ADDR", "")]
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing: asks which of our addresses leads elsewhere
        names.append(probe.getsockname()[0])
    return list(dict.fromkeys(name for name in names if name))


def _read_boot_id() -> str:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""
