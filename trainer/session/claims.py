"""Who trains here: one start of a training claims an attempt of a run directory, and publishes under its number alone.

Without a service the number itself is claimed: whoever makes the attempt's folder has it, all others take the next.

A service gives the number, and a training may be started again under it: workers restarted in place, a job put back in
the queue, a second one by mistake. The newest start takes the claim over, at once. It is refused only where the holder
certainly runs: a process of this host that is neither ended, nor ending, nor stopped. What an older start still
writes, its writers first, is not published: before each change in the checkpoints' folder rank 0's writer looks
whether the claim still is its own. Clocks are not compared, and nobody waits for a lease to run out.

In one process a run directory belongs to one Checkpointer at a time.
"""

from __future__ import annotations

import gc
import logging
import os
import secrets
import socket
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from trainer.contract import CONTRACT_VERSION, ContractError, RunPaths, parse, write_json
from trainer.format.stale import retry_stale
from trainer.storage.stored import next_attempt

log = logging.getLogger("trainer.checkpoint")

PATIENCE_S = 3.0  # for a holder of this host that may be about to end
_LOOK_S = 0.05
_EXITING = 0x4  # PF_EXITING in the flags of /proc/PID/stat
_KILLED = 1 << 8  # SIGKILL in a mask of signals


class RunDirectoryInUse(RuntimeError):
    """Another training, or another Checkpointer of this process, writes to the run directory."""


class ClaimLost(RuntimeError):
    """A newer start of the attempt has taken over: nothing more is published by this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """attempts/<n>/claim.json: the start of a training that publishes as attempt `attempt`, by its rank 0's process.

    `token` is random, `replaced` the token of the claim that this one found. `started`: clock ticks since `boot`.
    """

    version: int = CONTRACT_VERSION
    attempt: int
    token: str
    replaced: str = ""
    host: str
    boot: str
    pid_space: str
    pid: int
    started: int
    time: float

    @property
    def holder(self) -> str:
        """Who has it, for people."""
        return f"process {self.pid} of {self.host}"


# ---------------------------------------------------------------- one Checkpointer in a process


class Seat:
    """This process's one place at a run directory, until `leave`, or until nobody refers to it any more."""

    def __init__(self, key: Path) -> None:
        self._key = key

    def leave(self) -> None:
        """Let another one sit there; harmless when called again."""
        if _seats.get(self._key) is self:
            del _seats[self._key]


_seats: weakref.WeakValueDictionary[Path, Seat] = weakref.WeakValueDictionary()


def take_seat(run_dir: Path) -> Seat:
    """This process's place at a run directory; raises `RunDirectoryInUse` with the reason of `why_taken`."""
    if problem := why_taken(run_dir):
        raise RunDirectoryInUse(problem)
    key = run_dir.resolve()
    _seats[key] = seat = Seat(key)
    return seat


def why_taken(run_dir: Path) -> str:
    """Why no further Checkpointer can be made here; empty when one can."""
    key = run_dir.resolve()
    if key in _seats:
        gc.collect()  # of one that was given up without a word, maybe
    if key not in _seats:
        return ""
    return (
        f"{run_dir}: a Checkpointer of this process has this run directory already. Their checkpoints would overwrite "
        "each other: give each its own run_dir (or one of them all models, by extra=), or close the other one first"
    )


# ---------------------------------------------------------------- one start of an attempt


def claim_next(run_dir: Path) -> Claim:
    """The lowest attempt number above all that have left anything, taken by this process and nobody else.

    A run directory that takes no new file now gives a number that its first save will claim.
    """
    attempt = next_attempt(run_dir)
    while True:
        folder = RunPaths(run_dir).attempt_dir(attempt)
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir()
        except FileExistsError:
            attempt = max(attempt + 1, next_attempt(run_dir))
            continue
        except OSError as error:
            log.warning("%s is not claimed yet: %s", folder, error.strerror)
        claim = _claim_of_this_process(attempt)
        _write_if_possible(run_dir, claim)
        return claim


