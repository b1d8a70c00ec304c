"""Requests of the control socket at the ledger: looked up, decided (supervisor.verbs), committed, then answered."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Protocol

import structlog

from supervisor.control import Request, failure
from supervisor.ledger import LedgerUnusable
from supervisor.model import (
    Attempt,
    Intent,
    IntentState,
    Run,
)
from supervisor.submissions import Submission
from supervisor.verbs import (
    ENDED,
    HANDS_IN,
    INTERNAL,
    LEDGER,
    NAMES_RUNS,
    Asked,
    Decision,
    Jobs,
    Rights,
    by,
    choose_run_name,
    decide,
    is_dry_run,
    refuse,
)


class RequestLedger(Protocol):
    """What requests need of the store."""

    def load_run(self, name: str) -> Run | None:
        """The run of that name, or None."""
        ...

    def load_runs(self) -> tuple[Run, ...]:
        """All runs."""
        ...

    def load_attempts(self, run: str) -> tuple[Attempt, ...]:
        """The attempts of a run, ascending."""
        ...

    def load_aside(self, run: str) -> tuple[Attempt, ...]:
        """Those that are or were queued ahead and never trained."""
        ...

    def load_intents(self, state: IntentState | None = None) -> tuple[Intent, ...]:
        """The newest intents, newest last."""
        ...

    def add_run(
        self,
        run: Run,
        now: datetime,
        *,
        attempts: tuple[Attempt, ...] = (),
        intents: tuple[Intent, ...] = (),
        in_place_of: Run | None = None,
    ) -> Run:
        """Keep a new run, with what is known and meant of it already; `in_place_of` one that never had a job."""
        ...

    def set_run(self, run: Run, now: datetime, why: str) -> Run:
        """Keep what is wanted of a run from now on."""
        ...

    def set_paused(self, is_paused: bool, now: datetime, who: str) -> None:
        """Pause or resume the whole service."""
        ...

    def record_request(self, who_uid: int, text: str, now: datetime) -> None:
        """Keep who asked for what."""
        ...


class Keeper(Protocol):
    """What requests need of the place where handed-in scripts are kept (supervisor.submissions)."""

    def keep(self, run: str, submission: Submission) -> None:
        """Keep what was handed in, on disk when the call returns. Raises OSError."""
        ...

    def drop(self, run: str) -> None:
        """Remove it."""
        ...


def handle(
    request: Request,
    ledger: RequestLedger,
    now: datetime,
    rights: Rights,
    keeper: Keeper | None = None,
    jobs: Jobs | None = None,
) -> dict[str, Any]:
    """The answer to one request, after its effect is committed.

    A ledger that can't be written now (disk full, locked) is an answer too: nothing was changed, the service goes on.
    """
    try:
        asked = _look_up(request, ledger, now, rights, jobs)
        decision = _decide_safely(asked)
        if decision.changes and not is_dry_run(request):
            _commit(asked, decision, ledger, keeper)
    except (LedgerUnusable, OSError) as error:
        return failure(LEDGER, f"nothing was changed: {error}")
    is_tried = is_dry_run(request) and decision.reply.get("ok")
    return {**decision.reply, "dry_run": True} if is_tried else decision.reply


def _look_up(request: Request, ledger: RequestLedger, now: datetime, rights: Rights, jobs: Jobs | None) -> Asked:
    name = choose_run_name(request)
    asks_job = request.verb == "job" and name is not None
    needs_attempts = request.verb in {"job", "save", "drill"} and name is not None
    runs = ledger.load_runs() if request.verb in HANDS_IN else ()
    attempts = ledger.load_attempts(name) if needs_attempts and name else ()
    if request.verb in NAMES_RUNS:
        names = [run.name for run in runs if run.state not in ENDED]
        attempts = tuple(a for name in names for a in (*ledger.load_attempts(name), *ledger.load_aside(name)))
    return Asked(
        request=request,
        name=name,
        known=ledger.load_run(name) if name else None,
        now=now,
        rights=rights,
        runs=runs,
        attempts=attempts,
        jobs=jobs,
        refusals=tuple(i for i in ledger.load_intents() if i.run == name) if asks_job else (),
    )


def _commit(asked: Asked, decision: Decision, ledger: RequestLedger, keeper: Keeper | None) -> None:
    request, now = asked.request, asked.now
    text = f"{request.verb} {decision.run.name}" if decision.run else request.verb
    if decision.run is not None and decision.submission is not None:
        _add_script(decision.run, decision, ledger, now, keeper, asked.runs)
    elif decision.run is not None and asked.known is None:
        ledger.add_run(decision.run, now)
    elif decision.run is not None:
        ledger.set_run(decision.run, now, decision.why)
    if decision.is_paused is not None:
        ledger.set_paused(decision.is_paused, now, by(request))
    ledger.record_request(request.peer.uid, text, now)


def _add_script(
    run: Run,
    decision: Decision,
    ledger: RequestLedger,
    now: datetime,
    keeper: Keeper | None,
    runs: tuple[Run, ...],
) -> None:
    """What was handed in is on disk before the run is: a run without its script could not be submitted."""
    if keeper is None or decision.submission is None:
        raise LedgerUnusable("there is no place beside the ledger for what was handed in")
    keeper.keep(run.name, decision.submission)
    try:
        ledger.add_run(
            run,
            now,
            attempts=decision.attempts,
            intents=decision.intents,
            in_place_of=next((old for old in runs if old.name == run.name), None),
        )
    except BaseException:
        keeper.drop(run.name)
        raise


def _decide_safely(asked: Asked) -> Decision:
    """A request that meets a defect gets an answer, and the service goes on: nothing was committed yet."""
    try:
        return decide(asked)
    except (LedgerUnusable, OSError):
        raise
    except Exception:  # noqa: BLE001 - whatever it is, one person's request does not end the service
        verb = asked.request.verb[:40]
        structlog.get_logger("requests").exception("request.failed", verb=verb, uid=asked.request.peer.uid)
        return refuse(INTERNAL, "nothing was changed: a defect of the service; its log has the details")
