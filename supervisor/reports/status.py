"""`supervisor status`: what each run is doing now, and whether the daemon is there. Read-only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from supervisor.core.reliability import Mtbf, ettr, run_mtbf
from supervisor.model import UNREPORTED, Attempt, AttemptState, Checkpoint, CheckpointState, Interruption, Run, RunState
from supervisor.reports.liveness import Liveness
from supervisor.reports.table import Table, duration, instant, number, one_line
from supervisor.store import DaemonRow, Store

if TYPE_CHECKING:
    from supervisor.reports.saves import SaveStatus

_REASON_CHARS = 320
BUSY_S = 30.0  # a daemon that takes connections and showed a sign of life this lately is busy, not frozen


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """One run now."""

    run: Run
    state: str
    attempt: Attempt | None
    step: int | None
    verified_step: int | None
    interruptions: int  # unplanned
    inside: int = 0  # that the newest attempt's job survived
    recovery_s: float | None = None  # of the newest interruption that is over, to the first new step
    mtbf: Mtbf | None
    ettr: float | None
    reason: str = ""  # why it is in this state, in a sentence
    next_start_at: datetime | None = None  # the end of a back-off
    ahead: Attempt | None = None  # queued behind the running one
    attempts: tuple[Attempt, ...] = ()
    checkpoints: tuple[Checkpoint, ...] = ()
    history: tuple[Interruption, ...] = ()
    lost: tuple[str, ...] = ()  # nodes of the job that can't be used
    left_out: tuple[str, ...] = ()  # nodes of the job that something else was found against

    @property
    def spares(self) -> tuple[str, ...]:
        """Nodes of the job that could take another one's place."""
        gone = {*self.lost, *self.left_out}
        return tuple(n for n in self.attempt.spare_nodes if n not in gone) if self.attempt is not None else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The daemon and the runs, read at one instant."""

    now: datetime
    liveness: Liveness
    daemon: DaemonRow | None
    is_paused: bool
    runs: tuple[RunStatus, ...]


def read_status(store: Store, liveness: Liveness, now: datetime, *, name: str | None = None) -> Status:
    """All runs, or the one of that name (none of it known: no runs), as the ledger has them."""
    with store.reading():
        runs = store.load_runs() if name is None else tuple(run for run in (store.load_run(name),) if run)
        return Status(
            now=now,
            liveness=liveness,
            daemon=store.load_daemon(),
            is_paused=store.load_paused(),
            runs=tuple(_read_run(store, run, now) for run in runs),
        )


def _read_run(store: Store, run: Run, now: datetime) -> RunStatus:
    attempts = store.load_attempts(run.name)
    interruptions = store.load_interruptions(run.name)
    status = judge_run(run, attempts, store.load_checkpoints(run.name), interruptions, now)
    if run.spec.restart.queue_ahead_s <= 0:
        return status
    return replace(status, ahead=next((a for a in store.load_aside(run.name) if not a.is_over), None))


def judge_run(
    run: Run,
    attempts: Sequence[Attempt],
    checkpoints: Sequence[Checkpoint],
    interruptions: Sequence[Interruption],
    now: datetime,
) -> RunStatus:
    """One run's status from its records."""
    last = max(attempts, key=lambda a: a.number, default=None)
    state = state_word(run, last)
    next_at = _judge_wait(run, attempts, checkpoints, now) if state == "recovering" else None
    step = _step(last, checkpoints)
    lost, left_out = _find_left_out(last, interruptions)
    return RunStatus(
        run=run,
        state=state,
        attempt=last,
        step=step,
        verified_step=max((c.step for c in checkpoints if c.state is CheckpointState.VERIFIED), default=None),
        interruptions=sum(1 for interruption in interruptions if not interruption.is_planned),
        inside=sum(1 for i in interruptions if last is not None and i.attempt == last.number and i.is_in_job),
        recovery_s=next((i.recovery_s for i in reversed(interruptions) if i.recovery_s is not None), None),
        mtbf=run_mtbf(attempts, interruptions, now),
        ettr=ettr(attempts, now, is_script=run.script is not None, interruptions=interruptions),
        reason=_judge_reason(run, state, attempts, next_at),
        next_start_at=next_at,
        attempts=tuple(attempts),
        checkpoints=tuple(checkpoints),
        history=tuple(interruptions),
        lost=lost,
        left_out=left_out,
    )


