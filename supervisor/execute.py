"""Does what was meant: one committed intent at a time, its outcome written at once. Never decides what to mean.

A submission that was tried before is looked up by its token first: sbatch's answer may have been lost, and a second
sbatch would start a second training.
"""

from __future__ import annotations

import json
import os
import pwd
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path

import structlog

from slurm.client import SlurmClient
from slurm.errors import SlurmError, SlurmRefused, SlurmUnavailable
from slurm.sbatch_options import REQUEUE
from slurm.submission import render_batch_script, render_warning
from slurm.types import Identity, JobRecord, NodeRecord, SubmitRequest
from supervisor.accounts import user_name
from supervisor.clock import Clock
from supervisor.config import Settings
from supervisor.containers import has_own_checks, wrap
from supervisor.core.identity import fold_submission, is_own
from supervisor.core.sight import SECOND_LOOK_S
from supervisor.core.traces import Traces, find_traces
from supervisor.joblog import find_log_names, find_shared_log
from supervisor.model import (
    MARK_PREFIX,
    Attempt,
    AttemptEnd,
    AttemptState,
    Checkpoint,
    CheckpointState,
    Drill,
    Fact,
    Intent,
    IntentKind,
    IntentState,
    Interruption,
    NodeEvent,
    NodeMemory,
    Run,
    RunSpec,
    RunState,
    ScriptSpec,
    World,
)
from supervisor.parts import Readbacks, RunOwners
from supervisor.rundir import RunDirUnreadable
from supervisor.scripts import (
    every_s_of,
    fill,
    is_first_submission,
    loss_environment,
    placeholders,
    render_submission,
)
from supervisor.store import Store
from supervisor.submissions import SubmissionLost, Submissions
from trainer import contract

