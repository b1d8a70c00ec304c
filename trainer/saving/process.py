"""The writer as its rank sees it: a process that is started, spoken to, and ended or replaced."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from trainer.children import python_command
from trainer.saving.link import Link, LinkLost, Message
from trainer.saving.probe import probe_protection
from trainer.saving.protect import Descriptor, allow_reading_by, open_descriptor

START_LIMIT_S = 60.0
EXIT_LIMIT_S = 5.0


class WriterProcess:
    """One writer, started here. `listener`: of rank 0, where the other ranks' writers find this one.

    Everything raises `LinkLost` once it is gone.
    """

    def __init__(self, config: Mapping[str, Any], *, listener: socket.socket | None, has_descriptor: bool) -> None:
        self.is_ready = False
        self.has_memory = False
        self.descriptor = _open_descriptor() if has_descriptor else None
        ours, theirs = socket.socketpair()
        fds = [self.descriptor.fd] if self.descriptor is not None else []
        fds += [listener.fileno()] if listener is not None else []
        try:
            with theirs:
                self._process = _start(theirs.fileno())
            allow_reading_by(self._process.pid)
            self._link = Link(ours)
            hello = {**config, "pid": os.getpid(), "has_descriptor": self.descriptor is not None}
            with suppress(LinkLost):  # heard of when its answer is waited for
                self._link.send(hello, fds)
        finally:
            if self.descriptor is not None:
                os.close(self.descriptor.fd)  # the writer has the only one: with it goes the protection

    @property
    def pid(self) -> int:
        return self._process.pid

    def probe(self) -> str:
        """What is wrong with write protection here; empty when it works."""
        if self.descriptor is None:
            return "the kernel or the site gives no userfaultfd of full mode"
        return probe_protection(self._link, self.descriptor)

    def send(self, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        self._link.send(message, fds)

    def hear(self, within_s: float = 0.0) -> Message | None:
        """The next message, None when none comes within `within_s`."""
        message = self._link.receive(within_s)
        if message is not None and message["kind"] == "ready":
            self.is_ready = True
        return message

    def await_ready(self) -> None:
        """Wait until it serves."""
        while not self.is_ready:
            self.await_answer("ready", START_LIMIT_S, lambda _: None)

    def await_answer(self, kind: str, within_s: float, handle_other: Callable[[Message], None]) -> Message:
        """The next message of a kind; `LinkLost` also when it does not come within `within_s`."""
        deadline = time.monotonic() + within_s
        while (message := self.hear(max(0.0, deadline - time.monotonic()))) is not None:
            if message["kind"] == kind:
                return message
            handle_other(message)
        raise LinkLost(f"no answer within {within_s:g} s")

    def leave(self) -> None:
        """Part from it: it finishes the save whose bytes are staged, within its own bound, and ends."""
        self._link.close()
        self._process.returncode = 0  # nobody waits for it, and nobody is warned of it

    def end(self, *, is_idle: bool) -> str:
        """Let it end, killed unless `is_idle`; returns how it ended, never later than in a few seconds."""
        self._link.close()
        process = self._process
        if is_idle:
            with suppress(subprocess.TimeoutExpired):
                process.wait(EXIT_LIMIT_S)
        if process.poll() is None:
            process.kill()
            with suppress(subprocess.TimeoutExpired):
                process.wait(EXIT_LIMIT_S)
        if process.returncode is None:
            process.returncode = 0  # it hangs in the kernel: let nobody wait for it or warn of it
            return "hangs in the kernel"
        if process.returncode < 0:
            return f"ended ({signal.Signals(-process.returncode).name})"
        return "ended"


def _open_descriptor() -> Descriptor | None:
    try:
        return open_descriptor()
    except OSError:
        return None


def _start(link: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        python_command("trainer.saving.writer", str(link)),
        pass_fds=[link],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,  # whoever waits for the end of ours must not wait for its
        start_new_session=True,  # signals to the training's group are not meant for it
    )
