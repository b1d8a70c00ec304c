"""The ranks of one node: how each is started, and how their end is told. The ways to start them are beside this file.

A node starts its ranks together and stops them together; whether they are started again is the launcher's decision.
"""

from __future__ import annotations

import os
import string
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from trainer.agent.place import Place
from trainer.agent.program import Program

FINISHED = "finished"  # every rank of the node ended with 0
FAILED = "failed"  # a rank did not
START_FAILED = "start_failed"  # the ranks could not be started, or not find each other; no node is to blame

_NO_PYTHON = "--no-python"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersEnd:
    """How the ranks of this node ended, or the first of them that failed while others may still run."""

    kind: str  # FINISHED, FAILED or START_FAILED
    exit_code: int  # as a shell gives it: 128 + n for signal n
    rank: int | None = None
    local_rank: int | None = None
    error_file: str = ""  # where torch's @record leaves the traceback
    log: str = ""  # the rank's error output
    is_port_taken: bool = False
    reason: str = ""  # one sentence for people


class Workers(Protocol):
    """The ranks of this node, one start of the training after another. Called from the agent's main thread only."""

    @property
    def opens_port(self) -> bool:
        """True when the other nodes' starts must wait until something listens at rank 0's port."""
        ...

    def prepare(self) -> None:
        """Do what a start needs ahead of it. Returns at once."""
        ...

    def settle(self) -> None:
        """The ranks are past their start: what would have been in their way may be prepared. Returns at once."""
        ...

    def start(self, place: Place, program: Program, environment: Mapping[str, str]) -> None:
        """Start every rank. Returns at once; what goes wrong is told by `poll`."""
        ...

    def poll(self) -> WorkersEnd | None:
        """The first failure or, when all have finished, that; None while they run. The same answer until `start`.

        Cheap. The ranks are children of this process: SIGCHLD says when to look.
        """
        ...

    def pids(self) -> Mapping[int, int]:
        """The process of each local rank that runs."""
        ...

    def kept(self) -> frozenset[int]:
        """Processes that outlive a stop of the ranks: what is prepared for the next start."""
        ...

    def stop(self, grace_s: float) -> list[int]:
        """SIGTERM, after `grace_s` SIGKILL, whole trees; the pids that survive even that."""
        ...

    def close(self) -> None:
        """End what was prepared, too."""
        ...


def say_nothing_kept() -> Collection[int]:
    """For an agent that has no other children than the training's."""
    return ()


def say_to_log(text: str) -> None:
    """A line in the job's log."""
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is the same in every start of this node's ranks."""

    procs: int
    log_dir: Path
    prefix: tuple[str, ...] = ()  # in front of each rank's program
    retries: int = 0  # starts that may follow one, as far as is known
    others: Callable[[], Collection[int]] = say_nothing_kept  # the agent's children that are not the training's
    say: Callable[[str], None] = say_to_log


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStart:
    """One rank that is to be started."""

    rank: int
    local_rank: int
    command: tuple[str, ...]
    environment: Mapping[str, str]
    folder: Path  # of its logs

    @property
    def stdout(self) -> Path:
        """Where its standard output goes."""
        return self.folder / "stdout.log"

    @property
    def stderr(self) -> Path:
        """Where its error output goes."""
        return self.folder / "stderr.log"

    @property
    def error_file(self) -> Path:
        """Where torch's @record leaves the traceback."""
        return self.folder / "error.json"


# ---------------------------------------------------------------- pure


def is_python(program: Program) -> bool:
    """True when the program is a Python script or module, False when it is a program of its own."""
    return program.arguments[:1] != (_NO_PYTHON,)


def rank_command(
    program: Program, local_rank: int, environment: Mapping[str, str], prefix: Sequence[str] = ()
) -> tuple[str, ...]:
    """What starts one rank: as torchrun does, `${local_rank}` in an argument is filled in and $PYTHON_EXEC used."""
    if is_python(program):
        words: tuple[str, ...] = (environment.get("PYTHON_EXEC") or program.python, "-u", *program.arguments)
    else:
        words = program.arguments[1:]
    return (*prefix, *(string.Template(word).safe_substitute(local_rank=local_rank) for word in words))


def rank_environment(
    place: Place, environment: Mapping[str, str], *, local_rank: int, procs: int, retries: int, error_file: Path
) -> dict[str, str]:
    """The environment of one rank: what torchrun sets, with the number of this start as its restart count.

    TORCHELASTIC_USE_AGENT_STORE is False: rank 0 itself serves the store at MASTER_ADDR:MASTER_PORT. Whoever serves one
    for it says True.
    """
    rank, world = place.rank * procs + local_rank, place.nodes * procs
    return {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        **environment,
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "GROUP_RANK": str(place.rank),
        "ROLE_RANK": str(rank),
        "ROLE_NAME": "default",
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(procs),
        "GROUP_WORLD_SIZE": str(place.nodes),
        "ROLE_WORLD_SIZE": str(world),
        "MASTER_ADDR": place.master_addr,
        "MASTER_PORT": str(place.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(place.launch),
        "TORCHELASTIC_MAX_RESTARTS": str(place.launch + retries),
        "TORCHELASTIC_RUN_ID": place.rdzv_id,
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_ERROR_FILE": str(error_file),
    }


def plan_ranks(
    setting: Setting, place: Place, program: Program, environment: Mapping[str, str], *, folder: Path
) -> list[RankStart]:
    """Every rank of this node; their logs are in `folder`, one folder each, named by the local rank."""
    ranks = []
    for local_rank in range(setting.procs):
        own = folder / str(local_rank)
        ranks.append(
            RankStart(
                rank=place.rank * setting.procs + local_rank,
                local_rank=local_rank,
                command=rank_command(program, local_rank, environment, setting.prefix),
                environment=rank_environment(
                    place,
                    environment,
                    local_rank=local_rank,
                    procs=setting.procs,
                    retries=setting.retries,
                    error_file=own / "error.json",
                ),
                folder=own,
            )
        )
    return ranks


def shell_code(status: int) -> int:
    """The exit code of a wait status as a shell gives it: 128 + n for signal n."""
    code = os.waitstatus_to_exitcode(status)
    return 128 - code if code < 0 else code


def choose_first(codes: Mapping[int, int]) -> int | None:
    """The local rank to name among those that were found failed at once; None when none failed.

    One that was killed did not follow a peer's failure: a victim ends by an error of its own, by SIGABRT or SIGTERM.
    """
    failed = [(code in (134, 143) or code < 128, local_rank) for local_rank, code in codes.items() if code != 0]
    return min(failed)[1] if failed else None
