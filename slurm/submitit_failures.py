"""Whether an exception of a submitted function may be the machine's fault, so that another attempt can help. Pure.

With submitit an exception is final. Here it is too, except where a broken node, GPU, network or file system shows as
one: the peers of a dead node raise. What is not recognised is final, as it always was.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator

_MACHINE_ERRNOS = frozenset(
    {
        errno.ECOMM,
        errno.ECONNABORTED,
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.EIO,
        errno.ENETDOWN,
        errno.ENETRESET,
        errno.ENETUNREACH,
        errno.ENODEV,
        errno.ENOLINK,
        errno.ENOSPC,  # of one node's disk, perhaps: the service looks which
        errno.ENOTCONN,
        errno.EPIPE,
        errno.EREMOTEIO,
        errno.EROFS,
        errno.ESHUTDOWN,
        errno.ESTALE,
        errno.ETIMEDOUT,
    }
)
_MACHINE_TYPES = frozenset(
    {"DistBackendError", "DistNetworkError", "DistStoreError", "NVMLError", "RemoteDisconnected"}
)
_MACHINE_WORDS = re.compile(
    r"\b(?:NCCL|RCCL)\b"
    r"|\bgloo\b"
    r"|(?:CUDA|HIP|cuDNN|CUDNN|CUBLAS|cuBLAS|NVML|ACL) ?(?:driver )?error"
    r"|CUDNN_STATUS_|CUBLAS_STATUS_"
    r"|CUDA-capable device|NVIDIA driver|CUDA unknown error|CUDA initialization|uncorrectable ECC|fallen off the bus"
    r"|[Cc]onnection (?:closed|reset|refused|aborted)|[Bb]roken pipe|remote process exited"
    r"|Stale file handle|Input/output error|Transport endpoint|No route to host"
    r"|[Tt]imed out waiting|Wait timeout|Socket Timeout|[Ww]atchdog"
    r"|DataLoader worker \(pid.*\) is killed by signal|Bus error"
)
_USER_WORDS = re.compile(r"device-side assert|CUDA out of memory|HIP out of memory")
_MAX_CHAIN = 50


def is_machine_failure(error: BaseException) -> bool:
    """True when this exception, or one that it came of, is what a broken machine or a lost peer looks like."""
    chain = list(_chain(error))
    if any(_USER_WORDS.search(str(part)) for part in chain):
        return False
    return any(_is_machine_s(part) for part in chain)


def _is_machine_s(error: BaseException) -> bool:
    if isinstance(error, ConnectionError | TimeoutError):
        return True
    if isinstance(error, OSError) and error.errno in _MACHINE_ERRNOS:
        return True
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(names & _MACHINE_TYPES) or bool(_MACHINE_WORDS.search(str(error)))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The exception, what it was raised from or while, and the members of groups."""
    waiting, seen = [error], set[int]()
    while waiting and len(seen) < _MAX_CHAIN:
        part = waiting.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        cause = part.__cause__ if part.__cause__ is not None or part.__suppress_context__ else part.__context__
        if cause is not None:
            waiting.append(cause)
        if isinstance(part, BaseExceptionGroup):
            waiting += part.exceptions
