"""Runs the host probes on many nodes at once, beside the loop, through one srun.

As root or SlurmUser the probes run outside any job (`srun --no-allocate`); otherwise in a small job that starts at once
or not at all. A node that gave no answer is unknown, never failed: slow networks and busy nodes look the same.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta

from slurm.commands import reading_environment
from slurm.hostlist import fold_nodes
from supervisor.config import Settings
from supervisor.model import NodeChecks
from supervisor.probes import clock
from supervisor.probes.runner import ProbeReport, command
from trainer import contract
from trainer.contract import CheckResult, ContractError

MAX_LINE_BYTES = 256 * 1024


def srun_argv(
    nodes: Sequence[str], settings: Settings, *, is_privileged: bool, job_id: int | None = None
) -> tuple[str, ...]:
    """The argv of one sweep.

    `is_privileged`: root or SlurmUser, so that no job is needed; else a small job of its own, or a step beside the
    others of `job_id`.
    """
    count = len(set(nodes))
    deadline_s = settings.sweep.timeout_s / 2  # the other half: for srun to reach the nodes and give some up
    common = (
        "srun",
        f"--nodelist={fold_nodes(nodes)}",
        f"--nodes={count}",
        f"--ntasks={count}",
        "--ntasks-per-node=1",
        "--kill-on-bad-exit=0",
        f"--wait={settings.sweep.timeout_s:.0f}",  # after the first probe has ended, for the others
        "--input=none",
        "--chdir=/",
        "--mpi=none",
        "--quiet",
        "--job-name=supervisor-sweep",
    )
    place: tuple[str, ...] = ("--no-allocate",) if is_privileged else _SMALL_JOB
    if job_id is not None and not is_privileged:
        place = (f"--jobid={job_id}", "--overlap", "--mem=0", "--gres=none")
    launcher = settings.launcher
    probes = command(
        settings.sweep_limits, deadline_s=deadline_s, python=launcher.python, pythonpath=launcher.pythonpath or None
    )
    return (*common, *place, *probes)


_SMALL_JOB = ("--immediate=5", "--time=1", "--mem=1M", "--cpus-per-task=1", "--gres=none", "--oversubscribe")


class Sweeper:
    """One sweep at a time, in a thread of its own. `close` ends it."""

    def __init__(
        self,
        settings: Settings,
        on_done: Callable[[], None] = lambda: None,
        *,
        is_privileged: bool | None = None,
        parent: Mapping[str, str] | None = None,
    ) -> None:
        """`on_done` is called in the sweep's thread. `parent`: environment to take PATH and SLURM_CONF from."""
        conf = {"SLURM_CONF": str(settings.slurm.conf)} if settings.slurm.conf is not None else {}
        self._env = {**reading_environment(os.environ if parent is None else parent), **conf}
        self._is_privileged = os.geteuid() == 0 if is_privileged is None else is_privileged
        self._settings = settings
        self._on_done = on_done
        self._lock = threading.Lock()
        self._done: list[NodeChecks] = []
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False

    @property
    def is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self, nodes: Sequence[str], now: datetime, *, job_id: int | None = None) -> bool:
        """Sweep these nodes, idle ones or those of our job `job_id`.

        False, and nothing happens, when a sweep is under way or there is nothing to sweep.
        """
        if self.is_running or not nodes or self._is_closed:
            return False
        self._thread = threading.Thread(target=self._sweep, args=(tuple(nodes), now, job_id), name="sweep", daemon=True)
        self._thread.start()
        return True

    def collect(self) -> tuple[NodeChecks, ...]:
        """Results since the last call; never waits."""
        with self._lock:
            done, self._done = tuple(self._done), []
            return done

    def close(self) -> None:
        """Stop what is under way."""
        self._is_closed = True
        for send in (signal.SIGTERM, signal.SIGKILL):
            if self._thread is None or not self.is_running:
                return
            if self._process is not None:
                with suppress(ProcessLookupError):
                    os.killpg(self._process.pid, send)
            self._thread.join(3.0)

    def _sweep(self, nodes: tuple[str, ...], now: datetime, job_id: int | None) -> None:
        started = time.monotonic()
        answers = self._ask(nodes, self._settings.sweep.timeout_s, job_id)
        at = now + timedelta(seconds=time.monotonic() - started)
        with self._lock:
            self._done += [
                NodeChecks(node=node, at=at, results=answers.get(node, ()), is_complete=node in answers)
                for node in dict.fromkeys(nodes)
            ]
        self._on_done()

    def _ask(self, nodes: tuple[str, ...], timeout_s: float, job_id: int | None) -> dict[str, tuple[CheckResult, ...]]:
        asked_at, started = time.time(), time.monotonic()
        answers: dict[str, tuple[CheckResult, ...]] = {}
        max_skew_s = self._settings.sweep.limits.clock_max_skew_s
        argv = srun_argv(nodes, self._settings, is_privileged=self._is_privileged, job_id=job_id)
        try:
            process = subprocess.Popen(
                (*_die_with_parent(), *argv),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # what it complains about are nodes without an answer, and those are known
                env=self._env,
                cwd="/",
                start_new_session=True,
            )
        except OSError:
            return answers
        self._process = process
        if self._is_closed:  # closed while srun was starting
            process.terminate()
        lines = _Lines(process)
        while (line := lines.next(started + timeout_s - time.monotonic())) is not None:
            # the head's own clock may jump meanwhile: the time since the question is measured
            answered_at = asked_at + time.monotonic() - started
            node, results = judge_line(line, asked_at, answered_at, max_skew_s=max_skew_s)
            if node in nodes:
                answers.setdefault(node, results)
            if len(answers) == len(set(nodes)):
                break
        _end(process)
        return answers


