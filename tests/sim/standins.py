"""Synchronous stand-ins for the daemon's parts that run threads or processes, over one simulated shared file system.

What belongs to the daemon (ages, open readings, answers) dies with it; what belongs to the cluster is in `Disk`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

from slurm.client import SlurmClient
from slurm.errors import SlurmError
from slurm.types import ClusterFacts, JobRecord, NodeRecord
from supervisor.clock import Clock
from supervisor.model import (
    CheckpointView,
    Fresh,
    LogFile,
    NodeChecks,
    PortProbe,
    Run,
    RunView,
    Seen,
    Stale,
    Verification,
)
from supervisor.rundir import RunDirUnreadable
from supervisor.slurmwatch import NOT_ASKED, Answers
from trainer.contract import (
    Advice,
    AttemptSpec,
    CheckResult,
    ExitRecord,
    InterruptionRecord,
    LaunchReport,
    Progress,
    RunPaths,
    parse,
)

READ_BACK_S = 4.0
SWEEP_S = 3.0


# ---------------------------------------------------------------- the shared file system


@dataclass(slots=True)
class StoredCheckpoint:
    """One published checkpoint, and the truth about its bytes."""

    step: int
    attempt: int
    path: str
    published_at: datetime
    corrupted_at: datetime | None = None  # a byte was flipped then


@dataclass(slots=True)
class Disk:
    """What lies in one run's directory."""

    run_dir: Path
    is_hanging: bool = False
    specs: dict[int, AttemptSpec] = field(default_factory=dict)
    advice: dict[int, Advice] = field(default_factory=dict)
    progress: dict[int, Progress] = field(default_factory=dict)
    launches: dict[int, LaunchReport] = field(default_factory=dict)
    exits: dict[int, ExitRecord] = field(default_factory=dict)
    interruptions: dict[tuple[int, int], InterruptionRecord] = field(default_factory=dict)  # by attempt and launch
    checkpoints: dict[tuple[int, int], StoredCheckpoint] = field(default_factory=dict)

    def publish(self, step: int, attempt: int, now: datetime) -> None:
        path = str(RunPaths(self.run_dir).checkpoint(step, attempt))
        self.checkpoints[step, attempt] = StoredCheckpoint(step=step, attempt=attempt, path=path, published_at=now)

    def at(self, path: str) -> StoredCheckpoint | None:
        return next((c for c in self.checkpoints.values() if c.path == path), None)


class SimReader:
    """`RunDirs` over a Disk: ages start anew with each daemon, as the real reader's do."""

    def __init__(self, disk: Disk, clock: Clock, on_act: Callable[[str], None]) -> None:
        self._disk, self._clock, self._on_act = disk, clock, on_act
        self._since: dict[tuple[str, int], tuple[object, datetime]] = {}

    def read(
        self,
        run: str,
        run_dir: Path,
        attempt: int,
        *,
        is_final: bool,
        deadline_s: float,
        interruptions_from: int = 0,
        **_sources: object,
    ) -> RunView:
        self._answer()
        disk = self._disk
        progress, launch = disk.progress.get(attempt), disk.launches.get(attempt)
        return RunView(
            attempt=attempt,
            progress=Seen(value=progress, unchanged_s=self._age_s("progress", attempt, progress)) if progress else None,
            launch=Seen(value=launch, unchanged_s=self._age_s("launch", attempt, launch)) if launch else None,
            exit=disk.exits.get(attempt),
            interruptions=tuple(
                record
                for (number, launch), record in sorted(disk.interruptions.items())
                if number == attempt and launch >= interruptions_from
            ),
            checkpoints=tuple(
                CheckpointView(step=c.step, attempt=c.attempt, path=c.path, size_bytes=10, is_complete=True)
                for c in disk.checkpoints.values()
            ),
        )

    def write_attempt(self, run_dir: Path, attempt: int, files: Mapping[str, bytes]) -> None:
        self._answer()
        self._on_act("write_attempt")
        if "attempt.json" in files:  # not with advice
            self._disk.specs[attempt] = parse(AttemptSpec, files["attempt.json"])
        if "advice.json" in files:
            self._disk.advice[attempt] = parse(Advice, files["advice.json"])
        self._on_act("write_attempt")

    def link_resume(self, run_dir: Path, attempt: int, target: str) -> None:
        self._answer()
        self._on_act("link_resume")

    def find_logs(self, folder: Path, pattern: str) -> tuple[LogFile, ...]:
        self._answer()
        return ()

    def prune(self, run_dir: Path, step: int, attempt: int) -> None:
        self._answer()
        self._on_act("prune")
        self._disk.checkpoints.pop((step, attempt), None)
        self._on_act("prune")

    def _answer(self) -> None:
        if self._disk.is_hanging:
            raise RunDirUnreadable("no answer")

    def _age_s(self, what: str, attempt: int, content: object) -> float:
        known = self._since.get((what, attempt))
        if known is None or known[0] != content:
            known = self._since[what, attempt] = (content, self._clock.now())
        return (self._clock.now() - known[1]).total_seconds()


class SimOwners:
    """`RunOwners` with one reader for all."""

    def __init__(self, reader: SimReader) -> None:
        self._reader = reader

    def identity(self, run: Run) -> tuple[int | None, int | None]:
        return (None, None)

    def reader(self, run: Run) -> SimReader:
        return self._reader

    def close(self) -> None:
        pass


# ---------------------------------------------------------------- beside the loop


