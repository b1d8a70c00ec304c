"""The loop: observe, decide, commit, act. Builds everything once, holds the clock, waits for news.

One daemon per ledger (a lock file), one thread that writes. SIGTERM ends the daemon and leaves jobs running; the next
start goes on from the ledger. What escapes a cycle ends the process: the service manager starts it again.
"""

from __future__ import annotations

import grp
import json
import os
import selectors
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import msgspec
import structlog

from slurm.client import CliClient, SlurmClient
from slurm.pyslurm_client import choose_client
from slurm.states import find_unknown_words
from supervisor import runlock
from supervisor.accounts import user_name
from supervisor.clock import Clock, SystemClock
from supervisor.config import Settings
from supervisor.control import ControlServer
from supervisor.core.reconcile import reconcile
from supervisor.core.restarts import REFUSED
from supervisor.execute import Executor
from supervisor.model import Fresh, IntentKind, IntentState, Plan, Run, RunState, Snapshot, Stale, World
from supervisor.notify import notify, watchdog_interval_s
from supervisor.observe import Observer
from supervisor.owners import Owners
from supervisor.parts import RunOwners
from supervisor.requests import handle
from supervisor.slurmwatch import NOT_ASKED, Answers
from supervisor.store import LedgerDamaged, Store
from supervisor.submissions import Submissions
from supervisor.sweep import Sweeper
from supervisor.verbs import LOOK_AGAIN, READING, Rights
from trainer.contract import is_run_name

_BACKUP_EVERY_S = 3600.0
_KEEP_DAYS = 400
_FIRST_ANSWER_S = 30.0
_CLOCK_STEP_S = 2.0
_BEAT_EVERY_S = 30.0
_ROWS_SHOWN = 5
_MAX_OPEN_INTENTS = 100_000


