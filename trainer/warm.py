"""A prepared interpreter: imports torch ahead, then forks one process for each rank of each start.

trainer.node starts this file by its path, under the training program's own Python: it imports nothing but the standard
library and torch, as this package may be missing there. JSON lines on the given socket, from the agent:
`{"type": "start", "store_port", "ranks": [{"local_rank", "arguments", "environment", "stdout", "stderr"}]}`; end of
file ends it. To the agent: `{"type": "ready", "time"}` or `{"type": "refused", "reason"}`, and `{"type": "started",
"pids": {local rank: pid}, "store": pid or null}` or `{"type": "failed", "reason"}`. The ranks become the agent's own
children: it is a subreaper, and who forked them ends.

With a `store_port` the store that the ranks meet at is served there by one more process, as torchrun's agent does: a
rank that looked for it before rank 0 had opened it would wait half a second in vain.

A rank is as `python -u PROGRAM` would be: own session, default signals, nothing inherited but its log files, the
environment as given, a `__main__` of its own, fresh random numbers; the interpreter ends in its own way, with its
threads joined and its clean-up run. What a program can tell apart:

- its modules of torch and the standard library are imported already, under this process's environment: the agent
  starts another one when a variable that they read at import differs (see trainer.agent.workers_warm);
- what the program itself sets in os.environ before it imports torch comes too late for what torch reads at import;
- /proc/self/cmdline and /proc/self/environ are this process's; so `ps` shows this file and not the script. Its short
  name tells the rank: `pgrep -x rank3`;
- all ranks of a node hash strings alike, unless PYTHONHASHSEED says how;
- faulthandler is on.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import random
import select
import signal
import socket
import sys
import time
import types
from collections.abc import Mapping
from typing import Any, NoReturn

_FIRST = ("torch", "torch.distributed")
# What many trainings import beside, unless WARM_IMPORTS names other modules; only while nobody waits.
_MORE = "numpy,torch.utils.data,torch._dynamo,torch.distributed.fsdp,torch.distributed.checkpoint.state_dict"
_IDLE_S = 5.0  # after a start the processors are its own for so long, before more is imported
_REPARENT_LIMIT_S = 10.0
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_EXIT_NOT_STARTED = 1
EXIT_PORT_TAKEN = 98

Job = Mapping[str, Any]


def main() -> Job | None:
    """Serve starts until the agent is gone; in a rank, what it is to run."""
    control = socket.socket(fileno=int(sys.argv[1]))
    agent = int(sys.argv[2])
    os.set_inheritable(control.fileno(), False)
    _end_with(agent)
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):  # meant for the ranks
        signal.signal(number, signal.SIG_IGN)
    if not sys.flags.safe_path and sys.path:
        del sys.path[0]  # our neighbours' names must not hide other people's
    server = _Server(control, agent)
    return server.serve() if server.prepare() else None


class _Server:
    def __init__(self, control: socket.socket, agent: int) -> None:
        self._control = control
        self._agent = agent
        self._rest = b""
        self._more = os.environ.get("WARM_IMPORTS", _MORE).split(",")
        self._used_at = time.monotonic() - _IDLE_S

    def prepare(self) -> bool:
        """Import torch; True when processes may be forked from here."""
        try:
            for name in _FIRST:
                _import(name)
        except Exception as error:  # noqa: BLE001 - whatever a broken installation raises
            return self._refuse(f"torch could not be imported: {error!r:.300}")
        return self._look_at_threads() and self._tell({"type": "ready", "time": time.time()})

    def serve(self) -> Job | None:
        """Serve starts until the agent is gone; in a rank, what it is to run."""
        while True:
            self._import_more()
            data = self._control.recv(1 << 20)
            if not data:
                return None
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                job = self._start(json.loads(line))
                if job is not None:
                    return job
                self._used_at = time.monotonic()

    def _import_more(self) -> None:
        while self._more:
            idle_s = self._used_at + _IDLE_S - time.monotonic()
            if select.select([self._control], [], [], max(0.0, idle_s))[0]:
                return
            name = self._more.pop(0)
            if name:
                with contextlib.suppress(Exception):
                    _import(name)

    def _start(self, request: Mapping[str, Any]) -> Job | None:
        """Fork every rank from a process that then ends; in a rank, its job."""
        if not self._look_at_threads():
            return None
        told, tell = os.pipe()
        starter = os.fork()
        if starter == 0:
            os.close(told)
            return self._fork_all(request["ranks"], request["store_port"] if _can_serve() else None, tell)
        os.close(tell)
        os.waitpid(starter, 0)  # from now on the ranks are the agent's children
        with open(told, "rb") as stream:  # noqa: PTH123
            self._tell(json.loads(stream.read() or b'{"type": "failed", "reason": "the fork failed"}'))
        return None

    def _fork_all(self, jobs: list[Job], store_port: int | None, tell: int) -> Job:
        """In a process that ends at once; its children, the ranks, return."""
        pids: dict[int, int] = {}
        store: int | None = None
        try:
            if store_port is not None:
                store = self._fork(tell)
                if store == 0:
                    _serve_store(store_port)
            for job in jobs:
                pid = self._fork(tell)
                if pid == 0:
                    own = {"TORCHELASTIC_USE_AGENT_STORE": "True"} if store_port is not None else {}
                    _become_rank(job, {**job["environment"], **own})
                    return job
                pids[job["local_rank"]] = pid
        except OSError as error:
            for pid in [*pids.values(), *([store] if store else [])]:
                os.kill(pid, signal.SIGKILL)
            os.write(tell, json.dumps({"type": "failed", "reason": f"fork: {error}"}).encode())
            os._exit(0)
        os.write(tell, json.dumps({"type": "started", "pids": pids, "store": store}).encode())
        os._exit(0)

    def _fork(self, tell: int) -> int:
        """As os.fork; a child has become the agent's, and has let go of our descriptors."""
        starter = os.getpid()
        pid = os.fork()
        if pid == 0:
            os.close(tell)
            self._control.close()
            os.setsid()
            deadline = time.monotonic() + _REPARENT_LIMIT_S
            while os.getppid() == starter and time.monotonic() < deadline:
                time.sleep(0.001)
            _end_with(self._agent)
        return pid

    def _look_at_threads(self) -> bool:
        """A fork copies no thread but the one that calls it: with others about, locks may stay locked for ever.

        Pools that can be forked end before a fork, so one is made to see what is left.
        """
        if _count_threads() > 1:
            trial = os.fork()
            if trial == 0:
                os._exit(0)
            os.waitpid(trial, 0)
        if (count := _count_threads()) > 1:
            return self._refuse(f"{count} threads run after importing torch")
        return not sys.modules["torch"].cuda.is_initialized() or self._refuse("a GPU is in use after importing torch")

    def _refuse(self, reason: str) -> bool:
        self._tell({"type": "refused", "reason": reason})
        return False

    def _tell(self, message: Mapping[str, Any]) -> bool:
        try:
            self._control.sendall(json.dumps(message).encode() + b"\n")
        except OSError:  # the agent is gone, and so are we
            return False
        return True