def claim_given(run_dir: Path, attempt: int, *, patience_s: float = PATIENCE_S) -> Claim:
    """The claim of an attempt whose number was given, taken over from an older start.

    Raises `RunDirectoryInUse` when its holder is a process of this host and runs on for `patience_s`.
    """
    found = _read(run_dir, attempt)
    if found is not None and found.pid != os.getpid() and _runs_on(found, patience_s):
        raise RunDirectoryInUse(
            f"{run_dir}: {found.holder} is training attempt {attempt} already, and goes on. End it first, or give this "
            "training its own run_dir"
        )
    claim = replace(_claim_of_this_process(attempt), replaced=found.token if found is not None else "")
    _write_if_possible(run_dir, claim)
    return claim


def check_claim(run_dir: Path, claim: Claim) -> None:
    """Raise `ClaimLost` unless the claim still is this one; OSError when that can't be seen.

    A claim that could not be written before is written now.
    """
    found = _read(run_dir, claim.attempt)
    if found is None or (found.token == claim.replaced and claim.replaced):
        write_json(RunPaths(run_dir).claim(claim.attempt), claim)
        found = _read(run_dir, claim.attempt)
    if found is None or found.token != claim.token:
        who = f"{found.holder} has started it since" if found is not None else "its claim does not stay"
        raise ClaimLost(f"attempt {claim.attempt} is no longer this training's: {who}; nothing more of it is published")


def _read(run_dir: Path, attempt: int) -> Claim | None:
    """The claim that stands there; None where there is none, or none that says anything."""
    path = RunPaths(run_dir).claim(attempt)
    try:
        return parse(Claim, retry_stale(path.read_bytes))
    except (FileNotFoundError, NotADirectoryError, ContractError):
        return None


def _write_if_possible(run_dir: Path, claim: Claim) -> None:
    path = RunPaths(run_dir).claim(claim.attempt)
    try:
        write_json(path, claim)
    except OSError as error:  # saves may be possible later, and claim it then
        log.warning("%s is not written: %s", path, error.strerror)


# ---------------------------------------------------------------- processes


def _claim_of_this_process(attempt: int) -> Claim:
    pid = os.getpid()
    process = _look_at(pid)
    return Claim(
        attempt=attempt,
        token=secrets.token_hex(16),
        host=_host(),
        boot=_boot(),
        pid_space=_pid_space(),
        pid=pid,
        started=process.started if process is not None else 0,
        time=time.time(),
    )


def _runs_on(claim: Claim, patience_s: float, clock: Callable[[], float] = time.monotonic) -> bool:
    """True when the holder is a process of this host that is seen running and does not end within `patience_s`.

    One that is stopped, or hangs in the kernel, does not count: it may never end, and what it does later is refused.
    """
    if not claim.boot or (claim.host, claim.boot, claim.pid_space) != (_host(), _boot(), _pid_space()):
        return False
    is_seen_running = False
    deadline = clock() + patience_s
    while (process := _look_at(claim.pid)) is not None and process.started == claim.started and not process.is_ending:
        is_seen_running = is_seen_running or process.is_running
        if clock() >= deadline:
            return is_seen_running
        time.sleep(_LOOK_S)
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Process:
    started: int
    is_running: bool
    is_ending: bool


def _look_at(pid: int) -> _Process | None:
    try:
        # its name may hold anything, blanks and brackets included
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        status = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    except OSError:
        return None
    state, flags, started = fields[0], int(fields[6]), int(fields[19])
    pending = [int(line.split()[1], 16) for line in status if line.startswith(("SigPnd:", "ShdPnd:"))]
    is_killed = any(mask & _KILLED for mask in pending)
    is_ending = state in "ZXx" or bool(flags & _EXITING) or is_killed
    return _Process(started=started, is_running=state in "RS", is_ending=is_ending)


def _host() -> str:
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def _boot() -> str:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def _pid_space() -> str:
    """Which process numbers these are: a container has its own."""
    with suppress(OSError):
        return str(Path("/proc/self/ns/pid").readlink())
    return ""
