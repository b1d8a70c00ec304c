"""Mounts of the gated file system for a test, and the words to hold, slow down and refuse its calls."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.trainer.faults.gatedfs import ANY, Rule, unmount

WITHIN_S = 30.0


@dataclass(slots=True)
class Gates:
    """A mounted file system: `folder` is its root, `behind` where its bytes lie.

    Each call of its words replaces what was said before.
    """

    folder: Path
    behind: Path
    server: subprocess.Popen[bytes]
    held: list[tuple[str, str]] = field(default_factory=list)
    answers: int = 0
    unread: bytes = b""

    def hold(self, operation: str, pattern: str = ANY) -> None:
        """Calls of this operation on matching names wait from now on."""
        self._rule(Rule(operation, pattern, held=True))

    def refuse(self, operation: str, error: int, pattern: str = ANY) -> None:
        """They fail with this error."""
        self._rule(Rule(operation, pattern, error=error))

    def slow(self, operation: str, delay_s: float, pattern: str = ANY) -> None:
        """They are answered so much later."""
        self._rule(Rule(operation, pattern, delay_s=delay_s))

    def open(self) -> None:
        """Everything goes through again, also what was held."""
        self._rule()

    def wait_held(self, within_s: float = WITHIN_S) -> tuple[str, str]:
        """(operation, name) of a call that is held now; fails the test when none comes."""
        deadline = time.monotonic() + within_s
        while not self.held:
            assert self._hear(deadline - time.monotonic()), "no call came that was to be held"
        return self.held[0]

    def _rule(self, *rules: Rule) -> None:
        assert self.server.stdin is not None
        self.held.clear()
        self.server.stdin.write(json.dumps([asdict(rule) for rule in rules]).encode() + b"\n")
        self.server.stdin.flush()
        self._await_answer()

    def _await_answer(self) -> None:
        wanted, deadline = self.answers + 1, time.monotonic() + WITHIN_S
        while self.answers < wanted:
            assert self._hear(deadline - time.monotonic()), "the file system does not answer"

    def _hear(self, within_s: float) -> bool:
        assert self.server.stdout is not None
        if not select.select([self.server.stdout], [], [], max(0.0, within_s))[0]:
            return False
        data = os.read(self.server.stdout.fileno(), 65536)
        *lines, self.unread = (self.unread + data).split(b"\n")
        for line in lines:
            self._take(json.loads(line))
        return bool(data)

    def _take(self, said: Mapping[str, Any]) -> None:
        if "held" in said:
            self.held.append((said["held"], said["name"]))
        else:
            self.answers += 1
            self.held.clear()  # told before the answer: of the rules before


@contextmanager
def mount_gates(folder: Path) -> Iterator[Gates]:
    """A gated file system below `folder`; at the end whoever waits in it is let go, and it is unmounted."""
    behind, mounted = folder / "behind", folder / "mounted"
    behind.mkdir()
    mounted.mkdir()
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.trainer.faults.gatedfs", str(behind), str(mounted)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    gates = Gates(mounted, behind, server)
    try:
        gates._await_answer()
        yield gates
    finally:
        server.kill()  # the kernel answers all that waits with ENOTCONN
        server.communicate()
        unmount(mounted)
