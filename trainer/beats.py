"""The beat channel between trainer.launch and the trainer.node of each node: JSON lines over one TCP connection.

A node says hello with the secret of its step, then beats; the launcher answers with orders. Each side knows by its
own monotonic clock how long the other has been quiet. Whatever else connects to the port is cut off after one bad
line, and can neither block the launcher nor fill its memory. Standard library only.
"""

from __future__ import annotations

import hmac
import json
import math
import selectors
import socket
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]

MAX_LINE_BYTES = 256 * 1024  # the results of a node's checks are the longest line
MAX_HELLO_BYTES = 4096
HELLO_LIMIT_S = 5.0  # a connection that has not said hello by then is a stranger
MAX_STRANGERS = 4096  # above any real number of nodes that connect in one moment, below the limit on open files
MAX_UNSENT_BYTES = 1024 * 1024  # a peer that reads nothing is dropped; it may connect again
PING_INTERVAL_S = 1.0
_CLOCK_SAMPLES = 30  # of the last pings
_CLOCK_WAY_LIMIT_S = 10.0  # of older ones nothing is learnt


class ChannelError(ValueError):
    """The peer does not speak our protocol; the message says how."""


def render_line(message: Message) -> bytes:
    """A message as one line."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


class LineBuffer:
    """Cuts a byte stream into messages."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._rest = b""

    def feed(self, data: bytes) -> list[Message]:
        """The messages completed by `data`. Raises ChannelError for a long line or one that is no JSON object."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if max(map(len, [*lines, self._rest])) > self.limit_bytes:
            raise ChannelError(f"a line is longer than {self.limit_bytes} bytes")
        return [_parse_line(line) for line in lines if line.strip()]


def _parse_line(line: bytes) -> Message:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        raise ChannelError("a line is not JSON") from None
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise ChannelError("a line is not a message")
    return message


@dataclass(frozen=True, slots=True, kw_only=True)
class BeatEvent:
    """One thing that happened on the channel. `kind`: "connected", "message" or "closed"."""

    kind: str
    node: str
    at: float = 0.0  # when it was heard, on the monotonic clock
    address: str = ""  # the node's address as the launcher sees it
    message: Message = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockOffset:
    """How much a node's clock is ahead of the launcher's, at most `error_s` off."""

    offset_s: float
    error_s: float


class _Peer:
    def __init__(self, sock: socket.socket, address: str, now: float) -> None:
        self.sock = sock
        self.address = address
        self.since = now
        self.node = ""
        self.lines = LineBuffer(MAX_HELLO_BYTES)
        self.unsent = b""
        self.clock: deque[ClockOffset] = deque(maxlen=_CLOCK_SAMPLES)


class BeatServer:
    """Listens for the nodes of one step. Single-threaded: everything happens inside `poll` and `send`."""

    def __init__(self, *, secret: str, nodes: frozenset[str], host: str = "") -> None:
        self._secret = secret.encode()
        self._nodes = nodes
        self._selector = selectors.DefaultSelector()
        self._peers: dict[int, _Peer] = {}
        self._strangers: set[_Peer] = set()
        self._is_urgent = False  # something else than a beat came
        self._by_node: dict[str, _Peer] = {}
        self._events: list[BeatEvent] = []
        self._pinged_at = 0.0
        self._listener = socket.create_server((host, 0), backlog=1024)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self._listener.getsockname()[1])

    def wake_on(self, sock: socket.socket) -> None:
        """Let `poll` return early when `sock` is readable; its bytes are dropped."""
        sock.setblocking(False)
        self._selector.register(sock, selectors.EVENT_READ, "wake")

    def is_connected(self, node: str) -> bool:
        """True while the node holds its connection."""
        return node in self._by_node

    def clock_offset(self, node: str) -> ClockOffset | None:
        """How the clock of a connected node differs from ours, by the quickest of its last beats that tell."""
        peer = self._by_node.get(node)
        return min(peer.clock, key=lambda sample: sample.error_s, default=None) if peer else None

    def poll(self, timeout_s: float) -> list[BeatEvent]:
        """What happened since the last call, after waiting at most `timeout_s` for something.

        Beats alone do not end the wait: in a large job there are hundreds in a second, and each is worth a look at all
        nodes only when it is missing.
        """
        until = time.monotonic() + timeout_s
        self._is_urgent = False
        while True:
            self._select(max(0.0, until - time.monotonic()))
            if self._is_urgent or time.monotonic() >= until:
                break
        self._drop_strangers()
        self._ping()
        events, self._events = self._events, []
        return events

    def _select(self, timeout_s: float) -> None:
        for key, mask in self._selector.select(timeout_s):
            if key.fileobj is self._listener:
                self._accept()
            elif key.data == "wake":
                drain(key.fileobj)
                self._is_urgent = True
            else:
                self._serve(key.data, mask)

    def send(self, node: str, message: Message) -> None:
        """Queue a message; a node without a connection gets nothing (it is told its state when it is back)."""
        peer = self._by_node.get(node)
        if peer is not None:
            self._queue(peer, render_line(message))

    def close(self) -> None:
        """Close every connection and the listener."""
        for peer in list(self._peers.values()):
            peer.sock.close()
        self._listener.close()
        self._selector.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, address = self._listener.accept()
            except OSError:  # nothing more, or it is gone again, or no descriptor is free: the next poll tries again
                return
            if len(self._strangers) >= MAX_STRANGERS:
                sock.close()
                continue
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer = _Peer(sock, str(address[0]), time.monotonic())
            self._peers[sock.fileno()] = peer
            self._strangers.add(peer)
            self._selector.register(sock, selectors.EVENT_READ, peer)

    def _serve(self, peer: _Peer, mask: int) -> None:
        if mask & selectors.EVENT_WRITE:
            self._queue(peer, b"")
        if not mask & selectors.EVENT_READ or peer.sock.fileno() < 0:
            return
        try:
            data = peer.sock.recv(65536)
            if not data:
                self._drop(peer)
                return
            messages = peer.lines.feed(data)
        except BlockingIOError:
            return
        except (OSError, ChannelError):
            self._drop(peer)
            return
        for message in messages:
            self._take(peer, message)

    def _take(self, peer: _Peer, message: Message) -> None:
        if peer.sock.fileno() < 0:
            return
        if peer.node:
            if message["type"] == "beat":
                _take_clock(peer, message)
            self._tell(BeatEvent(kind="message", node=peer.node, at=time.monotonic(), message=message))
            return
        if not self._is_ours(message):
            self._drop(peer)
            return
        node = str(message["node"])
        earlier = self._by_node.pop(node, None)
        if earlier is not None:  # the node came back before its old connection was known to be dead
            earlier.node = ""
            self._drop(earlier)
        peer.node = node
        self._strangers.discard(peer)
        peer.lines.limit_bytes = MAX_LINE_BYTES
        self._by_node[node] = peer
        self._tell(BeatEvent(kind="connected", node=node, at=time.monotonic(), address=peer.address, message=message))

    def _tell(self, event: BeatEvent) -> None:
        self._events.append(event)
        self._is_urgent |= event.message.get("type") != "beat"

    def _is_ours(self, message: Message) -> bool:
        secret, node = message.get("secret"), message.get("node")
        return (
            message["type"] == "hello"
            and isinstance(secret, str)
            and isinstance(node, str)
            and hmac.compare_digest(secret.encode("utf-8", "replace"), self._secret)
            and node in self._nodes
        )

    def _queue(self, peer: _Peer, data: bytes) -> None:
        peer.unsent += data
        try:
            sent = peer.sock.send(peer.unsent)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._drop(peer)
            return
        peer.unsent = peer.unsent[sent:]
        if len(peer.unsent) > MAX_UNSENT_BYTES:
            self._drop(peer)
            return
        mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.unsent else 0)
        self._selector.modify(peer.sock, mask, peer)

    def _drop(self, peer: _Peer) -> None:
        fileno = peer.sock.fileno()
        if fileno < 0:
            return
        self._selector.unregister(peer.sock)
        self._peers.pop(fileno, None)
        self._strangers.discard(peer)
        peer.sock.close()
        if peer.node and self._by_node.get(peer.node) is peer:
            del self._by_node[peer.node]
            self._tell(BeatEvent(kind="closed", node=peer.node, at=time.monotonic()))

    def _drop_strangers(self) -> None:
        limit = time.monotonic() - HELLO_LIMIT_S
        for peer in [p for p in self._strangers if p.since < limit]:
            self._drop(peer)

    def _ping(self) -> None:
        now = time.monotonic()
        if now - self._pinged_at < PING_INTERVAL_S:
            return
        self._pinged_at = now
        line = render_line({"type": "ping", "at": now})
        for peer in list(self._by_node.values()):
            if not peer.unsent:  # whoever does not read needs no second ping
                self._queue(peer, line)


def _take_clock(peer: _Peer, beat: Message) -> None:
    """Learn of a beat that answers a ping: how long the way was, and the node's clock in the middle of it."""
    pinged_at, held_s, told = beat.get("ping"), beat.get("held_s"), beat.get("time")
    if not (isinstance(pinged_at, float) and isinstance(held_s, float) and isinstance(told, float)):
        return
    way_s = time.monotonic() - pinged_at - held_s
    if 0.0 <= way_s < _CLOCK_WAY_LIMIT_S and math.isfinite(told):
        peer.clock.append(ClockOffset(offset_s=told + way_s / 2 - time.time(), error_s=way_s / 2))


def drain(sock: Any) -> None:
    """Drop what waits in a socket that does not block."""
    try:
        while sock.recv(4096):
            pass
    except OSError:
        return
