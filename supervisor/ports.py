"""Watches the slurmd ports of suspected nodes: TCP connects, twice a second, far quicker than Slurm's own time-out.

One thread with non-blocking connects; a connection that comes about is closed at once, with nothing said. What goes
wrong on our own side (no descriptors, no network) is no evidence against a node and leaves its count as it was.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from supervisor.model import PortProbe

INTERVAL_S = 0.5
TIMEOUT_S = 0.8
MAX_IN_FLIGHT = 256
RESOLVE_AGAIN_S = 300.0

_OWN_TROUBLE = frozenset(
    {
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOBUFS,
        errno.ENOMEM,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.EADDRNOTAVAIL,
        errno.EACCES,
        errno.EPERM,
    }
)


@dataclass(slots=True)
class _Target:
    node: str
    host: str
    port: int
    address: str | None  # numeric; None: not resolved yet
    next_at: float
    is_known: bool = False  # at least one connect has told something
    failures: int = 0
    first_failed: float = 0.0  # start of the first failed connect in a row
    last_failed: float = 0.0  # when the newest one was over


@dataclass(slots=True)
class _Flight:
    target: _Target
    socket: socket.socket
    started: float


class PortWatch:
    """Connects to the watched ports in a background thread. `close` ends it."""

    def __init__(
        self,
        on_change: Callable[[], None] = lambda: None,
        *,
        interval_s: float = INTERVAL_S,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """`on_change` is called in the thread when a node begins or ceases to answer."""
        self._on_change = on_change
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._targets: dict[str, _Target] = {}
        self._flights: dict[int, _Flight] = {}
        self._resolver = _Resolver(self._wake)
        self._lock = threading.Lock()
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(self._wake_read, select.POLLIN)
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, name="port-watch", daemon=True)
        self._thread.start()

    def watch(self, targets: Mapping[str, tuple[str, int]]) -> None:
        """Watch exactly these: node to (address or host name, port). What is known of nodes that stay is kept."""
        with self._lock:
            kept = {}
            for node, (host, port) in targets.items():
                known = self._targets.get(node)
                if known is not None and (known.host, known.port) == (host, port):
                    kept[node] = known
                else:
                    kept[node] = _Target(node=node, host=host, port=port, address=None, next_at=time.monotonic())
            self._targets = kept
        self._wake()

    def results(self) -> Mapping[str, PortProbe]:
        """What is known of the watched nodes; one that no connect has told anything about yet is left out."""
        with self._lock:
            return {
                t.node: PortProbe(
                    node=t.node,
                    address=t.address or t.host,
                    silent_s=t.last_failed - t.first_failed if t.failures else 0.0,
                    failures=t.failures,
                )
                for t in self._targets.values()
                if t.is_known
            }

    def close(self) -> None:
        """End the thread and all connects."""
        self._is_closed = True
        self._wake()
        self._thread.join(5.0)
        if not self._thread.is_alive():
            os.close(self._wake_read)
            os.close(self._wake_write)

    def _wake(self) -> None:
        with suppress(OSError):
            os.write(self._wake_write, b"x")

    def _work(self) -> None:
        while not self._is_closed:
            now = time.monotonic()
            has_changed = self._expire(now)
            has_changed |= self._connect_due(now)
            if has_changed:
                self._on_change()
            if self._take_answers(self._poll.poll(self._pause_ms())):
                self._on_change()
        for flight in self._flights.values():
            flight.socket.close()
        self._flights.clear()

    def _pause_ms(self) -> float:
        now = time.monotonic()
        with self._lock:
            idle = {t.node: t for t in self._targets.values()}
        for flight in self._flights.values():
            idle.pop(flight.target.node, None)
        due = [t.next_at for t in idle.values() if t.address] if len(self._flights) < MAX_IN_FLIGHT else []
        due += [flight.started + self._timeout_s for flight in self._flights.values()]
        return min(1000.0, max(0.0, (min(due, default=now + 1.0) - now) * 1000 + 1))

    def _connect_due(self, now: float) -> bool:
        in_flight = {id(flight.target) for flight in self._flights.values()}
        with self._lock:
            targets = list(self._targets.values())
        has_changed = False
        for target in sorted(targets, key=lambda t: t.next_at):
            if target.next_at > now or len(self._flights) >= MAX_IN_FLIGHT:
                break
            if id(target) not in in_flight:
                has_changed |= self._connect(target, now)
        return has_changed

    def _connect(self, target: _Target, now: float) -> bool:
        target.next_at = now + self._interval_s
        target.address = self._resolver.address(target.host)
        if target.address is None:
            return False
        try:
            family = socket.AF_INET6 if ":" in target.address else socket.AF_INET
            connection = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        except OSError:
            return False
        code = connection.connect_ex((target.address, target.port))
        if code in (errno.EINPROGRESS, errno.EAGAIN):
            self._flights[connection.fileno()] = _Flight(target=target, socket=connection, started=now)
            self._poll.register(connection, select.POLLOUT)
            return False
        connection.close()
        return self._note(target, code, now)

    def _take_answers(self, events: list[tuple[int, int]]) -> bool:
        has_changed = False
        for fd, _ in events:
            if fd == self._wake_read:
                with suppress(BlockingIOError):
                    os.read(fd, 4096)
                continue
            flight = self._flights[fd]
            code = flight.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            has_changed |= self._land(fd, code)
        return has_changed

    def _expire(self, now: float) -> bool:
        late = [fd for fd, flight in self._flights.items() if now - flight.started >= self._timeout_s]
        has_changed = False
        for fd in late:
            has_changed |= self._land(fd, errno.ETIMEDOUT)
        return has_changed

    def _land(self, fd: int, code: int) -> bool:
        flight = self._flights.pop(fd)
        self._poll.unregister(fd)
        flight.socket.close()
        return self._note(flight.target, code, flight.started)

    def _note(self, target: _Target, code: int, started: float) -> bool:
        """Take in one connect's outcome; True when the node begins or ceases to answer."""
        if code in _OWN_TROUBLE:
            return False
        with self._lock:
            was_failing, was_known, target.is_known = target.failures > 0, target.is_known, True
            if code == 0:
                target.failures = 0
                return was_failing or not was_known
            if not was_failing:
                target.first_failed = started
            target.failures += 1
            target.last_failed = time.monotonic()
            return not was_failing


class _Resolver:
    """Host names to numeric addresses, asked for in a thread of their own: a name server may hang."""

    def __init__(self, on_resolved: Callable[[], None]) -> None:
        self._on_resolved = on_resolved
        self._known: dict[str, tuple[str, float]] = {}
        self._asking: set[str] = set()

    def address(self, host: str) -> str | None:
        """The address as far as it is known now; a first or old question is put in the background."""
        if _is_numeric(host):
            return host
        address, asked_at = self._known.get(host, (None, 0.0))
        if (address is None or time.monotonic() - asked_at > RESOLVE_AGAIN_S) and host not in self._asking:
            self._asking.add(host)
            threading.Thread(target=self._ask, args=(host,), name="resolve", daemon=True).start()
        return address

    def _ask(self, host: str) -> None:
        try:
            found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            found.sort(key=lambda answer: answer[0] != socket.AF_INET)  # slurmd listens on IPv4 unless told otherwise
            self._known[host] = (str(found[0][4][0]), time.monotonic())
        except OSError:
            pass  # unknown, and asked again at the next connect
        finally:
            self._asking.discard(host)
        self._on_resolved()


def _is_numeric(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