def _import(name: str) -> None:
    gc.disable()  # a sixth of the import would be spent on collecting among objects that live for ever
    try:
        importlib.import_module(name)
    finally:
        gc.collect()
        gc.freeze()  # its memory stays shared with the ranks
        gc.enable()


def _count_threads() -> int:
    return len(os.listdir("/proc/self/task"))  # noqa: PTH208 - pathlib is one import more


def _end_with(parent: int) -> None:
    """SIGKILL when the agent dies, if it has not yet."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(_EXIT_NOT_STARTED)


# ---------------------------------------------------------------- a rank


def _can_serve() -> bool:
    """True when ranks find the same keys in a store of rank 0's and in one of the agent's.

    Older torch put a prefix before them, and a node whose ranks are no forks would not.
    """
    rendezvous = sys.modules["torch.distributed.rendezvous"]
    code = getattr(getattr(rendezvous, "_create_c10d_store", None), "__code__", None)
    return code is not None and "PrefixStore" not in code.co_names


def _serve_store(port: int) -> NoReturn:
    """Serve the store until killed."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # its ranks may still need it
    try:
        store = sys.modules["torch.distributed"].TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    except RuntimeError as error:
        os.write(2, f"{error}\n".encode())
        os._exit(EXIT_PORT_TAKEN if "EADDRINUSE" in str(error) else _EXIT_NOT_STARTED)
    while store is not None:
        signal.pause()
    os._exit(0)


def _become_rank(job: Job, environment: Mapping[str, str]) -> None:
    """As a process that was just started: default signals, own files and random numbers."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGINT}:
        if signal.getsignal(number) is not None and number < signal.SIGRTMIN:
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # as every Python has them
        signal.signal(number, signal.SIG_IGN)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    try:
        for target, name in ((1, job["stdout"]), (2, job["stderr"])):
            descriptor = os.open(name, flags, 0o666)
            os.dup2(descriptor, target)
            os.close(descriptor)
    except OSError as error:
        os.write(2, f"{error}\n".encode())
        os._exit(_EXIT_NOT_STARTED)
    ctypes.CDLL(None).prctl(_PR_SET_NAME, f"rank{environment.get('RANK', '')}".encode(), 0, 0, 0)
    os.environ.clear()
    os.environ.update(environment)
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    sys.modules["torch"].default_generator.seed()  # drawn at import; those of GPUs begin with a constant
    importlib.invalidate_caches()
    faulthandler.enable()


def run(job: Job) -> None:
    """What `python -u PROGRAM` does, in a module `__main__` of its own."""
    arguments = list(job["arguments"])
    sys.orig_argv = [sys.executable, "-u", *arguments]
    main = types.ModuleType("__main__")
    main.__dict__.update({"__builtins__": sys.modules["builtins"], "__annotations__": {}})
    sys.modules["__main__"] = main
    try:
        if arguments[0] == "-m":
            _run_module(arguments)
        else:
            _run_script(arguments, main)
    except SystemExit:
        raise
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        sys.excepthook = lambda *_: None  # said already, without our own frames
        raise


def _run_module(arguments: list[str]) -> None:
    import runpy

    sys.argv = ["-m", *arguments[2:]]
    if not sys.flags.safe_path:
        sys.path.insert(0, os.getcwd())  # noqa: PTH109
    runpy._run_module_as_main(arguments[1])  # type: ignore[attr-defined] # noqa: SLF001 - what the interpreter calls


def _run_script(arguments: list[str], main: types.ModuleType) -> None:
    from importlib.machinery import SourceFileLoader

    name = arguments[0]
    path = os.path.abspath(name)  # noqa: PTH100
    sys.argv = arguments
    if not sys.flags.safe_path:
        sys.path.insert(0, os.path.dirname(os.path.realpath(name)))  # noqa: PTH120
    try:
        with open(name, "rb") as stream:  # noqa: PTH123
            source = stream.read()
    except OSError as error:
        print(f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}", file=sys.stderr)
        sys.exit(2)
    main.__dict__.update({"__file__": path, "__cached__": None, "__loader__": SourceFileLoader("__main__", path)})
    exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)  # noqa: S102


if __name__ == "__main__":
    _job = main()
    if _job is not None:
        run(_job)