class SimAnswers:
    """`SlurmAnswers` without a thread: a question is answered before the next look."""

    def __init__(self, client: SlurmClient, clock: Clock) -> None:
        self._client, self._clock = client, clock
        never = Stale(why="not asked yet", since_at=clock.now())
        self.answers = Answers(jobs=never, nodes=never)
        self.facts: ClusterFacts | None = None
        self._asked_at: datetime | None = None

    @property
    def age_s(self) -> float:
        return float("inf") if self._asked_at is None else (self._clock.now() - self._asked_at).total_seconds()

    def ask(self, *, ended_since: datetime | None = None) -> None:
        now = self._asked_at = self._clock.now()
        try:
            self.facts = self.facts or self._client.fetch_cluster()
        except SlurmError:
            self.answers = Answers(jobs=Stale(why="down", since_at=now), nodes=Stale(why="down", since_at=now))
            return
        ended = self.answers.ended
        if self.facts.has_accounting and ended is None:
            ended = Stale(why=NOT_ASKED, since_at=now)
        jobs, nodes = self._fetch_jobs(now), self._fetch_nodes(now)
        if self.facts.has_accounting and ended_since is not None:
            ended = self._fetch_ended(ended_since, now)
        self.answers = Answers(jobs=jobs, nodes=nodes, ended=ended)

    def wait(self, timeout_s: float) -> bool:
        return True

    def close(self) -> None:
        pass

    def _fetch_jobs(self, now: datetime) -> Fresh[Mapping[int, JobRecord]] | Stale:
        try:
            return Fresh(value={j.job_id: j for j in self._client.fetch_jobs().jobs}, asked_at=now)
        except SlurmError as error:
            return _stale(error, now)

    def _fetch_nodes(self, now: datetime) -> Fresh[Mapping[str, NodeRecord]] | Stale:
        try:
            return Fresh(value={n.name: n for n in self._client.fetch_nodes().nodes}, asked_at=now)
        except SlurmError as error:
            return _stale(error, now)

    def _fetch_ended(self, since: datetime, now: datetime) -> Fresh[Mapping[int, JobRecord]] | Stale:
        try:
            return Fresh(value={j.job_id: j for j in self._client.fetch_ended_jobs(since=since).jobs}, asked_at=now)
        except SlurmError as error:
            return _stale(error, now)


def _stale(error: SlurmError, now: datetime) -> Stale:
    return Stale(why=str(error), since_at=now)


class SimReadbacks:
    """`Readbacks` that take a few seconds each and die with the daemon."""

    def __init__(self, disk: Disk, clock: Clock) -> None:
        self._disk, self._clock = disk, clock
        self._open: dict[tuple[str, int, int], datetime] = {}

    def start(
        self,
        run: str,
        run_dir: Path,
        step: int,
        attempt: int,
        uid: int | None = None,
        gid: int | None = None,
        **_foreign: str,
    ) -> None:
        self._open.setdefault((run, step, attempt), self._clock.now())

    def is_busy(self, run: str, step: int, attempt: int) -> bool:
        return (run, step, attempt) in self._open

    def collect(self) -> tuple[Verification, ...]:
        now = self._clock.now()
        due = [k for k, at in self._open.items() if now >= at + timedelta(seconds=READ_BACK_S)]
        return tuple(self._read(*key, self._open.pop(key)) for key in due)

    def close(self) -> None:
        self._open.clear()

    def _read(self, run: str, step: int, attempt: int, started_at: datetime) -> Verification:
        found = self._disk.checkpoints.get((step, attempt))
        ok: bool | None = None
        if found is not None and not self._disk.is_hanging:
            ok = found.corrupted_at is None or found.corrupted_at > started_at
        return Verification(run=run, step=step, attempt=attempt, ok=ok, detail="read", started_at=started_at)


class SimPorts:
    """`Ports`: a node that is dark does not answer from the first look on."""

    def __init__(self, clock: Clock, is_dark: Callable[[str], bool]) -> None:
        self._clock, self._is_dark = clock, is_dark
        self._watched: dict[str, datetime] = {}
        self._silent: dict[str, datetime] = {}

    def watch(self, targets: Mapping[str, tuple[str, int]]) -> None:
        now = self._clock.now()
        self._watched = {n: self._watched.get(n, now) for n in targets}
        self._look()

    def results(self) -> Mapping[str, PortProbe]:
        self._look()
        now = self._clock.now()
        found = {}
        for name in self._watched:
            since = self._silent.get(name)
            silent_s = (now - since).total_seconds() if since else 0.0
            failures = 0 if since is None else 1 + int(silent_s / 0.5)
            found[name] = PortProbe(node=name, address=name, silent_s=silent_s, failures=failures)
        return found

    def close(self) -> None:
        self._watched.clear()

    def _look(self) -> None:
        now = self._clock.now()
        self._silent = {n: self._silent.get(n, now) for n in self._watched if self._is_dark(n)}


class SimSweeps:
    """`Sweeps` with one check; a dark node does not answer."""

    def __init__(self, clock: Clock, is_dark: Callable[[str], bool], is_full: Callable[[str], bool]) -> None:
        self._clock, self._is_dark, self._is_full = clock, is_dark, is_full
        self._started: tuple[datetime, tuple[str, ...]] | None = None

    @property
    def is_running(self) -> bool:
        return self._started is not None

    def start(self, nodes: Sequence[str], now: datetime, *, job_id: int | None = None) -> bool:
        self._started = (now, tuple(nodes))
        return True

    def collect(self) -> tuple[NodeChecks, ...]:
        now = self._clock.now()
        if self._started is None or now < self._started[0] + timedelta(seconds=SWEEP_S):
            return ()
        nodes, self._started = self._started[1], None
        return tuple(
            NodeChecks(
                node=n,
                at=now,
                is_complete=not self._is_dark(n),
                results=()
                if self._is_dark(n)
                else (CheckResult(check="disk", ok=not self._is_full(n), detail="full"),),
            )
            for n in nodes
        )

    def close(self) -> None:
        self._started = None
