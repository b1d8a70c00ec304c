"""The control socket: a local request and its answer, one JSON object a line each; both ends.

The kernel says who asks (SO_PEERCRED). Neither end trusts the other: what arrives is bounded in size and time, a
client that sends garbage, nothing, or never reads its answer costs the daemon's loop nothing but one descriptor.

    ControlError
    ├── SocketInUse      another daemon answers at this path
    ├── DaemonDown       nobody answers: nothing was changed
    │   └── DaemonSilent   a daemon is there but has not answered in time: the request may have been accepted
    └── Refused          the daemon understood and said no (code, message)
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import selectors
import socket
import stat
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

MAX_LINE_BYTES = 4 * 1024 * 1024  # a batch script (512 KiB) and an environment (256 KiB), as JSON
MAX_CLIENTS = 256
MAX_CLIENTS_PER_UID = 32  # one account can't keep the others out
CLIENT_TIMEOUT_S = 10.0  # to send a whole request, and again to take its answer

_SO_PEERGROUPS = 59  # Linux 4.13; the socket module has no name for it
_UCRED = struct.Struct("3i")
_MAX_PATH_BYTES = 107  # sun_path holds 108 bytes with its zero
_CHUNK_BYTES = 64 * 1024


class ControlError(Exception):
    """Base of this module's errors; the message is one line for people."""


class SocketInUse(ControlError):
    """Another daemon answers at this path, or something that is no socket stands there."""


class DaemonDown(ControlError):
    """No daemon answers; the message says how to start it."""


class DaemonSilent(DaemonDown):
    """The daemon took the connection and did not answer in time."""


