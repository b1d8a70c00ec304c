"""nvidia-resiliency-ext's `ft_launcher` with shorter keep-alives of its nodes: in its code they are fixed.

A node is dead after three missed ones, 15 s as delivered. Its loop wakes up once a second, so one a second is the
shortest that works.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

KEEP_ALIVE_S = 1.0


def main() -> None:
    """Run `ft_launcher` with the command line as it is."""
    from nvidia_resiliency_ext.fault_tolerance import (  # type: ignore[import-not-found]
        _ft_rendezvous,
        launcher,
    )

    make_settings = _ft_rendezvous.RendezvousSettings

    def make_shorter(*arguments: Any, **named: Any) -> Any:
        return make_settings(*arguments, **{**named, "keep_alive_interval": timedelta(seconds=KEEP_ALIVE_S)})

    _ft_rendezvous.RendezvousSettings = make_shorter
    launcher.main()


if __name__ == "__main__":
    main()
