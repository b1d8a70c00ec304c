"""Messages between processes: whole, with their descriptors, and only from those who know the secret."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator

import pytest

from trainer.saving.link import MAX_GREETING_BYTES, Greeting, Link, LinkLost, connect


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


_DEEP = (200_000).to_bytes(4, "big") + b"[" * 200_000


@pytest.mark.parametrize(
    "data", [b"\xff\xff\xff\xff", b"\0\0\0\2[]", b"\0\0\0\1x", _DEEP], ids=["huge", "list", "no json", "deep"]
)
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
    greeting = Greeting(listener.accept()[0], b"secret")
    assert greeting.hear(10) == 3
    thread.join()
    link = greeting.link
    (other,) = found
    assert isinstance(other, Link)
    long = {"kind": "long", "text": "x" * 2 * MAX_GREETING_BYTES}
    other.send(long)
    assert link.receive(10) == long
    link.send(long)
    assert other.receive(10) == long
    link.close()
    other.close()


def test_a_stranger_is_let_in_by_nobody(listener: socket.socket) -> None:
    thread, found = _connect(listener, b"guessed")
    greeting = Greeting(listener.accept()[0], b"secret")
    with pytest.raises(LinkLost):
        greeting.hear(10)
    greeting.link.close()
    thread.join()
    assert isinstance(found[0], LinkLost)


def _message(text: bytes) -> bytes:
    return len(text).to_bytes(4, "big") + text


@pytest.mark.parametrize(
    "data",
    [
        (MAX_GREETING_BYTES + 1).to_bytes(4, "big"),
        _message(b"[" * 4000),
        _message(b'{"rank": ' + b"[" * 900 + b"]" * 900 + b', "nonce": "a", "proof": "b"}'),
        _message(b'{"rank": Infinity, "nonce": "a", "proof": "b"}'),
        _message(b'{"rank": 1, "nonce": "\\ud800", "proof": "\\ud800"}'),
        _message(b"{}"),
        b"GET / HTTP/1.1\r\n\r\n",
    ],
    ids=["long", "deep", "nested", "infinite", "surrogate", "empty", "http"],
)
def test_what_strangers_say_ends_their_link_and_nothing_else(listener: socket.socket, data: bytes) -> None:
    with socket.create_connection(listener.getsockname()) as stranger:
        greeting = Greeting(listener.accept()[0], b"secret")
        stranger.sendall(data)
        with pytest.raises(LinkLost):
            greeting.hear(10)
        greeting.link.close()


def test_another_service_at_the_address_is_no_writer(listener: socket.socket) -> None:
    thread, found = _connect(listener, b"secret")
    connection, _ = listener.accept()
    connection.sendall(_message(b'{"nonce": "\\ud800"}') + _message('{"proof": "\u00e9"}'.encode()))
    thread.join(10)
    connection.close()
    assert isinstance(found[0], LinkLost)