class Waker:
    """Ends the loop's wait from another thread or from a signal."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def wake(self) -> None:
        with suppress(OSError):  # a full pipe wakes as well
            os.write(self._write, b"x")

    def drain(self) -> None:
        with suppress(BlockingIOError):
            while os.read(self._read, 4096):
                pass

    def fileno(self) -> int:
        return self._read

    def close(self) -> None:
        os.close(self._read)
        os.close(self._write)


@dataclass(slots=True)
class Cycle:
    """What one turn of the loop did, for its log line."""

    number: int
    plan: Plan
    acts: int
    snapshot: Snapshot
    spent_ms: float


class Daemon:
    """One supervising loop over one ledger and one cluster."""

    def __init__(
        self,
        settings: Settings,
        store: Store,
        client: SlurmClient,
        clock: Clock,
        *,
        sweeper: Sweeper | None = None,
        control: ControlServer | None = None,
        waker: Waker | None = None,
        owners: RunOwners | None = None,
        observer: Observer | None = None,
    ) -> None:
        self._settings = settings
        self._policy = settings.policy
        self._store = store
        self._clock = clock
        self._control = control
        self.waker = waker or Waker()
        self._owners: RunOwners = owners or Owners(is_root=os.geteuid() == 0)
        self.observer = observer or Observer(client, settings, clock, self._owners, sweeper, self.waker.wake)
        self._executor = Executor(
            client, store, settings, clock, self._owners, self.observer.verifier, on_step=self._beat
        )
        self._submissions = Submissions(settings.ledger.path)
        self._rights = Rights(service_uid=os.geteuid(), admin_gid=_admin_gid(settings))
        self._log = structlog.get_logger("daemon")
        self._number = 0
        self._beat_every_s = (watchdog_interval_s() or _BEAT_EVERY_S) / 3
        self._is_stopping = False
        self._said: dict[str, str] = {}
        self._told_answers: Answers | None = None
        self._told_words: frozenset[str] = frozenset()
        self._looked_up: frozenset[int] = frozenset()  # jobs with a token of a run
        self._user = user_name(os.geteuid()) if os.geteuid() != 0 else None  # whose jobs alone are this service's
        self._backed_up_mono = time.monotonic() - max(0.0, store.backup_age_s(clock.now()))

    # ---- one turn

    def cycle(self) -> Cycle:
        """Observe, decide, commit, act: once."""
        started = time.thread_time()
        self._number += 1
        structlog.contextvars.bind_contextvars(cycle=self._number)
        world = self._store.load_world(self._clock.now())
        snapshot = self.observer.take_snapshot(world)
        now = self._clock.now()
        plan = reconcile(world, snapshot, self._policy, now)
        intents = self._store.commit(plan, now)
        self._tell(plan)
        acts = 0
        if intents and not self._policy.is_observe_only:
            answering = isinstance(snapshot.jobs, Fresh) and isinstance(snapshot.nodes, Fresh)
            world = self._store.load_world(self._clock.now())
            acts = self._executor.settle(intents, world, is_slurm_answering=answering)
        self._drop_submissions(plan)
        self.observer.follow(plan)
        spent_ms = (time.thread_time() - started) * 1000
        cycle = Cycle(number=self._number, plan=plan, acts=acts, snapshot=snapshot, spent_ms=spent_ms)
        self._report(cycle, world)
        return cycle

    def _drop_submissions(self, plan: Plan) -> None:
        """Remove what was handed in for a run of which nothing is submitted again."""
        for fact in plan.facts:
            if isinstance(fact.record, Run) and not _may_go_on(fact.record):
                self._submissions.drop(fact.record.name)

    def _tell(self, plan: Plan) -> None:
        for fact in plan.facts:
            record = fact.record
            say = self._log.debug if fact.reason == "sweep" else self._log.info  # a change of verdict is an event too
            say(
                f"{type(record).__name__.lower()}.learnt",
                run=getattr(record, "run", None) or getattr(record, "name", None),
                attempt=getattr(record, "attempt", None) or getattr(record, "number", None),
                job_id=getattr(record, "job_id", None),
                node=getattr(record, "node", None),
                state=str(getattr(record, "state", None) or getattr(record, "verdict", "") or ""),
                reason=fact.reason,
            )

    def _report(self, cycle: Cycle, world: World) -> None:
        """One line per cycle that changed something; silence of a source and waiting are said when they change."""
        ended = cycle.snapshot.ended
        is_unasked = isinstance(ended, Stale) and ended.why == NOT_ASKED
        sources = {"squeue": cycle.snapshot.jobs, "scontrol": cycle.snapshot.nodes}
        sources |= {} if is_unasked or ended is None else {"sacct": ended}
        for name, source in sources.items():
            self._say(name, f"no answer: {source.why}" if isinstance(source, Stale) else "answers")
        for name, view in cycle.snapshot.runs.items():
            self._say(f"run directory of {name}", f"unreadable: {view.why}" if isinstance(view, Stale) else "answers")
        self._tell_oddities()
        self._say("notes", "; ".join(cycle.plan.notes))
        changed = bool(cycle.plan.facts or cycle.plan.intents or cycle.acts)
        summary = f"{len(world.runs)} runs, {len(cycle.plan.facts)} facts, {cycle.acts} acts"
        log = self._log.info if changed else self._log.debug
        log(
            "cycle.finished",
            facts=len(cycle.plan.facts),
            intents=len(cycle.plan.intents),
            acts=cycle.acts,
            slurm_commands=self.observer.slurm.answers.commands,
            cpu_ms=round(cycle.spent_ms, 2),
        )
        waiting = "; ".join(n for n, s in sources.items() if isinstance(s, Stale))
        status = f"Slurm does not answer ({waiting}); waiting" if waiting else summary
        is_news = self._said.get("waiting", "") != waiting  # `supervisor status` must not lag behind this
        self._said["waiting"] = waiting
        self._store.heartbeat(self._clock.now(), cycle=cycle.number, summary=status, pid=os.getpid(), is_news=is_news)
        notify(f"STATUS={status}")

    def _tell_oddities(self) -> None:
        """Rows of Slurm's answers that can't be read, and words in them that are not known; each word once."""
        answers = self.observer.slurm.answers
        if answers is self._told_answers:
            return
        self._told_answers = answers
        self._say("rows of Slurm", "; ".join(answers.unreadable[:_ROWS_SHOWN]))
        jobs = answers.jobs.value.values() if isinstance(answers.jobs, Fresh) else ()
        nodes = answers.nodes.value.values() if isinstance(answers.nodes, Fresh) else ()
        words = find_unknown_words(jobs, nodes)
        for word in sorted(words - self._told_words):
            self._log.warning("slurm.word_unknown", reason=f"{word} is not known here; it is taken for not usable")
        self._told_words |= words
        ours = [job for job in jobs if not job.is_ended and (self._user is None or job.user == self._user)]
        self._tell_unknown_jobs({job.job_id: job.comment for job in ours if job.comment.startswith("sup:")})

    def _tell_unknown_jobs(self, tokens: dict[int, str]) -> None:
        """Jobs with the token of a run that this ledger does not know, each once: nobody supervises them."""
        for job_id in tokens.keys() - self._looked_up:
            name = tokens[job_id].split(":")[1]
            attempts = (*self._store.load_attempts(name), *self._store.load_aside(name)) if is_run_name(name) else ()
            if tokens[job_id] not in {attempt.token for attempt in attempts}:
                reason = f"job {job_id} carries {tokens[job_id][:200]}, which is not in this ledger: it is another's, "
                reason += "or newer than a ledger that was put back, and goes on unsupervised"
                self._log.warning("job.unknown", job_id=job_id, reason=reason)
        self._looked_up = frozenset(tokens)

    def _say(self, what: str, text: str) -> None:
        if self._said.get(what, "") != text:
            self._said[what] = text
            if text:
                self._log.info("source.changed" if what != "notes" else "rules.noted", source=what, reason=text)

    # ---- the loop

    def run(self) -> None:
        """Turn until told to stop."""
        notify("READY=1")
        while not self._is_stopping:
            cycle = self.cycle()
            self._beat()
            self._maintain()
            self._wait(cycle.plan.wake_after_s)

    def _beat(self) -> None:
        notify("WATCHDOG=1")

    def _maintain(self) -> None:
        displacement = self._store.find_displacement()
        if displacement is not None:
            self._store.backup_beside(self._clock.now())  # what is open is whole: the next start goes on from it
            raise LedgerDamaged(displacement)
        if time.monotonic() - self._backed_up_mono < _BACKUP_EVERY_S or not self._store.load_runs():
            return  # no backup of an empty ledger: it would be taken for one that knows what runs
        self._backed_up_mono = time.monotonic()
        now = self._clock.now()
        damage = self._store.find_damage()
        if damage is not None:
            raise LedgerDamaged(damage)  # the next start goes back to the newest whole backup, or says what to do
        self._store.backup_beside(now)
        self._store.prune_history(now, _KEEP_DAYS)
        step_s = self._clock.step_s() if isinstance(self._clock, SystemClock) else 0.0
        if abs(step_s) > _CLOCK_STEP_S:
            self._log.warning("clock.stepped", by_s=round(step_s, 1), reason="ages are not affected")

    def _wait(self, seconds: float) -> None:
        """Until news, a request, a signal or the time is up. An accepted request ends the wait."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.waker, selectors.EVENT_READ)
            if self._control is not None:
                selector.register(self._control, selectors.EVENT_READ)
            until = time.monotonic() + seconds
            while not self._is_stopping:
                left = until - time.monotonic()
                ready = selector.select(min(max(0.0, left), self._beat_every_s))
                self._beat()
                if any(key.fileobj is self.waker for key, _ in ready):
                    self.waker.drain()
                    return
                if self._control is not None and self._serve():
                    return
                if left <= 0:
                    return

    def _serve(self) -> bool:
        """Answer what is asked on the control socket; True when something was changed."""
        if self._control is None:
            return False
        changed = False
        for request in self._control.poll(0.0):
            jobs = self.observer.slurm.answers.jobs
            reply = handle(request, self._store, self._clock.now(), self._rights, self._submissions, jobs)
            if reply.get("code") == LOOK_AGAIN:
                self.observer.ask_again()
                changed = True
            self._control.answer(request, reply)
            is_accepted = bool(reply.get("ok")) and request.verb not in READING
            changed = changed or is_accepted
            is_unanswered = reply.get("code") == LOOK_AGAIN  # the client asks again at once
            has_effect = request.verb not in READING and not request.body.get("dry_run") and not is_unanswered
            say = self._log.info if has_effect else self._log.debug
            say(
                "request.accepted" if reply.get("ok") else "request.refused",
                verb=request.verb[:40],
                run=str(request.body.get("run") or reply.get("run") or "")[:100] or None,
                uid=request.peer.uid,
                reason=reply.get("message"),
            )
        return changed

    def stop(self) -> None:
        """End after the current turn; jobs go on."""
        self._is_stopping = True
        self.waker.wake()

    def close(self) -> None:
        self.observer.close()
        self._owners.close()


