"""The last words of a node's ranks: the ends of their logs, and what these say of who failed first."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

CONSOLE_TAIL_BYTES = 4096  # of a failing worker's error output, repeated in the job's log
LOG_TAIL_BYTES = 64 * 1024
NCCL_TAIL_BYTES = 4096  # of each process

# What a worker says when its peer is gone: it fails because of another one.
_VICTIM = re.compile(
    r"Connection (?:closed|reset) by (?:remote )?peer|remote process exited or there was a network error"
    r"|failed to recv, got 0 bytes|Broken pipe"
)


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


def read_nccl_warnings(log_dir: Path) -> str:
    """The ends of the logs that NCCL kept for the processes of this node; usually nothing."""
    return "".join(read_tail(path, NCCL_TAIL_BYTES) for path in sorted(log_dir.glob("nccl.*.log")))
