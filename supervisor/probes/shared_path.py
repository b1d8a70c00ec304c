"""A file system that all nodes share: is it there, and can this node write to it and read back what it wrote?"""

from __future__ import annotations

import errno
import glob
import os
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from supervisor.model import MARK_PREFIX
from trainer.contract import CheckResult

# full or over quota is the file system's matter and looks the same from every node
_NOT_THE_NODE = frozenset({errno.ENOSPC, errno.EDQUOT})
_NOT_ALLOWED = frozenset({errno.EACCES, errno.EPERM})


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One attempt to write, flush, read and remove a small file. `error` 0: it worked."""

    path: str
    is_there: bool
    error: int = 0
    error_step: str = ""  # "look", "write" or "read"
    is_root: bool = False


def measure(path: str) -> Trial:
    """Try it. Blocks for as long as the file system does: the caller sets the deadline."""
    is_root = os.geteuid() == 0
    try:
        Path(path).stat()
    except FileNotFoundError:
        return Trial(path=path, is_there=False, is_root=is_root)
    except OSError as error:
        return Trial(path=path, is_there=True, error=error.errno or errno.EIO, error_step="look", is_root=is_root)
    code, step = _write_and_read(Path(path))
    return Trial(path=path, is_there=True, error=code, error_step=step, is_root=is_root)


def _write_and_read(folder: Path) -> tuple[int, str]:
    text = secrets.token_hex(16).encode()
    name = folder / f".supervisor-probe-{text[:16].decode()}"
    step = "write"
    try:
        fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, text)
            os.fsync(fd)
            step = "read"
            if os.pread(fd, len(text), 0) != text:
                return errno.EIO, step
        finally:
            os.close(fd)
            with suppress(OSError):
                name.unlink()
    except OSError as error:
        return error.errno or errno.EIO, step
    return 0, ""


def leave_mark(path: str, node: str) -> CheckResult:
    """Leave a file `path`-`node`, and take away what earlier attempts of the run left there for this node.

    The service looks for it from where it runs: a folder that both see is shared. Never fails the node: that nobody
    else sees its folder is not its fault.
    """
    check = f"mark:{path}"
    mark = Path(f"{path}-{node}")
    try:
        mark.parent.mkdir(parents=True, exist_ok=True)
        for old in mark.parent.glob(f"{MARK_PREFIX}*-{glob.escape(node)}"):
            if old != mark:
                old.unlink(missing_ok=True)
        mark.touch()
    except OSError as error:
        return CheckResult(check=check, ok=None, detail=f"{mark}: {error.strerror}")
    return CheckResult(check=check, ok=True)


def judge(trial: Trial) -> CheckResult:
    """Fails when the path is missing or broken here; unknown when the file system is full for everybody."""
    check = f"shared:{trial.path}"
    if not trial.is_there:
        return CheckResult(check=check, ok=False, detail=f"{trial.path} is not there")
    if trial.error == 0:
        return CheckResult(check=check, ok=True)
    detail = f"{trial.error_step} {trial.path}: {os.strerror(trial.error)}"
    if trial.error in _NOT_THE_NODE:
        return CheckResult(check=check, ok=None, detail=detail)
    if trial.error in _NOT_ALLOWED and trial.is_root:
        # root has no rights on many network file systems; that it is there is all that root can tell
        return CheckResult(check=check, ok=True, detail=detail)
    return CheckResult(check=check, ok=False, detail=detail)
