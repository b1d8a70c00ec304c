"""What a network file system answers while a file is being replaced there says nothing of the file: asked again."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from typing import TypeVar

RETRIES = 3
WAIT_S = 0.2

T = TypeVar("T")


def retry_stale(look: Callable[[], T], *, wait_s: float | None = None) -> T:
    """What `look` returns, asked again a few times, `wait_s` (0.2 s) apart, while NFS answers ESTALE.

    `look` must open by name each time: a handle that is stale stays stale.
    """
    for _ in range(RETRIES):
        try:
            return look()
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            time.sleep(WAIT_S if wait_s is None else wait_s)
    return look()
