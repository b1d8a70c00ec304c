"""A person's batch script on FakeSlurm: it knows nothing of the service, prints, saves its own way and crashes.

Nothing here knows the daemon. What the script was submitted with is all that it goes by, as a real one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path

from slurm.sbatch_line import render_log_path
from slurm.types import JobRecord, JobState, NodeBase, SubmitRequest
from supervisor.model import CheckpointView, LogFile, RunView, Seen, Verification
from supervisor.rundir import RunDirUnreadable
from tests.fakes import FakeClock, FakeSlurm
from trainer import contract

STEP_S = 60.0
START_S = 45.0
SAVE_EVERY = 4  # steps
SAVE_S = 15.0  # a save is not whole for so long
SLICE_S = 20.0
CHECKPOINTS = Path("/home/ann/checkpoints")


class Broken(AssertionError):
    """Something happened that must never happen."""


class ForgetfulSlurm(FakeSlurm):
    """Accounting may be behind: of what happened lately it knows nothing yet."""

    lag = timedelta(0)

    def _accounted(self, since: datetime) -> tuple[JobRecord, ...]:
        heard = self.clock.now() - self.lag
        known = [job for job in super()._accounted(since) if job.submit_at is not None and job.submit_at <= heard]
        return tuple(
            replace(job, state=JobState.RUNNING, raw_state="RUNNING", end_at=None, exit_code=None, exit_signal=None)
            if job.end_at is not None and job.end_at > heard
            else job
            for job in known
        )

    def has_ended(self, job_id: int) -> bool:
        return self._jobs[job_id].record.end_at is not None

    def requeue(self, job_id: int) -> None:
        """`scontrol requeue` by an administrator: the same job waits again."""
        self._settle()
        job = self._jobs[job_id]
        record = replace(
            job.record, state=JobState.PENDING, raw_state="PENDING", nodes=(), restarts=job.record.restarts + 1
        )
        job.record = replace(record, start_at=None, end_at=None, submit_at=self._at.replace(microsecond=0))
        job.allocated, job.eligible_at = (), self._at + timedelta(seconds=60)
        job.completing.clear()
        if job not in self._active:
            self._active.append(job)


@dataclass(slots=True)
class Saved:
    """A checkpoint folder of the training's own, and the truth about it."""

    step: int
    at: datetime
    whole_at: datetime
    broken_at: datetime | None = None

    def is_whole(self, now: datetime) -> bool:
        return self.whole_at <= now and (self.broken_at is None or self.broken_at > now)


@dataclass(slots=True)
class Script:
    """One batch script that runs."""

    job_id: int
    nodes: tuple[str, ...]
    log: Path
    step: int
    resume_from: str
    started_at: datetime
    stepped_at: datetime
    restarts: int
    is_loaded: bool = False
    is_hung: bool = False
    is_zombie: bool = False  # its job is over, its node is cut off: it goes on
    is_dead: bool = False


