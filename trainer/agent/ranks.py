"""The agent's end of the lines to its ranks: where each rank is, for how long, and whether it does anything.

A rank says hello on a Unix socket in a folder that only its user may enter; whoever is of another user, speaks another
language or claims the place of a rank that is still on the line is cut off. One thread serves them all. It measures
the age of a rank's news by a clock that stands still while this process is stopped (a suspended job).
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.agent.vitals import Vitals, VitalsWatch
from trainer.beats import ChannelError, LineBuffer, Message, render_line
from trainer.contract import PHASES

MAX_LINE_BYTES = 64 * 1024
MAX_UNSENT_BYTES = 64 * 1024
MAX_LINES = 4096  # connections; a node has at most some hundred ranks
FROZEN_S = 1.0  # the thread turns twice a second: what is beyond was a stop, and counts for nobody's age
# A rank that has been silent for this share of its limit is looked at, once a second: not in the middle of each step.
LOOK_SHARE, LOOK_LEAST_S, LOOK_MOST_S = 0.4, 0.5, 60.0
UNTOLD_LIMIT_S = 5.0
SIGNS_INTERVAL_S = 5.0  # of ranks that have no line

_TURN_S = 0.5
_FOLDER_PREFIX = "supervisor-ranks-"
_NUMBERS = (
    "limit_s",
    "entered",
    "timed_step",
    "timed",
    "step_s",
    "own_s",
)  # what a rank may say besides step and phase


def make_socket_folder() -> Path:
    """A new folder of this node for the socket, its user's alone; what dead agents left there is removed."""
    for parent in (tempfile.gettempdir(), "/tmp", "/dev/shm"):  # noqa: S108 - a socket's name must be short
        if len(parent) <= 60 and os.access(parent, os.W_OK | os.X_OK):
            _remove_stale(Path(parent))
            with contextlib.suppress(OSError):
                return Path(tempfile.mkdtemp(prefix=_FOLDER_PREFIX, dir=parent))
    return Path(tempfile.mkdtemp(prefix=_FOLDER_PREFIX))


def _remove_stale(parent: Path) -> None:
    for folder in parent.glob(f"{_FOLDER_PREFIX}*"):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as sock:
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            sock.settimeout(0.5)
            try:
                sock.connect(str(next(folder.glob("*.sock"))))
            except (ConnectionRefusedError, StopIteration):
                if time.time() - folder.stat().st_mtime > 60:  # not one that is being made
                    shutil.rmtree(folder, ignore_errors=True)


@dataclass(slots=True)
class _Line:
    sock: socket.socket
    pid: int  # as the kernel says
    lines: LineBuffer = field(default_factory=lambda: LineBuffer(MAX_LINE_BYTES))
    unsent: bytes = b""
    rank: int | None = None
    launch: int = 0
    stacks: str = ""  # where its faulthandler writes when it gets `signal`
    signal: int = 0
    step: int = -1
    phase: str = ""
    news: dict[str, Any] = field(default_factory=dict)
    changed_at: float = 0.0  # on the desk's clock
    vitals: Vitals | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Linked:
    """A rank that has a line: its process, and how its stacks are had when its interpreter is stuck."""

    rank: int
    pid: int
    stacks: str
    signal: int


