"""A simulated training on FakeSlurm: processes that step, save, hang and die, nodes that go dark, the truth about all.

Nothing here knows the daemon. Time moves in small slices, so that what happens between two of its looks has an order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path

from slurm.types import JobRecord, JobState
from tests.fakes import FakeClock, FakeSlurm
from tests.sim.standins import Disk
from trainer import contract
from trainer.contract import AttemptSpec, ExitRecord, InterruptionRecord, LaunchReport, NodeBeat, Progress
from trainer.launch import PROMOTION_LIMIT_S

STEP_S = 60.0
START_S = 45.0
SAVE_EVERY = 5  # steps
GIVES_UP_S = 4.0  # a launcher without a node's heartbeat
SLICE_S = 20.0


class Broken(AssertionError):
    """Something happened that must never happen."""


@dataclass(slots=True)
class Process:
    """The launcher and the training of one job."""

    job_id: int
    spec: AttemptSpec
    nodes: tuple[str, ...]
    started_at: datetime
    step: int
    stepped_at: datetime
    is_waiting: bool = False  # queued ahead, and not told to begin
    is_loaded: bool = False
    is_hung: bool = False
    is_zombie: bool = False  # its job is over, its host is cut off: it goes on writing
    is_dead: bool = False
    quiet_at: datetime | None = None  # since when a training node gives no heartbeat
    launch: int = 0  # which start of the training inside the job
    chosen: tuple[str, ...] = ()  # nodes of that start, where it is not the first

    @property
    def host(self) -> str:
        return self.nodes[0]

    @property
    def training(self) -> tuple[str, ...]:
        return self.chosen or self.nodes[: self.spec.nodes]

    @property
    def is_training(self) -> bool:
        return not self.is_dead and not self.is_zombie and not self.is_waiting


@dataclass(slots=True)
class SimCluster:
    """Slurm, nodes, disk and processes."""

    clock: FakeClock
    slurm: FakeSlurm
    final_step: int
    run: str = "gpt"
    disk: Disk = field(default_factory=lambda: Disk(run_dir=Path("/shared/runs/gpt")))
    dead: set[str] = field(default_factory=set)  # without power
    cut: set[str] = field(default_factory=set)  # without network, but running
    full: set[str] = field(default_factory=set)  # without space on the scratch disk
    guilty: set[str] = field(default_factory=set)  # nodes that have given a reason to be drained
    processes: list[Process] = field(default_factory=list)
    has_finished: bool = False
    recoveries: int = 0  # starts of the training inside a job
    on_resume: Callable[[AttemptSpec], None] = lambda _spec: None

    def __post_init__(self) -> None:
        self.slurm.on_start = self._start

    # ---- time

    def advance(self, seconds: float) -> None:
        end = self.clock.now() + timedelta(seconds=seconds)
        while (left := (end - self.clock.now()).total_seconds()) > 0:
            self.slurm.advance(min(SLICE_S, left))
            for process in list(self.processes):
                if not process.is_dead:
                    self._tick(process)
            self.processes = [p for p in self.processes if not p.is_dead]

    def is_dark(self, node: str) -> bool:
        return node in self.dead or node in self.cut

    def live_jobs(self) -> list[JobRecord]:
        """Jobs of the run that wait or run, as the controller knows."""
        return [j for j in self.slurm.jobs() if j.name == self.run and j.end_at is None]

    def running(self) -> Process | None:
        return next((p for p in self.processes if p.is_training), None)

    # ---- faults

    def power_cut(self, node: str) -> None:
        if not self.is_dark(node):
            self.slurm.power_cut(node)
        self.dead.add(node)
        self.guilty.add(node)
        self.cut.discard(node)
        for process in self.processes:
            process.is_dead |= process.host == node

    def cable_cut(self, node: str) -> None:
        if not self.is_dark(node):
            self.slurm.power_cut(node)  # all that Slurm sees of it
            self.cut.add(node)
            self.guilty.add(node)

    def revive(self, node: str) -> None:
        if self.is_dark(node):
            self.dead.discard(node)
            self.cut.discard(node)
            self.slurm.revive(node)
            for process in self.processes:  # slurmd ends what does not belong there any more
                process.is_dead |= process.is_zombie and process.host == node

    def end(self, process: Process, code: int, *, state: JobState | None = None, node: str | None = None) -> None:
        """The launcher writes its exit record and ends; `state` is then Slurm's word."""
        attempt = process.spec.attempt
        self.disk.exits[attempt] = ExitRecord(
            attempt=attempt, job_id=process.job_id, exit_code=code, reason=f"exit {code}", node=node, time=0.0
        )
        default = JobState.COMPLETED if code == 0 else JobState.FAILED
        self.end_without_a_word(process, state or default, code)

    def end_without_a_word(self, process: Process, state: JobState, code: int = 0) -> None:
        process.is_dead = True
        self.slurm.end_job(process.job_id, state, code)

    # ---- processes

    def _start(self, job: JobRecord) -> None:
        if job.name != self.run:
            return
        number = int(job.comment.split(":")[2])
        spec = self.disk.specs.get(number)
        if spec is None:
            raise Broken(f"job {job.job_id} started without its attempt's files")
        now = self.clock.now()
        process = Process(
            job_id=job.job_id, spec=spec, nodes=job.nodes, started_at=now, step=0, stepped_at=now, is_waiting=True
        )
        self._begin(process)
        self.processes.append(process)

    def _begin(self, process: Process) -> None:
        """Begin to train as the attempt's file says by now; one that is queued ahead waits for that."""
        spec = self.disk.specs[process.spec.attempt]
        if spec.is_ahead:
            if (self.clock.now() - process.started_at).total_seconds() > PROMOTION_LIMIT_S:
                self.end(process, contract.EXIT_RESUBMIT)
            return
        if any(p.is_training for p in self.processes):
            raise Broken(f"job {process.job_id} starts to train beside another")
        self.on_resume(spec)
        process.spec, process.is_waiting = spec, False
        process.started_at = process.stepped_at = self.clock.now()
        process.step = spec.resume_step

    def _tick(self, process: Process) -> None:
        now = self.clock.now()
        if process.is_waiting:
            self._wait(process)
            return
        if process.is_zombie or self.slurm.job(process.job_id).end_at is not None:
            self._linger(process)
            return
        if process.host in self.dead:
            process.is_dead = True
            return
        if self.disk.is_hanging:
            process.stepped_at = now
            return
        self._report(process)
        quiet = [n for n in process.training if n != process.host and self.is_dark(n)]
        process.quiet_at = (process.quiet_at or now) if quiet else None
        if process.quiet_at is not None:
            if (now - process.quiet_at).total_seconds() >= GIVES_UP_S and not self._start_again(process, quiet):
                self.end(process, contract.EXIT_NODE_SILENT, node=quiet[0])
            return
        if not process.is_loaded and not self._load(process):
            return
        self._make_steps(process, now)

    def _start_again(self, process: Process, lost: list[str]) -> bool:
        """The launcher goes on inside the job, without the nodes that it has lost; False: too few are left."""
        spec, now = process.spec, self.clock.now()
        left = [n for n in process.nodes if not self.is_dark(n)]
        count = min(spec.nodes, len(left)) // spec.node_multiple * spec.node_multiple
        if not spec.in_job or count < (spec.nodes_min or spec.nodes):
            return False
        advice = self.disk.advice.get(spec.attempt)
        if advice is not None and advice.resume_step > spec.resume_step:
            spec = replace(spec, resume_from=advice.resume_from, resume_step=advice.resume_step)
        process.chosen = tuple(left[:count])
        self.disk.interruptions[spec.attempt, process.launch] = InterruptionRecord(
            attempt=spec.attempt,
            launch=process.launch,
            kind="node_lost",
            cause=f"{lost[0]} is lost",
            nodes=tuple(lost),
            last_step=process.step,
            resume_step=spec.resume_step,
            training=process.chosen,
            detected_at=now.timestamp(),
        )
        self.recoveries += 1
        process.spec, process.launch, process.step = spec, process.launch + 1, spec.resume_step
        process.started_at = process.stepped_at = now
        process.is_loaded = process.is_hung = False
        process.quiet_at = None
        return True

    def _wait(self, process: Process) -> None:
        is_over = self.slurm.job(process.job_id).end_at is not None
        if is_over or process.host in self.dead:
            process.is_dead = True
        elif not self.disk.is_hanging:
            self._begin(process)

    def _load(self, process: Process) -> bool:
        """The training checks what it loads: a flipped byte ends it with its own exit code."""
        loaded = self.disk.at(process.spec.resume_from)
        process.is_loaded = not process.spec.resume_from or (loaded is not None and loaded.corrupted_at is None)
        if not process.is_loaded:
            self.end(process, contract.EXIT_CHECKPOINT_REJECTED)
        return process.is_loaded

    def _make_steps(self, process: Process, now: datetime) -> None:
        ready_at = process.started_at + timedelta(seconds=START_S)
        while not process.is_hung and not process.is_dead:
            next_at = max(process.stepped_at, ready_at) + timedelta(seconds=STEP_S)
            if next_at > now:
                return
            if process.step < self.final_step:
                process.step, process.stepped_at = process.step + 1, next_at
                self._publish(process)
            if process.step >= self.final_step:
                self.has_finished = True
                self.end(process, contract.EXIT_FINISHED)

    def _publish(self, process: Process) -> None:
        attempt = process.spec.attempt
        self.disk.progress[attempt] = Progress(
            attempt=attempt,
            step=process.step,
            final_step=self.final_step,
            phase="step",
            time=0.0,
            seq=process.step,
            launch=process.launch,
        )
        before = self.disk.interruptions.get((attempt, process.launch - 1))
        if before is not None and before.resumed_at is None:
            resumed = replace(before, resumed_at=self.clock.now().timestamp())
            self.disk.interruptions[attempt, process.launch - 1] = resumed
        if process.step % SAVE_EVERY == 0 or process.step == self.final_step:
            self.disk.publish(process.step, attempt, self.clock.now())

    def _report(self, process: Process) -> None:
        now, attempt = self.clock.now(), process.spec.attempt
        quiet_s = 0.0 if process.quiet_at is None else (now - process.quiet_at).total_seconds()
        beats = {
            n: NodeBeat(
                state="running" if n in process.training else "spare",
                age_s=quiet_s if self.is_dark(n) and n != process.host else 0.2,
            )
            for n in process.nodes
        }
        self.disk.launches[attempt] = LaunchReport(
            attempt=attempt,
            job_id=process.job_id,
            seq=int(now.timestamp()),
            time=0.0,
            host=process.host,
            phase="running",
            nodes=beats,
            launch=process.launch,
            training=process.training,
            resume_step=process.spec.resume_step,
        )

    def _linger(self, process: Process) -> None:
        """The job is over. On a host that is cut off nobody tells the processes: they go on stepping and publishing."""
        if process.host not in self.cut:
            process.is_dead = True
            return
        process.is_zombie = True
        now = self.clock.now()
        if (now - process.stepped_at).total_seconds() >= STEP_S and process.step < self.final_step - 1:
            process.step, process.stepped_at = process.step + 1, now
            if process.step % SAVE_EVERY == 0:
                self.disk.publish(process.step, process.spec.attempt, now)

    def flip_newest(self) -> None:
        """Damage one byte of the newest checkpoint."""
        if self.disk.checkpoints:
            newest = self.disk.checkpoints[max(self.disk.checkpoints)]
            if newest.corrupted_at is None:
                self.disk.checkpoints[newest.step, newest.attempt] = replace(newest, corrupted_at=self.clock.now())
