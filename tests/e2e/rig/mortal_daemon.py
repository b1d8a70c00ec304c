"""The real daemon on a ledger and a Slurm client that kill the process, at the point that $E2E_KILL_AT names.

A point is `VERB.KIND:WHEN`: `commit.submit:before`, `mark.cancel:after`, `act.drain:before`, `settle.submit:after`.
The first time that it is reached, the process gets SIGKILL: nothing is closed, flushed or said.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from slurm.client import CliClient
from slurm.types import Identity, SubmitRequest, Submitted
from supervisor import runlock
from supervisor.clock import SystemClock
from supervisor.config import load_settings
from supervisor.control import ControlServer
from supervisor.daemon import Daemon
from supervisor.logs import configure_logs
from supervisor.model import Fact, Intent, IntentState, Plan
from supervisor.store import Store

POINT = os.environ["E2E_KILL_AT"]


@contextmanager
def mortal(what: str) -> Iterator[None]:
    die_at(f"{what}:before")
    yield
    die_at(f"{what}:after")


def die_at(point: str) -> None:
    if point == POINT:
        os.kill(os.getpid(), signal.SIGKILL)


class MortalStore(Store):
    def commit(self, plan: Plan, now: datetime) -> tuple[Intent, ...]:
        kinds = sorted({intent.kind.value for intent in plan.intents})
        for kind in kinds:
            die_at(f"commit.{kind}:before")
        intents = super().commit(plan, now)
        for kind in kinds:
            die_at(f"commit.{kind}:after")
        return intents

    def mark_tried(self, intent: Intent, now: datetime) -> Intent:
        with mortal(f"mark.{intent.kind.value}"):
            return super().mark_tried(intent, now)

    def settle(
        self, intent: Intent, state: IntentState, outcome: str, now: datetime, *, facts: tuple[Fact, ...] = ()
    ) -> None:
        with mortal(f"settle.{intent.kind.value}"):
            super().settle(intent, state, outcome, now, facts=facts)


class MortalClient(CliClient):
    def submit(self, request: SubmitRequest) -> Submitted:
        with mortal("act.submit"):
            return super().submit(request)

    def cancel(self, job_id: int, identity: Identity | None = None) -> None:
        with mortal("act.cancel"):
            super().cancel(job_id, identity)

    def drain(self, node: str, reason: str) -> None:
        with mortal("act.drain"):
            super().drain(node, reason)


def main() -> None:
    configure_logs(level="info")
    settings, clock = load_settings(Path(sys.argv[1]), os.environ), SystemClock()
    path = settings.ledger.path
    with (
        runlock.acquire(path, clock.now()),
        MortalStore.open(path, now=clock.now()) as store,
        ControlServer(settings.control.socket) as control,
    ):
        store.claim(clock.now(), pid=os.getpid(), host=socket.gethostname())
        client = MortalClient(timeout_s=settings.slurm.command_timeout_s)
        daemon = Daemon(settings, store, client, clock, control=control)
        signal.signal(signal.SIGTERM, lambda *_: daemon.stop())
        daemon.run()
        daemon.close()


main()
