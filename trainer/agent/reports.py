"""What a node's agent leaves on the shared file system, by a thread: one that hangs must not hold up the loop."""

from __future__ import annotations

import queue
import socket
import sys
import threading
import time
from pathlib import Path

from trainer import contract
from trainer.contract import CheckResult, NodeReport


def describe_node(
    attempt: int, node: str, checks: tuple[CheckResult, ...], exit_code: int | None, log_tail: str
) -> NodeReport:
    """What is known of this node now."""
    return NodeReport(
        attempt=attempt,
        node=node,
        host=socket.gethostname(),
        time=time.time(),
        checks=checks,
        exit_code=exit_code,
        log_tail=log_tail,
    )


class Reports:
    """Writes records in the order in which they are given. What cannot be written is said in the job's log."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._waiting: queue.SimpleQueue[tuple[Path, object]] = queue.SimpleQueue()
        self._given = self._done = 0
        self._thread = threading.Thread(target=self._run, name="reports", daemon=True)
        self._thread.start()

    def offer(self, path: Path, record: object) -> None:
        """Publish a record there as soon as the file system takes it."""
        self._given += 1
        self._waiting.put((path, record))

    def flush(self, limit_s: float) -> bool:
        """Wait until everything given is written; False when it is not by then."""
        deadline = time.monotonic() + limit_s
        while self._done < self._given and time.monotonic() < deadline:
            time.sleep(0.01)
        return self._done >= self._given

    def _run(self) -> None:
        while True:
            path, record = self._waiting.get()
            try:
                contract.write_json(path, record)
            except (OSError, ValueError) as error:  # a full disk must not hide the exit code
                print(f"{self._node}: {path.name} not written: {error}", file=sys.stderr, flush=True)
            self._done += 1
