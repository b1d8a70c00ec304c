"""Reads checkpoints back beside the loop: every byte against the checksums that there are.

In child processes that are niced and have dropped to the run's owner. What can't be read is unknown (`ok` None), never
corrupt.
"""

from __future__ import annotations

import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from supervisor.child import Child, ChildGone, ChildLate, Wire, serve
from supervisor.layouts.own import Readback, verify_checkpoint
from supervisor.layouts.readback import read_back
from supervisor.model import Verification
from trainer import contract

MAX_AT_ONCE = 2
SILENT_AFTER_S = 120.0  # no byte read for this long: the file system hangs
RETRY_AFTER_S = 30.0  # what could not be read is not tried again before
BEAT_S = 1.0


def verify_foreign(
    path: Path, layout: str, stamp: str, *, on_bytes: Callable[[int], None] = lambda _count: None
) -> Readback:
    """Read back a checkpoint that the training laid out its own way, if it still is the one with this stamp."""
    try:
        reading = read_back(path, layout, stamp, on_bytes=on_bytes)
    except OSError as error:
        return Readback(ok=None, detail=f"could not be read: {error}")
    return Readback(
        ok=reading.is_whole, detail=reading.detail, bytes_read=reading.size, is_covered=not reading.unsealed
    )


# ---------------------------------------------------------------- beside the loop

Key = tuple[str, int, int]  # run, step, attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class _Order:
    path: str
    run: str
    step: int
    attempt: int
    layout: str = ""  # empty: our own
    stamp: str = ""


@dataclass(slots=True, kw_only=True)
class _Waiting:
    order: _Order
    uid: int | None
    gid: int | None
    not_before: float = 0.0  # monotonic

    @property
    def key(self) -> Key:
        return (self.order.run, self.order.step, self.order.attempt)


@dataclass(slots=True)
class _Job:
    waiting: _Waiting
    child: Child
    started_at: datetime
    heard: float  # monotonic


