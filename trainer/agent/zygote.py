"""The agent's side of trainer/warm.py: one prepared interpreter, started, asked to fork ranks, ended."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainer.agent.workers import RankStart
from trainer.beats import ChannelError, LineBuffer, Message
from trainer.descendants import KILL_LIMIT_S

_WARM = Path(__file__).parents[1] / "warm.py"
_MESSAGE_LIMIT_BYTES = 1024 * 1024


class Zygote:
    """One process of trainer/warm.py. Its messages are read without waiting."""

    def __init__(self, python: str, environment: Mapping[str, str]) -> None:
        """Start it. Raises OSError."""
        self.python = python
        self.environment = dict(environment)
        self.is_ready = False
        self._lines = LineBuffer(_MESSAGE_LIMIT_BYTES)
        self._unsent = b""
        self._socket, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [python, "-u", str(_WARM), str(theirs.fileno()), str(os.getpid())],
                    stdin=subprocess.DEVNULL,
                    env=self.environment,
                    pass_fds=(theirs.fileno(),),
                )
        except OSError:
            self._socket.close()
            raise
        self._socket.setblocking(False)

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def fork(self, ranks: Sequence[RankStart], store_port: int | None) -> None:
        """Ask for these ranks, and the store that all ranks meet at; it answers "started" or "failed", or it ends."""
        jobs = [
            {
                "local_rank": rank.local_rank,
                "arguments": python_arguments(rank.command),
                "environment": dict(rank.environment),
                "stdout": str(rank.stdout),
                "stderr": str(rank.stderr),
            }
            for rank in ranks
        ]
        self._unsent = json.dumps({"type": "start", "store_port": store_port, "ranks": jobs}).encode() + b"\n"
        self._send()

    def read(self, wait_s: float = 0.0) -> list[Message]:
        """What it has said since the last call; waits up to `wait_s` for a word. "gone" when it ended."""
        self._send()
        with contextlib.suppress(OSError, ValueError):
            select.select([self._socket], [], [], wait_s)
        try:
            data = self._socket.recv(_MESSAGE_LIMIT_BYTES)
            messages = self._lines.feed(data) if data else [_GONE]
        except BlockingIOError:
            return []
        except (OSError, ChannelError):
            messages = [_GONE]
        self.is_ready = self.is_ready or any(message["type"] == "ready" for message in messages)
        return messages

    def end(self) -> None:
        """Kill it; ranks that it has forked are not its own any more."""
        self._socket.close()
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # one whose file system hangs is left to the kernel
            self._process.wait(KILL_LIMIT_S)

    def _send(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):  # that it is gone shows when it is read
            while self._unsent:
                self._unsent = self._unsent[self._socket.send(self._unsent) :]


_GONE: Message = {"type": "gone"}


def python_arguments(command: Sequence[str]) -> list[str]:
    """What follows `python -u` in a rank's command."""
    return list(command[2:])
