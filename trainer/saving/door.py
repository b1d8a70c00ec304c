"""Where the other ranks' writers come in: anyone may connect, who knows the secret stays, nobody holds up the loop.

Strangers (port scanners, health checks, writers of another run) are heard a few bytes at a time and shown out when
they say something else, nothing in time, or are too many: then the oldest goes, because a writer needs a moment only.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import suppress

from trainer.saving.link import Greeting, Link, LinkLost

GREETING_LIMIT_S = 5.0
_STRANGERS = 32  # at a time, beside as many as there are writers

Welcome = Callable[[int, Link], None]


class Door:
    """One listening socket, which must be used by nobody else meanwhile. `welcome(rank, link)`: one is known."""

    def __init__(self, listener: socket.socket, secret: bytes, *, world: int, welcome: Welcome) -> None:
        listener.setblocking(False)  # who was there a moment ago may be gone
        self._listener = listener
        self._secret = secret
        self._room = _STRANGERS + world
        self._welcome = welcome
        self._waiting: dict[Greeting, float] = {}  # until when, the oldest first

    def sources(self) -> dict[int, Callable[[], None]]:
        """What to call when a descriptor can be read; nothing of it waits. Shows out those who said nothing."""
        for greeting in [greeting for greeting, until in self._waiting.items() if until < time.monotonic()]:
            self._show_out(greeting)
        found: dict[int, Callable[[], None]] = {self._listener.fileno(): self._open}
        for greeting in self._waiting:
            found[greeting.link.fileno()] = lambda greeting=greeting: self._hear(greeting)  # type: ignore[misc]
        return found

    def _open(self) -> None:
        with suppress(OSError, LinkLost):
            connection, _ = self._listener.accept()
            try:
                greeting = Greeting(connection, self._secret)
            except BaseException:
                connection.close()
                raise
            self._waiting[greeting] = time.monotonic() + GREETING_LIMIT_S
            if len(self._waiting) > self._room:
                self._show_out(next(iter(self._waiting)))

    def _hear(self, greeting: Greeting) -> None:
        if greeting not in self._waiting:
            return  # shown out since
        try:
            rank = greeting.hear()
        except LinkLost:
            self._show_out(greeting)
            return
        if rank is not None:
            del self._waiting[greeting]
            self._welcome(rank, greeting.link)

    def _show_out(self, greeting: Greeting) -> None:
        del self._waiting[greeting]
        greeting.link.close()

    def close(self) -> None:
        """Show out all who are not known yet."""
        for greeting in list(self._waiting):
            self._show_out(greeting)
