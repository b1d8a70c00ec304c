"""Runs torchrun, imported ahead of its arguments, and says which worker failed first and how.

trainer.node starts this file early, while checks and rendezvous are still under way: importing torch takes a second
that recovery need not wait for. It runs under the training program's own Python, which may lack this package, so it
imports nothing but the standard library and torch. One JSON line on standard input, `{"argv", "environment"}`, starts
torchrun; end of file instead means that no training is wanted here. JSON lines on the given descriptor tell
`{"type": "ready", "time"}` and, after a failure, `{"type": "failed", "rank", "local_rank", "exit_code", "error_file"}`:
torchrun itself exits 1 whatever its workers' exit codes were.

With SUPERVISOR_FORK_WORKERS=1 in the environment, workers that are Python programs are forked from here, where torch
is imported already, instead of importing it once more each: on nodes with few cores or a slow file system that is
most of a restart. It is off unless asked for, as a program could tell the difference: what it sets in its environment
before it imports torch comes too late for the little that torch reads at import.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import json
import os
import random
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

ENV_FORK_WORKERS = "SUPERVISOR_FORK_WORKERS"

_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Wait for the arguments, run torchrun, return the first failing worker's exit code (128 + n for signal n)."""
    if sys.path and os.path.dirname(os.path.abspath(__file__)) == os.path.abspath(sys.path[0]):  # noqa: PTH100, PTH120
        del sys.path[0]  # our modules' names must not hide other people's
    report = os.fdopen(int(sys.argv[1]), "w", buffering=1)
    os.set_inheritable(report.fileno(), False)
    _end_with_parent()
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # meant for the workers; by default they would end torchrun
        signal.signal(number, lambda _number, _frame: None)
    gc.disable()  # a sixth of the import is spent on collecting among objects that live for ever
    from torch.distributed import run

    gc.freeze()
    gc.enable()
    report.write(json.dumps({"type": "ready", "time": time.time()}) + "\n")
    line = sys.stdin.readline()
    if not line.endswith("\n"):
        return 0
    request = json.loads(line)
    os.environ.update(request["environment"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if os.environ.get(ENV_FORK_WORKERS) == "1":
        _fork_workers()
    return _run(run, request["argv"], report)


def _run(run: Any, argv: list[str], report: Any) -> int:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        run.main(argv)
    except ChildFailedError as error:
        print(error, file=sys.stderr, flush=True)
        rank, failure = error.get_first_failure()
        code = failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode
        message = {"type": "failed", "rank": rank, "local_rank": failure.local_rank, "exit_code": code}
        report.write(json.dumps({**message, "error_file": str(failure.error_file)}) + "\n")
        return code or 1
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


def _end_with_parent() -> None:
    """SIGTERM when trainer.node dies: torchrun then stops its workers."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)


# ---------------------------------------------------------------- forked workers


class ForkedWorker(subprocess.Popen[bytes]):
    """A worker forked from this process; to torchrun it is the process that it would have started itself."""

    def __init__(self, program: Sequence[str], environment: Mapping[str, str], streams: Sequence[Any]) -> None:
        self._child_created = False  # what Popen.__del__ looks at, should the fork fail
        self.args = program
        self.stdin = self.stdout = self.stderr = None
        self.returncode = None  # as in Popen
        self._waitpid_lock = threading.Lock()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _be_worker(program, environment, streams)
        self._child_created = True


def _fork_workers() -> None:
    """Let torchrun's start of a process be a fork, where that process would be a Python program."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    handler = subprocess_handler.SubprocessHandler
    start = handler._popen  # noqa: SLF001 - the one place where it starts a process

    def fork(self: Any, args: tuple[str, ...], env: dict[str, str]) -> subprocess.Popen[bytes]:
        program = args[2:] if args[:2] == (sys.executable, "-u") else ()
        if not program or not (program[0] == "-m" or program[0].endswith(".py")):
            return start(self, args, env)
        return ForkedWorker(program, env, (self._stdout, self._stderr))

    handler._popen = fork  # type: ignore[method-assign] # noqa: SLF001


def _be_worker(program: Sequence[str], environment: Mapping[str, str], streams: Sequence[Any]) -> NoReturn:
    code = 1
    try:
        _become_fresh(environment, streams)
        code = _run_program(program)
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)  # torchrun's frames stand above us: nothing of it may run here


def _become_fresh(environment: Mapping[str, str], streams: Sequence[Any]) -> None:
    """As a process that was just started: own session, default signals, no inherited files, own random numbers."""
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for descriptor, stream in enumerate(streams, start=1):
        if stream is not None:
            os.dup2(stream.fileno(), descriptor)
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        if int(name) > 2:
            with contextlib.suppress(OSError):
                os.close(int(name))
    sys.stdout = sys.__stdout__ = open(1, "w", buffering=1, closefd=False)  # type: ignore[misc] # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, closefd=False)  # type: ignore[misc] # noqa: SIM115
    os.environ.clear()
    os.environ.update(environment)
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def _run_program(program: Sequence[str]) -> int:
    """What `python PROGRAM` does, up to its exit code."""
    is_module = program[0] == "-m"
    name = program[1] if is_module else program[0]
    sys.argv = list(program[1:] if is_module else program)
    sys.path.insert(0, os.getcwd() if is_module else os.path.dirname(os.path.abspath(name)))  # noqa: PTH100, PTH109, PTH120
    code = 0
    try:
        if is_module:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(name, run_name="__main__")
    except SystemExit as end:
        code = _read_exit(end)
    except BaseException:  # noqa: BLE001 - as the interpreter does
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()  # type: ignore[attr-defined] # noqa: SLF001 - waits for the program's threads
    atexit._run_exitfuncs()  # noqa: SLF001
    return code


def _read_exit(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return (end.code or 0) & 0xFF
    print(end.code, file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
