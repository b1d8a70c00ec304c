"""The running ranks of a node: which ended how, their output in the job's log, and their end by force.

They are this process's own children, whoever forked them: it is a subreaper, so a process whose parent has ended is
handed to it.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import string
import sys
import tempfile
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from trainer.agent.place import Place
from trainer.agent.tee import Tee
from trainer.agent.words import read_tail
from trainer.agent.workers import FAILED, FINISHED, START_FAILED, RankStart, WorkersEnd, choose_first, shell_code
from trainer.descendants import kill_descendants
from trainer.warm import EXIT_PORT_TAKEN

_LOST_STATUS = 255  # somebody else has taken the exit status: not known to be a good end
_TICK_S = 0.005
_PORT_TAKEN = re.compile(r"EADDRINUSE|[Aa]ddress already in use")
_WORDS_BYTES = 16 * 1024


class RankProcesses:
    """The ranks of one start."""

    def __init__(self, place: Place, ranks: Sequence[RankStart]) -> None:
        self._place = place
        self._ranks = {one.local_rank: one for one in ranks}
        self._pids: dict[int, int] = {}
        self._codes: dict[int, int] = {}
        self._store: int | None = None  # the process that serves the ranks' store, where it is none of them
        self._end: WorkersEnd | None = None
        self._tee: Tee | None = None

    def add(self, pids: Mapping[int, int], store: int | None = None) -> None:
        """These processes are now the ranks, and this one serves their store."""
        self._pids.update(pids)
        self._store = store or self._store
        if self._place.rank == 0 and 0 in pids and self._tee is None:
            self._tee = _open_tee(self._ranks[0])

    def fail(self, end: WorkersEnd) -> None:
        """The start failed; what runs of it already is to be stopped."""
        self._end = self._end or end

    def pids(self) -> dict[int, int]:
        """Local rank to process, of those that run."""
        return {local_rank: pid for local_rank, pid in self._pids.items() if local_rank not in self._codes}

    def store(self) -> frozenset[int]:
        """The process that serves a store which ranks of other nodes may still need: ours have finished."""
        if self._store is None or self._end is None or self._end.kind != FINISHED:
            return frozenset()
        return frozenset({self._store})

    def end_store(self) -> None:
        """Kill the store's process; nobody needs it any more."""
        if self._store is not None:
            with contextlib.suppress(OSError):
                os.kill(self._store, signal.SIGKILL)
                os.waitpid(self._store, 0)
            self._store = None

    def poll(self) -> WorkersEnd | None:
        """See `Workers.poll`."""
        if self._end is None and self._pids:
            self._end = self._look_at_store() or self._look_at_ranks()
            if self._end is not None and not self.pids():
                self._close_tee()
        return self._end

    def stop(self, grace_s: float, kept: Collection[int]) -> list[int]:
        """See `Workers.stop`. `kept`: processes that are not the ranks'; they and what is below them go on."""
        left = stop_processes(self.pids().values(), grace_s, kept)
        self._store = self._store if self._store in kept else None
        self._reap()
        self._close_tee()
        self._end = self._end or WorkersEnd(kind=FAILED, exit_code=128 + signal.SIGTERM, reason="stopped")
        return left

    def _reap(self) -> dict[int, int]:
        """Exit codes of the ranks that have ended since the last call."""
        news = {}
        for local_rank, pid in self.pids().items():
            try:
                found, status = os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                news[local_rank] = _LOST_STATUS
                continue
            if found:
                news[local_rank] = shell_code(status)
        self._codes.update(news)
        return news

    def _look_at_store(self) -> WorkersEnd | None:
        if self._store is None:
            return None
        try:
            found, status = os.waitpid(self._store, os.WNOHANG)
        except ChildProcessError:
            return None
        if not found:
            return None
        self._store = None
        code = shell_code(status)
        if code == EXIT_PORT_TAKEN:
            return port_taken(self._place)
        return WorkersEnd(kind=START_FAILED, exit_code=1, reason=f"the ranks' store ended with {describe_code(code)}")

    def _look_at_ranks(self) -> WorkersEnd | None:
        news = self._reap()
        if (first := choose_first(news)) is not None:
            return self._tell(first, news[first])
        if len(self._codes) == len(self._ranks):
            return WorkersEnd(kind=FINISHED, exit_code=0, reason="finished")
        return None

    def _tell(self, local_rank: int, code: int) -> WorkersEnd:
        rank = self._ranks[local_rank]
        if self._is_port_taken():
            return port_taken(self._place)
        return WorkersEnd(
            kind=FAILED,
            exit_code=code,
            rank=rank.rank,
            local_rank=local_rank,
            error_file=str(rank.error_file),
            log=str(rank.stderr),
            reason=f"rank {rank.rank} ended with {describe_code(code)}",
        )

    def _is_port_taken(self) -> bool:
        """True when rank 0 said that it could not serve the store."""
        if self._place.rank != 0 or 0 not in self._codes:
            return False
        return says_port_taken(self._ranks[0].stderr, self._place.master_port)

    def _close_tee(self) -> None:
        if self._tee is not None:
            self._tee.finish()
            self._tee = None


def stop_processes(ranks: Iterable[int], grace_s: float, kept: Collection[int]) -> list[int]:
    """SIGTERM to the ranks' process groups, SIGKILL to all that is left of them after `grace_s` or when they are gone.

    Everything below this process is theirs, but for what is in `kept`. Returns the pids that survive SIGKILL.
    """
    running = [pid for pid in ranks if is_running(pid)]
    for pid in running:
        for number in (signal.SIGTERM, signal.SIGCONT):  # a stopped process takes SIGTERM when it goes on
            with contextlib.suppress(OSError):
                os.killpg(pid, number)
    deadline = time.monotonic() + grace_s
    while any(map(is_running, running)) and time.monotonic() < deadline:
        time.sleep(_TICK_S)
    return kill_descendants(kept=kept)


def is_running(pid: int) -> bool:
    """True while a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] not in "ZX"
    except (OSError, IndexError):
        return False


def says_port_taken(log: Path, port: int) -> bool:
    """True when the end of an error log tells that somebody else listens there."""
    words = read_tail(log, _WORDS_BYTES)
    return bool(_PORT_TAKEN.search(words)) and str(port) in words


def port_taken(place: Place) -> WorkersEnd:
    """The end of a start whose port belongs to somebody else."""
    return WorkersEnd(
        kind=START_FAILED,
        exit_code=1,
        is_port_taken=True,
        reason=f"port {place.master_port}, where the ranks were to meet, is taken",
    )


def describe_code(code: int) -> str:
    """An exit code for people: `exit code 1`, `signal SIGKILL`."""
    if code > 128:
        with contextlib.suppress(ValueError):
            return f"signal {signal.Signals(code - 128).name}"
    return f"exit code {code}"


def make_log_folder(log_dir: Path, place: Place) -> Path:
    """A new folder for the logs of one start, called as torchrun calls it. Raises OSError."""
    log_dir.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=f"{place.rdzv_id}_", dir=log_dir)) / f"attempt_{place.launch}"


def _open_tee(rank: RankStart) -> Tee:
    template = rank.environment.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE") or "[${role_name}${local_rank}]:"
    prefix = string.Template(template).safe_substitute(
        role_name=rank.environment["ROLE_NAME"], rank=rank.rank, local_rank=rank.local_rank
    )
    tee = Tee([(rank.stdout, sys.stdout.buffer), (rank.stderr, sys.stderr.buffer)], prefix)
    tee.start()
    return tee
