"""Slurm's answers, asked for beside the loop: a frozen controller costs a thread's time, never a cycle's."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from slurm.client import SlurmClient
from slurm.errors import SlurmError, SlurmRefused
from slurm.types import ClusterFacts, JobRecord, NodeRecord
from supervisor.clock import Clock
from supervisor.model import EPOCH, Fresh, Stale

NOT_ASKED = "accounting has not been asked yet"  # there was no need
_ENDED_WINDOW = timedelta(days=2)
_MIN_GAP_S = 0.25  # between the starts of two rounds of questions, however often they are asked for
_ROUND_SHARE = 4.0  # a controller that is slow to answer is asked a quarter of the time
_REST_MAX_S = 2.0  # but one that was silent once is asked again soon
_BACKOFF_MAX_S = 30.0  # and one that stays silent more and more seldom: questions that time out are load as well
_JITTER = 0.2  # several daemons that lost one controller at one instant must not come back in step


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """The newest answers; each is Fresh or Stale by itself."""

    jobs: Fresh[Mapping[int, JobRecord]] | Stale
    nodes: Fresh[Mapping[str, NodeRecord]] | Stale
    ended: Fresh[Mapping[int, JobRecord]] | Stale | None = None
    commands: int = 0  # how many the last round took
    unreadable: tuple[str, ...] = ()


def choose_gap_s(spent_s: float, silent_rounds: int = 0, jitter: float = 0.0) -> float:
    """Seconds between the starts of two rounds of questions, when the last one took `spent_s`.

    `silent_rounds`: how many in a row got no answer; the rest between them doubles, up to a cap. `jitter`, -1 to 1,
    moves it by up to a fifth.
    """
    if silent_rounds < 1:
        return max(_MIN_GAP_S, min(_ROUND_SHARE * spent_s, spent_s + _REST_MAX_S))
    rest_s = min(_BACKOFF_MAX_S, _REST_MAX_S * float(2 ** min(silent_rounds - 1, 10)))
    return spent_s + rest_s * (1 + _JITTER * jitter)


class SlurmWatch:
    """Asks for all jobs and all nodes, one command each; accounting only where a job has left the controller."""

    def __init__(self, client: SlurmClient, clock: Clock, on_answer: Callable[[], None]) -> None:
        self._client = client
        self._clock = clock
        self._on_answer = on_answer
        never = Stale(why="not asked yet", since_at=clock.now())
        self._answers = Answers(jobs=never, nodes=never)
        self._facts: ClusterFacts | None = None
        self._lock = threading.Lock()
        self._wanted = threading.Event()
        self._answered = threading.Event()
        self._ended_since: datetime | None = None
        self._asked_mono = float("-inf")
        self._silent_rounds = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name="slurm-watch", daemon=True)
        self._thread.start()

    @property
    def answers(self) -> Answers:
        """The newest answers; never waits."""
        with self._lock:
            return self._answers

    @property
    def facts(self) -> ClusterFacts | None:
        """What the cluster is, once it has answered."""
        with self._lock:
            return self._facts

    @property
    def age_s(self) -> float:
        """Seconds since the last round of questions began."""
        return time.monotonic() - self._asked_mono

    def ask(self, *, ended_since: datetime | None = None) -> None:
        """Have a round of questions put, with accounting from `ended_since` when given; returns at once."""
        with self._lock:
            self._ended_since = ended_since
        self._answered.clear()
        self._wanted.set()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the answer to the last `ask`; False when it did not come in time."""
        return self._answered.wait(timeout_s)

    def close(self) -> None:
        """Stop asking; a command that is under way ends by its own time-out."""
        self._closed.set()
        self._wanted.set()
        self._thread.join(0.5)

    # ---- the thread

    def _work(self) -> None:
        spent_s = 0.0
        while True:
            self._wanted.wait()
            gap_s = choose_gap_s(spent_s, self._silent_rounds, random.uniform(-1, 1))
            if self._closed.wait(max(0.0, gap_s - self.age_s)):
                return
            self._wanted.clear()
            self._asked_mono = time.monotonic()
            self._silent_rounds = 0 if self._round() else self._silent_rounds + 1
            spent_s = self.age_s
            self._answered.set()
            self._on_answer()

    def _round(self) -> bool:
        """Put the questions of one round; False when the controller left one unanswered."""
        with self._lock:
            before, since, facts = self._answers, self._ended_since, self._facts
        commands = 2
        if facts is None and self._silent_rounds == 0:  # not while every question costs a time-out
            facts = self._fetch_facts()
            commands += 2
        unreadable: list[str] = []
        jobs = self._fetch_jobs(before.jobs, unreadable)
        nodes = self._fetch_nodes(before.nodes, unreadable)
        ended = before.ended
        if facts is not None and not facts.has_accounting:
            ended = None
        elif since is not None:
            ended = self._fetch_ended(since, before.ended)
            commands += 1
        elif ended is None:  # None would mean that there is no accounting: a job could vanish unasked
            why = "not known whether there is accounting" if facts is None else NOT_ASKED
            ended = Stale(why=why, since_at=self._clock.now())
        with self._lock:
            self._facts = facts
            self._answers = Answers(
                jobs=jobs, nodes=nodes, ended=ended, commands=commands, unreadable=tuple(unreadable)
            )
        return isinstance(jobs, Fresh) and isinstance(nodes, Fresh)

    def _fetch_facts(self) -> ClusterFacts | None:
        try:
            return self._client.fetch_cluster()
        except SlurmError:
            return None

    def _fetch_jobs(
        self, before: Fresh[Mapping[int, JobRecord]] | Stale, unreadable: list[str]
    ) -> Fresh[Mapping[int, JobRecord]] | Stale:
        asked_at = self._clock.now()
        try:
            listing = self._client.fetch_jobs()
        except SlurmError as error:
            return self._stale(error, before)
        unreadable += [f"squeue: {row.why}: {row.text[:200]}" for row in listing.unreadable]
        if listing.unreadable:  # a job that can't be read must not look absent
            return Stale(why=f"{len(listing.unreadable)} rows of squeue can't be read", since_at=asked_at)
        return Fresh(value={job.job_id: job for job in listing.jobs}, asked_at=asked_at)

    def _fetch_nodes(
        self, before: Fresh[Mapping[str, NodeRecord]] | Stale, unreadable: list[str]
    ) -> Fresh[Mapping[str, NodeRecord]] | Stale:
        asked_at = self._clock.now()
        try:
            listing = self._client.fetch_nodes()
        except SlurmError as error:
            return self._stale(error, before)
        unreadable += [f"scontrol show node: {row.why}: {row.text[:200]}" for row in listing.unreadable]
        return Fresh(value={node.name: node for node in listing.nodes}, asked_at=asked_at)

    def _fetch_ended(
        self, since: datetime, before: Fresh[Mapping[int, JobRecord]] | Stale | None
    ) -> Fresh[Mapping[int, JobRecord]] | Stale | None:
        asked_at = self._clock.now()
        try:
            listing = self._client.fetch_ended_jobs(since=max(since, asked_at - _ENDED_WINDOW))
        except SlurmRefused:
            return None
        except SlurmError as error:
            return self._stale(error, before)
        by_age = sorted(listing.jobs, key=lambda job: job.submit_at or EPOCH)  # job ids come round: the newest counts
        return Fresh(value={job.job_id: job for job in by_age}, asked_at=asked_at)

    def _stale(self, error: SlurmError, before: object) -> Stale:
        since_at = before.since_at if isinstance(before, Stale) and before.why != "not asked yet" else self._clock.now()
        return Stale(why=str(error).splitlines()[0][:300], since_at=since_at)