class RankDesk:
    """Serves the ranks of one node. `wake` is called, from the desk's thread, when a rank has changed its phase."""

    def __init__(self, path: Path, wake: Callable[[], None] = lambda: None) -> None:
        self._path = path
        self._wake_agent = wake
        self._lock = threading.Lock()
        self._lines: dict[int, _Line] = {}  # by descriptor
        self._by_rank: dict[int, _Line] = {}
        self._answers: dict[int, dict[int, tuple[tuple[str, ...], bool]]] = {}  # by request: rank: files, all of them
        self._answered = threading.Condition(self._lock)
        self._requests = 0
        self._launch = 0
        self._clock = 0.0
        self._turned_at = time.monotonic()
        self._looked_at = 0.0
        self._unlinked: dict[int, int] = {}  # pids of ranks by rank, as the agent knows them
        self._log_dir: Path | None = None
        self._vitals, self._sign_vitals = VitalsWatch(), VitalsWatch()  # of two threads
        self._signs: list[Message] = []
        self._signs_at = -SIGNS_INTERVAL_S
        self._signer: threading.Thread | None = None
        self._stopping = False
        self._selector = selectors.DefaultSelector()
        self._wake, self._waker = socket.socketpair()
        for sock in (self._wake, self._waker):
            sock.setblocking(False)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        path.chmod(0o600)
        self._listener.listen(256)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="ranks", daemon=True)

    @property
    def path(self) -> Path:
        """The socket: the value of $SUPERVISOR_NODE_SOCKET for the ranks."""
        return self._path

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def begin(self, launch: int) -> None:
        """Another start of the training: what the ranks of earlier ones said is forgotten."""
        with self._lock:
            self._launch = launch
            self._unlinked, self._log_dir, self._signs = {}, None, []
            for line in [line for line in self._lines.values() if line.rank is not None and line.launch != launch]:
                self._drop(line)
        for stacks in self._path.parent.glob("rank*.stacks"):  # of ranks that are gone
            stacks.unlink(missing_ok=True)

    def watch(self, pids: Mapping[int, int], log_dir: Path | None) -> None:
        """Look after these processes, too: {rank: pid}; signs of life are told of those that have no line."""
        with self._lock:
            self._unlinked, self._log_dir = dict(pids), log_dir

    def states(self) -> list[Message]:
        """One entry for each rank of the current start, for the beats."""
        with self._lock:
            linked = [self._tell(line) for _, line in sorted(self._by_rank.items())]
            return linked + [sign for sign in self._signs if sign["rank"] not in self._by_rank]

    def linked(self) -> tuple[Linked, ...]:
        """The ranks that have a line now."""
        with self._lock:
            return tuple(
                Linked(rank=rank, pid=line.pid, stacks=line.stacks, signal=line.signal)
                for rank, line in sorted(self._by_rank.items())
            )

    def ask_evidence(self, directory: Path) -> int:
        """Ask every rank that has a line for evidence into `directory`; the request's number."""
        with self._lock:
            self._requests += 1
            number = self._requests
            self._answers = {number: {}}
            for line in list(self._by_rank.values()):
                self._queue(line, render_line({"type": "evidence", "id": number, "dir": str(directory)}))
        self._poke()
        return number

    def await_evidence(self, number: int, ranks: frozenset[int], limit_s: float) -> dict[int, tuple[str, ...]]:
        """The files that these ranks have written, as soon as all have ended or at the limit."""
        deadline = time.monotonic() + limit_s
        with self._lock:
            while True:
                answers = self._answers.get(number, {})
                left_s = deadline - time.monotonic()
                if left_s <= 0 or all(rank in answers and answers[rank][1] for rank in ranks):
                    return {rank: files for rank, (files, _) in answers.items()}
                self._answered.wait(left_s)

    def close(self) -> None:
        """End the thread and remove the socket's folder if it is one of `make_socket_folder`."""
        self._stopping = True
        self._poke()
        if self._thread.is_alive():
            self._thread.join(2.0)
        if not self._thread.is_alive():
            self._release()
        self._path.unlink(missing_ok=True)
        if self._path.parent.name.startswith(_FOLDER_PREFIX):
            shutil.rmtree(self._path.parent, ignore_errors=True)

    def _release(self) -> None:
        with self._lock:
            for line in list(self._lines.values()):
                self._drop(line)
            for sock in (self._listener, self._wake, self._waker):
                sock.close()
            self._selector.close()

    # ---- the thread

    def _poke(self) -> None:
        with contextlib.suppress(OSError):
            self._waker.send(b".")

    def _run(self) -> None:
        while not self._stopping:
            ready = self._selector.select(_TURN_S)
            with self._lock:
                self._turn()
                changed = [self._serve_ready(key, mask) for key, mask in ready]
            if any(changed):
                self._wake_agent()
            self._look()

    def _turn(self) -> None:
        now = time.monotonic()
        self._clock += min(now - self._turned_at, FROZEN_S)
        self._turned_at = now

    def _now(self) -> float:
        return self._clock + min(time.monotonic() - self._turned_at, FROZEN_S)

    def _serve_ready(self, key: selectors.SelectorKey, mask: int) -> bool:
        if key.fileobj is self._listener:
            self._accept()
            return False
        if key.fileobj is self._wake:
            with contextlib.suppress(OSError):
                self._wake.recv(4096)
            return False
        return self._serve(key.data, mask)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            pid, uid, _gid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if uid != os.getuid() or len(self._lines) >= MAX_LINES:
                sock.close()
                continue
            sock.setblocking(False)
            line = _Line(sock=sock, pid=pid)
            self._lines[sock.fileno()] = line
            self._selector.register(sock, selectors.EVENT_READ, line)

    def _serve(self, line: _Line, mask: int) -> bool:
        if mask & selectors.EVENT_WRITE:
            self._queue(line, b"")
        if not mask & selectors.EVENT_READ or line.sock.fileno() < 0:
            return False
        try:
            data = line.sock.recv(65536)
            if not data:
                self._drop(line)
                return False
            changed = [self._take(line, message) for message in line.lines.feed(data)]
        except BlockingIOError:
            return False
        except (OSError, ChannelError, TypeError, ValueError):
            self._drop(line)
            return False
        return any(changed)

    def _take(self, line: _Line, message: Message) -> bool:
        if line.sock.fileno() < 0:
            return False
        if message["type"] == "hello" and line.rank is None:
            self._seat(line, message)
        elif message["type"] == "progress" and line.rank is not None:
            return self._take_news(line, message)
        elif message["type"] == "evidence" and line.rank is not None:
            files = tuple(str(name) for name in message.get("files") or ())
            answers = self._answers.get(message.get("id") or 0)
            if answers is not None:
                answers[line.rank] = (files, bool(message.get("done", True)))
                self._answered.notify_all()
        return False

    def _seat(self, line: _Line, hello: Message) -> None:
        rank = int(hello["rank"])
        earlier = self._by_rank.get(rank)
        if int(hello.get("launch") or 0) != self._launch or (earlier is not None and earlier.pid != line.pid):
            self._drop(line)  # of another start, or a program that a rank has started
            return
        if earlier is not None:
            self._drop(earlier)
        line.rank, line.launch = rank, self._launch
        line.stacks, line.signal = str(hello.get("stacks") or ""), int(hello.get("signal") or 0)
        line.changed_at = self._now()
        self._by_rank[rank] = line

    def _take_news(self, line: _Line, message: Message) -> bool:
        step, phase = int(message["step"]), str(message["phase"])
        if phase not in PHASES:
            raise ValueError(phase)
        is_phase_new = phase != line.phase
        if is_phase_new or step != line.step:
            line.changed_at = self._now()
            line.vitals = None
        line.step, line.phase = step, phase
        line.news = {name: message[name] for name in _NUMBERS if type(message.get(name)) in (int, float)}
        entered = message.get("entered")
        if isinstance(entered, dict) and len(entered) <= len(PHASES):
            line.news["entered"] = {str(name): int(count) for name, count in entered.items()}
        return is_phase_new

    def _tell(self, line: _Line) -> Message:
        entry: Message = {
            "rank": line.rank,
            "pid": line.pid,
            "step": line.step,
            "phase": line.phase,
            "age_s": round(self._now() - line.changed_at, 3),
            **line.news,
        }
        if line.vitals is not None:
            entry |= {"busy": line.vitals.is_busy, "state": line.vitals.state}
        return entry

    def _queue(self, line: _Line, data: bytes) -> None:
        line.unsent += data
        try:
            sent = line.sock.send(line.unsent)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._drop(line)
            return
        line.unsent = line.unsent[sent:]
        if len(line.unsent) > MAX_UNSENT_BYTES:  # a stopped process reads nothing
            line.unsent = b""
        mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if line.unsent else 0)
        self._selector.modify(line.sock, mask, line)

    def _drop(self, line: _Line) -> None:
        fileno = line.sock.fileno()
        if fileno < 0:
            return
        self._selector.unregister(line.sock)
        self._lines.pop(fileno, None)
        line.sock.close()
        if line.rank is not None and self._by_rank.get(line.rank) is line:
            del self._by_rank[line.rank]
            self._answered.notify_all()

    # ---- looking at processes

    def _look(self) -> None:
        """Vitals of the ranks that are quiet, once a second; of those without a line every few seconds."""
        now = time.monotonic()
        if now - self._looked_at < 1.0:
            return
        self._looked_at = now
        with self._lock:
            now_s = self._now()
            quiet = [line for line in self._by_rank.values() if now_s - line.changed_at > _look_after_s(line)]
            unlinked = {rank: pid for rank, pid in self._unlinked.items() if rank not in self._by_rank}
            log_dir = self._log_dir
        if quiet:
            vitals = self._vitals.look([line.pid for line in quiet], now)
            with self._lock:
                for line in quiet:
                    line.vitals = vitals.get(line.pid)
        is_free = self._signer is None or not self._signer.is_alive()
        if unlinked and is_free and now - self._signs_at >= SIGNS_INTERVAL_S:
            self._signs_at = now
            self._signer = threading.Thread(target=self._read_signs, args=(unlinked, log_dir), daemon=True)
            self._signer.start()

    def _read_signs(self, pids: Mapping[int, int], log_dir: Path | None) -> None:
        """Beside the desk's thread: the logs' file system may hang."""
        signs = self._sign_vitals.read_signs(pids, log_dir, time.monotonic())
        with self._lock:
            if pids.items() <= self._unlinked.items():  # still of this start
                self._signs = signs


def _look_after_s(line: _Line) -> float:
    limit_s = float(line.news.get("limit_s", UNTOLD_LIMIT_S))
    return min(max(LOOK_SHARE * limit_s, LOOK_LEAST_S), LOOK_MOST_S)