# ---------------------------------------------------------------- building it


def run_daemon(settings: Settings, *, once: bool = False, dry_run: bool = False) -> int:
    """Run the service until SIGTERM; with `once`, one cycle; with `dry_run`, one cycle that only prints its plan.

    Raises AlreadyRunning, LedgerTooNew and the other errors of the ledger and the control socket, each one line.
    """
    if dry_run:
        return print_plan(settings)
    clock = SystemClock()
    settings.ledger.path.parent.mkdir(parents=True, exist_ok=True)
    with (
        runlock.acquire(settings.ledger.path, clock.now()),
        Store.open(settings.ledger.path, now=clock.now(), force_network=settings.ledger.force_network) as store,
        _control_server(settings, once=once) as control,
    ):
        store.claim(clock.now(), pid=os.getpid(), host=socket.gethostname())
        log = structlog.get_logger("daemon")
        log.info(
            "daemon.started", pid=os.getpid(), ledger=str(settings.ledger.path), socket=str(settings.control.socket)
        )
        if store.recovered_from is not None:
            _pause_after_recovery(store, clock, store.recovered_from)
        daemon = _build(settings, store, clock, control)
        _on_signals(daemon)
        if store.recovered_from is None:  # a backup does not know the newest runs
            _tidy_submissions(Submissions(settings.ledger.path), store)
        try:
            if once:
                daemon.observer.slurm.ask()
                daemon.observer.slurm.wait(_FIRST_ANSWER_S)
                daemon.cycle()
            else:
                daemon.run()
        finally:
            notify("STOPPING=1")
            daemon.close()
            store.end(clock.now())
            log.info("daemon.stopped", reason="jobs go on; the next start adopts them")
    return 0