def judge_line(
    line: bytes, asked_at: float, answered_at: float, *, max_skew_s: float
) -> tuple[str, tuple[CheckResult, ...]]:
    """Node and results of one line, the clock judged by what the head node knows; ("", ()) when it is no such line."""
    try:
        report = contract.parse(ProbeReport, line)
    except ContractError:
        return "", ()
    reading = clock.ClockReading(
        asked_at=asked_at,
        node_started_at=report.started_at,
        node_ended_at=report.ended_at,
        answered_at=answered_at,
    )
    results = tuple(result for result in report.results if result.check != "clock")
    skew = clock.judge(reading, max_skew_s=max_skew_s)
    return report.node, (*results, skew)


class _Lines:
    """Lines of a process's output as they come, bounded in length."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        self._fd = process.stdout.fileno()
        self._buffer = bytearray()
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)

    def next(self, timeout_s: float) -> bytes | None:
        """The next line; None at the end of the output or after `timeout_s`."""
        until = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            left_s = until - time.monotonic()
            if left_s <= 0 or not self._poll.poll(left_s * 1000):
                return None
            data = os.read(self._fd, 65536)
            if not data:
                return None
            self._buffer += data
            if b"\n" not in self._buffer and len(self._buffer) > MAX_LINE_BYTES:
                self._buffer.clear()
        line, _, rest = bytes(self._buffer).partition(b"\n")
        self._buffer[:] = rest
        return line


def _die_with_parent() -> tuple[str, ...]:
    """A prefix that has srun told when the service is gone; SIGTERM lets it take its step down."""
    setpriv = shutil.which("setpriv")
    return (setpriv, "--pdeathsig", "TERM", "--") if setpriv else ()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Let srun end by itself if it is about to; then ask it, then kill it. Always reaped."""
    for send in (None, signal.SIGTERM, signal.SIGKILL):
        if send is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, send)
        with suppress(subprocess.TimeoutExpired):
            process.wait(2.0)
            break
    if process.stdout is not None:
        process.stdout.close()
