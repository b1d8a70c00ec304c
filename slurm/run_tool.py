"""Run one of Slurm's tools: bounded in time and in output, with nothing inherited but what is given."""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Protocol

MAX_OUTPUT_BYTES = 64 * 1024 * 1024  # 2,048 nodes are 1.1 MB, 100,000 jobs some 30 MB
_CHUNK_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """How a tool ended. `returncode` None: it was killed at its time limit, or at its output limit."""

    returncode: int | None
    stdout: str = ""
    stderr: str = ""
    is_truncated: bool = False  # killed at the output limit


class Run(Protocol):
    """Runs `argv` with exactly `env`; OSError when the tool can't be started."""

    def __call__(self, argv: tuple[str, ...], timeout_s: float, env: Mapping[str, str]) -> Completed: ...


def run_tool(
    argv: tuple[str, ...],
    timeout_s: float,
    env: Mapping[str, str],
    *,
    path: str | None = None,
    stdin: bytes = b"",
) -> Completed:
    """Run a tool and read at most `MAX_OUTPUT_BYTES`; past `timeout_s` kill it with all its children.

    The tool is looked up on `path` (None: this process's PATH), not on the PATH in `env`: a job's PATH must not choose
    which sbatch a daemon runs as root.

    Raises:
        OSError: the tool is not there or can't be started.
    """
    executable = shutil.which(argv[0], path=path)
    if executable is None:
        raise FileNotFoundError(f"{argv[0]} is not on PATH")
    deadline = time.monotonic() + timeout_s
    with (
        _opened(stdin) as given,
        subprocess.Popen(
            argv,
            executable=executable,
            env=dict(env),
            stdin=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        ) as process,
    ):
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            output = _read_until(deadline, process.stdout, process.stderr)
            returncode = _wait_until(deadline, process) if output.is_complete else None
        finally:
            _kill_group(process)
    return Completed(
        returncode=returncode,
        stdout=output.text(0),
        stderr=output.text(1),
        is_truncated=output.is_truncated,
    )


@contextlib.contextmanager
def _opened(stdin: bytes) -> Iterator[int]:
    """A file descriptor to read `stdin` from: memory, because a pipe holds no more than 64 KiB."""
    descriptor = os.memfd_create("stdin") if stdin else os.open(os.devnull, os.O_RDONLY)
    try:
        if stdin:
            with os.fdopen(descriptor, "wb", closefd=False) as stream:
                stream.write(stdin)
            os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)


class _Output:
    """What two pipes have given so far."""

    def __init__(self) -> None:
        self.parts: tuple[bytearray, bytearray] = (bytearray(), bytearray())
        self.is_complete = False

    @property
    def is_truncated(self) -> bool:
        return sum(map(len, self.parts)) > MAX_OUTPUT_BYTES

    def text(self, index: int) -> str:
        return self.parts[index].decode("utf-8", errors="replace")


def _read_until(deadline: float, *pipes: IO[bytes]) -> _Output:
    output = _Output()
    with selectors.DefaultSelector() as selector:
        for index, pipe in enumerate(pipes):
            selector.register(pipe, selectors.EVENT_READ, index)
        while selector.get_map() and not output.is_truncated:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return output
            for key, _ in selector.select(left_s):
                chunk = os.read(key.fd, _CHUNK_BYTES)
                output.parts[key.data].extend(chunk)
                if not chunk:
                    selector.unregister(key.fileobj)
        output.is_complete = not output.is_truncated
    return output


def _wait_until(deadline: float, process: subprocess.Popen[bytes]) -> int | None:
    try:
        return process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill the tool if it still runs, and whatever it started: a wrapper's child may hold a connection."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
