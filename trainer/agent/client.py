"""A node's end of the beat channel: a thread that beats, hears orders, and comes back when the connection breaks.

Two kinds of silence are told apart. While the launcher's host acknowledges what we send, the cable is whole and the
launcher merely slow, stopped or gone: nobody else can have been told to train in our place. When nothing is
acknowledged any more, the launcher may be acting on our silence right now. Monotonic clock only.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from trainer.beats import MAX_LINE_BYTES, ChannelError, LineBuffer, Message, drain, render_line

_SIOCOUTQ = 0x5411  # bytes of a TCP connection that its peer has not acknowledged
_RETRY_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long a node trains on without its launcher, in seconds."""

    unreachable_s: float  # nothing that we send is acknowledged
    silent_s: float  # the launcher's host acknowledges, but the launcher says nothing
    answer_s: float = 2.0  # after we were frozen ourselves: for a new connection and the launcher's answer

    @property
    def frozen_s(self) -> float:
        """A thread that did not run for this long was stopped, not busy."""
        return min(self.unreachable_s, self.silent_s) / 2


class BeatClient:
    """Beats from a thread of its own; whoever asks is told when the launcher is lost, and the launcher when it is back.

    `hello` is called for each connection's first message, `state` for the fields of each beat, `connected` for the
    messages to (re)send after a hello. The inbox gets the launcher's orders and, as messages of our own, `lost` and
    `back`, each once for each loss.

    After a freeze (a suspended job, a stopped node) what stands in the connection is old news and proves nothing: the
    node connects anew, and is lost unless the launcher answers within a short time.
    """

    def __init__(
        self,
        *,
        address: tuple[str, int],
        hello: Callable[[], Message],
        interval_s: float,
        state: Callable[[], Message],
        connected: Callable[[], list[Message]],
        patience: Patience,
    ) -> None:
        self.inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()  # may be fed from a signal handler
        self._address = address
        self._hello = hello
        self._interval_s = interval_s
        self._state = state
        self._connected = connected
        self._patience = patience
        # Connecting blocks the thread, which must not look like a freeze.
        self._io_limit_s = min(2.0, patience.frozen_s / 2)
        self._heard_at = self._reached_at = self._turned_at = time.monotonic()
        self._lost_at: float | None = None  # when the launcher was last known to be there, since it is lost
        self._refused_since: float | None = None  # its host is there and it is not
        self._muted = (math.inf, math.inf)
        self._ping: tuple[object, float] | None = None
        self._local_address = ""
        self._is_urgent = False
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

    def beat_now(self) -> None:
        """Let the next beat go at once. May be called from any thread."""
        self._is_urgent = True
        self._wake_up()

    def is_lost(self) -> bool:
        """True from the moment the launcher counts as lost until it is heard again."""
        now = time.monotonic()
        if not self._thread.is_alive():
            return True
        if self._lost_at is not None:
            return True
        if now - self._turned_at > self._patience.frozen_s:
            return False  # both threads were stopped just now: the other one looks first
        return self._is_silence_too_long(now)

    def is_dead(self) -> bool:
        """True when the thread has ended that beats, which it must not before `stop`."""
        return not self._thread.is_alive()

    def silence_s(self) -> float:
        """How long ago the launcher was last known to be there."""
        return time.monotonic() - (self._last_sign() if self._lost_at is None else self._lost_at)

    def refused_s(self) -> float:
        """For how long its host has refused connections: it lives, and the launcher is gone."""
        since = self._refused_since
        return 0.0 if since is None else time.monotonic() - since

    def mute(self, for_s: float, *, after_s: float = 0.0) -> None:
        """From then on neither say nor hear anything for so long, as with a cut cable; infinity: for ever."""
        begin = time.monotonic() + after_s
        self._muted = (begin, begin + for_s)
        self._wake_up()

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

    # ---- the thread

    def _wake_up(self) -> None:
        with contextlib.suppress(OSError):  # full of wake-ups: it will wake; closed: there is nobody to wake
            self._waker.send(b".")

    def _run(self) -> None:
        while not self._stopping.is_set():
            if not self._is_muted():
                self._connect()
            self._turn()
            self._stopping.wait(_RETRY_S)

    def _connect(self) -> None:
        try:
            with socket.create_connection(self._address, timeout=self._io_limit_s) as sock:
                self._refused_since, self._reached_at = None, time.monotonic()
                self._turn()
                self._serve(sock)
                while self._is_muted() and not self._stopping.wait(_RETRY_S):
                    self._turn()  # a cut cable does not carry the news of a closed connection
        except ConnectionRefusedError:
            if self._refused_since is None:
                self._refused_since = time.monotonic()
        except (OSError, ChannelError):
            self._refused_since = None

    def _is_muted(self) -> bool:
        begin, end = self._muted
        return begin <= time.monotonic() < end

    def _turn(self) -> bool:
        """Note that this thread runs, and whether the launcher is lost; True when it was stopped before."""
        now = time.monotonic()
        was_frozen = now - self._turned_at > self._patience.frozen_s
        if was_frozen:
            limits, answer_s = self._patience, self._patience.answer_s
            self._heard_at = max(self._heard_at, now - limits.silent_s + min(answer_s, limits.silent_s))
            self._reached_at = max(self._reached_at, now - limits.unreachable_s + min(answer_s, limits.unreachable_s))
        self._turned_at = now
        if self._lost_at is None and self._is_silence_too_long(now):
            self._lost_at = self._last_sign()
            self.inbox.put({"type": "lost"})
        return was_frozen

    def _is_silence_too_long(self, now: float) -> bool:
        return now > self._give_up_at()

    def _give_up_at(self) -> float:
        """When the launcher is lost unless something comes. To be heard is not enough where a cable is cut one way."""
        return min(self._heard_at + self._patience.silent_s, self._reached_at + self._patience.unreachable_s)

    def _last_sign(self) -> float:
        return min(self._heard_at, self._reached_at)

    def _hear(self) -> None:
        self._heard_at = time.monotonic()
        if self._lost_at is not None:
            self._lost_at = None
            self.inbox.put({"type": "back"})

    def _serve(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._local_address = str(sock.getsockname()[0])
        sock.sendall(render_line(self._hello()))
        for message in self._connected():
            sock.sendall(render_line(message))
        begun_at = sent_at = time.monotonic()
        lines = LineBuffer(MAX_LINE_BYTES)
        self._ping = None
        with selectors.DefaultSelector() as selector:
            selector.register(sock, selectors.EVENT_READ)
            selector.register(self._wake, selectors.EVENT_READ)
            beat_at = time.monotonic()
            while True:
                ready = {key.fileobj for key, _ in selector.select(self._wait_s(beat_at))}
                if _is_acknowledged(sock) and not self._is_muted():
                    self._reached_at = max(self._reached_at, sent_at)
                if self._turn() or self._is_muted():
                    return
                if time.monotonic() - max(self._reached_at, begun_at) > self._patience.unreachable_s:
                    return  # a fresh connection comes through sooner than a broken one's next try
                if self._wake in ready:
                    drain(self._wake)
                if sock in ready:
                    data = sock.recv(65536)
                    if not data:
                        return
                    self._hear()
                    for message in lines.feed(data):
                        self._take(message)
                sent_at = self._flush(sock) or sent_at
                if self._stopping.is_set():
                    return
                if self._is_urgent or time.monotonic() >= beat_at:
                    self._is_urgent = False
                    sock.sendall(render_line(self._beat()))
                    sent_at = time.monotonic()
                    beat_at = sent_at + self._interval_s

    def _wait_s(self, beat_at: float) -> float:
        now = time.monotonic()
        is_lost_next = self._lost_at is None and now < self._give_up_at() < beat_at
        return max(0.0, (self._give_up_at() + 0.001 if is_lost_next else beat_at) - now)

    def _take(self, message: Message) -> None:
        if message["type"] == "ping":
            if "at" in message:
                self._ping = (message["at"], time.monotonic())
            return  # being heard is all it is for
        self.inbox.put(message)

    def _beat(self) -> Message:
        beat: Message = {"type": "beat", **self._state()}
        if self._ping is not None:  # for the launcher, to tell how our clock differs from its own
            at, taken_at = self._ping
            beat |= {"ping": at, "held_s": round(time.monotonic() - taken_at, 6), "time": time.time()}
            self._ping = None
        return beat

    def _flush(self, sock: socket.socket) -> float | None:
        sent_at = None
        while True:
            try:
                message = self._outbox.get_nowait()
            except queue.Empty:
                return sent_at
            sock.sendall(render_line(message))
            sent_at = time.monotonic()


def _is_acknowledged(sock: socket.socket) -> bool:
    """True when the peer's kernel has taken everything that was sent."""
    try:
        unacknowledged = fcntl.ioctl(sock.fileno(), _SIOCOUTQ, b"\0" * 4)
    except OSError:
        return False
    return unacknowledged == b"\0" * 4
