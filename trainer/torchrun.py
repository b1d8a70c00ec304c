"""Runs torchrun, imported ahead of its arguments, and says which worker failed first and how.

trainer.node starts this file early, while checks and rendezvous are still under way: importing torch takes a second
that recovery need not wait for. It runs under the training program's own Python, which may lack this package, so it
imports nothing but the standard library and torch. One JSON line on standard input, `{"argv", "environment"}`, starts
torchrun; end of file instead means that no training is wanted here. JSON lines on the given descriptor tell
`{"type": "ready", "time"}` and, after a failure, `{"type": "failed", "rank", "local_rank", "exit_code", "error_file"}`:
torchrun itself exits 1 whatever its workers' exit codes were. `{"type": "port_taken"}`: it could not serve the store.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import sys
import time
from typing import Any

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
    os.environ.clear()
    os.environ.update(request["environment"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
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
    except RuntimeError as error:
        if "EADDRINUSE" in str(error):
            report.write(json.dumps({"type": "port_taken"}) + "\n")
        raise
    return 0


def _end_with_parent() -> None:
    """SIGTERM when trainer.node dies: torchrun then stops its workers."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main())
