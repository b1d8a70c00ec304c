from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from supervisor.ports import PortWatch


def wait_until(condition: Callable[[], bool], deadline_s: float = 10.0) -> None:
    until = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


class Listener:
    """Accepts and drops connections, like a daemon that is spoken to by nobody."""

    def __init__(self, port: int = 0) -> None:
        self._socket = socket.create_server(("127.0.0.1", port))
        self.port: int = self._socket.getsockname()[1]
        self.accepted = 0
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self.accepted += 1
            connection.close()

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


@pytest.fixture
def watch() -> Iterator[PortWatch]:
    watch = PortWatch(interval_s=0.02, timeout_s=0.2)
    yield watch
    watch.close()


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener()
    yield listener
    listener.close()


@pytest.fixture
def full_port() -> Iterator[int]:
    """A port that answers no connect at all: its queue is full, and nobody takes from it."""
    server = socket.socket()
    server.bind(("127.0.0.1", 0))
    server.listen(0)
    address = server.getsockname()
    fillers = [socket.socket() for _ in range(8)]
    for filler in fillers:
        filler.setblocking(False)
        filler.connect_ex(address)
    yield address[1]
    for each in (*fillers, server):
        each.close()


def test_a_port_that_answers_has_no_silence(watch: PortWatch, listener: Listener) -> None:
    watch.watch({"n1": ("127.0.0.1", listener.port)})
    wait_until(lambda: listener.accepted > 3)
    probe = watch.results()["n1"]
    assert (probe.node, probe.address, probe.silent_s, probe.failures) == ("n1", "127.0.0.1", 0.0, 0)


def test_a_refused_port_is_silent_for_longer_and_longer(watch: PortWatch) -> None:
    watch.watch({"n1": ("127.0.0.1", 1)})
    wait_until(lambda: "n1" in watch.results() and watch.results()["n1"].failures >= 5)
    first = watch.results()["n1"].silent_s
    wait_until(lambda: watch.results()["n1"].silent_s > first)


def test_a_port_that_says_nothing_is_silent(watch: PortWatch, full_port: int) -> None:
    watch.watch({"n1": ("127.0.0.1", full_port)})
    wait_until(lambda: "n1" in watch.results() and watch.results()["n1"].failures >= 2)
    assert watch.results()["n1"].silent_s >= 0.2


def test_an_answer_ends_the_silence_and_each_turn_is_told() -> None:
    changes: list[float] = []
    watch = PortWatch(lambda: changes.append(time.monotonic()), interval_s=0.02, timeout_s=0.2)
    first = Listener()
    watch.watch({"n1": ("127.0.0.1", first.port)})
    wait_until(lambda: first.accepted > 0 and len(changes) == 1)
    first.close()
    wait_until(lambda: watch.results()["n1"].failures > 2)
    assert len(changes) == 2
    second = Listener(first.port)
    wait_until(lambda: watch.results()["n1"].failures == 0)
    wait_until(lambda: len(changes) == 3)
    second.close()
    watch.close()


def test_trouble_of_our_own_is_no_evidence(watch: PortWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[object] = []

    def refuse(*_: object, **__: object) -> socket.socket:
        tries.append(None)
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("supervisor.ports.socket.socket", refuse)
    watch.watch({"n1": ("127.0.0.1", 1)})
    wait_until(lambda: len(tries) > 3)
    assert watch.results() == {}


def test_only_what_is_watched_is_reported_and_what_is_known_is_kept(watch: PortWatch, listener: Listener) -> None:
    watch.watch({"n1": ("127.0.0.1", 1), "n2": ("127.0.0.1", listener.port)})
    wait_until(lambda: set(watch.results()) == {"n1", "n2"} and watch.results()["n1"].failures > 3)
    watch.watch({"n1": ("127.0.0.1", 1)})
    assert watch.results()["n1"].failures > 3
    assert set(watch.results()) == {"n1"}


def test_a_host_name_is_resolved_and_an_unknown_one_is_not_silent(watch: PortWatch, listener: Listener) -> None:
    watch.watch({"n1": ("localhost", listener.port), "n2": ("no-such-host.invalid", 1)})
    wait_until(lambda: "n1" in watch.results())
    assert watch.results()["n1"].failures == 0
    assert "n2" not in watch.results()


def test_two_thousand_ports_are_asked_within_seconds(watch: PortWatch) -> None:
    watch.watch({f"n{i}": ("127.0.0.1", 1) for i in range(2000)})
    wait_until(lambda: len(watch.results()) == 2000, deadline_s=20)
