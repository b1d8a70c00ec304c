"""Strangers at the port of rank 0's writer: however many, and whatever they say or don't, no save waits for them."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.trainer.saving.waiting import await_that
from trainer.saving.door import Door
from trainer.saving.link import Link, connect


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=256) as made:
        yield made


def _serve_until(door: Door, condition: Callable[[], object]) -> None:
    await_that(lambda: _serve(door) and condition())


def _serve(door: Door) -> bool:
    sources = door.sources()
    poll = select.poll()
    for fd in sources:
        poll.register(fd, select.POLLIN)
    for fd, _ in poll.poll(50):
        sources[fd]()
    return True


def _stranger(listener: socket.socket, held: ExitStack) -> socket.socket:
    return held.enter_context(socket.create_connection(listener.getsockname(), 10))


def _is_shown_out(stranger: socket.socket) -> bool:
    stranger.setblocking(False)
    try:
        while stranger.recv(4096):
            pass
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def test_a_writer_comes_in_past_any_number_of_strangers_who_are_never_many_at_a_time(listener: socket.socket) -> None:
    came: dict[int, Link] = {}
    door = Door(listener, b"secret", world=2, welcome=came.__setitem__)
    with ExitStack() as held:
        strangers = [_stranger(listener, held) for _ in range(100)]
        found: list[Link] = []
        address = listener.getsockname()
        thread = threading.Thread(target=lambda: found.append(connect(address, b"secret", 1, 20)), daemon=True)
        thread.start()
        _serve_until(door, lambda: came)
        thread.join(10)
        assert list(came) == [1]
        found[0].send({"kind": "hello"})
        assert came[1].receive(10) == {"kind": "hello"}
        assert len(door.sources()) <= 40
        assert _is_shown_out(strangers[0])
        door.close()
        for link in (*found, *came.values()):
            link.close()


def test_who_says_nothing_in_time_is_shown_out(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.saving.door.GREETING_LIMIT_S", 0.1)
    door = Door(listener, b"secret", world=1, welcome=lambda rank, link: None)
    with ExitStack() as held:
        silent = _stranger(listener, held)
        _serve_until(door, lambda: _is_shown_out(silent))


def test_one_who_was_gone_before_the_door_was_opened_holds_up_nobody(listener: socket.socket) -> None:
    door = Door(listener, b"secret", world=1, welcome=lambda rank, link: None)
    (come_in,) = door.sources().values()
    come_in()  # nobody there: does not wait
    assert len(door.sources()) == 1


@pytest.mark.torch
@pytest.mark.parametrize("words", [b"", b"GET / HTTP/1.1\r\n\r\n", (200_000).to_bytes(4, "big") + b"[" * 200_000])
def test_saves_go_on_whoever_is_at_the_port(tmp_path: Path, words: bytes) -> None:
    torch = pytest.importorskip("torch")
    from tests.trainer.saving.crew import crew

    with crew(tmp_path, [[torch.ones(300_000)], [torch.ones(5)]]) as two, ExitStack() as held:
        two.save(1)
        listener = two.savers[0]._meeting.listener
        assert listener is not None
        pid = two.savers[0].writer_pid
        for _ in range(50):
            stranger = _stranger(listener, held)
            stranger.setblocking(False)
            stranger.send(words)
        results = two.save(2)
        assert all(result.is_verified for result in results), results
        assert max(result.blocking_s for result in results) < 2  # 3 s: given up
        assert two.savers[0].writer_pid == pid
