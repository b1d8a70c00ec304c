"""Gathers one frozen Snapshot: Slurm, run directories, ports, sweeps, verifications; each source Fresh or Stale."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import TypedDict

from slurm.client import SlurmClient
from slurm.types import JobRecord, NodeRecord
from supervisor.accounts import user_name
from supervisor.attribution.attribute import attribute
from supervisor.clock import Clock
from supervisor.config import Settings
from supervisor.joblog import find_log
from supervisor.model import (
    Attempt,
    AttemptState,
    Cause,
    Fresh,
    Plan,
    Run,
    RunState,
    RunView,
    Snapshot,
    Stale,
    World,
)
from supervisor.parts import Ports, Readbacks, RunOwners, SlurmAnswers, Sweeps
from supervisor.ports import PortWatch
from supervisor.rundir import RunDirUnreadable
from supervisor.slurmwatch import SlurmWatch
from supervisor.verify import Verifier

_READ_DEADLINE_S = 2.0
_SLURMD_PORT = 6818  # Slurm's own default
_ABSENT_ASK_S = 10.0


class Observer:
    """Everything that looks at the world; nothing here changes it."""

    def __init__(
        self,
        client: SlurmClient,
        settings: Settings,
        clock: Clock,
        owners: RunOwners,
        sweeper: Sweeps | None,
        on_news: Callable[[], None],
        *,
        slurm: SlurmAnswers | None = None,
        verifier: Readbacks | None = None,
        ports: Ports | None = None,
    ) -> None:
        self.slurm = slurm or SlurmWatch(client, clock, on_news)
        self.verifier = verifier or Verifier(on_news)
        self._ports = ports or PortWatch(on_news)
        self._sweeper = sweeper
        self._owners = owners
        self._settings = settings
        self._clock = clock
        self._stale_since: dict[str, datetime] = {}
        self._readable_since: dict[str, datetime] = {}
        self._swept_at: datetime | None = None
        self._swept_attempts: set[tuple[str, int]] = set()
        self._wants_answer = True
        self._absent_since_at: dict[int, datetime] = {}
        self._known_nodes: Mapping[str, NodeRecord] = {}  # addresses outlive a controller that stops answering

    # ---- one look

    def take_snapshot(self, world: World) -> Snapshot:
        """One picture for one cycle."""
        self._ask_if_due(world)
        # The answers first: what a run directory says is then never older than what Slurm said.
        answers = self.slurm.answers
        jobs = answers.jobs.value if isinstance(answers.jobs, Fresh) else {}
        views, causes = self._read_runs(world, jobs)
        self._sweep_if_due(world)
        return Snapshot(
            jobs=answers.jobs,
            nodes=answers.nodes,
            ended=answers.ended,
            absent_s=self._age_absences(world, answers.jobs),
            runs=views,
            causes=causes,
            ports=self._ports.results(),
            sweeps=self._sweeper.collect() if self._sweeper is not None else (),
            verifications=self.verifier.collect(),
            default_partition=self.slurm.facts.default_partition if self.slurm.facts is not None else None,
        )

    def follow(self, plan: Plan) -> None:
        """Look closer where the plan asks for it."""
        self._wants_answer = plan.ask_slurm
        answers, facts = self.slurm.answers, self.slurm.facts
        records = answers.nodes.value if isinstance(answers.nodes, Fresh) else self._known_nodes
        self._known_nodes = records
        default_port = (facts.slurmd_port if facts is not None else None) or _SLURMD_PORT
        self._ports.watch(
            {
                n: (records[n].address or records[n].host_name or n, records[n].port or default_port)
                for n in plan.probe
                if n in records
            }
        )

    def ask_again(self) -> None:
        """Have Slurm asked in the next cycle, whatever its last answer's age."""
        self._wants_answer = True

    def close(self) -> None:
        self.slurm.close()
        self._ports.close()
        self.verifier.close()
        if self._sweeper is not None:
            self._sweeper.close()

    # ---- Slurm

    def _ask_if_due(self, world: World) -> None:
        if self._wants_answer or self.slurm.age_s >= self._settings.slurm.poll_interval_s:
            self._wants_answer = False
            self.slurm.ask(ended_since=self._absent_since(world))

    def _age_absences(self, world: World, jobs: Fresh[Mapping[int, JobRecord]] | Stale) -> dict[int, float]:
        """For how long each job of a newest attempt has been missing from the answers, by job id.

        From the first answer without it to the newest: a silent controller adds nothing, a daemon that restarts begins
        anew.
        """
        if isinstance(jobs, Stale):
            return {}
        ours = {a[-1].job_id for a in world.attempts.values() if a and not a[-1].is_over}
        missing = {job_id for job_id in ours if job_id is not None and job_id not in jobs.value}
        since = {job_id: self._absent_since_at.get(job_id, jobs.asked_at) for job_id in missing}
        self._absent_since_at = since
        return {job_id: (jobs.asked_at - at).total_seconds() for job_id, at in since.items()}

    def _absent_since(self, world: World) -> datetime | None:
        """Accounting is asked only when a job of ours has left the controller's memory."""
        answers = self.slurm.answers
        if not isinstance(answers.jobs, Fresh) or answers.ended is None:
            return None
        absent = [
            a.submitted_at
            for attempts in world.attempts.values()
            for a in attempts[-1:]
            if not a.is_over and a.job_id is not None and a.submitted_at is not None
            if a.job_id not in answers.jobs.value
            and (self._clock.now() - a.submitted_at).total_seconds() > _ABSENT_ASK_S
        ]
        return min(absent) - timedelta(minutes=5) if absent else None

    # ---- run directories

    def _read_runs(
        self, world: World, jobs: Mapping[int, JobRecord]
    ) -> tuple[dict[str, Fresh[RunView] | Stale], dict[str, Cause]]:
        views: dict[str, Fresh[RunView] | Stale] = {}
        causes: dict[str, Cause] = {}
        for run in world.runs:
            attempts = world.attempts.get(run.name, ())
            last = attempts[-1] if attempts else None
            if not _needs_reading(run, last):
                continue
            job = jobs.get(last.job_id) if last is not None and last.job_id is not None else None
            view = self._read_run(run, last, job)
            views[run.name] = view
            if isinstance(view, Fresh) and last is not None and not last.is_over and _has_ended(view.value, last, job):
                causes[run.name] = attribute(view.value, job)
        return views, causes

    def _read_run(self, run: Run, last: Attempt | None, job: JobRecord | None) -> Fresh[RunView] | Stale:
        asked_at = self._clock.now()
        sources = _sources(run, last)
        if last is None and not sources:  # the folders are made with the first attempt: there is nothing to read yet
            return Fresh(value=RunView(attempt=0), asked_at=asked_at)
        number = last.number if last is not None else 0
        reader = self._owners.reader(run)
        try:
            view = reader.read(
                run.name,
                run.spec.run_dir,
                number,
                is_final=job is not None and job.is_ended,
                deadline_s=_READ_DEADLINE_S,
                **sources,
            )
            if view.exit is not None and last is not None and not last.is_over:
                view = reader.read(
                    run.name, run.spec.run_dir, number, is_final=True, deadline_s=_READ_DEADLINE_S, **sources
                )
        except RunDirUnreadable as error:
            since = self._stale_since.setdefault(run.name, asked_at)
            self._readable_since.pop(run.name, None)
            return Stale(why=str(error), since_at=since)
        self._stale_since.pop(run.name, None)
        readable_since = self._readable_since.setdefault(run.name, asked_at)
        return Fresh(value=_with_ages_since(view, (asked_at - readable_since).total_seconds()), asked_at=asked_at)

    # ---- sweeps

    def _sweep_if_due(self, world: World) -> None:
        interval_s = self._settings.sweep.interval_s
        if self._sweeper is None or interval_s <= 0 or self._sweeper.is_running or world.is_paused:
            return
        started = self._just_started(world)
        if started is not None:
            self._swept_attempts.add((started.run, started.number))
            self._sweeper.start(started.nodes, self._clock.now(), job_id=started.job_id)
            return
        now = self._clock.now()
        if self._swept_at is not None and (now - self._swept_at).total_seconds() < interval_s:
            return
        nodes = self.slurm.answers.nodes
        if isinstance(nodes, Stale):
            return
        idle = tuple(sorted(r.name for r in nodes.value.values() if r.is_idle and not r.is_drain_set))
        if not idle:
            return
        self._swept_at = now
        self._sweeper.start(idle, now)

    def _just_started(self, world: World) -> Attempt | None:
        """An attempt whose own nodes have not been swept: the launcher's start checks know no head node's clock."""
        last = (attempts[-1] for attempts in world.attempts.values() if attempts)
        running = (a for a in last if a.state is AttemptState.RUNNING and a.stepped_at is not None and a.nodes)
        return next((a for a in running if (a.run, a.number) not in self._swept_attempts), None)


