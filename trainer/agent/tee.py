"""Repeats a rank's output in the job's log while it is written, each line behind the rank's name."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

_INTERVAL_S = 0.1
_CHUNK_BYTES = 64 * 1024
_LINE_LIMIT_BYTES = 1024 * 1024  # a line that is longer is passed on in pieces


class Tee(threading.Thread):
    """Follows files, each from when it is there. A file system that hangs holds up this thread and nobody else."""

    def __init__(self, pairs: Sequence[tuple[Path, BinaryIO]], prefix: str) -> None:
        super().__init__(name="tee", daemon=True)
        self._pairs = pairs
        self._prefix = prefix.encode()
        self._is_over = threading.Event()

    def run(self) -> None:
        """Pass lines on until `finish` was called and the files' ends are reached."""
        followed = [_Followed(path, out, self._prefix) for path, out in self._pairs]
        while not self._is_over.wait(_INTERVAL_S):
            for one in followed:
                one.pass_on()
        for one in followed:
            one.pass_on()
            one.close()

    def finish(self, limit_s: float = 2.0) -> None:
        """Pass on what is left; nothing is written to the files any more."""
        self._is_over.set()
        if self.ident is not None:
            self.join(limit_s)


class _Followed:
    def __init__(self, path: Path, out: BinaryIO, prefix: bytes) -> None:
        self._path, self._out, self._prefix, self._rest = path, out, prefix, b""
        self._stream: BinaryIO | None = None

    def pass_on(self) -> None:
        while data := self._read():
            *lines, self._rest = (self._rest + data).split(b"\n")
            self._write(lines)
            if len(self._rest) > _LINE_LIMIT_BYTES:
                self._write([self._rest])
                self._rest = b""

    def _read(self) -> bytes:
        try:
            self._stream = self._stream or self._path.open("rb")
            return self._stream.read(_CHUNK_BYTES)
        except OSError:
            return b""

    def close(self) -> None:
        if self._rest:
            self._write([self._rest])
        if self._stream is not None:
            self._stream.close()

    def _write(self, lines: Sequence[bytes]) -> None:
        try:
            for line in lines:
                self._out.write(self._prefix + line + b"\n")
            self._out.flush()
        except (OSError, ValueError):  # the job's log is full or gone; the rank's own file has it all
            return