@dataclass(slots=True)
class ScriptCluster:
    """Slurm, the shared disk and the scripts."""

    clock: FakeClock
    slurm: ForgetfulSlurm
    output: str
    final_step: int
    checkpoints: dict[str, Saved] = field(default_factory=dict)
    logs: dict[Path, tuple[int, datetime]] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    is_hanging: bool = False
    cut: set[str] = field(default_factory=set)
    dead: set[str] = field(default_factory=set)
    scripts: list[Script] = field(default_factory=list)
    started: dict[str, list[int]] = field(default_factory=dict)  # jobs that began, by token
    has_finished: bool = False
    on_resume: Callable[[JobRecord, SubmitRequest], None] = lambda _job, _request: None

    def __post_init__(self) -> None:
        self.slurm.on_start = self._start

    def advance(self, seconds: float) -> None:
        end = self.clock.now() + timedelta(seconds=seconds)
        while (left := (end - self.clock.now()).total_seconds()) > 0:
            self.slurm.advance(min(SLICE_S, left))
            for script in self.scripts:
                self._tick(script)
            self.scripts = [s for s in self.scripts if not s.is_dead]

    def live_jobs(self) -> list[JobRecord]:
        return [j for j in self.slurm.jobs() if j.end_at is None]

    def running(self) -> Script | None:
        return next((s for s in self.scripts if not s.is_dead and not s.is_zombie), None)

    # ---- faults

    def lose_node(self, node: str, *, is_power_cut: bool) -> None:
        if node not in self.cut | self.dead:
            self.slurm.power_cut(node)
        (self.dead if is_power_cut else self.cut).add(node)
        for script in self.scripts:
            script.is_dead |= is_power_cut and script.nodes[0] == node

    def revive(self, node: str) -> None:
        if node in self.cut | self.dead:
            self.cut.discard(node)
            self.dead.discard(node)
            self.slurm.revive(node)
            for script in self.scripts:
                script.is_dead |= script.is_zombie and script.nodes[0] == node

    def break_newest(self) -> None:
        whole = [s for s in self.checkpoints.values() if s.is_whole(self.clock.now())]
        if whole:
            max(whole, key=lambda s: s.step).broken_at = self.clock.now()

    def end(self, script: Script, state: JobState, code: int = 0) -> None:
        script.is_dead = True
        self.slurm.end_job(script.job_id, state, code)

    # ---- scripts

    def _start(self, job: JobRecord) -> None:
        now, request = self.clock.now(), self.slurm.request_of(job.job_id)
        for script in self.scripts:
            if not script.is_zombie and self.slurm.has_ended(script.job_id):  # one behind it starts in the same moment
                script.is_zombie = script.nodes[0] in self.cut
                script.is_dead |= not script.is_zombie
        if any(not s.is_dead and not s.is_zombie for s in self.scripts):
            raise Broken(f"job {job.job_id} starts beside another")
        for script in self.scripts:
            script.is_dead |= script.job_id == job.job_id
        begun = self.started.setdefault(job.comment, [])
        if job.job_id not in begun:
            begun.append(job.job_id)
        if len(begun) > 1:
            raise Broken(f"{job.comment} runs again as job {job.job_id}, as if job {begun[0]} had not been")
        if job.restarts == 0:
            self.on_resume(job, request)
        rendered = render_log_path(self.output, job_id=job.job_id, job_name=job.name, user="root", node=job.nodes[0])
        assert rendered is not None
        resume_from, step = self.find_resume(request)
        script = Script(
            job_id=job.job_id,
            nodes=job.nodes,
            log=Path(rendered),
            step=step,
            resume_from=resume_from,
            started_at=now,
            stepped_at=now,
            restarts=job.restarts,
        )
        self._print(script, at=now)
        self.scripts.append(script)

    def find_resume(self, request: SubmitRequest) -> tuple[str, int]:
        """(path, step) that a job begins from now: of one that was queued ahead, where its link points."""
        environment: Mapping[str, str] = request.environment
        path, step = environment[contract.ENV_RESUME_FROM], environment[contract.ENV_RESUME_STEP]
        if step:
            return path, int(step)
        target = self.links.get(path, "")
        return target, int(target.rpartition("-")[2]) if target else 0

    def _print(self, script: Script, *, at: datetime) -> None:
        size, _ = self.logs.get(script.log, (0, at))
        self.logs[script.log] = (size + 40, at)

    def _tick(self, script: Script) -> None:
        now = self.clock.now()
        if script.is_dead:
            return
        job = self.slurm.job(script.job_id)
        if not script.is_zombie and job.end_at is None and self._is_node_down(script):
            self.slurm.end_job(script.job_id, JobState.NODE_FAIL)  # a person's script asks for no --no-kill
        if self.slurm.job(script.job_id).end_at is not None or job.restarts > script.restarts:
            script.is_zombie = script.nodes[0] in self.cut
            script.is_dead = not script.is_zombie
        if script.is_dead or script.is_hung or self.is_hanging:
            return
        if not script.is_loaded and script.resume_from:
            saved = self.checkpoints.get(script.resume_from)
            if saved is None or not saved.is_whole(now):
                self.end(script, JobState.FAILED, 1)
                return
        script.is_loaded = True
        if script.step >= self.final_step and not script.is_zombie:
            self.end(script, JobState.COMPLETED)  # nothing is left to do: it says so again
        self._make_steps(script, now)

    def _is_node_down(self, script: Script) -> bool:
        return any(self.slurm.node(node).base is NodeBase.DOWN for node in script.nodes)

    def _make_steps(self, script: Script, now: datetime) -> None:
        while not script.is_dead:
            ready_at = script.started_at + timedelta(seconds=START_S)
            next_at = max(script.stepped_at, ready_at) + timedelta(seconds=STEP_S)
            if next_at > now:
                return
            script.step, script.stepped_at = script.step + 1, next_at
            self._print(script, at=next_at)
            if script.step % SAVE_EVERY == 0 or script.step >= self.final_step:
                path = str(CHECKPOINTS / f"step-{script.step}")
                if path not in self.checkpoints or not self.checkpoints[path].is_whole(now):
                    whole_at = next_at + timedelta(seconds=SAVE_S)
                    self.checkpoints[path] = Saved(step=script.step, at=next_at, whole_at=whole_at)
            if script.step >= self.final_step:
                self.has_finished = True  # its last checkpoint is there, whoever is told
                script.is_dead = script.is_zombie
                if not script.is_zombie:
                    self.end(script, JobState.COMPLETED)


