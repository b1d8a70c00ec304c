"""The whole daemon on a simulated cluster under one fault schedule, and what must be true at every step of it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

from slurm.types import JobState
from supervisor.config import DrainSettings, Settings, SlurmSettings, SweepSettings
from supervisor.core.drains import drain_limit
from supervisor.daemon import Daemon
from supervisor.model import (
    Attempt,
    Checkpoint,
    CheckpointSpec,
    CheckpointState,
    Interruption,
    NodesSpec,
    ProgressSpec,
    RestartSpec,
    Run,
    RunSpec,
    RunState,
)
from supervisor.observe import Observer
from supervisor.store import Store
from tests.fakes import EPOCH, FakeClock, FakeSlurm
from tests.sim.cluster import Broken, Process, SimCluster
from tests.sim.mortal import Fate, Killed, MortalClient, MortalStore
from tests.sim.schedule import NODES, SPAN_S, Fault, Schedule
from tests.sim.standins import SimAnswers, SimOwners, SimPorts, SimReadbacks, SimReader, SimSweeps
from trainer.contract import AttemptSpec

RUN = "gpt"
CALM_S = 6 * 3600.0  # after the last fault the run gets this long to come to its end
QUIET_S = 131.0  # between two looks while nothing happens: the loop may be slower than it wants, never wrong
BUSY_S = 3.0
_NO_WORK = frozenset({CheckpointState.FENCED, CheckpointState.PRUNED})


def settings_for(folder: Path) -> Settings:
    return replace(
        Settings(),
        ledger=replace(Settings().ledger, path=folder / "ledger.db"),
        slurm=SlurmSettings(poll_interval_s=15.0, submit_lookup_wait_s=15.0),
        drain=DrainSettings(max_nodes=2, max_fraction=0.34, window_s=3600.0),
        sweep=SweepSettings(interval_s=300.0),
    )


def spec_for(schedule: Schedule) -> RunSpec:
    return RunSpec(
        name=RUN,
        command=("train.py",),
        root=Path("/shared/runs"),
        nodes=NodesSpec(min=2, max=schedule.max_nodes, spares=schedule.spares),
        checkpoint=CheckpointSpec(keep_last=2),
        progress=ProgressSpec(start_max_s=600.0, step_max_s=400.0),
        restart=RestartSpec(queue_ahead_s=1e9 if schedule.is_queued_ahead else 0.0),
    )


class Simulation:
    """One schedule, played from the first cycle to the end of the run."""

    def __init__(self, schedule: Schedule, folder: Path) -> None:
        self.schedule = schedule
        self.clock = FakeClock()
        self.slurm = FakeSlurm(
            clock=self.clock,
            nodes=NODES,
            has_accounting=schedule.has_accounting,
            min_job_age_s=schedule.min_job_age_s,
        )
        self.cluster = SimCluster(clock=self.clock, slurm=self.slurm, final_step=schedule.final_step)
        self.cluster.on_resume = self._check_resume
        self.settings = settings_for(folder)
        self.fate = Fate(schedule.deaths)
        self.cycles = 0
        self.deaths = 0
        self.outcome = ""
        self.ends: tuple[str, ...] = ()
        self._ends: list[tuple[float, str, str]] = []  # when a lasting fault is over
        self._by_alice: dict[str, str] = {}
        self._drained_at: dict[str, list[datetime]] = {}
        self._was_drained: set[str] = set()
        self._busy_until_s = 60.0
        self._is_calm = False
        self._wants_resume = False
        self._store = self._open()
        self._store.add_run(Run(spec=spec_for(schedule)), self.clock.now())
        self._truth = Store.open_readonly(self.settings.ledger.path)  # outlives every daemon
        self._version = -1
        self._fenced_at = -1
        self._run: Run | None = None
        self._attempts: tuple[Attempt, ...] = ()
        self._aside: tuple[Attempt, ...] = ()
        self._daemon = self._build()

    def load_interruptions_in_job(self) -> tuple[Interruption, ...]:
        """What the ledger knows of starts that were followed by another one in the same job."""
        return tuple(i for i in self._truth.load_interruptions("gpt") if i.is_in_job)

    @property
    def now_s(self) -> float:
        return (self.clock.now() - EPOCH).total_seconds()

    # ---- the daemon

    def _open(self) -> MortalStore:
        store = MortalStore.open(self.settings.ledger.path, now=self.clock.now())
        store.fate = self.fate
        return store

    def _build(self) -> Daemon:
        client, clock, cluster = MortalClient(self.slurm, self.fate), self.clock, self.cluster
        owners = SimOwners(SimReader(cluster.disk, clock, self.fate.touch))
        observer = Observer(
            client,
            self.settings,
            clock,
            owners,
            SimSweeps(clock, cluster.is_dark, lambda n: n in cluster.full),
            lambda: None,
            slurm=SimAnswers(client, clock),
            verifier=SimReadbacks(cluster.disk, clock),
            ports=SimPorts(clock, cluster.is_dark),
        )
        return Daemon(self.settings, self._store, client, clock, owners=owners, observer=observer)

    def _die(self) -> None:
        """kill -9, and a new daemon on the same ledger after a while."""
        self._store.close()
        self._daemon.waker.close()
        down_s = self.schedule.downtimes[self.deaths % len(self.schedule.downtimes)]
        self.deaths += 1
        self._play(down_s)
        self._store = self._open()
        self._daemon = self._build()

    def close(self) -> None:
        with suppress(OSError):  # it may be dead already
            self._daemon.waker.close()
        self._store.close()
        self._truth.close()

    # ---- the play

    def run(self) -> Run:
        """Play the schedule, then let the run come to its end; the run as it is then."""
        faults = list(self.schedule.faults)
        until_s = SPAN_S + CALM_S
        while self.now_s < until_s:
            while faults and faults[0].at_s <= self.now_s:
                self._strike(faults.pop(0))
            if self._wants_resume:
                self._store.set_paused(False, self.clock.now(), "alice")
                self._wants_resume = False
            wait_s = self._cycle()
            self._check()
            run = self.run_now()
            if not faults and self.now_s > SPAN_S and not self._is_calm:
                self._calm_down()
                run = self.run_now()
            if run.state in (RunState.FINISHED, RunState.STOPPED) and self.is_all_gone():
                break
            if run.state is RunState.HELD and self._is_calm and self.is_all_gone():
                break
            if run.state is RunState.HELD and self.is_all_gone():
                self._release(run)
            next_s = min([faults[0].at_s if faults else until_s, *(at for at, _, _ in self._ends), until_s])
            pace_s = BUSY_S if self.now_s < self._busy_until_s or self._is_unsettled() else QUIET_S
            self._play(min(max(wait_s, pace_s), max(0.1, next_s - self.now_s)))
        return self.run_now()

    def _calm_down(self) -> None:
        """The faults are over: nodes return, Slurm answers, alice gives back what she took."""
        self._is_calm = True
        self.slurm.outage = False
        self.cluster.disk.is_hanging = False
        for node in sorted(self.cluster.dead | self.cluster.cut):
            self.cluster.revive(node)
        self.cluster.full.clear()
        for number in range(1, NODES + 1):
            self._undrain(f"n{number}")
        self._store.set_paused(False, self.clock.now(), "alice")
        self._ends.clear()
        if self.run_now().state is RunState.HELD:
            self._release(self.run_now())

    def _cycle(self) -> float:
        self.cycles += 1
        try:
            return self._daemon.cycle().plan.wake_after_s
        except Killed:
            self._die()
            return 0.0

    def _play(self, seconds: float) -> None:
        """Let time pass, ending lasting faults on their way."""
        end_s = self.now_s + seconds
        for at_s, kind, node in sorted(self._ends):
            if at_s <= end_s:
                self.cluster.advance(max(0.0, at_s - self.now_s))
                self._ends.remove((at_s, kind, node))
                self._lift(kind, node)
        self.cluster.advance(max(0.0, end_s - self.now_s))

    def _is_unsettled(self) -> bool:
        process = self.cluster.running()
        return process is None or process.quiet_at is not None

    def is_all_gone(self) -> bool:
        """True when nothing is left of the run in the cluster, whatever was queued ahead of it included."""
        self._look()
        return all(a.is_job_gone for a in (*self._attempts, *self._aside)) and not self.cluster.live_jobs()

    def _release(self, run: Run) -> None:
        """A person has looked: `supervisor release`."""
        now = self.clock.now()
        self._store.set_run(replace(run, state=RunState.ACTIVE, reason="", released_at=now), now, "released")

    # ---- faults

    def _strike(self, fault: Fault) -> None:
        self._busy_until_s = self.now_s + 36.0
        kind, _, how = fault.kind.partition(":")
        if how:
            self.slurm.plan(kind, how)
            return
        self._strike_cluster(kind, fault)

    def _strike_cluster(self, kind: str, fault: Fault) -> None:
        cluster, node = self.cluster, self._pick_node(fault.pick)
        process = cluster.running()
        if kind in ("power_cut", "cable_cut"):
            getattr(cluster, kind)(node)
            self._ends.append((self.now_s + fault.lasts_s * 3, "dark", node))
        elif kind == "rack_loses_power":
            for other in [f"n{(fault.pick + i) % NODES + 1}" for i in range(3)]:
                cluster.power_cut(other)
                self._ends.append((self.now_s + fault.lasts_s * 3, "dark", other))
        elif kind == "scratch_full_everywhere":
            cluster.full |= {f"n{number}" for number in range(1, NODES + 1)}
            cluster.guilty |= cluster.full
        elif kind == "outage":
            self.slurm.outage = True
            self._ends.append((self.now_s + fault.lasts_s, "outage", ""))
        elif kind == "disk_hangs":
            cluster.disk.is_hanging = True
            self._ends.append((self.now_s + min(fault.lasts_s, 300.0), "disk_hangs", ""))
        elif kind == "scratch_full":
            cluster.full.add(node)
            cluster.guilty.add(node)
        elif kind == "flip_newest":
            cluster.flip_newest()
        elif kind == "drained_by_alice":
            self._by_alice[node] = f"alice: maintenance {fault.pick}"
            self.slurm.set_drain(node, self._by_alice[node], user="alice")
        elif kind == "undrained_by_alice":
            self._undrain(node)
        elif kind == "pause":
            self._store.set_paused(True, self.clock.now(), "alice")
            self._ends.append((self.now_s + fault.lasts_s, "pause", ""))
        elif kind == "stop":
            run = self.run_now()
            if run.state in (RunState.ACTIVE, RunState.HELD):
                self._store.set_run(replace(run, state=RunState.STOPPING, reason="alice"), self.clock.now(), "stop")
        elif kind == "daemon_killed":
            self._die()
        elif process is not None:
            self._strike_process(kind, process)

    def _strike_process(self, kind: str, process: Process) -> None:
        cluster = self.cluster
        if process.host in cluster.dead or cluster.slurm.job(process.job_id).end_at is not None:
            return
        states = {
            "crash_without_a_word": JobState.FAILED,
            "preempt": JobState.PREEMPTED,
            "time_limit": JobState.TIMEOUT,
            "node_fail": JobState.NODE_FAIL,
            "cancelled_by_a_person": JobState.CANCELLED,
        }
        codes = {"crash": 1, "save_and_exit": 75, "checks_fail": 76, "do_not_restart": 93}
        if kind == "hang":
            process.is_hung = True
        elif kind in states:
            cluster.end_without_a_word(process, states[kind], 1 if kind == "crash_without_a_word" else 0)
        else:
            blamed = process.host if kind == "checks_fail" else None
            cluster.guilty |= {blamed} if blamed else set()
            cluster.end(process, codes[kind], node=blamed)

    def _lift(self, kind: str, node: str) -> None:
        self._busy_until_s = self.now_s + 36.0
        if kind == "dark":
            self.cluster.revive(node)
        elif kind == "outage":
            self.slurm.outage = False
        elif kind == "disk_hangs":
            self.cluster.disk.is_hanging = False
        elif kind == "pause":
            self._wants_resume = True  # a request: it needs a daemon that lives

    def _pick_node(self, pick: int) -> str:
        """A node of the present job, more often than not."""
        process = self.cluster.running()
        if process is not None and pick % 4:
            return process.nodes[pick % len(process.nodes)]
        return f"n{pick % NODES + 1}"

    def _undrain(self, node: str) -> None:
        """A person returns a node to service, whoever drained it; the truth needs no answer of the controller."""
        self._by_alice.pop(node, None)
        self._was_drained.discard(node)
        if not self.cluster.is_dark(node) and node not in self.cluster.full:
            self.cluster.guilty.discard(node)  # the old evidence is spent
        outage, self.slurm.outage = self.slurm.outage, False
        self.slurm.undrain(node)
        self.slurm.outage = outage

    # ---- what must be true

    def run_now(self) -> Run:
        self._look()
        assert self._run is not None
        return self._run

    def attempts(self) -> tuple[Attempt, ...]:
        self._look()
        return self._attempts

    def _look(self) -> None:
        """Read the ledger again if somebody has written to it."""
        version = self._truth._db.execute("PRAGMA data_version").fetchone()[0]
        if version != self._version:
            self._version = version
            self._run, self._attempts = self._truth.load_run(RUN), self._truth.load_attempts(RUN)
            self._aside = self._truth.load_aside(RUN)

    def checkpoints(self) -> dict[str, Checkpoint]:
        return {c.path: c for c in self._truth.load_checkpoints(RUN)}

    def _check(self) -> None:
        self._look()
        aside = {a.token for a in self._aside}
        live = [j for j in self.cluster.live_jobs() if j.comment not in aside]
        if len(live) > 1 or len(self.cluster.live_jobs()) > 2:
            raise Broken(f"{len(live)} live jobs of one run: {[(j.job_id, j.comment) for j in live]}")
        if sum(p.is_training for p in self.cluster.processes) > 1:
            raise Broken("two trainings of one run at once")
        if sum(not a.is_over for a in self.attempts()) > 1 or sum(not a.is_over for a in self._aside) > 1:
            raise Broken("two live attempts in the ledger")
        self._check_drains()
        self._check_fences()
        run = self.run_now()
        if run.state in (RunState.HELD, RunState.STOPPED) and not run.reason:
            raise Broken(f"the run is {run.state} without a reason")

    def _check_drains(self) -> None:
        now = self.clock.now()
        for number in range(1, NODES + 1):
            node = self.slurm.node(f"n{number}")
            theirs = self._by_alice.get(node.name)
            if theirs is not None and (not node.is_drain_set or node.reason != theirs):
                raise Broken(f"alice's drain of {node.name} was changed: {node.reason}")
            if node.is_drain_set and theirs is None and node.name not in self._was_drained:
                self._was_drained.add(node.name)
                self._drained_at.setdefault(node.name, []).append(now)
                if node.name not in self.cluster.guilty:
                    raise Broken(f"{node.name} is drained and has done nothing: {node.reason}")
        window = now - timedelta(seconds=self.settings.drain.window_s)
        lately = sum(at > window for moments in self._drained_at.values() for at in moments)
        if lately > drain_limit(self.settings.policy, NODES):
            raise Broken(f"{lately} nodes drained within the window")

    def _check_fences(self) -> None:
        """What an attempt publishes once it is over never counts."""
        if self._fenced_at == self._version:
            return
        self._fenced_at = self._version
        over_at = {a.number: a.over_at for a in self.attempts()}
        for path, known in self.checkpoints().items():
            truth, ended_at = self.cluster.disk.at(path), over_at[known.attempt]
            is_late = truth is not None and ended_at is not None and truth.published_at > ended_at
            if is_late and known.state in (CheckpointState.COMPLETE, CheckpointState.VERIFIED):
                raise Broken(f"{path} counts, and was published after attempt {known.attempt} was over")

    def _check_resume(self, spec: AttemptSpec) -> None:
        """Called when a job starts: from what, and was that to be believed when it was decided?"""
        if not spec.resume_from:
            if any(c.state not in _NO_WORK for c in self.checkpoints().values()):
                raise Broken(f"attempt {spec.attempt} starts at 0 though there is work that it throws away")
            return
        known = self.checkpoints().get(spec.resume_from)
        truth = self.cluster.disk.at(spec.resume_from)
        attempt = next(a for a in self.attempts() if a.number == spec.attempt)
        if known is None or known.verified_at is None or known.state is CheckpointState.FENCED:
            raise Broken(f"attempt {spec.attempt} resumes from {known}")
        if truth is None:
            raise Broken(f"attempt {spec.attempt} resumes from {spec.resume_from}, which is gone")
        if truth.corrupted_at is not None and truth.corrupted_at <= min(known.verified_at, attempt.planned_at):
            raise Broken(f"attempt {spec.attempt} resumes from a corrupt checkpoint")
        author = next(a for a in self.attempts() if a.number == truth.attempt)
        if author.over_at is not None and truth.published_at > author.over_at:
            raise Broken(f"attempt {spec.attempt} resumes from what a fenced attempt published")
        last = self.attempts()[-2] if len(self.attempts()) > 1 else None
        if last is not None and last.over_at is not None and known.verified_at < last.over_at:
            raise Broken(f"attempt {spec.attempt}: its checkpoint was not read back after the last end")