_ORDER = {
    IntentKind.CANCEL: 0,
    IntentKind.CLAIM: 0,
    IntentKind.PROMOTE: 0,
    IntentKind.ADVISE: 1,
    IntentKind.VERIFY: 1,  # only starts it
    IntentKind.SUBMIT: 2,
    IntentKind.DRAIN: 3,
    IntentKind.PRUNE: 4,
    IntentKind.NOTIFY: 5,
}
_NEEDS_SLURM = frozenset({IntentKind.CANCEL, IntentKind.CLAIM, IntentKind.SUBMIT, IntentKind.DRAIN})
_WAITS_IN_PAUSE = frozenset({IntentKind.SUBMIT, IntentKind.DRAIN, IntentKind.PRUNE})  # meant before the pause
_RETRY_MAX_S = 60.0
_NOTIFY_TIMEOUT_S = 10.0
_CANCEL_FRESH_S = 5.0  # a cancel that was meant longer ago looks first whose job has the number now
_READ_DEADLINE_S = 2.0
_LEARN_MAX_S = 120.0  # how long checkpoints of a job without a number are waited for to come to rest
_SAYS_CHARS = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one act came to. OPEN: not known, or to be tried again."""

    state: IntentState
    text: str
    facts: tuple[Fact, ...] = ()
    is_silence: bool = False  # Slurm did not answer in time: what else needs it waits for the next cycle


class Executor:
    """The only place with side effects on Slurm and on run directories."""

    def __init__(
        self,
        client: SlurmClient,
        store: Store,
        settings: Settings,
        clock: Clock,
        owners: RunOwners,
        verifier: Readbacks,
        on_step: Callable[[], None] = lambda: None,
    ) -> None:
        self._client = client
        self._store = store
        self._settings = settings
        self._clock = clock
        self._owners = owners
        self._verifier = verifier
        self._submissions = Submissions(settings.ledger.path)
        self._traces: dict[str, tuple[object, datetime]] = {}  # by token: what was found, and since when it is so
        self._on_step = on_step  # the watchdog's beat: each act is bounded, their sum need not be
        self._log = structlog.get_logger("execute")

    def settle(self, intents: tuple[Intent, ...], world: World, *, is_slurm_answering: bool) -> int:
        """Do every open intent that is due; returns how many acts were done.

        While Slurm does not answer, what needs it waits: each try would only hold the loop up.
        """
        done = 0
        for intent in sorted(intents, key=lambda i: (_ORDER[i.kind], i.id or 0)):
            if not self._is_due(intent) or (intent.kind in _NEEDS_SLURM and not is_slurm_answering):
                continue
            if intent.tries == 0 and intent.kind in _WAITS_IN_PAUSE and _is_paused(intent, world):
                continue
            outcome = self._do(intent, world)
            self._on_step()
            if outcome is not None and outcome.is_silence:
                is_slurm_answering = False
            if outcome is None or (outcome.state is IntentState.OPEN and outcome.text == intent.outcome):
                continue
            done += 1
            self._write(intent, outcome)
        return done

    def _is_due(self, intent: Intent) -> bool:
        if intent.tried_at is None or intent.kind is IntentKind.VERIFY:
            return True
        wait_s = min(_RETRY_MAX_S, 0.5 * 2 ** min(intent.tries, 10))
        waited_s = (self._clock.now() - intent.tried_at).total_seconds()
        return bool(waited_s >= wait_s)

    def _write(self, intent: Intent, outcome: Outcome) -> None:
        self._store.settle(intent, outcome.state, outcome.text, self._clock.now(), facts=outcome.facts)
        self._log.info(
            f"intent.{outcome.state.value}",
            kind=intent.kind.value,
            run=intent.run or None,
            attempt=intent.attempt,
            job_id=intent.job_id,
            node=intent.node or None,
            reason=intent.reason,
            outcome=outcome.text,
        )

    def _do(self, intent: Intent, world: World) -> Outcome | None:
        """The outcome, or None when there is nothing to write yet."""
        run = next((r for r in world.runs if r.name == intent.run), None)
        try:
            match intent.kind:
                case IntentKind.SUBMIT:
                    attempt = _find_attempt(world, intent)
                    attempts = world.attempts.get(intent.run, ())
                    return self._submit(intent, run, attempt, attempts, is_paused=_is_paused(intent, world))
                case IntentKind.CANCEL:
                    return self._cancel(intent, run, world)
                case IntentKind.PROMOTE:
                    return self._promote(intent, run, _find_attempt(world, intent))
                case IntentKind.ADVISE:
                    return self._advise(intent, run, _find_attempt(world, intent))
                case IntentKind.CLAIM:
                    return self._claim(intent, run, _find_attempt(world, intent))
                case IntentKind.DRAIN:
                    return self._drain(intent, world)
                case IntentKind.VERIFY:
                    return self._verify(intent, run, _find_checkpoint(world, intent))
                case IntentKind.PRUNE:
                    return self._prune(intent, run, _find_checkpoint(world, intent))
                case IntentKind.NOTIFY:
                    return self._notify(intent)
        except SlurmRefused as error:
            return self._refused(intent, error)
        except (SlurmError, RunDirUnreadable) as error:
            is_silence = isinstance(error, SlurmUnavailable)
            return Outcome(state=IntentState.OPEN, text=f"no answer: {_first_line(error)}", is_silence=is_silence)

    def _mark(self, intent: Intent) -> Intent:
        return self._store.mark_tried(intent, self._clock.now())

    # ---------------------------------------------------------------- submit

    def _submit(
        self,
        intent: Intent,
        run: Run | None,
        attempt: Attempt | None,
        attempts: tuple[Attempt, ...],
        *,
        is_paused: bool,
    ) -> Outcome | None:
        if run is None or attempt is None or attempt.state not in (AttemptState.PLANNED, AttemptState.AHEAD):
            return Outcome(state=IntentState.WITHDRAWN, text="the attempt is not planned any more")
        if intent.tries > 0:
            since = attempt.planned_at - timedelta(minutes=10)
            found = tuple(j for j in self._client.find_by_token(attempt.token, since=since) if _is_own(j, run))
            if found:
                return self._adopt(run, attempt, found)
            job_id = self._find_traces(run, attempt)
            if job_id is not None:
                text = f"job {job_id}, found by what it left in the run directory"
                fact = Fact(record=self._submitted(run, attempt, job_id), reason="found by its traces")
                return Outcome(state=IntentState.DONE, text=text, facts=(fact,))
            may_have_run = run.script is not None and attempt.state is not AttemptState.AHEAD
            traces = self._read_traces(run, attempt, attempts) if may_have_run else None
            if traces is not None:
                return self._end_vanished(attempt, traces)
            now = self._clock.now()
            if intent.tried_at is not None:
                waited_s = (now - intent.tried_at).total_seconds()
                if waited_s < self._settings.slurm.submit_lookup_wait_s:
                    return None  # Slurm may still be taking it in
            if attempt.state is AttemptState.AHEAD:  # whether it is still of use is not known: the next one will do
                return self._refuse_attempt(attempt, AttemptEnd.NOT_NEEDED, "sbatch did not answer, and has no job")
            if run.state is not RunState.ACTIVE:
                return self._refuse_attempt(attempt, AttemptEnd.STOPPED, "stopped before it was submitted")
            if is_paused:
                return None
        try:
            request = self._prepare(run, attempt, attempts)
        except SubmissionLost as error:
            return self._refuse_attempt(attempt, AttemptEnd.DO_NOT_RESTART, str(error))
        attempt = self._note_log_offset(intent, run, attempt)
        self._mark(intent)
        try:
            submitted = self._client.submit(request)
        except SlurmRefused as error:
            # Who handed a script in is shown what sbatch says, as sbatch says it.
            says = error.stderr[:_SAYS_CHARS] if run.script is not None else ""
            refused = replace(attempt, exit_code=error.returncode)
            return self._refuse_attempt(refused, AttemptEnd.REFUSED, _first_line(error), says=says)
        finally:
            self._submissions.remove_batch(run.name, attempt.number)
        after = self._submitted(run, attempt, submitted.job_id)
        text = f"job {submitted.job_id}" + (f"; sbatch says: {submitted.warnings}" if submitted.warnings else "")
        return Outcome(state=IntentState.DONE, text=text, facts=(Fact(record=after, reason="submitted"),))

    def _find_traces(self, run: Run, attempt: Attempt) -> int | None:
        """The job id of an attempt that has run: without accounting Slurm forgets a job soon after its end."""
        reader = self._owners.reader(run)
        view = reader.read(run.name, run.spec.run_dir, attempt.number, is_final=False, deadline_s=_READ_DEADLINE_S)
        if view.exit is not None:
            job_id = view.exit.job_id
        elif view.launch is not None:
            job_id = view.launch.value.job_id
        else:
            return None
        # The owner wrote that number: a job that Slurm still lists under it has another token, so it is not ours.
        return None if any(job.job_id == job_id for job in self._client.fetch_jobs().jobs) else job_id

    def _read_traces(self, run: Run, attempt: Attempt, attempts: tuple[Attempt, ...]) -> Traces | None:
        """What a script's job has left whose number is not known; raises RunDirUnreadable where that can't be seen."""
        reader, spec = self._owners.reader(run), run.spec.checkpoint
        view = reader.read(
            run.name,
            run.spec.run_dir,
            attempt.number,
            is_final=False,
            deadline_s=_READ_DEADLINE_S,
            checkpoint_directory=spec.directory,
            unfinished_markers=spec.unfinished_markers,
            layout=spec.layout,
        )
        if view.checkpoints_unknown:
            raise RunDirUnreadable(view.checkpoints_unknown)
        names = find_log_names(run, user=user_name(run.owner_uid))
        logs = reader.find_logs(names.folder, names.pattern) if names is not None else ()
        others = {a.job_id for a in attempts if a.job_id is not None}
        others |= {job.job_id for job in self._client.fetch_jobs().jobs}
        return find_traces(attempt, view, logs, checkpoints=self._store.load_checkpoints(run.name), others=others)

    def _end_vanished(self, attempt: Attempt, traces: Traces) -> Outcome:
        """The attempt has run, and nobody knows how it ended: over, once nothing goes on and the ledger has it all."""
        now = self._clock.now()
        before, since = self._traces.get(attempt.token, (None, now))
        if before != traces.stamp:
            since = now
        self._traces[attempt.token] = (traces.stamp, since)
        if (now - since).total_seconds() < (SECOND_LOOK_S if traces.is_learnt else _LEARN_MAX_S):
            text = "Slurm knows no job of it, and it has run: what it left may still change"
            return Outcome(state=IntentState.OPEN, text=text)
        del self._traces[attempt.token]
        why = f"Slurm does not know its job, and it has run: {', '.join(traces.signs)}"
        outcome = self._refuse_attempt(attempt, AttemptEnd.VANISHED, why)
        interruption = Interruption(
            run=attempt.run,
            attempt=attempt.number,
            kind=AttemptEnd.VANISHED.value,
            cause=why,
            node=None,
            is_planned=False,
            detected_at=now,
            last_step=traces.last_step,
        )
        return replace(outcome, state=IntentState.DONE, facts=(*outcome.facts, Fact(record=interruption, reason=why)))

    def _submitted(self, run: Run, attempt: Attempt, job_id: int) -> Attempt:
        state = attempt.state if attempt.state is AttemptState.AHEAD else AttemptState.SUBMITTED
        identity = self._identity(run)
        user = user_name(identity.uid if identity is not None else os.geteuid())
        return replace(attempt, state=state, job_id=job_id, submitted_at=self._clock.now(), slurm_user=user)

    def _adopt(self, run: Run, attempt: Attempt, found: tuple[JobRecord, ...]) -> Outcome:
        """The answer was lost but the job is there. Of two with one token the older stays."""
        first, *others = sorted(found, key=lambda j: (j.is_ended, j.job_id))
        after = fold_submission(self._submitted(run, attempt, first.job_id), first)
        facts = [Fact(record=after, reason="found by its token")]
        text = f"job {first.job_id}, found by its token"
        for other in others:
            if other.is_live:
                self._client.cancel(other.job_id, self._identity(run))
                text += f"; its twin {other.job_id} was cancelled"
        return Outcome(state=IntentState.DONE, text=text, facts=tuple(facts))

    def _refuse_attempt(self, attempt: Attempt, end: AttemptEnd, why: str, *, says: str = "") -> Outcome:
        if attempt.state is AttemptState.AHEAD:
            end = AttemptEnd.NOT_NEEDED
        over = replace(
            attempt, state=AttemptState.OVER, over_at=self._clock.now(), end=end, end_detail=why, is_job_gone=True
        )
        return Outcome(state=IntentState.REFUSED, text=says or why, facts=(Fact(record=over, reason=why),))

    def _prepare(self, run: Run, attempt: Attempt, attempts: tuple[Attempt, ...]) -> SubmitRequest:
        """Write the attempt's files (again, if it must be: same content, same names) and build the request.

        Raises SubmissionLost when what was handed in is not there any more.
        """
        if run.script is not None:
            return self._prepare_script(run, run.script, attempt, attempts)
        spec = run.spec
        directory = spec.paths.attempt_dir(attempt.number)
        script = self._write_files(run, attempt)
        identity = self._identity(run)
        batch = directory / "batch.sh"
        if identity is not None:  # others may be able to put another file there, and sbatch would run it as the owner
            batch = self._write_batch(run, attempt, script, identity)
        return SubmitRequest(
            script=batch,
            token=attempt.token,
            job_name=run.name,
            nodes=attempt.nodes_wanted + attempt.spares,
            output=directory / "job.log",
            chdir=spec.workdir,
            partition=spec.slurm.partition,
            account=spec.slurm.account,
            qos=spec.slurm.qos,
            time_limit=spec.slurm.time_limit,
            gpus_per_node=spec.slurm.gpus_per_node,
            exclude=attempt.exclude,
            dependency=_dependency(attempt, attempts),
            options=(*render_warning(spec.slurm.warn_before_limit_s, spec.slurm.time_limit), *spec.slurm.options),
            identity=identity,
            inherited=run.inherited,
        )

    def _write_batch(self, run: Run, attempt: Attempt, text: str, identity: Identity | None) -> Path:
        owner = None if identity is None else (identity.uid, identity.gid)
        try:
            return self._submissions.write_batch(run.name, attempt.number, text, owner)
        except OSError as error:
            raise RunDirUnreadable(f"batch script: {error}") from None

    def _write_files(self, run: Run, attempt: Attempt) -> str:
        """What the launcher reads; returns the text of the batch script."""
        directory = run.spec.paths.attempt_dir(attempt.number)
        job_spec = render_attempt_spec(run, attempt, self._settings)
        script = render_batch_script(
            python=self._settings.launcher.python,
            attempt_dir=directory,
            job_name=run.name,
            output=directory / "job.log",
            pythonpath=self._settings.launcher.pythonpath,
        )
        files = {"attempt.json": contract.render_json(job_spec), "batch.sh": script.encode()}
        self._owners.reader(run).write_attempt(run.spec.run_dir, attempt.number, files)
        return script

    def _promote(self, intent: Intent, run: Run | None, attempt: Attempt | None) -> Outcome:
        """Tell the launcher of a job that was queued ahead where to begin: it waits for this file to say so."""
        if run is None or attempt is None or attempt.is_over:
            return Outcome(state=IntentState.WITHDRAWN, text="the attempt is over")
        if run.script is not None:
            return self._move_link(intent, run, attempt)
        self._mark(intent)
        self._write_files(run, attempt)
        return Outcome(state=IntentState.DONE, text=f"job {attempt.job_id} is told to begin")

    def _advise(self, intent: Intent, run: Run | None, attempt: Attempt | None) -> Outcome:
        """Tell the running training how often to save, and of saves that were asked for: it looks at the file."""
        if run is None or attempt is None or attempt.is_over:
            return Outcome(state=IntentState.WITHDRAWN, text="the attempt is over")
        self._mark(intent)
        advice = contract.Advice(
            attempt=attempt.number,
            seq=attempt.advice_seq,
            checkpoint_every_s=every_s_of(run, attempt),
            save_requests=attempt.save_requests,
            resume_from=attempt.advised_path,
            resume_step=attempt.advised_step,
            drill=_drill_request(attempt.drill),
        )
        name = run.spec.paths.advice(attempt.number).name
        files = {name: contract.render_json(advice)}
        self._owners.reader(run).write_attempt(run.spec.run_dir, attempt.number, files)
        said = f"told: a save every {advice.checkpoint_every_s:.0f} s"
        said += f"; step {advice.resume_step} may be resumed from" if advice.resume_from else ""
        return Outcome(state=IntentState.DONE, text=said)

    def _move_link(self, intent: Intent, run: Run, attempt: Attempt) -> Outcome:
        """Point the link of a script's job that waits at another checkpoint; one that has begun may have read it.

        What a log that all attempts share has by now is of the attempts before.
        """
        if attempt.state is not AttemptState.AHEAD or attempt.started_at is not None:
            return Outcome(state=IntentState.WITHDRAWN, text="it does not wait any more")
        self._mark(intent)
        self._owners.reader(run).link_resume(run.spec.run_dir, attempt.number, intent.text)
        measured = self._measure_log(run, attempt)
        after = replace(measured, resume_path=intent.text, resume_step=intent.step or 0)
        text = f"it would begin from {intent.text}"
        return Outcome(state=IntentState.DONE, text=text, facts=(Fact(record=after, reason=intent.reason),))

    def _prepare_script(
        self, run: Run, script: ScriptSpec, attempt: Attempt, attempts: tuple[Attempt, ...]
    ) -> SubmitRequest:
        """A person's own batch script, under a name that nobody but the service can put anything else behind."""
        kept = self._submissions.load(run.name, digest=script.digest)
        reader = self._owners.reader(run)
        reader.write_attempt(run.spec.run_dir, attempt.number, {})
        if attempt.state is AttemptState.AHEAD and attempt.resume_path:
            reader.link_resume(run.spec.run_dir, attempt.number, attempt.resume_path)
        identity = self._identity(run)
        return render_submission(
            run,
            attempt,
            batch=self._write_batch(run, attempt, kept.text, identity),
            environment=kept.environment,
            identity=None if identity is None else (identity.uid, identity.gid),
            is_first=is_first_submission(attempts, attempt.number),
            behind=_find_behind(attempt, attempts),
        )

    def _note_log_offset(self, intent: Intent, run: Run, attempt: Attempt) -> Attempt:
        """The attempt with the size of a log that earlier ones wrote to: what stands there is not its own."""
        after = attempt if intent.tries > 0 else self._measure_log(run, attempt)
        if after == attempt:
            return attempt
        fact = Fact(record=after, reason="the log has lines of before")
        self._store.settle(intent, IntentState.OPEN, intent.outcome, self._clock.now(), facts=(fact,))
        return after

    def _measure_log(self, run: Run, attempt: Attempt) -> Attempt:
        log = find_shared_log(run, user=user_name(run.owner_uid))
        if log is None:
            return attempt
        view = self._owners.reader(run).read(
            run.name, run.spec.run_dir, attempt.number, is_final=False, deadline_s=_READ_DEADLINE_S, log_path=log
        )
        return replace(attempt, log_offset=view.log.value) if view.log is not None and view.log.value else attempt

    # ---------------------------------------------------------------- cancel, claim, drain

    def _claim(self, intent: Intent, run: Run | None, attempt: Attempt | None) -> Outcome:
        """Put our token on a job: an adopted one, or ours that bears another comment by now. It is found by that."""
        if run is None or attempt is None or attempt.is_over or intent.job_id is None:
            return Outcome(state=IntentState.WITHDRAWN, text="the job is over")
        if attempt.is_adopted:
            self._owners.reader(run).write_attempt(run.spec.run_dir, attempt.number, {})
        self._mark(intent)
        may_requeue = run.script is not None and REQUEUE in run.script.options
        self._client.claim(intent.job_id, attempt.token, self._identity(run), may_requeue=may_requeue)
        return Outcome(state=IntentState.DONE, text=f"job {intent.job_id} carries our token")

    def _cancel(self, intent: Intent, run: Run | None, world: World) -> Outcome:
        """In the owner's name: the number of a job came from a program or a file of theirs, and may be another's."""
        age_s = (self._clock.now() - intent.created_at).total_seconds()
        is_old = intent.tries > 0 or age_s > _CANCEL_FRESH_S
        if is_old and self._is_anothers(intent, run, _find_attempt(world, intent)):
            return Outcome(state=IntentState.DONE, text=f"gone: the number {intent.job_id} is another job's now")
        self._mark(intent)
        if intent.job_id is not None:
            self._client.cancel(intent.job_id, self._identity(run) if run is not None else None)
        return Outcome(state=IntentState.DONE, text="cancelled")

    def _identity(self, run: Run) -> Identity | None:
        """Whom Slurm's commands for this run are run as; None: as ourselves."""
        uid, gid = self._owners.identity(run)
        return None if uid is None or gid is None else Identity(uid=uid, gid=gid)

    def _is_anothers(self, intent: Intent, run: Run | None, attempt: Attempt | None) -> bool:
        """A controller that came back without its state gives out the same numbers again while we waited for it."""
        jobs = {job.job_id: job for job in self._client.fetch_jobs().jobs}
        job = jobs.get(intent.job_id or 0)
        if job is None or run is None or attempt is None:
            return False
        return not is_own(job, attempt, run)

    def _drain(self, intent: Intent, world: World) -> Outcome:
        """Read, drain, read back. A drain that someone else set is never changed."""
        before = self._read_node(intent.node)
        if before is None:
            return Outcome(state=IntentState.REFUSED, text="Slurm does not know this node")
        if before.is_withdrawn and before.reason != intent.text:
            return Outcome(state=IntentState.REFUSED, text=f"drained by {before.reason_user}: {before.reason}")
        if not before.is_drain_set:
            self._mark(intent)
            self._client.drain(intent.node, intent.text)
        after = self._read_node(intent.node)
        if after is None or not after.is_drain_set:
            return Outcome(state=IntentState.OPEN, text="the drain does not show yet")
        now = self._clock.now()
        memory = replace(
            world.nodes.get(intent.node) or NodeMemory(node=intent.node),
            is_drained_by_us=after.reason == intent.text,
            drain_reason=after.reason,
            drained_at=now,
            boot_at=after.boot_at,
        )
        event = NodeEvent(node=intent.node, at=now, event="node.drained", detail=after.reason, run=intent.run)
        facts = (Fact(record=memory, reason=intent.reason), Fact(record=event, reason=intent.reason))
        return Outcome(state=IntentState.DONE, text=after.reason, facts=facts)

    def _read_node(self, name: str) -> NodeRecord | None:
        return next((n for n in self._client.fetch_nodes().nodes if n.name == name), None)

    def _refused(self, intent: Intent, error: SlurmRefused) -> Outcome:
        text = _first_line(error)
        if intent.kind is IntentKind.SUBMIT:  # not the submission, but the look-up: the job may exist
            return Outcome(state=IntentState.OPEN, text=f"the look-up was refused: {text}")
        facts: tuple[Fact, ...] = ()
        if intent.kind is IntentKind.DRAIN:
            event = NodeEvent(node=intent.node, at=self._clock.now(), event="drain.refused", detail=text)
            facts = (Fact(record=event, reason=text),)
        return Outcome(state=IntentState.REFUSED, text=text, facts=facts)

    # ---------------------------------------------------------------- checkpoints

    def _verify(self, intent: Intent, run: Run | None, checkpoint: Checkpoint | None) -> Outcome | None:
        """Start reading back; the result is an observation of a later cycle, which closes the intent."""
        if run is None or intent.step is None or intent.attempt is None:
            return Outcome(state=IntentState.WITHDRAWN, text="the run is gone")
        if not self._verifier.is_busy(run.name, intent.step, intent.attempt):
            uid, gid = self._owners.identity(run)
            place = {}
            if run.spec.checkpoint.layout != "supervisor":
                if checkpoint is None:
                    return Outcome(state=IntentState.WITHDRAWN, text="the checkpoint is gone")
                place = {"path": checkpoint.path, "layout": run.spec.checkpoint.layout, "stamp": checkpoint.stamp}
            self._verifier.start(run.name, run.spec.run_dir, intent.step, intent.attempt, uid, gid, **place)
        return None

    def _prune(self, intent: Intent, run: Run | None, checkpoint: Checkpoint | None) -> Outcome:
        if run is None or checkpoint is None or intent.step is None or intent.attempt is None:
            return Outcome(state=IntentState.WITHDRAWN, text="already gone")
        self._mark(intent)
        self._owners.reader(run).prune(run.spec.run_dir, intent.step, intent.attempt)
        gone = replace(checkpoint, state=CheckpointState.PRUNED)
        return Outcome(state=IntentState.DONE, text="removed", facts=(Fact(record=gone, reason=intent.reason),))

    # ---------------------------------------------------------------- notify

    def _notify(self, intent: Intent) -> Outcome:
        """Say it in the log, and through the site's command where there is one. Said once, whatever comes of it."""
        self._mark(intent)
        self._log.warning("person.told", text=intent.text, run=intent.run or None, node=intent.node or None)
        command = self._settings.notify.command
        if not command:
            return Outcome(state=IntentState.DONE, text="logged")
        message = json.dumps({"text": intent.text, "run": intent.run, "node": intent.node})
        try:
            ended = subprocess.run(
                [*command, intent.text],
                input=message,
                text=True,
                capture_output=True,
                timeout=_NOTIFY_TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return Outcome(state=IntentState.REFUSED, text=f"notify command: {error}")
        state = IntentState.DONE if ended.returncode == 0 else IntentState.REFUSED
        return Outcome(state=state, text=f"notify command: exit {ended.returncode} {ended.stderr[:200]}".strip())


def split_environment(spec: RunSpec) -> dict[str, str]:
    """The variables that a run file gives its ranks, by name."""
    return {name: text for name, _, text in (word.partition("=") for word in spec.environment)}


def _drill_request(drill: Drill | None) -> contract.DrillRequest | None:
    if drill is None:
        return None
    return contract.DrillRequest(id=drill.id, kind=drill.kind, node=drill.node, at_step=drill.at_step)


def render_attempt_spec(run: Run, attempt: Attempt, settings: Settings) -> contract.AttemptSpec:
    """What the launcher is told: a pure function of the run, the attempt and the settings.

    Placeholders in the command's words are filled: {resume_from}, {resume_step}, {run}, {attempt}, {run_dir}.
    """
    spec = run.spec
    values = placeholders(run, attempt)
    wrapping = wrap(spec, pythonpath=settings.launcher.pythonpath)
    return contract.AttemptSpec(
        run=run.name,
        attempt=attempt.number,
        command=tuple(fill(word, values) for word in spec.command),
        nodes=attempt.nodes_wanted,
        procs_per_node=spec.procs_per_node,
        resume_from=attempt.resume_path,
        resume_step=attempt.resume_step,
        is_ahead=attempt.state is AttemptState.AHEAD,
        checkpoint_every_s=every_s_of(run, attempt),
        skip_samples=tuple(contract.SampleRange(first=part.first, end=part.end) for part in attempt.skip_samples),
        environment={**split_environment(spec), **loss_environment(spec)},
        local_dir=spec.checkpoint.local_dir,
        object_url=spec.checkpoint.object_url,
        object_keep_last=spec.checkpoint.object_keep_last,
        upload_bytes_per_s=spec.checkpoint.upload_mb_per_s * 1e6,
        command_template=spec.command,
        in_job=spec.restart.in_job,
        nodes_min=attempt.nodes_wanted if spec.nodes.elastic is False else spec.nodes.min,
        node_multiple=spec.nodes.multiple_of,
        max_without_progress=spec.restart.max_without_progress,
        backoff_s=spec.restart.backoff_s,
        stop_grace_s=spec.restart.stop_grace_s,
        worker_start=spec.restart.worker_start,
        beat_interval_s=spec.liveness.beat_interval_s,
        suspect_after_s=spec.liveness.suspect_after_s,
        liveness_timeout_s=spec.liveness.timeout_s,
        phase_bounds_s={phase: spec.progress.bounds(phase) for phase in contract.PHASES},
        straggler_ratio=spec.straggler.ratio,
        straggler_window=spec.straggler.window_steps,
        straggler_action=spec.straggler.action,
        srun_options=wrapping.srun_options,
        command_prefix=wrapping.command_prefix,
        start_checks=render_start_checks(run, settings, attempt.number) if has_own_checks(spec) else (),
    )


def render_start_checks(run: Run, settings: Settings, attempt: int) -> tuple[str, ...]:
    """The command of the node probes that each node runs before training starts.

    Where the training saves in a folder of its own, each node leaves a mark there, which is looked for from here.
    """
    limits = settings.sweep_limits
    argv = (settings.launcher.python, "-m", "supervisor.probes.runner", "--limits", json.dumps(limits))
    folder = run.spec.checkpoint.directory
    mark = ("--mark", str(folder / f"{MARK_PREFIX}{attempt}")) if folder is not None else ()
    return (*argv, "--shared", str(run.spec.run_dir), *mark)


def _is_own(job: JobRecord, run: Run) -> bool:
    """Anybody may put our token into a comment; the name is the run's, and the account is its owner's."""
    if job.name and job.name != run.job_name:
        return False
    try:
        owner = pwd.getpwuid(run.owner_uid).pw_name
    except KeyError:
        return True
    return not job.user or job.user in (owner, str(run.owner_uid), _own_name())


def _own_name() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def _is_paused(intent: Intent, world: World) -> bool:
    return world.is_paused or any(r.is_paused for r in world.runs if r.name == intent.run)


def _find_attempt(world: World, intent: Intent) -> Attempt | None:
    every = (*world.attempts.get(intent.run, ()), *world.aside.get(intent.run, ()))
    return next((a for a in every if a.number == intent.attempt), None)


def _dependency(attempt: Attempt, attempts: tuple[Attempt, ...]) -> str:
    """Singleton keeps two jobs of a run apart by itself; `afterany` says which one is waited for."""
    before = _find_behind(attempt, attempts)
    return f"afterany:{before},singleton" if before is not None else "singleton"


def _find_behind(attempt: Attempt, attempts: tuple[Attempt, ...]) -> int | None:
    """The job that one queued ahead waits for."""
    return attempts[-1].job_id if attempts and attempt.state is AttemptState.AHEAD else None


def _find_checkpoint(world: World, intent: Intent) -> Checkpoint | None:
    key = (intent.step, intent.attempt)
    return next((c for c in world.checkpoints.get(intent.run, ()) if c.key == key), None)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:500]


__all__ = ["Executor", "Outcome", "render_attempt_spec", "render_start_checks"]