class _Sources(TypedDict, total=False):
    """Where a training that knows nothing of the contract leaves its signs, and what is known of one that keeps it."""

    log_path: Path | None
    log_offset: int
    pattern: str
    checkpoint_directory: Path | None
    layout: str
    unfinished_markers: tuple[str, ...]
    interruptions_from: int


def _sources(run: Run, last: Attempt | None) -> _Sources:
    spec = run.spec
    sources = _Sources()
    if run.script is not None and last is not None:
        log = find_log(run, last, user=user_name(run.owner_uid))
        if log is not None:
            sources["log_path"], sources["log_offset"] = log, last.log_offset
    if last is not None and last.interruptions_read:
        sources["interruptions_from"] = last.interruptions_read
    if spec.progress.pattern:
        sources["pattern"] = spec.progress.pattern
    if spec.checkpoint.layout != "supervisor":
        sources["layout"] = spec.checkpoint.layout
        sources["checkpoint_directory"] = spec.checkpoint.directory
        sources["unfinished_markers"] = spec.checkpoint.unfinished_markers
    return sources


def _with_ages_since(view: RunView, readable_s: float) -> RunView:
    """Nothing is older than the view itself: who wrote to a file system that hung was held up by it as well."""
    progress, launch = view.progress, view.launch
    return replace(
        view,
        progress=replace(progress, unchanged_s=min(progress.unchanged_s, readable_s)) if progress else None,
        launch=replace(launch, unchanged_s=min(launch.unchanged_s, readable_s)) if launch else None,
    )


def _needs_reading(run: Run, last: Attempt | None) -> bool:
    if run.state in (RunState.ACTIVE, RunState.STOPPING):
        return True
    return last is not None and not (last.is_over and last.is_job_gone)


def _has_ended(view: RunView, last: Attempt, job: JobRecord | None) -> bool:
    if last.state is AttemptState.PLANNED:
        return False
    return view.exit is not None or (job is not None and job.is_ended)
