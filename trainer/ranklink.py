"""A rank's line to the agent of its node: where the training is, and evidence when somebody asks for it.

Where $SUPERVISOR_NODE_SOCKET names a socket, a thread tells the agent the step and the phase (a change of phase at
once, otherwise twice a second at most), and writes the stacks of all threads and the Flight Recorder's entries when
the agent asks: also while the main thread stands in a collective. For a process whose interpreter is stuck in native
code there is a signal that makes faulthandler write the stacks into a file of the socket's folder.

The training pays for an assignment; nothing here raises into it, delays it or outlives it. It imports no torch.
A child made by fork has no line of its own. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer import contract
from trainer.beats import ChannelError, LineBuffer, Message, render_line
from trainer.rankevidence import arm_stack_signal, write_evidence
from trainer.steptime import TIMES

TELL_INTERVAL_S = 0.5
RECONNECT_S = 1.0
MAX_LINE_BYTES = 64 * 1024

News = tuple[int, str, float | None, Mapping[str, int]]  # step, phase, limit_s, long phases entered


class RankLink:
    """The line of this process. Made by `open_link`."""

    def __init__(self, path: Path, *, rank: int, local_rank: int, launch: int) -> None:
        self._path = path
        self._rank = rank
        self._hello: Message = {
            "type": "hello",
            "rank": rank,
            "local_rank": local_rank,
            "launch": launch,
            "pid": os.getpid(),
        }
        self._news: News | None = None
        self._told: News | None = None
        self._is_urgent = False
        self._is_closed = False
        self._answers: list[Message] = []
        self._sock: socket.socket | None = None
        self._wake, self._waker = socket.socketpair()
        self._wake.setblocking(False)
        self._waker.setblocking(False)
        threading.Thread(target=self._run, name="ranklink", daemon=True).start()

    def tell(self, news: News, *, urgent: bool) -> None:
        """Hand over where the training is; the thread sends it."""
        self._news = news
        if urgent and not self._is_closed:
            self._is_urgent = True
            self._wake_up()

    def forget(self) -> None:
        """In a child of fork: the line is the parent's."""
        self._is_closed = True
        for sock in (self._wake, self._waker, self._sock):
            if sock is not None:
                sock.close()

    def _wake_up(self) -> None:
        with contextlib.suppress(OSError):  # full of wake-ups: it will wake
            self._waker.send(b".")

    # ---- the thread

    def _run(self) -> None:
        with contextlib.suppress(Exception):
            stacks, number = arm_stack_signal(self._path.parent, self._rank)
            self._hello |= {"stacks": stacks, "signal": number}
        while not self._is_closed:
            with contextlib.suppress(Exception), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
                self._sock = sock
                sock.settimeout(RECONNECT_S)
                sock.connect(str(self._path))
                self._serve(sock)
            time.sleep(RECONNECT_S)

    def _serve(self, sock: socket.socket) -> None:
        sock.sendall(render_line(self._hello))
        self._told = None
        lines = LineBuffer(MAX_LINE_BYTES)
        poller = select.poll()
        poller.register(sock, select.POLLIN)
        poller.register(self._wake, select.POLLIN)
        told_at = 0.0
        while not self._is_closed:
            ready = {fd for fd, _ in poller.poll(TELL_INTERVAL_S * 1000)}
            if self._wake.fileno() in ready:
                self._wake.recv(4096)
            if sock.fileno() in ready:
                data = sock.recv(65536)
                if not data:
                    return
                self._take(lines, data)
            while self._answers:
                sock.sendall(render_line(self._answers.pop(0)))
            if self._is_urgent or time.monotonic() - told_at >= TELL_INTERVAL_S:
                told_at = time.monotonic()
                self._is_urgent = False
                self._send_news(sock)

    def _send_news(self, sock: socket.socket) -> None:
        news = self._news
        if news is None or news == self._told:
            return
        step, phase, limit_s, entered = news
        message = {
            "type": "progress",
            "step": step,
            "phase": phase,
            "limit_s": limit_s,
            "entered": entered,
            **TIMES.told(),
        }
        sock.sendall(render_line(message))
        self._told = news

    def _take(self, lines: LineBuffer, data: bytes) -> None:
        with contextlib.suppress(ChannelError):
            for message in lines.feed(data):
                if message["type"] == "evidence":  # a file system that hangs must not silence the line
                    threading.Thread(
                        target=self._give_evidence, args=(message,), name="rankevidence", daemon=True
                    ).start()

    def _give_evidence(self, request: Message) -> None:
        files: list[str] = []
        for name in write_evidence(Path(str(request.get("dir", ""))), self._rank):
            files.append(name)
            is_last = name == ""
            self._answers.append(
                {"type": "evidence", "id": request.get("id"), "files": [f for f in files if f], "done": is_last}
            )
            self._wake_up()


# ---------------------------------------------------------------- one for each process

_link: RankLink | None = None
_lock = threading.Lock()


def open_link(environment: Mapping[str, str] = os.environ) -> RankLink | None:
    """The line of this process, opened at the first call; None where there is no agent or no rank."""
    global _link  # noqa: PLW0603 - one for each process, whoever asks
    path = environment.get(contract.ENV_NODE_SOCKET, "")
    if not path:
        return None
    with _lock:
        if _link is None:
            with contextlib.suppress(OSError, ValueError, RuntimeError):  # no descriptor, no thread, a strange rank
                _link = RankLink(Path(path), **_read_ranks(environment))
        return _link


def _read_ranks(environment: Mapping[str, str]) -> dict[str, Any]:
    get = environment.get
    return {
        "rank": int(get("RANK") or get("SLURM_PROCID") or 0),
        "local_rank": int(get("LOCAL_RANK") or get("SLURM_LOCALID") or 0),
        "launch": int(get(contract.ENV_LAUNCH) or 0),
    }


def _forget() -> None:
    global _link, _lock  # noqa: PLW0603
    _lock = threading.Lock()
    link, _link = _link, None
    if link is not None:
        with contextlib.suppress(OSError):
            link.forget()


os.register_at_fork(after_in_child=_forget)
