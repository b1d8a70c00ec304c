"""A person's script, supervised by the whole daemon under one fault schedule, and what must be true at every step."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from random import Random

from slurm.types import JobRecord, JobState, SubmitRequest, Submitted
from supervisor.config import SlurmSettings, SweepSettings
from supervisor.daemon import Daemon
from supervisor.model import Attempt, Checkpoint, CheckpointState, Run, RunState
from supervisor.observe import Observer
from supervisor.scripts import Handed, read_script
from supervisor.store import Store
from supervisor.submissions import Submission, Submissions
from tests.fakes import EPOCH, FakeClock
from tests.sim.mortal import Fate, Killed, MortalClient, MortalStore
from tests.sim.script_cluster import (
    CHECKPOINTS,
    Broken,
    ForgetfulSlurm,
    ScriptCluster,
    ScriptReadbacks,
    ScriptReader,
)
from tests.sim.simulation import settings_for
from tests.sim.standins import SimAnswers, SimPorts, SimSweeps
from trainer import contract

RUN = "train"
TEXT = "#!/bin/bash\n#SBATCH --job-name=train\npython train.py\n"
ARGUMENTS = ("two words", "", "--lr=3")
SECRET = "hunter2"
OURS = {
    contract.ENV_RUN,
    contract.ENV_ATTEMPT,
    contract.ENV_RUN_DIR,
    contract.ENV_RESUME_FROM,
    contract.ENV_RESUME_STEP,
    contract.ENV_CHECKPOINT_EVERY_S,
}
RESTARTS = "SLURM_RESTART_COUNT"  # as a script that Slurm itself starts again would see it
NODES = 4
SPAN_S = 3600.0
CALM_S = 5 * 3600.0
BUSY_S = 3.0

# kind: how often, among the others
_KINDS = {
    "power_cut": 4,
    "cable_cut": 4,
    "outage": 4,
    "crash": 6,
    "hang": 2,
    "time_limit": 2,
    "preempt": 2,
    "save_and_exit": 2,
    "cancelled_by_a_person": 1,
    "requeued_by_an_administrator": 2,
    "break_newest": 3,
    "disk_hangs": 3,
    "accounting_behind": 3,
    "accounting_away": 3,
    "kept_is_lost": 0.5,
    "kept_is_changed": 0.3,
    "submit:unavailable": 2,
    "submit:lost_reply": 6,
    "submit:lost_request": 3,
    "submit:late": 4,
    "submit:refused": 1,
    "cancel:lost_reply": 1,
    "cancel:lost_request": 1,
    "find_by_token:unavailable": 2,
    "find_by_token:refused": 1,
    "fetch_jobs:unavailable": 1,
    "daemon_killed": 5,
    "pause": 1,
    "stop": 0.2,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptSchedule:
    """Everything that a seed decides."""

    seed: int
    faults: tuple[tuple[float, str, int, float], ...]  # at (s), kind, pick, lasts (s)
    deaths: frozenset[int]
    downtimes: tuple[float, ...]
    has_accounting: bool
    has_shared_log: bool
    final_step: int
    min_job_age_s: int
    is_queued_ahead: bool  # the next job waits behind each running one
    crashes_at_once: bool  # the first job, whose answer is lost: what it leaves is all that is known of it


def draw_schedule(seed: int) -> ScriptSchedule:
    random = Random(f"script {seed}")
    kinds = random.choices(list(_KINDS), weights=list(_KINDS.values()), k=random.randint(1, 6))
    final_step = random.choice([6, 14, 30])
    moments = sorted(random.uniform(0, final_step * 75.0) for _ in kinds)
    is_lost = random.random() < 0.3
    return ScriptSchedule(
        seed=seed,
        faults=(
            *([(0.0, "submit:lost_reply", 0, 0.0)] if is_lost else []),
            *(
                (at, kind, random.randrange(100), random.choice([5.0, 30.0, 120.0, 700.0]))
                for at, kind in zip(moments, kinds, strict=True)
            ),
        ),
        deaths=frozenset(random.sample(range(1, 80), k=random.choice([0, 0, 1, 2, 4, 8])) + ([6] if is_lost else [])),
        downtimes=tuple(random.choice([0.0, 1.0, 5.0, 60.0, 400.0, 900.0]) for _ in range(40)),
        has_accounting=random.random() < 0.4,
        has_shared_log=random.random() < 0.3,
        final_step=final_step,
        min_job_age_s=random.choice([60, 300]),
        crashes_at_once=is_lost and random.random() < 0.7,
        is_queued_ahead=random.random() < 0.4,
    )


class CheckedClient(MortalClient):
    """A client that looks at what is submitted, as Slurm reads it."""

    def submit(self, request: SubmitRequest) -> Submitted:
        if request.script.read_text() != TEXT:
            raise Broken("another text is submitted")
        own = {name: value for name, value in request.environment.items() if name not in {*OURS, RESTARTS}}
        if own != {"KEY": SECRET, "PATH": "/bin"} or request.arguments != ARGUMENTS or not request.is_own_environment:
            raise Broken(f"not what was handed in: {request.arguments} {sorted(own)}")
        if not set(request.environment) >= OURS:
            raise Broken("a variable of the contract is missing")
        return super().submit(request)


class ScriptOwners:
    """`RunOwners` with one reader for all."""

    def __init__(self, reader: ScriptReader) -> None:
        self._reader = reader

    def identity(self, run: Run) -> tuple[int | None, int | None]:
        return (None, None)

    def reader(self, run: Run) -> ScriptReader:
        return self._reader

    def close(self) -> None:
        pass


class ScriptSimulation:
    """One schedule, played from the submission of the script to the end of the run."""

    def __init__(self, schedule: ScriptSchedule, folder: Path) -> None:
        self.schedule = schedule
        self.clock = FakeClock()
        self.slurm = ForgetfulSlurm(
            clock=self.clock,
            nodes=NODES,
            has_accounting=schedule.has_accounting,
            min_job_age_s=schedule.min_job_age_s,
        )
        output = "logs/all.out" if schedule.has_shared_log else "logs/%x-%j.out"
        words = (
            *("--nodes=1", f"--output={output}", f"--supervise-checkpoint-dir={CHECKPOINTS}", "--supervise-layout=dcp"),
            *(["--supervise-queue-ahead-s=9e8"] if schedule.is_queued_ahead else []),
            *("--supervise-stall-s=400", "train.sh", *ARGUMENTS),
        )
        environment = {"KEY": SECRET, "PATH": "/bin"}
        script = read_script(Handed(text=TEXT, path="train.sh", words=words, environment=environment, cwd="/home/ann"))
        assert script.script is not None
        self.cluster = ScriptCluster(
            clock=self.clock, slurm=self.slurm, output=script.script.output, final_step=schedule.final_step
        )
        self.cluster.on_resume = self._check_resume
        self.settings = replace(
            settings_for(folder),
            slurm=SlurmSettings(poll_interval_s=15.0, submit_lookup_wait_s=15.0),
            sweep=SweepSettings(interval_s=0.0),
        )
        self.fate = Fate(schedule.deaths)
        self.deaths = 0
        self._ends: list[tuple[float, str, str]] = []
        self._busy_until_s = 60.0
        self._has_crashed_at_once = False
        self._is_kept_lost = False
        self.submissions = Submissions(self.settings.ledger.path)
        self.submissions.keep(RUN, Submission(text=TEXT, environment=script.environment))
        self._store = self._open()
        self._store.add_run(Run(spec=script.spec, script=script.script), self.clock.now())
        self._truth = Store.open_readonly(self.settings.ledger.path)  # outlives every daemon
        self._version = -1
        self._run: Run | None = None
        self._attempts: tuple[Attempt, ...] = ()
        self._daemon = self._build()

    @property
    def now_s(self) -> float:
        return (self.clock.now() - EPOCH).total_seconds()

    def _open(self) -> MortalStore:
        store = MortalStore.open(self.settings.ledger.path, now=self.clock.now())
        store.fate = self.fate
        return store

    def _build(self) -> Daemon:
        client = CheckedClient(self.slurm, self.fate)
        owners = ScriptOwners(ScriptReader(self.cluster, self.fate.touch))
        observer = Observer(
            client,
            self.settings,
            self.clock,
            owners,
            SimSweeps(self.clock, lambda n: n in self.cluster.cut | self.cluster.dead, lambda _: False),
            lambda: None,
            slurm=SimAnswers(client, self.clock),
            verifier=ScriptReadbacks(self.cluster),
            ports=SimPorts(self.clock, lambda n: n in self.cluster.cut | self.cluster.dead),
        )
        return Daemon(self.settings, self._store, client, self.clock, owners=owners, observer=observer)

    def _die(self) -> None:
        self._store.close()
        self._daemon.waker.close()
        down_s = self.schedule.downtimes[self.deaths % len(self.schedule.downtimes)]
        self.deaths += 1
        self._play(down_s)
        self._store = self._open()
        self._daemon = self._build()

    def close(self) -> None:
        with suppress(OSError):
            self._daemon.waker.close()
        self._store.close()
        self._truth.close()

    # ---- the play

    def run(self) -> Run:
        faults = list(self.schedule.faults)
        until_s = SPAN_S + CALM_S
        is_calm = False
        while self.now_s < until_s:
            while faults and faults[0][0] <= self.now_s:
                self._strike(*faults.pop(0)[1:])
            try:
                wait_s = self._daemon.cycle().plan.wake_after_s
            except Killed:
                self._die()
                wait_s = 0.0
            self._check()
            run = self.run_now()
            if not faults and self.now_s > SPAN_S and not is_calm:
                is_calm = True
                self._calm_down()
            if run.state in (RunState.FINISHED, RunState.STOPPED) and self._all_gone():
                break
            if run.state is RunState.HELD and self._all_gone():
                if is_calm or self._is_kept_lost:
                    break
                self._release(run)
            next_s = min([faults[0][0] if faults else until_s, *(at for at, _, _ in self._ends), until_s])
            # Without accounting the end of a script's job is seen in time, or never: so often it is looked.
            quiet_s = self.schedule.min_job_age_s / 3
            pace_s = BUSY_S if self.now_s < self._busy_until_s or self.cluster.running() is None else quiet_s
            self._play(min(max(wait_s, pace_s), max(0.1, next_s - self.now_s)))
        return self.run_now()

    def _play(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        for end in sorted(self._ends):
            if end[0] <= end_s:
                self._pass(end[0] - self.now_s)
                self._ends.remove(end)
                self._lift(*end[1:])
        self._pass(end_s - self.now_s)

    def _pass(self, seconds: float) -> None:
        seconds = max(0.0, seconds)
        if self.schedule.crashes_at_once and not self._has_crashed_at_once and seconds > 2.0:
            self.cluster.advance(2.0)
            seconds -= 2.0
            script = self.cluster.running()
            if script is not None:
                self._has_crashed_at_once = True
                self.cluster.end(script, JobState.FAILED, 1)
        self.cluster.advance(seconds)

    def _calm_down(self) -> None:
        for end in list(self._ends):
            self._lift(*end[1:])
        self._ends.clear()
        self._store.set_paused(False, self.clock.now(), "alice")

    def _all_gone(self) -> bool:
        return all(a.is_job_gone for a in self.attempts()) and not self.cluster.live_jobs()

    def _release(self, run: Run) -> None:
        now = self.clock.now()
        self._store.set_run(replace(run, state=RunState.ACTIVE, reason="", released_at=now), now, "released")

    # ---- faults

    def _strike(self, kind: str, pick: int, lasts_s: float) -> None:
        self._busy_until_s = self.now_s + 36.0
        verb, _, how = kind.partition(":")
        script = self.cluster.running()
        node = script.nodes[0] if script is not None and pick % 4 else f"n{pick % NODES + 1}"
        kept = self.settings.ledger.path.parent / "submissions" / f"{RUN}.json"
        if how:
            self.slurm.plan(verb, how)
        elif kind in ("power_cut", "cable_cut"):
            self.cluster.lose_node(node, is_power_cut=kind == "power_cut")
            self._ends.append((self.now_s + lasts_s * 3, "dark", node))
        elif kind == "outage":
            self.slurm.outage = True
            self._ends.append((self.now_s + lasts_s, kind, ""))
        elif kind == "disk_hangs":
            self.cluster.is_hanging = True
            self._ends.append((self.now_s + min(lasts_s, 300.0), kind, ""))
        elif kind == "accounting_behind":
            self.slurm.lag = timedelta(seconds=40)
            self._ends.append((self.now_s + lasts_s, kind, ""))
        elif kind == "accounting_away":
            self.slurm.plan("fetch_ended_jobs", *["unavailable"] * (1 + pick % 20))
        elif kind == "kept_is_lost":
            self._is_kept_lost = True
            kept.unlink(missing_ok=True)
        elif kind == "kept_is_changed" and kept.exists():
            self._is_kept_lost = True
            kept.write_text(kept.read_text().replace(SECRET, "HUNTER2"))
        elif kind == "break_newest":
            self.cluster.break_newest()
        elif kind == "daemon_killed":
            self._die()
        elif kind == "pause":
            self._store.set_paused(True, self.clock.now(), "alice")
            self._ends.append((self.now_s + lasts_s, kind, ""))
        elif kind == "stop":
            run = self.run_now()
            if run.state in (RunState.ACTIVE, RunState.HELD):
                self._store.set_run(replace(run, state=RunState.STOPPING, reason="alice"), self.clock.now(), "stop")
        elif script is not None and self.slurm.job(script.job_id).end_at is None:
            self._strike_script(kind)

    def _strike_script(self, kind: str) -> None:
        script = self.cluster.running()
        assert script is not None
        ends = {
            "crash": (JobState.FAILED, 1),
            "time_limit": (JobState.TIMEOUT, 0),
            "preempt": (JobState.PREEMPTED, 0),
            "cancelled_by_a_person": (JobState.CANCELLED, 0),
            "save_and_exit": (JobState.FAILED, contract.EXIT_RESUBMIT),
        }
        if kind == "hang":
            script.is_hung = True
        elif kind == "requeued_by_an_administrator":
            script.is_dead = True
            self.slurm.requeue(script.job_id)
        elif kind in ends:
            self.cluster.end(script, *ends[kind])

    def _lift(self, kind: str, node: str) -> None:
        self._busy_until_s = self.now_s + 36.0
        if kind == "dark":
            self.cluster.revive(node)
        elif kind == "outage":
            self.slurm.outage = False
        elif kind == "disk_hangs":
            self.cluster.is_hanging = False
        elif kind == "accounting_behind":
            self.slurm.lag = timedelta(0)
        elif kind == "pause":
            with Store.open(self.settings.ledger.path, now=self.clock.now()) as person:
                person.set_paused(False, self.clock.now(), "alice")

    # ---- what must be true

    def run_now(self) -> Run:
        self._look()
        assert self._run is not None
        return self._run

    def attempts(self) -> tuple[Attempt, ...]:
        self._look()
        return self._attempts

    def _find(self, job: JobRecord) -> Attempt:
        """The attempt that a job was submitted for, queued ahead or not."""
        every = (*self.attempts(), *self._truth.load_aside(RUN))
        return next(a for a in every if a.token == job.comment)

    def _look(self) -> None:
        """Read the ledger again if somebody has written to it."""
        version = self._truth._db.execute("PRAGMA data_version").fetchone()[0]
        if version != self._version:
            self._version = version
            self._run, self._attempts = self._truth.load_run(RUN), self._truth.load_attempts(RUN)

    def _check(self) -> None:
        live = self.cluster.live_jobs()
        waiting = sum(job.is_pending and bool(self._find(job).is_aside) for job in live)
        if len(live) > 1 + min(1, waiting):
            raise Broken(f"{len(live)} live jobs of one run: {[(j.job_id, j.comment) for j in live]}")
        if sum(not a.is_over for a in self.attempts()) > 1:
            raise Broken("two live attempts in the ledger")
        run = self.run_now()
        if run.state in (RunState.HELD, RunState.STOPPED) and not run.reason:
            raise Broken(f"the run is {run.state} without a reason")

    def _was_read_back(self, checkpoint: Checkpoint, by: datetime) -> bool:
        """True when that was known by then: where nothing happens the daemon looks seldom."""
        pace = timedelta(seconds=self.schedule.min_job_age_s / 3)
        return checkpoint.verified_at is not None and checkpoint.verified_at + pace < by

    def _check_resume(self, job: JobRecord, request: SubmitRequest) -> None:
        """A job starts: from the newest whole checkpoint that had been seen when it was planned.

        One that was queued ahead: from the newest that had been read back by then, or a newer one.
        """
        number, (_, step) = int(request.environment[contract.ENV_ATTEMPT]), self.cluster.find_resume(request)
        attempt = self._find(job)
        is_ahead = not request.environment[contract.ENV_RESUME_STEP]
        none = (CheckpointState.FENCED, CheckpointState.PRUNED)
        seen = [c for c in self._truth.load_checkpoints(RUN) if c.state not in none]
        given_up = {a.number for a in self._truth.load_aside(RUN) if a.is_over}
        if any(c.attempt in given_up for c in seen):
            raise Broken(f"checkpoints of an attempt that was not needed count: {seen}")
        whole = [
            c
            for c in seen
            if c.first_seen_at <= attempt.planned_at
            and (not is_ahead or self._was_read_back(c, attempt.planned_at))
            and (saved := self.cluster.checkpoints.get(c.path)) is not None
            and saved.broken_at is None
            and c.state is not CheckpointState.CORRUPT
        ]
        newest = max((c.step for c in whole), default=0)
        if step < newest:
            raise Broken(f"attempt {number} (job {job.job_id}) begins at {step} though step {newest} was seen whole")