class Verifier:
    """Verifies checkpoints in the background: at most one of a run and `max_at_once` in all; others wait their turn."""

    def __init__(
        self,
        on_done: Callable[[], None] = lambda: None,
        *,
        max_at_once: int = MAX_AT_ONCE,
        silent_after_s: float = SILENT_AFTER_S,
        retry_after_s: float = RETRY_AFTER_S,
    ) -> None:
        self._on_done = on_done
        self._max = max_at_once
        self._silent_after_s = silent_after_s
        self._retry_after_s = retry_after_s
        self._waiting: deque[_Waiting] = deque()
        self._jobs: list[_Job] = []
        self._abandoned: list[Child] = []
        self._done: list[Verification] = []
        self._not_before: dict[Key, float] = {}  # of those that could not be read last time
        self._lock = threading.Lock()
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, name="verifier", daemon=True)
        self._thread.start()

    def start(
        self,
        run: str,
        run_dir: Path,
        step: int,
        attempt: int,
        uid: int | None = None,
        gid: int | None = None,
        *,
        path: str = "",
        layout: str = "",
        stamp: str = "",
    ) -> None:
        """Have one checkpoint read back; nothing happens when it is under way or waiting already.

        `path`, `layout` and `stamp` name one that the training laid out its own way.
        """
        place = path or str(contract.RunPaths(run_dir).checkpoint(step, attempt))
        order = _Order(path=place, run=run, step=step, attempt=attempt, layout=layout, stamp=stamp)
        waiting = _Waiting(order=order, uid=uid, gid=gid)
        with self._lock:
            if not self._has(waiting.key):
                waiting.not_before = self._not_before.pop(waiting.key, 0.0)
                self._waiting.append(waiting)
        self._wake()

    def is_busy(self, run: str, step: int, attempt: int) -> bool:
        """True from `start` until the result has been collected."""
        key = (run, step, attempt)
        with self._lock:
            return self._has(key) or any((v.run, v.step, v.attempt) == key for v in self._done)

    def collect(self) -> tuple[Verification, ...]:
        """Results since the last call; never waits."""
        with self._lock:
            done, self._done = tuple(self._done), []
            return done

    def close(self) -> None:
        """Stop; what was under way is dropped and was never verified."""
        self._is_closed = True
        self._wake()
        self._thread.join(5.0)
        with self._lock:
            for child in [*(job.child for job in self._jobs), *self._abandoned]:
                child.kill()
                child.close()
            self._jobs.clear()
            self._waiting.clear()
        if not self._thread.is_alive():
            os.close(self._wake_read)
            os.close(self._wake_write)

    def _has(self, key: Key) -> bool:
        return any(w.key == key for w in self._waiting) or any(job.waiting.key == key for job in self._jobs)

    def _wake(self) -> None:
        with suppress(OSError):
            os.write(self._wake_write, b"x")

    def _work(self) -> None:
        while not self._is_closed:
            self._begin()
            self._wait()
            finished = [(job, result) for job in self._jobs if (result := self._hear(job)) is not None]
            for job, result in finished:
                self._finish(job, result)
            if finished:
                self._on_done()

    def _begin(self) -> None:
        with self._lock:
            for waiting in list(self._waiting):
                busy_runs = {job.waiting.order.run for job in self._jobs}
                is_due = waiting.not_before <= time.monotonic() and not self._is_closed
                if is_due and len(self._jobs) < self._max and waiting.order.run not in busy_runs:
                    self._waiting.remove(waiting)
                    self._launch(waiting)

    def _launch(self, waiting: _Waiting) -> None:
        started_at = datetime.now(UTC)
        try:
            child = Child("supervisor.verify", uid=waiting.uid, gid=waiting.gid)
        except OSError as error:
            self._settle(waiting, Readback(ok=None, detail=f"no process could be started: {error}"), started_at)
            return
        with suppress(ChildLate, ChildGone):  # said again, and handled, by the first `receive`
            child.tell(msgspec.json.encode(waiting.order), deadline_s=1.0)
        self._jobs.append(_Job(waiting=waiting, child=child, started_at=started_at, heard=time.monotonic()))

    def _wait(self) -> None:
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        for job in self._jobs:
            poll.register(job.child.stdout, select.POLLIN)
        poll.poll(1000)
        with suppress(BlockingIOError):
            os.read(self._wake_read, 4096)

    def _hear(self, job: _Job) -> Readback | None:
        try:
            while (frame := job.child.receive(0.0)) is not None:
                job.heard = time.monotonic()
                if frame != b"beat":
                    return msgspec.json.decode(frame, type=Readback)
        except (ChildGone, msgspec.DecodeError) as error:
            return Readback(ok=None, detail=f"the verifying process failed: {error}")
        silent_s = time.monotonic() - job.heard
        if silent_s > self._silent_after_s:
            return Readback(ok=None, detail=f"nothing could be read for {silent_s:.0f} s")
        return None

    def _finish(self, job: _Job, result: Readback) -> None:
        job.child.kill()
        is_gone = job.child.close(wait_s=0.2)
        with self._lock:
            self._jobs.remove(job)
            self._abandoned = [c for c in self._abandoned if c.is_alive()] + ([] if is_gone else [job.child])
            self._settle(job.waiting, result, job.started_at)

    def _settle(self, waiting: _Waiting, result: Readback, started_at: datetime) -> None:
        """Keep one result for `collect`; the lock is held."""
        run, step, attempt = waiting.key
        if result.ok is None:
            self._not_before[waiting.key] = time.monotonic() + self._retry_after_s
        self._done.append(
            Verification(
                run=run,
                step=step,
                attempt=attempt,
                ok=result.ok,
                detail=result.detail,
                started_at=started_at,
                is_covered=result.is_covered,
            )
        )


# ---------------------------------------------------------------- child side


def _answer(data: bytes, wire: Wire) -> bytes:
    order = msgspec.json.decode(data, type=_Order)
    with suppress(OSError):  # where it is not permitted, reading back is not worth less
        os.nice(10)  # the block layer takes its priority from it
    last = time.monotonic()

    def beat(_count: int) -> None:
        nonlocal last
        if time.monotonic() - last >= BEAT_S:
            last = time.monotonic()
            wire.send(b"beat")

    if order.layout:
        result = verify_foreign(Path(order.path), order.layout, order.stamp, on_bytes=beat)
    else:
        result = verify_checkpoint(
            Path(order.path),
            expect_run=order.run,
            expect_step=order.step,
            expect_attempt=order.attempt,
            on_bytes=beat,
        )
    return msgspec.json.encode(result)


if __name__ == "__main__":
    sys.exit(serve(_answer, sys.argv))
