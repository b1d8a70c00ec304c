"""Signals to the launcher: save, save and end, end. Requests to save go on to the training."""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Mapping

from trainer.launching.fleet import Fleet
from trainer.verdict import Verdict


class Requests:
    """What the launcher was signalled; ranks that start later are told as they begin."""

    def __init__(self, fleet: Fleet) -> None:
        self.is_terminated = False  # SIGTERM or SIGINT came to the launcher
        self._fleet = fleet
        self._signals: list[int] = []
        self._passed_on: list[int] = []
        self._end: int | None = None

    def install(self) -> None:
        """Take the signals from now on, and wake the loop for each."""
        wake, waker = socket.socketpair()
        waker.setblocking(False)
        self._fleet.server.wake_on(wake)
        self._waker = waker  # closed with the process
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD):
            signal.signal(number, lambda received, _frame: self._signals.append(received))

    def take(self) -> tuple[bool, ...]:
        """What came since the last call, passed on; True for each request to save."""
        received, self._signals = self._signals, []
        for number in received:
            if number in (signal.SIGUSR1, signal.SIGUSR2):
                self._request_save(number)
            elif number in (signal.SIGTERM, signal.SIGINT):
                self.is_terminated = True
                self._end = self._end or number
        return tuple(number in (signal.SIGUSR1, signal.SIGUSR2) for number in received if number != signal.SIGCHLD)

    def verdict(self, silent_since: Mapping[str, float]) -> Verdict | None:
        """The end of the attempt, if it was asked for; it names the node that is silent, if one is."""
        if self._end is None:
            return None
        silent = sorted(silent_since, key=silent_since.__getitem__)
        evidence = f"; silent: {', '.join(silent)}" if silent else ""
        reason = f"the launcher received {signal.Signals(self._end).name}{evidence}"
        return Verdict(exit_code=128 + self._end, reason=reason, node=silent[0] if silent else None)

    def tell_all(self, name: str) -> None:
        """Repeat every request to a node that is back."""
        for count in range(len(self._passed_on)):
            self._tell(name, count)

    def _request_save(self, number: int) -> None:
        """Have the training save, and with SIGUSR1 end; one that has not begun is told as it begins."""
        wish = "save and end" if number == signal.SIGUSR1 else "save"
        why = signal.Signals(number).name
        print(f"trainer.launch: {why}: the training is asked to {wish}", file=sys.stderr, flush=True)
        self._passed_on.append(number)
        for name in self._fleet.nodes:
            self._tell(name, len(self._passed_on) - 1)

    def _tell(self, name: str, count: int) -> None:
        self._fleet.send(name, {"type": "signal", "number": self._passed_on[count], "count": count + 1})
