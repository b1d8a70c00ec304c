"""Makes the failure of a drill: on a sandbox for real (power, cable, signals), else through the service and its agents.

Through the service a node's agent kills or stops one of its ranks, ends itself with all of them, or lets go of the
launcher: what the others see of it is what they would see of the real failure. No node of a real cluster is harmed.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from slurm.sandbox import Sandbox, SandboxError
from slurm.sandbox.spec import STATE_NAME, read_spec
from supervisor.control import ask

_FORKED_RANK = re.compile(r"rank(\d+)\n")  # trainer.warm: its environment in /proc is that of who forked it


class CannotMake(Exception):
    """The failure can't be made; the message says why. Nothing was done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A failure that can be made: how, in words, and what does it. `make` raises CannotMake or the service's errors.

    `check` asks whether it may be made, and raises alike; `announce` tells the service of one that it doesn't make, so
    that it counts as no real failure.
    """

    how: str
    is_sandbox: bool
    make: Callable[[], None]
    check: Callable[[], None] = lambda: None
    announce: Callable[[], None] = lambda: None


def find_sandbox(conf: Path | None, environment: Mapping[str, str]) -> Sandbox | None:
    """The running sandbox that this slurm.conf belongs to, if it is one that this account started."""
    path = conf or (Path(environment["SLURM_CONF"]) if environment.get("SLURM_CONF") else None)
    if path is None or not (path.parent / STATE_NAME).is_file():
        return None
    try:
        if read_spec(path.parent).conf.resolve() != path.resolve():
            return None
        return Sandbox.attach(path.parent)
    except (SandboxError, OSError):
        return None


def plan_in_sandbox(
    sandbox: Sandbox, run: str, kind: str, node: str, *, socket: Path | None = None, start_hint: str = ""
) -> Failure:
    """The real failure, on a node of a sandbox, known to the service by `socket`.

    Raises CannotMake for a cable that isn't there.
    """
    if kind == "network" and sandbox.mode != "isolated":
        raise CannotMake("nodes of a loopback sandbox have no cable to cut: use --kill node, or an isolated sandbox")
    ways: Mapping[str, tuple[str, Callable[[], None]]] = {
        "node": (f"power of {node} cut", lambda: sandbox.power_cut(node)),
        "network": (f"cable of {node} cut", lambda: sandbox.cable_cut(node)),
        "process": (f"SIGKILL to a rank on {node}", lambda: _signal_rank(sandbox, run, node, signal.SIGKILL)),
        "hang": (f"SIGSTOP to a rank on {node}", lambda: _signal_rank(sandbox, run, node, signal.SIGSTOP)),
    }
    how, make = ways[kind]
    request = {**request_drill(run, kind, node), "is_made": True}
    return Failure(
        how=how,
        is_sandbox=True,
        make=lambda: _guarded(make),
        announce=lambda: _ask(socket, request, start_hint) if socket is not None else None,
    )


def plan_by_service(socket: Path, run: str, kind: str, node: str, *, start_hint: str) -> Failure:
    """The failure as the agent of a node makes it, when the service tells the launcher to."""
    ways = {
        "node": f"the agent on {node} kills its ranks and itself",
        "network": f"the agent on {node} lets go of the launcher",
        "process": f"the agent on {node} sends SIGKILL to one of its ranks",
        "hang": f"the agent on {node} sends SIGSTOP to one of its ranks",
    }
    return Failure(
        how=ways[kind],
        is_sandbox=False,
        make=lambda: _ask(socket, request_drill(run, kind, node), start_hint),
        check=lambda: _ask(socket, request_drill(run, kind, node, dry_run=True), start_hint),
    )


def request_drill(run: str, kind: str, node: str, *, dry_run: bool = False) -> dict[str, object]:
    """The request of the control socket."""
    return {
        "verb": "drill",
        "run": run,
        "kind": kind,
        "node": node,
        "at_step": None,
        "id": secrets.token_hex(4),
        "dry_run": dry_run,
    }


def _ask(socket: Path, request: dict[str, object], start_hint: str) -> None:
    ask(socket, request, start_hint=start_hint)


def _guarded(make: Callable[[], None]) -> None:
    try:
        make()
    except (SandboxError, OSError) as error:
        raise CannotMake(f"the sandbox did not do it: {error}") from None


def _signal_rank(sandbox: Sandbox, run: str, node: str, number: signal.Signals) -> None:
    ranks = find_ranks(sandbox.node_pids(node), run)
    if not ranks:
        raise CannotMake(f"no rank of {run} is to be seen on {node}")
    os.kill(ranks[max(ranks)], number)


def find_ranks(pids: tuple[int, ...], run: str, proc: Path = Path("/proc")) -> dict[int, int]:
    """Rank to the process that is it: the first one in its line of descent that has the rank in its environment."""
    own = {pid: rank for pid in pids if (rank := _rank_of(proc / str(pid), run)) is not None}
    return {rank: pid for pid, rank in own.items() if _parent(proc / str(pid)) not in own}


def _rank_of(process: Path, run: str) -> int | None:
    try:
        pairs = (item.partition(b"=") for item in (process / "environ").read_bytes().split(b"\0"))
        environment = {name: value for name, _, value in pairs}
        if environment.get(b"SUPERVISOR_RUN") != run.encode():
            return None
        forked = _FORKED_RANK.fullmatch((process / "comm").read_text())
        return int(forked[1]) if forked else int(environment[b"RANK"])
    except (OSError, KeyError, ValueError):
        return None


def _parent(process: Path) -> int:
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return 0
