"""The last words of a node's ranks: the ends of their logs, and what these say of who failed first."""

from __future__ import annotations

import contextlib
import glob
import os
import re
import socket
import threading
from pathlib import Path

CONSOLE_TAIL_BYTES = 4096  # of a failing worker's error output, repeated in the job's log
LOG_TAIL_BYTES = 64 * 1024
NCCL_TAIL_BYTES = 4096  # of each process

# What a worker says when its peer is gone: it fails because of another one.
_VICTIM = re.compile(
    r"Connection (?:closed|reset) by (?:remote )?peer|remote process exited or there was a network error"
    r"|failed to recv, got 0 bytes|Broken pipe"
)
_PORT_TAKEN = re.compile(r"EADDRINUSE|[Aa]ddress already in use")


def read_tail(path: Path, limit_bytes: int) -> str:
    """The end of a file as text; empty when it cannot be read."""
    try:
        with path.open("rb") as stream:
            stream.seek(0, os.SEEK_END)
            stream.seek(max(0, stream.tell() - limit_bytes))
            return stream.read(limit_bytes).decode(errors="replace")
    except OSError:
        return ""


def find_worker_log(log_dir: Path, local_rank: int) -> Path | None:
    """The newest error log that torchrun keeps for a local rank."""
    logs = list(log_dir.glob(f"*/attempt_*/{local_rank}/stderr.log"))
    with contextlib.suppress(OSError):
        return max(logs, key=lambda path: path.stat().st_mtime, default=None)
    return None


def is_victim(last_words: str) -> bool:
    """True when a worker's last words say that it failed because a peer did."""
    return bool(_VICTIM.search(last_words[-CONSOLE_TAIL_BYTES:]))


def read_nccl_warnings(folder: Path) -> str:
    """The ends of the logs that NCCL kept there for the processes of this host; usually nothing."""
    host = glob.escape(socket.gethostname())
    return "".join(read_tail(path, NCCL_TAIL_BYTES) for path in sorted(folder.glob(f"nccl.{host}.*.log")))


def is_port_taken(last_words: str) -> bool:
    """True when a rank's last words say that somebody else listens on the port that it was given."""
    return bool(_PORT_TAKEN.search(last_words[-CONSOLE_TAIL_BYTES:]))


def find_last_words(log: Path | None, evidence_dir: Path, limit_s: float) -> str:
    """The end of a failed rank's error log behind NCCL's warnings; empty when the file system does not give it soon."""
    found: list[str] = []

    def read() -> None:
        tail = read_tail(log, LOG_TAIL_BYTES) if log else ""
        found.append((read_nccl_warnings(evidence_dir) + tail)[-LOG_TAIL_BYTES:])

    reader = threading.Thread(target=read, name="last-words", daemon=True)
    reader.start()
    reader.join(limit_s)
    return found[0] if found else ""
