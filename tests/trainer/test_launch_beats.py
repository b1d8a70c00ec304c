"""The beat channel among strangers, broken connections and silence."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from trainer.agent.client import BeatClient, Patience
from trainer.beats import (
    MAX_HELLO_BYTES,
    MAX_LINE_BYTES,
    BeatEvent,
    BeatServer,
    ChannelError,
    LineBuffer,
    Message,
    render_line,
)


@pytest.fixture
def server() -> Iterator[BeatServer]:
    with closing(BeatServer(secret="s3cret", nodes=frozenset({"n1", "n2"}), host="127.0.0.1")) as server:
        yield server


def collect(server: BeatServer, until: Callable[[list[BeatEvent]], bool], deadline_s: float = 10) -> list[BeatEvent]:
    events: list[BeatEvent] = []
    stop = time.monotonic() + deadline_s
    while time.monotonic() < stop:
        events += server.poll(0.05)
        if until(events):
            return events
    raise AssertionError(events)


def client(server: BeatServer, news: list[Message] | None = None) -> BeatClient:
    client = BeatClient(
        address=("127.0.0.1", server.port),
        hello=lambda: {"type": "hello", "secret": "s3cret", "node": "n1"},
        interval_s=0.05,
        state=lambda: {"state": "running"},
        connected=lambda: news or [],
        patience=Patience(unreachable_s=0.5, silent_s=1.0),
    )
    client.start()
    return client


def kinds(events: list[BeatEvent]) -> set[str]:
    return {event.message.get("type", event.kind) for event in events}


def test_a_node_says_hello_and_beats(server: BeatServer) -> None:
    node = client(server)
    events = collect(server, lambda events: {"hello", "beat"} <= kinds(events))
    assert events[0].address == "127.0.0.1"
    assert {event.node for event in events} == {"n1"}
    node.stop(2)


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\0\xff\n",
        b"[]\n",
        b'{"type":"beat"}\n',
        b'{"type":"hello","node":"n1"}\n',
        b'{"type":"hello","node":"n1","secret":"wrong"}\n',
        b'{"type":"hello","node":"n9","secret":"s3cret"}\n',
        b'{"type":"hello","node":["n1"],"secret":"s3cret"}\n',
        b"[" * MAX_HELLO_BYTES + b"\n",
        b"x" * (MAX_HELLO_BYTES + 1),
    ],
)
def test_strangers_are_cut_off_and_heard_by_nobody(server: BeatServer, data: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as stranger:
        stranger.sendall(data)
        stranger.setblocking(False)
        assert collect(server, lambda _: is_closed(stranger)) == []


def is_closed(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def test_a_node_is_heard_while_strangers_hold_connections(server: BeatServer) -> None:
    strangers = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(50)]
    node = client(server)
    collect(server, lambda events: "beat" in kinds(events))
    node.stop(2)
    for stranger in strangers:
        stranger.close()


def test_a_node_that_comes_back_tells_its_news_again(server: BeatServer) -> None:
    node = client(server, news=[{"type": "ended", "exit_code": 0}])
    collect(server, lambda events: "ended" in kinds(events))
    server._drop(server._by_node["n1"])  # as a broken connection does
    events = collect(server, lambda events: "ended" in kinds(events))
    assert [event.kind for event in events][:2] == ["closed", "connected"]
    node.stop(2)


def test_a_second_connection_of_a_node_replaces_the_first(server: BeatServer) -> None:
    first, second = client(server), client(server)
    collect(server, lambda events: sum(event.kind == "connected" for event in events) >= 2)
    assert server.is_connected("n1")
    first.stop(2)
    second.stop(2)


def test_orders_reach_the_node_and_keep_it_from_feeling_alone(server: BeatServer) -> None:
    node = client(server)
    collect(server, lambda events: "beat" in kinds(events))
    server.send("n1", {"type": "go", "rank": 0})
    server.send("n2", {"type": "go", "rank": 1})  # not there: nothing happens
    collect(server, lambda _: not node.inbox.empty())
    assert node.inbox.get(timeout=1)["type"] in ("go", "ping")
    assert not node.is_lost()
    node.stop(2)


def test_beats_alone_do_not_wake_the_launcher_and_anything_else_does(server: BeatServer) -> None:
    node = client(server)
    collect(server, lambda events: "beat" in kinds(events))
    begun = time.monotonic()
    beats = server.poll(0.4)
    assert time.monotonic() - begun >= 0.4
    assert len(beats) >= 2
    node.send({"type": "ended", "exit_code": 0})
    begun = time.monotonic()
    assert "ended" in kinds(server.poll(20))
    assert time.monotonic() - begun < 10
    node.stop(2)


def test_a_mute_node_says_and_hears_nothing_and_comes_back(server: BeatServer) -> None:
    node = client(server)
    collect(server, lambda events: "beat" in kinds(events))
    node.mute(1.0)
    server.poll(0.2)  # what was under way
    assert server.poll(0.5) == []
    assert server.is_connected("n1")
    collect(server, lambda events: "connected" in {event.kind for event in events})
    node.stop(2)


def test_a_node_knows_when_it_has_lost_its_launcher() -> None:
    with closing(BeatServer(secret="s3cret", nodes=frozenset({"n1"}), host="127.0.0.1")) as server:
        node = client(server)
        collect(server, lambda events: "beat" in kinds(events))
        assert not node.is_lost()
    stop = time.monotonic() + 5
    while not node.is_lost() and time.monotonic() < stop:
        time.sleep(0.02)
    assert node.is_lost()
    node.stop(3)


def test_lines_are_put_together_from_pieces() -> None:
    lines = LineBuffer(MAX_LINE_BYTES)
    whole = render_line({"type": "a"}) + render_line({"type": "b"})
    found = [message["type"] for i in range(len(whole)) for message in lines.feed(whole[i : i + 1])]
    assert found == ["a", "b"]


def test_a_line_without_an_end_does_not_fill_the_memory() -> None:
    lines = LineBuffer(100)
    lines.feed(b"x" * 100)
    with pytest.raises(ChannelError, match="100 bytes"):
        lines.feed(b"x")
