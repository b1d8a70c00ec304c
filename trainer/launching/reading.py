"""Files that the job writes, read with care: whoever owns the folder may have put anything there."""

from __future__ import annotations

import os
import stat
from pathlib import Path

MAX_BYTES = 1024 * 1024  # far more than any of them has


def read_regular(path: Path) -> bytes:
    """The bytes of a regular file. Raises OSError for everything else: a link, a pipe, a device, one that is too large.

    Opening never waits for another process, as it would at a pipe; a file system that hangs is the caller's concern.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(f"{path.name} is no regular file")
        with os.fdopen(handle, "rb", closefd=False) as stream:
            data = stream.read(MAX_BYTES + 1)
    finally:
        os.close(handle)
    if len(data) > MAX_BYTES:
        raise OSError(f"{path.name} has more than {MAX_BYTES} bytes")
    return data
