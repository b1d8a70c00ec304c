"""The beat channel between trainer.launch and the trainer.node of each node: JSON lines over one TCP connection.

A node says hello with the secret of its step, then beats; the launcher answers with orders. Each side knows by its
own monotonic clock how long the other has been quiet. Whatever else connects to the port is cut off after one bad
line, and can neither block the launcher nor fill its memory. Standard library only.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]

MAX_LINE_BYTES = 256 * 1024  # the results of a node's checks are the longest line
MAX_HELLO_BYTES = 4096
HELLO_LIMIT_S = 5.0  # a connection that has not said hello by then is a stranger
MAX_STRANGERS = 4096  # above any real number of nodes that connect in one moment, below the limit on open files
MAX_UNSENT_BYTES = 1024 * 1024  # a peer that reads nothing is dropped; it may connect again
PING_INTERVAL_S = 1.0


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


# ---------------------------------------------------------------- launcher's side


@dataclass(frozen=True, slots=True, kw_only=True)
class BeatEvent:
    """One thing that happened on the channel. `kind`: "connected", "message" or "closed"."""

    kind: str
    node: str
    address: str = ""  # the node's address as the launcher sees it
    message: Message = field(default_factory=dict)


class _Peer:
    def __init__(self, sock: socket.socket, address: str, now: float) -> None:
        self.sock = sock
        self.address = address
        self.since = now
        self.node = ""
        self.lines = LineBuffer(MAX_HELLO_BYTES)
        self.unsent = b""


class BeatServer:
    """Listens for the nodes of one step. Single-threaded: everything happens inside `poll` and `send`."""

    def __init__(self, *, secret: str, nodes: frozenset[str], host: str = "") -> None:
        self._secret = secret.encode()
        self._nodes = nodes
        self._selector = selectors.DefaultSelector()
        self._peers: dict[int, _Peer] = {}
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

    def poll(self, timeout_s: float) -> list[BeatEvent]:
        """What happened since the last call, after waiting at most `timeout_s` for something."""
        for key, mask in self._selector.select(timeout_s):
            if key.fileobj is self._listener:
                self._accept()
            elif key.data == "wake":
                _drain(key.fileobj)
            else:
                self._serve(key.data, mask)
        self._drop_strangers()
        self._ping()
        events, self._events = self._events, []
        return events

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
            if len(self._peers) - len(self._by_node) >= MAX_STRANGERS:
                sock.close()
                continue
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer = _Peer(sock, str(address[0]), time.monotonic())
            self._peers[sock.fileno()] = peer
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
            self._events.append(BeatEvent(kind="message", node=peer.node, message=message))
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
        peer.lines.limit_bytes = MAX_LINE_BYTES
        self._by_node[node] = peer
        self._events.append(BeatEvent(kind="connected", node=node, address=peer.address, message=message))

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
        peer.sock.close()
        if peer.node and self._by_node.get(peer.node) is peer:
            del self._by_node[peer.node]
            self._events.append(BeatEvent(kind="closed", node=peer.node))

    def _drop_strangers(self) -> None:
        limit = time.monotonic() - HELLO_LIMIT_S
        for peer in [p for p in self._peers.values() if not p.node and p.since < limit]:
            self._drop(peer)

    def _ping(self) -> None:
        now = time.monotonic()
        if now - self._pinged_at < PING_INTERVAL_S:
            return
        self._pinged_at = now
        for peer in list(self._by_node.values()):
            if not peer.unsent:  # whoever does not read needs no second ping
                self._queue(peer, render_line({"type": "ping"}))


def _drain(sock: Any) -> None:
    try:
        while sock.recv(4096):
            pass
    except OSError:
        return


# ---------------------------------------------------------------- node's side


class BeatClient:
    """A node's end of the channel: beats from a thread of its own, and comes back when the connection breaks.

    `state` is called for the fields of each beat; `connected` for the messages to (re)send after each hello.

    After a freeze (a suspended job, a stopped node) what stands in the connection is old news and proves nothing: the
    node connects anew, and is lost unless the launcher answers within a short time.
    """

    def __init__(
        self,
        *,
        address: tuple[str, int],
        hello: Message,
        interval_s: float,
        state: Callable[[], Message],
        connected: Callable[[], list[Message]],
        lost_after_s: float,
    ) -> None:
        self.inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()  # may be fed from a signal handler
        self._address = address
        self._hello = hello
        self._interval_s = interval_s
        self._state = state
        self._connected = connected
        self._lost_after_s = lost_after_s
        self._frozen_s = lost_after_s / 2  # a thread that did not run for this long was stopped, not busy
        self._answer_limit_s = lost_after_s / 5  # after a freeze, for a new connection and the launcher's answer
        self._heard_at = self._turned_at = time.monotonic()
        self._local_address = ""
        self._outbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._wake, self._waker = socket.socketpair()
        self._wake.setblocking(False)
        self._waker.setblocking(False)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="beats", daemon=True)

    def start(self) -> None:
        """Begin to connect and beat."""
        self._thread.start()

    def send(self, message: Message) -> None:
        """Send as soon as possible; lost if the connection breaks now (see `connected`)."""
        self._outbox.put(message)
        self._wake_up()

    def is_lost(self) -> bool:
        """True when the launcher was not heard for `lost_after_s`."""
        now = time.monotonic()
        if not self._thread.is_alive():
            return True
        if now - self._turned_at > self._frozen_s:
            return False  # both threads were stopped just now: the other one looks first
        return now - self._heard_at > self._lost_after_s

    @property
    def local_address(self) -> str:
        """This node's address on the way to the launcher; empty before the first connection."""
        return self._local_address

    def stop(self, timeout_s: float) -> None:
        """Send what is queued, then close."""
        self._stopping.set()
        self._wake_up()
        self._thread.join(timeout_s)
        if not self._thread.is_alive():  # one that hangs in a send still uses them
            self._wake.close()
            self._waker.close()

    def _wake_up(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full of wake-ups: it will wake
            self._waker.send(b".")

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                with socket.create_connection(self._address, timeout=2.0) as sock:
                    self._serve(sock)
            except (OSError, ChannelError):
                pass
            self._turn()
            self._stopping.wait(0.2)

    def _turn(self) -> bool:
        """Note that this thread runs; True when it was stopped before."""
        now = time.monotonic()
        was_frozen = now - self._turned_at > self._frozen_s
        if was_frozen:
            self._heard_at = max(self._heard_at, now - self._lost_after_s + self._answer_limit_s)
        self._turned_at = now
        return was_frozen

    def _serve(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._local_address = str(sock.getsockname()[0])
        sock.sendall(render_line(self._hello))
        for message in self._connected():
            sock.sendall(render_line(message))
        lines = LineBuffer(MAX_LINE_BYTES)
        with selectors.DefaultSelector() as selector:
            selector.register(sock, selectors.EVENT_READ)
            selector.register(self._wake, selectors.EVENT_READ)
            beat_at = time.monotonic()
            while True:
                ready = {key.fileobj for key, _ in selector.select(max(0.0, beat_at - time.monotonic()))}
                if self._turn():
                    return
                if self._wake in ready:
                    _drain(self._wake)
                if sock in ready:
                    data = sock.recv(65536)
                    if not data:
                        return
                    self._heard_at = time.monotonic()
                    for message in lines.feed(data):
                        self.inbox.put(message)
                self._flush(sock)
                if self._stopping.is_set():
                    return
                if time.monotonic() >= beat_at:
                    sock.sendall(render_line({"type": "beat", **self._state()}))
                    beat_at = time.monotonic() + self._interval_s

    def _flush(self, sock: socket.socket) -> None:
        while True:
            try:
                message = self._outbox.get_nowait()
            except queue.Empty:
                return
            sock.sendall(render_line(message))