class Refused(ControlError):
    """The daemon said no."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Who asks, as the kernel says."""

    pid: int
    uid: int
    gid: int
    groups: frozenset[int] = frozenset()  # gid included


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request. Its answer is due through `ControlServer.answer`."""

    verb: str
    body: Mapping[str, Any]
    peer: Peer
    connection: int = -1


Handler = Callable[[Request], Mapping[str, Any]]


def failure(code: str, message: str) -> dict[str, Any]:
    """The answer to a request that is not granted."""
    return {"ok": False, "code": code, "message": message}


# ---------------------------------------------------------------- the daemon's end


@dataclass(slots=True)
class _Connection:
    sock: socket.socket
    peer: Peer
    deadline: float  # on the server's clock
    received: bytearray = field(default_factory=bytearray)
    to_send: memoryview | None = None
    is_asked: bool = False  # its request is with the caller


class ControlServer:
    """Listens, collects whole requests, sends answers. Never blocks: the caller's loop drives it.

    `fileno()` is readable when `poll` has something to do, so that the loop can wait on it together with others.
    """

    def __init__(self, path: Path, *, mode: int = 0o666, clock: Callable[[], float] = time.monotonic) -> None:
        """Listen at `path`. A socket that a dead daemon left is replaced. Raises ControlError."""
        self.path = path
        self._clock = clock
        self._connections: dict[int, _Connection] = {}
        self._socket = _listen(path, mode)
        self._inode = path.stat().st_ino
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)

    def fileno(self) -> int:
        """A descriptor that is readable when a client waits for `poll`."""
        return _selector_fileno(self._selector)

    def poll(self, timeout_s: float = 0.0) -> list[Request]:
        """Wait for at most `timeout_s` and return the requests that are complete."""
        requests: list[Request] = []
        for key, events in self._selector.select(max(0.0, timeout_s)):
            if key.fileobj is self._socket:
                self._accept()
                continue
            connection = self._connections.get(key.fd)
            if connection is None:
                continue
            if events & selectors.EVENT_WRITE:
                self._send(connection)
            elif (request := self._receive(connection)) is not None:
                requests.append(request)
        self._drop_late()
        return requests

    def answer(self, request: Request, reply: Mapping[str, Any]) -> None:
        """Send the answer; a client that has gone away is no error: what was accepted stays accepted."""
        connection = self._connections.get(request.connection)
        if connection is not None and connection.is_asked:
            self._start_answer(connection, reply)

    def serve(self, timeout_s: float, handle: Handler) -> int:
        """Poll once and answer each request with what `handle` returns; the number of requests."""
        requests = self.poll(timeout_s)
        for request in requests:
            self.answer(request, handle(request))
        return len(requests)

    def close(self) -> None:
        """Stop listening and remove the socket, unless another daemon has replaced it."""
        for connection in list(self._connections.values()):
            self._drop(connection)
        self._selector.close()
        self._socket.close()
        with contextlib.suppress(OSError):
            if self.path.stat().st_ino == self._inode:
                self.path.unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        try:
            sock, _ = self._socket.accept()
        except OSError:  # gone again, or out of descriptors: the next poll tries again
            return
        sock.setblocking(False)
        peer = _peer_of(sock)
        of_same = sum(1 for other in self._connections.values() if other.peer.uid == peer.uid)
        if len(self._connections) >= MAX_CLIENTS or of_same >= MAX_CLIENTS_PER_UID:
            with contextlib.suppress(OSError):
                sock.send(_render(failure("busy", "too many clients are connected; try again")))
            sock.close()
            return
        connection = _Connection(sock=sock, peer=peer, deadline=self._clock() + CLIENT_TIMEOUT_S)
        self._connections[sock.fileno()] = connection
        self._selector.register(sock, selectors.EVENT_READ)

    def _receive(self, connection: _Connection) -> Request | None:
        try:
            data = connection.sock.recv(_CHUNK_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            self._drop(connection)
            return None
        if not data:
            self._drop(connection)
            return None
        connection.received += data
        line, newline, _ = bytes(connection.received).partition(b"\n") if b"\n" in data else (b"", b"", b"")
        if len(line) > MAX_LINE_BYTES or (not newline and len(connection.received) > MAX_LINE_BYTES):
            self._start_answer(connection, failure("bad_input", f"a request has at most {MAX_LINE_BYTES} bytes"))
            return None
        return self._read_line(connection, line) if newline else None

    def _read_line(self, connection: _Connection, line: bytes) -> Request | None:
        body = _parse_object(line)
        if body is None or not isinstance(body.get("verb"), str):
            self._start_answer(connection, failure("bad_input", 'a request is one JSON object with a "verb"'))
            return None
        connection.is_asked = True
        self._selector.unregister(connection.sock)  # nothing more is read from it
        return Request(verb=body["verb"], body=body, peer=connection.peer, connection=connection.sock.fileno())

    def _start_answer(self, connection: _Connection, reply: Mapping[str, Any]) -> None:
        connection.to_send = memoryview(_render(reply))
        connection.deadline = self._clock() + CLIENT_TIMEOUT_S
        if connection.is_asked:
            connection.is_asked = False
            self._selector.register(connection.sock, selectors.EVENT_WRITE)
        else:
            self._selector.modify(connection.sock, selectors.EVENT_WRITE)
        self._send(connection)

    def _send(self, connection: _Connection) -> None:
        if connection.to_send is None:
            return
        try:
            sent = connection.sock.send(connection.to_send)
        except BlockingIOError:
            return
        except OSError:
            self._drop(connection)
            return
        connection.to_send = connection.to_send[sent:]
        if not connection.to_send:
            self._drop(connection)

    def _drop_late(self) -> None:
        now = self._clock()
        for connection in list(self._connections.values()):
            if not connection.is_asked and connection.deadline <= now:
                self._drop(connection)

    def _drop(self, connection: _Connection) -> None:
        self._connections.pop(connection.sock.fileno(), None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.sock)
        connection.sock.close()


def _listen(path: Path, mode: int) -> socket.socket:
    """A listening socket under `path`, published by rename: a client finds the old one or one that answers."""
    temporary = path.with_name(f".{path.name[:40]}.{os.getpid()}")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _refuse_if_alive(path)
        temporary.unlink(missing_ok=True)
        with _short(temporary) as address:
            sock.bind(address)
        temporary.chmod(mode)
        sock.listen(MAX_CLIENTS)
        sock.setblocking(False)
        temporary.replace(path)
    except OSError as error:
        sock.close()
        raise ControlError(f"control socket {path}: {error.strerror or error}") from None
    except ControlError:
        sock.close()
        raise
    return sock


def _refuse_if_alive(path: Path) -> None:
    try:
        is_socket = stat.S_ISSOCK(path.lstat().st_mode)
    except FileNotFoundError:
        return
    if not is_socket:
        raise SocketInUse(f"control socket {path}: something that is no socket stands there")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as probe, _short(path) as address:
        probe.settimeout(1.0)
        try:
            probe.connect(address)
        except (ConnectionRefusedError, FileNotFoundError):
            return
        except TimeoutError:
            pass  # somebody listens and is slow: alive
    raise SocketInUse(f"control socket {path}: another daemon answers there")


def _peer_of(sock: socket.socket) -> Peer:
    pid, uid, gid = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return Peer(pid=pid, uid=uid, gid=gid, groups=frozenset((gid, *_peer_groups(sock, uid, gid))))


def _peer_groups(sock: socket.socket, uid: int, gid: int) -> tuple[int, ...]:
    try:
        data = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 1024)
        return struct.unpack(f"{len(data) // 4}I", data)
    except OSError:  # an old kernel, or more than 256 groups
        try:
            return tuple(os.getgrouplist(pwd.getpwuid(uid).pw_name, gid))
        except (KeyError, OSError):
            return ()


def _selector_fileno(selector: selectors.BaseSelector) -> int:
    if isinstance(selector, selectors.EpollSelector):
        return selector.fileno()
    raise ControlError("the control socket needs epoll")


# ---------------------------------------------------------------- the client's end

START_HINT = "start it with `systemctl start supervisor` or `supervisor daemon`"


def ask(
    path: Path, request: Mapping[str, Any], timeout_s: float = 30.0, *, start_hint: str = START_HINT
) -> dict[str, Any]:
    """The daemon's answer to one request. Raises DaemonDown, DaemonSilent, or Refused with the daemon's reason."""
    deadline = time.monotonic() + timeout_s
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as sock:
        sock.settimeout(timeout_s)
        _connect(sock, path, start_hint)
        try:
            sock.sendall(_render(request))
            line = _read_answer(sock, deadline)
        except TimeoutError:
            raise DaemonSilent(
                f"the daemon has not answered within {timeout_s:g} s; it may still accept the request: "
                "look at `supervisor status`"
            ) from None
        except OSError as error:
            raise DaemonSilent(f"the daemon broke the connection: {error.strerror or error}") from None
    reply = _parse_object(line)
    if reply is None or not isinstance(reply.get("ok"), bool):
        raise DaemonSilent("the daemon ended the connection without an answer; look at `supervisor status`")
    if not reply["ok"]:
        raise Refused(str(reply.get("code", "refused")), str(reply.get("message", "the daemon said no")))
    return reply


def _connect(sock: socket.socket, path: Path, start_hint: str) -> None:
    try:
        with _short(path) as address:
            sock.connect(address)
    except (FileNotFoundError, ConnectionRefusedError):
        raise DaemonDown(f"the daemon is not running (no answer at {path}); {start_hint}") from None
    except TimeoutError:
        raise DaemonSilent(f"the daemon does not take connections at {path}: is it frozen?") from None
    except OSError as error:
        raise DaemonDown(f"control socket {path}: {error.strerror or error}; {start_hint}") from None


def _read_answer(sock: socket.socket, deadline: float) -> bytes:
    received = bytearray()
    while b"\n" not in received and len(received) <= MAX_LINE_BYTES:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        data = sock.recv(_CHUNK_BYTES)
        if not data:
            break
        received += data
    return bytes(received).partition(b"\n")[0]


# ---------------------------------------------------------------- both


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """An address of `path` that fits in a socket address, however deep the folder lies."""
    if len(os.fsencode(path)) <= _MAX_PATH_BYTES:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def _render(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, separators=(",", ":"), default=str).encode() + b"\n"


def _parse_object(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
