"""One Python child process behind length-prefixed frames: for work that may hang, or that must run as another user.

Parent side: `Child.call` puts a question and waits, never longer than its deadline. A child that is late stays late: it
takes no other question until its answer came (a process that hangs in the kernel can't be killed, only left).
Child side: `serve` drops to the owner, says that it is ready, and answers one frame after the other.

The child ends when the parent does: its standard input is the parent's life line. (PR_SET_PDEATHSIG would follow the
thread that started it, and is cleared by the change of user.)
"""

from __future__ import annotations

import os
import select
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

MAX_FRAME_BYTES = 64 * 1024 * 1024
START_ALLOWANCE_S = 20.0  # a child that has not said hello by then is given up

_HEADER = struct.Struct(">I")
_HELLO = b"ready"
_PACKAGE_ROOT = str(Path(__file__).resolve().parent.parent)


class ChildLate(Exception):
    """No answer within the deadline: unknown. The child may still be at it."""


class ChildGone(Exception):
    """The child ended or broke the framing; its question is unanswered."""


class Child:
    """A child process that answers frames; used by one thread at a time."""

    def __init__(
        self, module: str, *, uid: int | None = None, gid: int | None = None, arguments: tuple[str, ...] = ()
    ) -> None:
        """Start `python -m module`, with a scrubbed environment, to run as `uid` and `gid` (only root can)."""
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-s", "-m", module, *identity_arguments(uid, gid), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd="/",
            env=scrubbed_environment(),
            start_new_session=True,  # a Ctrl-C at the daemon's terminal is the daemon's to handle
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin = self._process.stdin.fileno()
        self._stdout = self._process.stdout.fileno()
        os.set_blocking(self._stdin, False)
        os.set_blocking(self._stdout, False)
        self._buffer = bytearray()
        self._is_ready = False
        self._owed = 0  # answers to questions that the caller gave up
        self._started = time.monotonic()
        self.late_since: float | None = None  # monotonic time of the question that is still unanswered

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def stdout(self) -> int:
        """File descriptor to wait on before `receive`."""
        return self._stdout

    def is_alive(self) -> bool:
        """False once the process has ended (and is reaped by this call)."""
        return self._process.poll() is None

    def is_free(self) -> bool:
        """True when it can take a question: late answers that have come in the meantime are dropped here."""
        if not self.is_alive():
            return False
        try:
            while self._owed and self.receive(0.0) is not None:
                self._owed -= 1
        except ChildGone:
            return False
        if not self._owed:
            self.late_since = None
        return not self._owed

    def call(self, question: bytes, *, deadline_s: float) -> bytes:
        """The answer to one question; raises ChildLate or ChildGone within `deadline_s`."""
        until = time.monotonic() + deadline_s
        if not self._await_hello(until):
            raise ChildLate("the reading process is still starting")
        self.late_since = time.monotonic()
        self._owed += 1
        self._send(question, until)
        answer = self.receive(until - time.monotonic())
        if answer is None:
            raise ChildLate(f"no answer within {deadline_s:g} s")
        self._owed -= 1
        self.late_since = None
        return answer

    def tell(self, question: bytes, *, deadline_s: float) -> None:
        """Send a question whose answers the caller takes with `receive`."""
        self._send(question, time.monotonic() + deadline_s)

    def receive(self, timeout_s: float) -> bytes | None:
        """The next frame, or None when none is complete within `timeout_s`; raises ChildGone."""
        until = time.monotonic() + timeout_s
        while True:
            frame = self._take_frame()
            if frame == _HELLO and not self._is_ready:
                self._is_ready = True
                continue
            if frame is not None:
                return frame
            if not _wait(self._stdout, select.POLLIN, until):
                return None
            self._fill()

    def kill(self) -> None:
        """SIGKILL; reaped by a later `is_alive` (a process in the kernel's hands goes when the kernel lets it)."""
        if self.is_alive():
            self._process.kill()

    def close(self, *, wait_s: float = 1.0) -> bool:
        """Cut the life line, wait a moment, then kill; True when the process is gone and reaped."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        try:
            self._process.wait(wait_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            try:
                self._process.wait(wait_s)
            except subprocess.TimeoutExpired:
                return False
        return True

    def _await_hello(self, until: float) -> bool:
        while not self._is_ready:
            frame = self._take_frame()
            if frame is not None:
                if frame != _HELLO:
                    raise ChildGone("the reading process did not start properly")
                self._is_ready = True
            elif not _wait(self._stdout, select.POLLIN, until):
                if time.monotonic() - self._started > START_ALLOWANCE_S:
                    self.kill()
                return False
            else:
                self._fill()
        return True

    def _send(self, payload: bytes, until: float) -> None:
        data = memoryview(_HEADER.pack(len(payload)) + payload)
        while data:
            if not _wait(self._stdin, select.POLLOUT, until):
                self.kill()  # half a question was sent: the framing is lost
                raise ChildLate("the reading process does not take the question")
            try:
                data = data[os.write(self._stdin, data) :]
            except BlockingIOError:
                continue
            except OSError as error:
                raise ChildGone(f"the reading process ended: {error.strerror}") from None

    def _fill(self) -> None:
        try:
            data = os.read(self._stdout, 1 << 20)
        except BlockingIOError:
            return
        if not data:
            self._process.poll()
            raise ChildGone(f"the reading process ended (exit code {self._process.returncode})")
        self._buffer += data

    def _take_frame(self) -> bytes | None:
        if len(self._buffer) < _HEADER.size:
            return None
        (length,) = _HEADER.unpack_from(self._buffer)
        if length > MAX_FRAME_BYTES:
            self.kill()
            raise ChildGone(f"an answer of {length} bytes is too long")
        end = _HEADER.size + length
        if len(self._buffer) < end:
            return None
        frame = bytes(self._buffer[_HEADER.size : end])
        del self._buffer[:end]
        return frame


def scrubbed_environment() -> dict[str, str]:
    """What a child of the service gets: nothing of the daemon's own environment."""
    return {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONPATH": _PACKAGE_ROOT, "PYTHONDONTWRITEBYTECODE": "1"}


def identity_arguments(uid: int | None, gid: int | None) -> tuple[str, ...]:
    """Arguments that make `serve` drop to the owner; empty when there is nothing to drop (not root, or root's own)."""
    if not uid or os.geteuid() != 0:
        return ()
    return ("--uid", str(uid), "--gid", str(uid if gid is None else gid))


def _wait(fd: int, event: int, until: float) -> bool:
    poll = select.poll()
    poll.register(fd, event)
    remaining_ms = max(0.0, (until - time.monotonic()) * 1000)
    return bool(poll.poll(remaining_ms))


# ---------------------------------------------------------------- child side


class Wire:
    """The child's end of the pipes."""

    def __init__(self, answers: int) -> None:
        self._answers = answers

    def receive(self) -> bytes | None:
        """The next question; None when the parent is gone."""
        header = self._read(_HEADER.size)
        return None if header is None else self._read(_HEADER.unpack(header)[0])

    def send(self, payload: bytes) -> None:
        """Write one frame."""
        data = memoryview(_HEADER.pack(len(payload)) + payload)
        while data:
            data = data[os.write(self._answers, data) :]

    @staticmethod
    def _read(count: int) -> bytes | None:
        parts = bytearray()
        while len(parts) < count:
            data = os.read(0, count - len(parts))
            if not data:
                return None
            parts += data
        return bytes(parts)


def serve(answer: Callable[[bytes, Wire], bytes | None], argv: list[str]) -> int:
    """Drop to the owner, say hello, and answer until the parent is gone. Everything must be imported by now."""
    answers = os.dup(1)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)  # a stray print must not break the framing
    _drop(argv)
    os.umask(0o022)
    threading.Thread(target=_end_with_parent, name="life-line", daemon=True).start()
    wire = Wire(answers)
    try:
        wire.send(_HELLO)
        while (question := wire.receive()) is not None:
            reply = answer(question, wire)
            if reply is not None:
                wire.send(reply)
    except BrokenPipeError:
        pass
    return 0


def _drop(argv: list[str]) -> None:
    if "--uid" not in argv:
        return
    uid, gid = int(argv[argv.index("--uid") + 1]), int(argv[argv.index("--gid") + 1])
    os.setgroups(_groups_of(uid, gid))
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)


def _groups_of(uid: int, gid: int) -> list[int]:
    import pwd

    try:
        return os.getgrouplist(pwd.getpwuid(uid).pw_name, gid)
    except KeyError:
        return [gid]


def _end_with_parent() -> None:
    poll = select.poll()
    poll.register(0, 0)  # only the hang-up; questions are the main thread's
    while not any(event & (select.POLLHUP | select.POLLERR | select.POLLNVAL) for _, event in poll.poll()):
        pass
    os._exit(0)
