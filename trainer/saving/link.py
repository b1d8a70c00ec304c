"""Messages between a rank and its writer, and between writers: JSON objects behind a length, file descriptors beside.

Both ends are ours and of one release, so a message is a plain mapping with a "kind"; what is not one ends the link.
A link never waits for ever: sending has a limit, and whoever receives says how long.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

Message = dict[str, Any]

MAX_MESSAGE_BYTES = 256 * 1024 * 1024
MAX_GREETING_BYTES = 4096  # of those who have not shown yet that they know the secret
_SEND_LIMIT_S = 10.0
_BUFFER_BYTES = 1024 * 1024
_LENGTH = struct.Struct("!I")
_NONCE_BYTES = 32
_MAX_FDS = 4
_CENTER = -1  # what the listening end proves in place of a rank


class LinkLost(Exception):
    """The other end is gone, or says what makes no sense."""


class Link:
    """One end of a connection. Any thread may send; one receives. `max_bytes`: of a message of the other end."""

    def __init__(self, connection: socket.socket, max_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._socket = connection
        self.max_bytes = max_bytes
        self._socket.settimeout(_SEND_LIMIT_S)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            connection.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
        self._is_local = connection.family == socket.AF_UNIX
        self._sending = threading.Lock()
        self._received = bytearray()
        self._fds: deque[int] = deque()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        """Hand over a message; raises `LinkLost` when the other end is gone or takes nothing for too long."""
        data = json.dumps(message, separators=(",", ":")).encode()
        data = _LENGTH.pack(len(data)) + data
        try:
            with self._sending:
                if fds:
                    sent = socket.send_fds(self._socket, [data], list(fds))
                    data = data[sent:]
                self._socket.sendall(data)
        except OSError as error:
            raise LinkLost(f"sending failed: {error}") from error

    def receive(self, within_s: float | None = None) -> Message | None:
        """The next message, or None when none came within `within_s` (None: wait without a bound)."""
        deadline = None if within_s is None else time.monotonic() + within_s
        while (message := self._take()) is None:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._wait_readable(left):
                return None
            self._read()
        return message

    def _wait_readable(self, left_s: float | None) -> bool:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(None if left_s is None else left_s * 1000))

    def _read(self) -> None:
        try:
            if self._is_local:
                data, fds, _, _ = socket.recv_fds(self._socket, _BUFFER_BYTES, _MAX_FDS)
                self._fds.extend(fds)
            else:
                data = self._socket.recv(min(_BUFFER_BYTES, self.max_bytes))
        except OSError as error:
            raise LinkLost(f"receiving failed: {error}") from error
        if not data:
            raise LinkLost("the other end is gone")
        self._received += data

    def _take(self) -> Message | None:
        if len(self._received) < _LENGTH.size:
            return None
        (size,) = _LENGTH.unpack_from(self._received)
        if size > self.max_bytes:
            raise LinkLost(f"a message of {size} bytes")
        end = _LENGTH.size + size
        if len(self._received) < end:
            return None
        data = bytes(self._received[_LENGTH.size : end])
        del self._received[:end]
        try:
            message = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise LinkLost(f"a message that is no JSON: {error}") from error
        if not isinstance(message, dict):
            raise LinkLost("a message that is no object")
        return message

    def take_fd(self) -> int:
        """The file descriptor that came with the message just received; the caller owns it."""
        if not self._fds:
            raise LinkLost("a message without its file descriptor")
        return self._fds.popleft()

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.popleft())
        self._socket.close()


# ---------------------------------------------------------------- who is allowed to connect


class Greeting:
    """The link of one who has connected and is not known yet. `link` is the caller's."""

    def __init__(self, connection: socket.socket, secret: bytes) -> None:
        """Ask for the proof; raises `LinkLost` when the other end is gone already."""
        self.link = Link(connection, MAX_GREETING_BYTES)
        self._secret = secret
        self._nonce = os.urandom(_NONCE_BYTES).hex()
        with contextlib.suppress(OSError):
            _keep_alive(connection)
        self.link.send({"kind": "challenge", "nonce": self._nonce})

    def hear(self, within_s: float = 0.0) -> int | None:
        """The rank whose writer it is, None if it has not said so within `within_s`; `LinkLost`: a stranger."""
        hello = self.link.receive(within_s)
        if hello is None:
            return None
        rank, nonce = hello.get("rank"), hello.get("nonce")
        if not isinstance(rank, int) or not isinstance(nonce, str):
            raise LinkLost("it is no writer")
        if not _is_proof(hello.get("proof"), _prove(self._secret, self._nonce, rank)):
            raise LinkLost("it does not know the secret")
        self.link.send({"kind": "welcome", "proof": _prove(self._secret, nonce, _CENTER)})
        self.link.max_bytes = MAX_MESSAGE_BYTES
        return rank


def connect(address: tuple[str, int], secret: bytes, rank: int, within_s: float) -> Link:
    """A link to the writer at `address`; raises `LinkLost` when none is there or it does not know the secret."""
    try:
        connection = socket.create_connection(address, within_s)
    except OSError as error:
        raise LinkLost(f"{address[0]}:{address[1]}: {error}") from error
    _keep_alive(connection)
    link = Link(connection, MAX_GREETING_BYTES)
    with contextlib.ExitStack() as on_error:
        on_error.callback(link.close)
        nonce = os.urandom(_NONCE_BYTES).hex()
        challenge = link.receive(within_s) or {}
        asked = challenge.get("nonce")
        if not isinstance(asked, str):
            raise LinkLost(f"{address[0]}:{address[1]} is another service")
        link.send({"kind": "hello", "rank": rank, "nonce": nonce, "proof": _prove(secret, asked, rank)})
        welcome = link.receive(within_s) or {}
        if not _is_proof(welcome.get("proof"), _prove(secret, nonce, _CENTER)):
            raise LinkLost(f"{address[0]}:{address[1]} is another service")
        link.max_bytes = MAX_MESSAGE_BYTES
        on_error.pop_all()
    return link


def _prove(secret: bytes, nonce: str, rank: int) -> str:
    return hmac.new(secret, f"{nonce}:{rank}".encode(errors="replace"), "sha256").hexdigest()


def _is_proof(given: object, expected: str) -> bool:
    return isinstance(given, str) and hmac.compare_digest(given.encode(errors="replace"), expected.encode())


def _keep_alive(connection: socket.socket) -> None:
    # A node that lost its power sends no EOF: these find it in about twenty seconds.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 20_000)