class ScriptReader:
    """`RunDirs` over that disk."""

    def __init__(self, cluster: ScriptCluster, on_act: Callable[[str], None]) -> None:
        self._cluster, self._on_act = cluster, on_act
        self._since: dict[int, tuple[object, datetime]] = {}

    def read(
        self,
        run: str,
        run_dir: Path,
        attempt: int,
        *,
        is_final: bool,
        deadline_s: float,
        log_path: Path | None = None,
        log_offset: int = 0,
        pattern: str = "",
        checkpoint_directory: Path | None = None,
        layout: str = "supervisor",
        unfinished_markers: tuple[str, ...] = (),
        interruptions_from: int = 0,
    ) -> RunView:
        self._answer()
        now = self._cluster.clock.now()
        view = RunView(attempt=attempt)
        if layout != "supervisor":
            view = replace(view, checkpoints=tuple(_view(p, s, now) for p, s in self._saved()))
        if log_path is None or log_path not in self._cluster.logs:
            return view
        size = self._cluster.logs[log_path][0] - log_offset
        known = self._since.get(attempt)
        if known is None or known[0] != size:
            known = self._since[attempt] = (size, now)
        return replace(view, log=Seen(value=size, unchanged_s=(now - known[1]).total_seconds()))

    def write_attempt(self, run_dir: Path, attempt: int, files: Mapping[str, bytes]) -> None:
        self._answer()
        self._on_act("write_attempt")

    def link_resume(self, run_dir: Path, attempt: int, target: str) -> None:
        self._answer()
        self._on_act("link_resume")
        self._cluster.links[str(contract.RunPaths(run_dir).resume_link(attempt))] = target
        self._on_act("link_resume")

    def find_logs(self, folder: Path, pattern: str) -> tuple[LogFile, ...]:
        self._answer()
        found = [
            (match, size, at)
            for path, (size, at) in self._cluster.logs.items()
            if path.parent == folder and (match := re.fullmatch(pattern, path.name)) is not None
        ]
        return tuple(
            LogFile(
                name=match[0],
                job_id=int(match[1]) if match.re.groups else None,
                size_bytes=size,
                changed_at_s=at.timestamp(),
            )
            for match, size, at in found
        )

    def prune(self, run_dir: Path, step: int, attempt: int) -> None:
        raise Broken("a checkpoint of the training's own is removed")

    def _saved(self) -> list[tuple[str, Saved]]:
        return sorted(self._cluster.checkpoints.items(), key=lambda item: item[1].step)

    def _answer(self) -> None:
        if self._cluster.is_hanging:
            raise RunDirUnreadable("no answer")


def _view(path: str, saved: Saved, now: datetime) -> CheckpointView:
    return CheckpointView(
        step=saved.step,
        attempt=0,
        path=path,
        size_bytes=10,
        is_complete=saved.is_whole(now),
        is_unfinished=saved.whole_at > now,
        detail="" if saved.is_whole(now) else "a file is missing",
        stamp=f"{saved.at.timestamp():.0f}",
    )


class ScriptReadbacks:
    """`Readbacks` of folders without checksums: they can be read, or not."""

    def __init__(self, cluster: ScriptCluster) -> None:
        self._cluster = cluster
        self._open: dict[tuple[str, int, int], tuple[str, datetime]] = {}

    def start(
        self,
        run: str,
        run_dir: Path,
        step: int,
        attempt: int,
        uid: int | None = None,
        gid: int | None = None,
        *,
        path: str = "",
        layout: str = "",
        stamp: str = "",
    ) -> None:
        self._open.setdefault((run, step, attempt), (path, self._cluster.clock.now()))

    def is_busy(self, run: str, step: int, attempt: int) -> bool:
        return (run, step, attempt) in self._open

    def collect(self) -> tuple[Verification, ...]:
        now = self._cluster.clock.now()
        due = [key for key, (_, at) in self._open.items() if now >= at + timedelta(seconds=4)]
        return tuple(self._read(key, *self._open.pop(key)) for key in due)

    def close(self) -> None:
        self._open.clear()

    def _read(self, key: tuple[str, int, int], path: str, at: datetime) -> Verification:
        run, step, attempt = key
        saved = self._cluster.checkpoints.get(path)
        ok = None if self._cluster.is_hanging or saved is None else saved.is_whole(self._cluster.clock.now())
        return Verification(run=run, step=step, attempt=attempt, ok=ok, detail="read", started_at=at, is_covered=False)