def _find_left_out(
    last: Attempt | None, interruptions: Sequence[Interruption]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    if last is None or not any(i.attempt == last.number and i.nodes for i in interruptions):
        return (), ()
    from supervisor.core.launches import find_left_out  # and what it needs; a healthy run does not

    return find_left_out(last, interruptions)


def state_word(run: Run, last: Attempt | None) -> str:
    """What a run is doing, in one word; `last` is its newest attempt.

    pending, starting, running, recovering, waiting (too few nodes), paused, held, stopping, stopped or finished.
    """
    if run.state is not RunState.ACTIVE:
        return str(run.state)
    if run.is_paused:
        return "paused"
    is_first = last is None or last.number == 1
    if last is None or last.is_over:
        if run.reason.startswith("waiting"):
            return "waiting"
        return "pending" if last is None else "recovering"
    if last.state is not AttemptState.RUNNING:
        return "pending" if is_first else "recovering"
    if last.recovering:
        return "recovering"
    if last.stepped_at is None and last.phase != UNREPORTED:
        return "starting" if is_first else "recovering"
    return "running"


def _step(last: Attempt | None, checkpoints: Sequence[Checkpoint]) -> int | None:
    """The newest step that the newest attempt is known to have made; it may have saved a newer one than was noted."""
    if last is None:
        return None
    seen = last.last_step if last.last_step is not None else last.resume_step or None
    saved = (c.step for c in checkpoints if c.attempt == last.number and c.is_kept)
    return max([*saved, *(() if seen is None else (seen,))], default=None)


def find_saves_of(status: RunStatus, now: datetime) -> SaveStatus:
    """How often the run saves, what that rests on, and what would be lost now."""
    from supervisor.reports.saves import judge_saves  # and what it needs; a table of all runs does not

    return judge_saves(status.run, status.attempts, status.checkpoints, now, step=status.step, history=status.history)


def _judge_wait(
    run: Run, attempts: Sequence[Attempt], checkpoints: Sequence[Checkpoint], now: datetime
) -> datetime | None:
    """When the next attempt may start, while a back-off still lasts."""
    last = max(attempts, key=lambda a: a.number, default=None)
    if last is None or not last.is_over:
        return None
    from supervisor.core.restarts import count_failures, next_start_at  # and what they need; a healthy run does not

    at = next_start_at(run.spec.restart, count_failures(run, tuple(attempts), tuple(checkpoints)), last)
    return at if at is not None and at > now else None


def _judge_reason(run: Run, state: str, attempts: Sequence[Attempt], next_at: datetime | None) -> str:
    """The run's own reason; of a run that recovers, why it must, and until when it waits."""
    if run.reason and state != "recovering":
        return run.reason
    last = max(attempts, key=lambda a: a.number, default=None)
    if state == "recovering" and last is not None and not last.is_over and last.recovering:
        return f"started again inside job {last.job_id}: {last.recovering}"
    over = max((a for a in attempts if a.is_over), key=lambda a: a.number, default=None)
    if over is None or over.end is None or state not in {"recovering", "stopped", "held", "finished"}:
        return run.reason
    end = f"{over.end}: {over.end_detail}" if over.end_detail else str(over.end)
    if state != "recovering":
        return end
    if run.reason and any(a.number > over.number for a in attempts):  # of the attempt that is to recover the run
        return f"{run.reason}; attempt {over.number} ended, {end}"
    wait = f"next attempt at {next_at:%H:%M:%S} UTC (back-off); " if next_at else ""
    return f"{wait}attempt {over.number} ended, {end}"


# ---------------------------------------------------------------- as JSON


def status_as_json(status: Status) -> dict[str, Any]:
    """The report of `supervisor status --json`."""
    return {"daemon": _daemon_as_json(status), "runs": [_run_as_json(run, status.now) for run in status.runs]}


def is_running(status: Status) -> bool:
    """True when the daemon answers, or holds its socket and showed a sign of life just now (busy)."""
    if status.liveness.is_answering:
        return True
    age_s = _age_s(status)
    return status.liveness.is_there and age_s is not None and age_s < BUSY_S


def _age_s(status: Status) -> float | None:
    return (status.now - status.daemon.cycle_at).total_seconds() if status.daemon else None


def _daemon_as_json(status: Status) -> dict[str, Any]:
    row, running = status.daemon, is_running(status)
    return {
        "running": running,
        "answering": status.liveness.is_answering,
        "why": status.liveness.why or None,
        "pid": row.pid if row and running else None,
        "host": row.host if row else None,
        "version": row.version if row else None,
        "started_at": row.started_at if row and running else None,
        "cycle_at": row.cycle_at if row else None,
        "paused": status.is_paused,
        "slurm": _slurm_word(status),
        "summary": row.summary if row else None,
    }


def _slurm_word(status: Status) -> str:
    if status.daemon is None or not is_running(status):
        return "unknown"
    return "not answering" if "does not answer" in status.daemon.summary else "answering"


def _run_as_json(status: RunStatus, now: datetime) -> dict[str, Any]:
    from supervisor.reports.saves import saves_as_json

    saves = find_saves_of(status, now)
    run, last, mtbf = status.run, status.attempt, status.mtbf
    return {
        "run": run.name,
        "state": status.state,
        "paused": run.is_paused,
        "attempt": last.number if last else None,
        "job_id": last.job_id if last else None,
        "next_job_id": status.ahead.job_id if status.ahead else None,  # queued behind it
        "nodes": list(last.nodes) if last else [],
        "training_nodes": list(last.training) if last else [],
        "spare_nodes": list(status.spares),  # of the job, and not training
        "lost_nodes": list(status.lost),
        "left_out_nodes": list(status.left_out),
        "launch": last.launch if last else None,  # which start of the training inside the job, from 0
        "recovering": last.recovering or None if last and not last.is_over else None,
        "stragglers": list(last.stragglers) if last and not last.is_over else [],
        "phase": last.phase or None if last else None,
        "step": status.step,
        "final_step": run.final_step,
        "verified_step": status.verified_step,
        "steps_at_risk": saves.at_risk,
        "saves": saves_as_json(saves),
        "interruptions": status.interruptions,
        "interruptions_in_job": status.inside,
        "recovery_s": status.recovery_s,
        "mtbf_h": mtbf.mtbf_h if mtbf else None,
        "mtbf_low_h": mtbf.low_h if mtbf else None,
        "mtbf_high_h": mtbf.high_h if mtbf else None,
        "observed_h": mtbf.observed_h if mtbf else None,
        "ettr": status.ettr,
        "reason": status.reason or None,
        "next_start_at": status.next_start_at,
        "owner_uid": run.owner_uid,
        "run_dir": str(run.spec.run_dir),
        "log": find_log_of(status),
        "submitted_at": run.created_at,
        "changed_at": run.changed_at,
        "progress_at": last.progress_at if last else None,
        "end": str(last.end) if last and last.end else None,
    }


def find_log_of(status: RunStatus) -> str | None:
    """Where the job of the newest attempt writes, as far as that is known."""
    if status.attempt is None:
        return None
    from supervisor.accounts import user_name
    from supervisor.joblog import find_log  # and what it needs; a table of all runs does not

    log = find_log(status.run, status.attempt, user=user_name(status.run.owner_uid))
    return str(log) if log is not None else None


# ---------------------------------------------------------------- for people

_COLUMNS = ("run", "state", "attempt", "job", "nodes", "step", "verified", "interrupted", "mtbf", "ettr", "reason")


def daemon_line(status: Status) -> str:
    """One line about the daemon."""
    row, age_s = status.daemon, _age_s(status)
    seen = f"last sign of life {duration(age_s)} ago" if age_s is not None else "it has never run here"
    if status.liveness.is_answering:
        who = f"pid {row.pid}, since {instant(row.started_at)} UTC" if row else "starting"
        paused = "; PAUSED: nothing is submitted, cancelled or drained" if status.is_paused else ""
        slurm = f"; {row.summary}" if row and _slurm_word(status) == "not answering" else ""
        return f"daemon: running ({who}){slurm}{paused}"
    if status.liveness.is_there:
        word = "busy" if is_running(status) else "NOT ANSWERING, frozen?"
        return f"daemon: {word} ({seen}): {status.liveness.why}"
    return f"daemon: NOT RUNNING ({status.liveness.why}); what follows is what it last knew ({seen})"


def status_table(status: Status) -> Table:
    """One line per run."""
    return Table(
        columns=_COLUMNS,
        rows=tuple(_row(run) for run in status.runs),
        numeric=frozenset({"attempt", "job", "step", "verified", "interrupted", "ettr"}),
    )


def _row(status: RunStatus) -> tuple[str, ...]:
    last = status.attempt
    return (
        status.run.name,
        status.state,
        str(last.number) if last else "-",
        str(last.job_id) if last and last.job_id is not None else "-",
        fold(last.nodes) if last and last.nodes else "-",
        _steps(status),
        number(status.verified_step),
        str(status.interruptions),
        mtbf_words(status.mtbf),
        number(status.ettr, 3),
        one_line(status.reason, _REASON_CHARS),
    )


def start_lines(status: RunStatus) -> tuple[str, ...]:
    """Of the newest attempt: the nodes that train, the start inside its job, and ranks that are slow."""
    last = status.attempt
    if last is None or last.is_over or not last.training:
        return ()
    others = (("spare", status.spares), ("lost", status.lost), ("left out", status.left_out))
    words = "".join(f"; {word}: {fold(nodes)}" for word, nodes in others if nodes)
    lines = [f"\ntraining on {fold(last.training)}{words}"]
    if last.launch:
        took = f", the last one in {duration(status.recovery_s)}" if status.recovery_s is not None else ""
        times = "once" if last.launch == 1 else f"{last.launch} times"
        lines.append(f"started again inside its job {times}{took}")
    lines += [f"straggler: {one_line(text)}" for text in last.stragglers]
    return tuple(lines)


def _steps(status: RunStatus) -> str:
    final = f"/{status.run.final_step}" if status.run.final_step is not None else ""
    return f"{number(status.step)}{final}"


def mtbf_words(mtbf: Mtbf | None) -> str:
    """MTBF with its interval; a lower bound while nothing has failed."""
    if mtbf is None:
        return "-"
    if mtbf.mtbf_h is None or mtbf.high_h is None:
        return f"> {duration(mtbf.low_h * 3600)}"
    low, high = duration(mtbf.low_h * 3600), duration(mtbf.high_h * 3600)
    return f"{duration(mtbf.mtbf_h * 3600)} ({low} to {high})"


def fold(nodes: Sequence[str]) -> str:
    """Node names as Slurm writes them: n[1-3]."""
    if len(nodes) <= 2:
        return ",".join(nodes)
    from slurm.hostlist import fold_nodes

    return fold_nodes(tuple(nodes))
