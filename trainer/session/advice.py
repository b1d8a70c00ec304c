"""What the service tells a running training: looked at every few seconds, by a thread of its own.

The file stands on a shared file system that may hang; the training never waits for it.
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

from trainer.contract import Advice, ContractError, parse

log = logging.getLogger("trainer.session.advice")

LOOK_EVERY_S = 2.0


class AdviceReader:
    """`latest` is the newest advice that could be read, or None. `close` ends the thread without waiting for it."""

    def __init__(self, path: Path, attempt: int, *, every_s: float = LOOK_EVERY_S) -> None:
        self.latest: Advice | None = None
        self._path = path
        self._attempt = attempt
        self._every_s = every_s
        self._seen: tuple[int, int, int] | None = None
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="advice", daemon=True).start()

    def close(self) -> None:
        """End the thread at its next look."""
        self._closed.set()

    def look(self) -> None:
        """Read the file if it is another one than at the last look; what is no advice for this attempt is ignored."""
        try:
            found = os.stat(self._path)  # noqa: PTH116 - one call, no object
            seen = (found.st_mtime_ns, found.st_size, found.st_ino)
            if seen == self._seen:
                return
            advice = parse(Advice, self._path.read_bytes())
        except FileNotFoundError:
            return
        except (OSError, ContractError) as error:
            log.debug("advice %s is not read: %s", self._path, error)
            return
        self._seen = seen
        if advice.attempt == self._attempt and (self.latest is None or advice.seq > self.latest.seq):
            self.latest = advice

    def _run(self) -> None:
        while True:
            self.look()
            if self._closed.wait(self._every_s):
                return
