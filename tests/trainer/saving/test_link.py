"""Messages between processes: whole, with their descriptors, and only from those who know the secret."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator

import pytest

from trainer.saving.link import Link, LinkLost, accept, connect


@pytest.fixture
def pair() -> Iterator[tuple[Link, Link]]:
    links = tuple(Link(end) for end in socket.socketpair())
    yield links[0], links[1]
    for link in links:
        link.close()


def test_messages_arrive_whole_and_in_order(pair: tuple[Link, Link]) -> None:
    here, there = pair
    big = {"kind": "big", "text": "x" * 3_000_000}
    sender = threading.Thread(target=_send_all, args=(here, [{"kind": "a"}, big]))
    sender.start()
    assert there.receive(10) == {"kind": "a"}
    assert there.receive(10) == big
    sender.join()


def _send_all(link: Link, messages: list[dict[str, str]]) -> None:
    for message in messages:
        link.send(message)


def test_a_descriptor_comes_with_its_message(pair: tuple[Link, Link]) -> None:
    here, there = pair
    reader, writer = os.pipe()
    here.send({"kind": "take"}, [writer])
    os.close(writer)
    assert there.receive(10) == {"kind": "take"}
    fd = there.take_fd()
    os.write(fd, b"hello")
    os.close(fd)
    assert os.read(reader, 9) == b"hello"
    os.close(reader)


def test_nothing_to_hear_is_no_error(pair: tuple[Link, Link]) -> None:
    assert pair[0].receive(0.0) is None


def test_the_end_of_the_other_is_heard(pair: tuple[Link, Link]) -> None:
    here, there = pair
    there.close()
    with pytest.raises(LinkLost):
        here.receive(10)


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff", b"\0\0\0\2[]", b"\0\0\0\1x"], ids=["huge", "list", "no json"])
def test_what_is_no_message_ends_the_link(data: bytes) -> None:
    ours, theirs = socket.socketpair()
    link = Link(ours)
    theirs.sendall(data)
    with pytest.raises(LinkLost):
        link.receive(10)
    link.close()
    theirs.close()


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    made = socket.create_server(("127.0.0.1", 0))
    yield made
    made.close()


def _connect(listener: socket.socket, secret: bytes) -> tuple[threading.Thread, list[object]]:
    found: list[object] = []

    def run() -> None:
        try:
            found.append(connect(listener.getsockname(), secret, 3, 10))
        except LinkLost as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, found


def test_a_writer_that_knows_the_secret_is_known_by_its_rank(listener: socket.socket) -> None:
    thread, found = _connect(listener, b"secret")
    accepted = accept(listener, b"secret", 10)
    thread.join()
    assert accepted is not None
    link, rank = accepted
    assert rank == 3
    (other,) = found
    assert isinstance(other, Link)
    other.send({"kind": "hello"})
    assert link.receive(10) == {"kind": "hello"}
    link.close()
    other.close()


def test_a_stranger_is_let_in_by_nobody(listener: socket.socket) -> None:
    thread, found = _connect(listener, b"guessed")
    assert accept(listener, b"secret", 10) is None
    thread.join()
    assert isinstance(found[0], LinkLost)
