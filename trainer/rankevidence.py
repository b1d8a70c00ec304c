"""What a process can tell of itself when its training hangs: the stacks of its threads, the Flight Recorder's entries.

Written by a thread of the process, which needs the interpreter's lock but not the main thread. Nothing of the source
files is read and nothing imported: the file system may be what hangs. Standard library only.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

MAX_FRAMES = 200  # of one thread
_SIGNALS = 6  # how many real-time signals are tried

_armed: list[int] = []  # descriptors that faulthandler writes to; open as long as the process lives


def write_evidence(directory: Path, rank: int) -> Iterator[str]:
    """Write what can be had into `directory`; yields the name of each file that is whole, and "" at the end.

    `rank<r>.stacks.txt` first, then `rank<r>.flight`, and `rank<r>.nccl.flight` where NCCL keeps its own.
    """
    writers: tuple[tuple[str, Callable[[], bytes | None]], ...] = (
        (f"rank{rank}.stacks.txt", lambda: render_stacks().encode(errors="replace")),
        (f"rank{rank}.flight", lambda: dump_flight("_dump_fr_trace")),
        (f"rank{rank}.nccl.flight", lambda: dump_flight("_dump_nccl_trace")),
    )
    for name, write in writers:
        with contextlib.suppress(Exception):
            data = write()
            if data is not None:
                _publish(directory / name, data)
                yield name
    yield ""


def render_stacks() -> str:
    """The stacks of all threads of this process, the main thread's first, innermost frame first."""
    frames = sys._current_frames()  # noqa: SLF001 - what it is for
    known = {thread.ident: thread for thread in threading.enumerate()}
    main = threading.main_thread().ident
    own = threading.get_ident()
    parts = [f"process {os.getpid()}: {_read_command()}"]
    for ident in sorted(frames, key=lambda ident: (ident != main, ident)):
        if ident != own:
            thread = known.get(ident)
            parts.append(_render_thread(frames[ident], thread))
    return "\n\n".join(parts) + "\n"


def _render_thread(frame: FrameType | None, thread: threading.Thread | None) -> str:
    native = thread.native_id if thread is not None else None
    lines = [f'Thread {native or "?"} {_read_state(native)} "{thread.name if thread else "?"}"']
    while frame is not None and len(lines) <= MAX_FRAMES:
        code = frame.f_code
        lines.append(f'  File "{code.co_filename}", line {frame.f_lineno}, in {code.co_qualname}')
        frame = frame.f_back
    return "\n".join(lines)


def _read_state(native_id: int | None) -> str:
    if native_id is not None:
        with contextlib.suppress(OSError, IndexError):
            stat = Path(f"/proc/self/task/{native_id}/stat").read_text(errors="replace")
            return f"({stat.rpartition(')')[2].split()[0]})"
    return "(?)"


def _read_command() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/self/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()[:500]
    return "?"


def dump_flight(name: str) -> bytes | None:
    """The Flight Recorder's entries as torch pickles them, by the function of this name; None where there are none."""
    torch = sys.modules.get("torch")
    distributed = getattr(torch, "distributed", None)
    is_initialized = getattr(distributed, "is_initialized", None)
    if is_initialized is None or not is_initialized():
        return None
    dump = getattr(getattr(getattr(torch, "_C", None), "_distributed_c10d", None), name, None)
    return dump() if dump is not None else None


def _publish(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_native_id()}.tmp")
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def arm_stack_signal(folder: Path, rank: int) -> tuple[str, int]:
    """Let a spare signal write the stacks of all threads into a file of `folder`; (path, signal), ("", 0) if not.

    It works while the interpreter's lock is held, where a thread can do nothing.
    """
    number = _find_spare_signal()
    if not number:
        return "", 0
    path = folder / f"rank{rank}.{os.getpid()}.stacks"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    _armed.append(fd)
    faulthandler.register(number, file=fd, all_threads=True, chain=False)
    return str(path), number


def _find_spare_signal() -> int:
    status = Path("/proc/self/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    taken = int(fields["SigCgt"], 16) | int(fields["SigIgn"], 16) | int(fields["SigBlk"], 16)
    first = int(signal.SIGRTMIN) + 6
    return next((number for number in range(first, first + _SIGNALS) if not taken >> (number - 1) & 1), 0)