def _tidy_submissions(submissions: Submissions, store: Store) -> None:
    """Remove what nobody needs of handed-in scripts: of runs that are over, and what a killed service left."""
    runs = store.load_runs()
    submissions.drop_others({run.name for run in runs if _may_go_on(run)}, known={run.name for run in runs})
    intents = store.load_intents(IntentState.OPEN, limit=_MAX_OPEN_INTENTS)
    submissions.remove_batches({(i.run or "", i.attempt or 0) for i in intents if i.kind is IntentKind.SUBMIT})


def _may_go_on(run: Run) -> bool:
    """False for a run that is finished, or whose script sbatch has refused; a stopped one can be released."""
    is_refused = run.state is RunState.STOPPED and run.reason.startswith(REFUSED)
    return run.state is not RunState.FINISHED and not is_refused


def _pause_after_recovery(store: Store, clock: Clock, backup: str) -> None:
    """A restored backup may not know the newest attempts: nothing is submitted until a person has looked."""
    store.set_paused(True, clock.now(), f"the ledger was damaged and restored from {backup}")
    structlog.get_logger("daemon").error(
        "ledger.restored",
        reason=f"restored from {backup}: paused, since jobs submitted after that are unknown; compare "
        "`supervisor status` with squeue, cancel what is not known, then `supervisor resume`",
    )


def print_plan(settings: Settings) -> int:
    """Look once, decide, print the plan as JSON; nothing is written and nothing is done."""
    clock = SystemClock()
    world = World()
    if settings.ledger.path.exists():
        with Store.open_readonly(settings.ledger.path) as store:
            world = store.load_world(clock.now())
    waker = Waker()
    owners = Owners(is_root=os.geteuid() == 0)
    observer = Observer(_client(settings), settings, clock, owners, None, waker.wake)
    try:
        observer.slurm.ask()
        observer.slurm.wait(_FIRST_ANSWER_S)
        snapshot = observer.take_snapshot(world)
        plan = reconcile(world, snapshot, settings.policy, clock.now())
    finally:
        observer.close()
        owners.close()
    print(json.dumps(msgspec.to_builtins(plan, enc_hook=str), indent=2))  # noqa: T201 - this is its output
    return 0


def _build(settings: Settings, store: Store, clock: Clock, control: ControlServer | None) -> Daemon:
    waker = Waker()
    sweeper = Sweeper(settings, waker.wake) if settings.sweep.interval_s > 0 else None
    return Daemon(settings, store, _client(settings), clock, sweeper=sweeper, control=control, waker=waker)


def _client(settings: Settings) -> SlurmClient:
    parent = dict(os.environ)
    if settings.slurm.conf is not None:
        parent["SLURM_CONF"] = str(settings.slurm.conf)
    timeout_s = settings.slurm.command_timeout_s
    log = structlog.get_logger("daemon")

    def notice(sentence: str) -> None:
        log.warning("slurm.noticed", reason=sentence)

    cli = CliClient(timeout_s=timeout_s, parent=parent, form=settings.slurm.form, on_notice=notice)
    choice = choose_client(settings.slurm.client, cli=cli, parent=parent, timeout_s=timeout_s, on_notice=notice)
    say = log.warning if settings.slurm.client not in {"auto", choice.kind} else log.info
    say("client.chosen", client=choice.kind, reason=choice.reason)
    return choice.client


@contextmanager
def _control_server(settings: Settings, *, once: bool) -> Iterator[ControlServer | None]:
    if once:
        yield None
        return
    settings.control.socket.parent.mkdir(parents=True, exist_ok=True)
    with ControlServer(settings.control.socket) as control:
        yield control


def _admin_gid(settings: Settings) -> int | None:
    if settings.control.admin_group is None:
        return None
    try:
        return grp.getgrnam(settings.control.admin_group).gr_gid
    except KeyError:
        structlog.get_logger("daemon").warning(
            "admin_group.unknown", reason=f"there is no group {settings.control.admin_group}: nobody is an admin by it"
        )
        return None


def _on_signals(daemon: Daemon) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: daemon.stop())
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
