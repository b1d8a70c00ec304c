"""The daemon's edges with a death planned: at the n-th touch of the ledger or of the cluster the daemon is killed."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any

from slurm.types import (
    ClusterFacts,
    Identity,
    JobDescription,
    JobListing,
    JobRecord,
    NodeListing,
    SubmitRequest,
    Submitted,
)
from supervisor.model import Fact, Intent, IntentState, Plan
from supervisor.store import Store
from tests.fakes import FakeSlurm


class Killed(BaseException):
    """kill -9: nothing of the daemon runs after this; not an Exception, so that nobody handles it."""


class Fate:
    """Counts the daemon's touches, before and after each act; some of them are its last."""

    def __init__(self, deaths: Iterable[int] = ()) -> None:
        self._deaths = frozenset(deaths)
        self.touches = 0
        self.last = ""

    def touch(self, what: str) -> None:
        self.touches += 1
        self.last = what
        if self.touches in self._deaths:
            raise Killed(what)


class MortalStore(Store):
    """The real ledger, between whose transactions the daemon may die."""

    fate: Fate = Fate()

    def commit(self, plan: Plan, now: datetime) -> tuple[Intent, ...]:
        if not (plan.facts or plan.intents or plan.withdrawn or plan.settled):
            return super().commit(plan, now)
        self.fate.touch("before commit")
        intents = super().commit(plan, now)
        self.fate.touch("after commit")
        return intents

    def mark_tried(self, intent: Intent, now: datetime) -> Intent:
        self.fate.touch("before mark")
        marked = super().mark_tried(intent, now)
        self.fate.touch("after mark")
        return marked

    def settle(
        self, intent: Intent, state: IntentState, outcome: str, now: datetime, *, facts: tuple[Fact, ...] = ()
    ) -> None:
        self.fate.touch("before settle")
        super().settle(intent, state, outcome, now, facts=facts)
        self.fate.touch("after settle")


class MortalClient:
    """`SlurmClient` over FakeSlurm, in whose calls the daemon may die; keeps the drains that it made."""

    def __init__(self, slurm: FakeSlurm, fate: Fate) -> None:
        self._slurm, self._fate = slurm, fate

    def fetch_cluster(self) -> ClusterFacts:
        return self._slurm.fetch_cluster()

    def fetch_jobs(self) -> JobListing:
        return self._slurm.fetch_jobs()

    def fetch_nodes(self) -> NodeListing:
        return self._slurm.fetch_nodes()

    def fetch_ended_jobs(self, *, since: datetime) -> JobListing:
        return self._slurm.fetch_ended_jobs(since=since)

    def find_by_token(self, token: str, *, since: datetime) -> tuple[JobRecord, ...]:
        return self._slurm.find_by_token(token, since=since)

    def submit(self, request: SubmitRequest) -> Submitted:
        return self._act("submit", request)  # type: ignore[no-any-return]

    def cancel(self, job_id: int, identity: Identity | None = None) -> None:
        self._act("cancel", job_id, identity)

    def claim(self, job_id: int, token: str, identity: Identity | None = None, *, may_requeue: bool = False) -> None:
        self._act("claim", job_id, token, identity, may_requeue=may_requeue)

    def describe_job(self, job_id: int) -> JobDescription:
        return self._slurm.describe_job(job_id)

    def fetch_script(self, job_id: int) -> str:
        return self._slurm.fetch_script(job_id)

    def drain(self, node: str, reason: str) -> None:
        self._act("drain", node, reason)

    def undrain(self, node: str) -> None:
        self._act("undrain", node)

    def _act(self, verb: str, *arguments: Any, **options: Any) -> Any:
        self._fate.touch(f"before {verb}")
        answer = getattr(self._slurm, verb)(*arguments, **options)
        self._fate.touch(f"after {verb}")
        return answer
