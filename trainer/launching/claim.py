"""One launcher an attempt: who came first holds it, and a second one goes.

attempts/<n>/launcher.json says who. It is taken over only from a launcher that is gone for certain: another process of
the same boot of this host, or of another job, or of an earlier start of this job, whose launch.json stands still.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from trainer import contract
from trainer.contract import CONTRACT_VERSION, ContractError, LaunchReport

CLAIM_NAME = "launcher.json"
STANDS_STILL_S = 3.0  # a launcher rewrites launch.json once a second


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherClaim:
    """Which process launches an attempt."""

    version: int = CONTRACT_VERSION
    attempt: int
    host: str
    boot_id: str
    pid: int
    started: int  # of that process, in clock ticks since the boot
    job_id: int
    restarts: int  # of the job, by Slurm
    nonce: str = ""


class AlreadyLaunched(Exception):
    """Another launcher has the attempt; the message says which."""


def own_claim(attempt: int, host: str, job_id: int, restarts: int) -> LauncherClaim:
    """The claim of this process."""
    return LauncherClaim(
        attempt=attempt,
        host=host,
        boot_id=read_boot_id(),
        pid=os.getpid(),
        started=process_start(os.getpid()) or 0,
        job_id=job_id,
        restarts=restarts,
        nonce=secrets.token_hex(8),
    )


def take_claim(attempt_dir: Path, claim: LauncherClaim) -> None:
    """Make the attempt ours. Raises `AlreadyLaunched` when another launcher has it, OSError when nobody can say."""
    path = attempt_dir / CLAIM_NAME
    mine = attempt_dir / f".{CLAIM_NAME}.{claim.nonce}"
    mine.write_bytes(contract.render_json(claim))
    try:
        with contextlib.suppress(FileExistsError):
            os.link(mine, path)
            return
        holder = _read(path)
        if holder is not None and not _is_gone(attempt_dir, holder, claim):
            raise AlreadyLaunched(
                f"attempt {holder.attempt} has a launcher already: process {holder.pid} on {holder.host},"
                f" job {holder.job_id}"
            )
        mine.replace(path)
        winner = _read(path)
        if winner is None or winner.nonce != claim.nonce:  # two came at once to take it over
            raise AlreadyLaunched(f"attempt {claim.attempt} was just taken over by another launcher")
    finally:
        mine.unlink(missing_ok=True)


def _read(path: Path) -> LauncherClaim | None:
    try:
        return contract.parse(LauncherClaim, path.read_bytes())
    except (FileNotFoundError, ContractError):
        return None


def _is_gone(attempt_dir: Path, holder: LauncherClaim, claim: LauncherClaim) -> bool:
    is_same_boot = (holder.host, holder.boot_id) == (claim.host, claim.boot_id)
    if is_same_boot and process_start(holder.pid) != holder.started:
        return True
    if (holder.job_id, holder.restarts) == (claim.job_id, claim.restarts) or is_same_boot:
        return False
    return _stands_still(attempt_dir / "launch.json")


def _stands_still(path: Path) -> bool:
    first = _sequence(path)
    deadline = time.monotonic() + STANDS_STILL_S
    while time.monotonic() < deadline:
        time.sleep(0.1)
        if _sequence(path) != first:
            return False
    return True


def _sequence(path: Path) -> int | None:
    with contextlib.suppress(OSError, ContractError):
        return contract.parse(LaunchReport, path.read_bytes()).seq
    return None


def read_boot_id() -> str:
    """Of this kernel; empty where it has none."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def process_start(pid: int) -> int | None:
    """When a process of this host began, in clock ticks since the boot; None: there is none, or it is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[19]) if fields[0] not in "ZX" else None
