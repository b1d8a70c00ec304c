"""Ranks forked from an interpreter that has torch imported already: a start again and again without the imports.

Where that cannot be, the ranks are started as fresh processes, and the job's log says why once.
"""

from __future__ import annotations

from collections.abc import Mapping

from trainer.agent.place import Place
from trainer.agent.program import Program
from trainer.agent.rank_processes import RankProcesses
from trainer.agent.workers import START_FAILED, RankStart, Setting, WorkersEnd, is_python
from trainer.agent.workers_direct import not_started, plan_start, spawn
from trainer.agent.zygote import Zygote
from trainer.beats import Message
from trainer.verdict import EXIT_NOT_STARTED

# Variables that Python, torch or the libraries below it read when they are loaded. Those of NCCL and of torch's own
# process groups are read when a group is made.
_READ_AT_IMPORT = (
    "PYTHON", "LD_", "LC_", "LANG", "MALLOC_", "GLIBC_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_",
    "TORCH", "PYTORCH_", "CUDA_", "NVIDIA_", "HIP_", "HSA_", "ROCR_", "GPU_", "TRITON_", "USE_",
    "NPY_", "NUMEXPR_",
)  # fmt: skip
_NOT_READ_AT_IMPORT = ("TORCHELASTIC_", "TORCH_NCCL_", "TORCH_FR_", "TORCH_ELASTIC_")
_FORK_LIMIT_S = 1.0  # it takes some milliseconds a rank; who is late is looked for again


class WarmWorkers:
    """Ranks forked from a prepared interpreter under the program's own Python."""

    opens_port = False

    def __init__(self, setting: Setting, program: Program, environment: Mapping[str, str]) -> None:
        self._setting = setting
        self._program = program
        self._environment = environment
        self._zygote: Zygote | None = None
        self._processes: RankProcesses | None = None
        self._waiting: list[RankStart] = []  # asked for and not told of yet
        self._refusal = ""

    def prepare(self) -> None:
        """Begin to import torch, unless that is done or under way."""
        self._look_after(self._environment)

    def settle(self) -> None:
        """All of it is prepared ahead."""

    def start(self, place: Place, program: Program, environment: Mapping[str, str]) -> None:
        """Fork every rank, as soon as torch is imported."""
        self._program, self._environment = program, environment
        if self._processes is not None:
            self._processes.end_store()
        plan = plan_start(self._setting, place, program, environment)
        self._processes, self._waiting = plan.processes, plan.ranks
        if not plan.ranks:
            return
        self._look_after(plan.ranks[0].environment)
        if self._zygote is None:
            self._start_direct()
            return
        self._zygote.fork(plan.ranks, place.master_port if place.rank == 0 else None)
        if self._zygote.is_ready:
            self._listen(_FORK_LIMIT_S)

    def poll(self) -> WorkersEnd | None:
        """See `Workers`."""
        self._listen()
        return self._processes.poll() if self._processes is not None else None

    def pids(self) -> Mapping[int, int]:
        """See `Workers`."""
        return self._processes.pids() if self._processes is not None else {}

    def kept(self) -> frozenset[int]:
        """The prepared interpreter, and the store of ranks of which only others may still run."""
        own = frozenset() if self._zygote is None else frozenset({self._zygote.pid})
        return own if self._processes is None else own | self._processes.store()

    def stop(self, grace_s: float) -> list[int]:
        """See `Workers`; the prepared interpreter stays."""
        self._listen()
        if self._waiting and self._zygote is not None and self._zygote.is_ready:
            self._listen(_FORK_LIMIT_S)
        if self._waiting:  # it is importing still
            self._end_zygote()
            self._waiting = []
        if self._processes is None:
            return []
        return self._processes.stop(grace_s, {*self._setting.others(), *self.kept()})

    def close(self) -> None:
        """End the ranks and the prepared interpreter."""
        self._end_zygote()
        if self._processes is not None:
            self._processes.end_store()
        self.stop(0.0)

    def _look_after(self, environment: Mapping[str, str]) -> None:
        """Have an interpreter that suits these variables, where one can be had."""
        python = environment.get("PYTHON_EXEC") or self._program.python
        if self._zygote is not None and not suits(self._zygote, python, environment):
            self._end_zygote()
        if self._zygote is not None or self._refusal:
            return
        refusal = "" if is_python(self._program) else "the command is no Python program"
        try:
            if not refusal:
                self._zygote = Zygote(python, shared_environment(environment))
        except OSError as error:
            refusal = str(error)
        if refusal:
            self._refuse(refusal)

    def _listen(self, wait_s: float = 0.0) -> None:
        zygote = self._zygote
        while zygote is not None and zygote is self._zygote and (messages := zygote.read(wait_s)):
            for message in messages:
                self._hear(message)
            if not self._waiting:
                break

    def _hear(self, message: Message) -> None:
        if message["type"] == "started":
            self._waiting = []
            if self._processes is not None:
                pids = {int(local_rank): pid for local_rank, pid in message["pids"].items()}
                self._processes.add(pids, message["store"])
        elif message["type"] == "failed":
            self._waiting = []
            if self._processes is not None:
                end = WorkersEnd(kind=START_FAILED, exit_code=EXIT_NOT_STARTED, reason=str(message["reason"]))
                self._processes.fail(end)
        elif message["type"] == "refused":
            self._end_zygote()
            self._refuse(str(message["reason"]))
            self._start_direct()
        elif message["type"] == "gone":  # the next start has another one
            self._end_zygote()
            if self._waiting:
                self._setting.say("the prepared interpreter ended; fresh processes are started")
                self._start_direct()

    def _refuse(self, reason: str) -> None:
        self._refusal = reason
        self._setting.say(f"no warm start: {reason}; fresh processes are started")

    def _start_direct(self) -> None:
        ranks, self._waiting = self._waiting, []
        for rank in ranks:
            if self._processes is None:
                return
            try:
                self._processes.add({rank.local_rank: spawn(rank)})
            except OSError as error:
                self._processes.fail(not_started(rank.command[0], error))
                return

    def _end_zygote(self) -> None:
        if self._zygote is not None:
            self._zygote.end()
            self._zygote = None


def shared_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """What the prepared interpreter has of a rank's environment: all but what is the rank's own."""
    own = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK")
    return {
        name: value for name, value in environment.items() if name not in own and not name.startswith("TORCHELASTIC_")
    }


def suits(zygote: Zygote, python: str, environment: Mapping[str, str]) -> bool:
    """True when a fork of it can be a rank with this environment: what is read at import is the same."""
    return zygote.python == python and _read_at_import(zygote.environment) == _read_at_import(environment)


def _read_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_READ_AT_IMPORT) and not name.startswith(_NOT_READ_AT_IMPORT)
    }
