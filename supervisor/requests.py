"""What the verbs of the control socket mean for the ledger: checked, authorised, committed, then answered.

Nothing that the client says is believed: the run file is parsed again, the owner is who the kernel says, and no file
of a user is opened here (the daemon may be root). Deciding is pure but for the names of accounts (`decide`); `handle`
reads and commits around it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from supervisor.accounts import user_name
from supervisor.config import ConfigError, parse_run_file
from supervisor.control import Peer, Request, failure
from supervisor.ledger import LedgerUnusable
from supervisor.model import Run, RunState
from supervisor.tomlfile import load_toml
from trainer.contract import is_run_name

# Codes of answers; the command line maps them to exit codes.
BAD_INPUT = "bad_input"
NAME_IN_USE = "name_in_use"
UNKNOWN_RUN = "unknown_run"
NOT_ALLOWED = "not_allowed"
CONFLICT = "conflict"
LEDGER = "ledger"

MAX_RUN_FILE_CHARS = 128 * 1024


class RequestLedger(Protocol):
    """What requests need of the store."""

    def load_run(self, name: str) -> Run | None:
        """The run of that name, or None."""
        ...

    def add_run(self, run: Run, now: datetime) -> Run:
        """Keep a new run."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Rights:
    """Who may change what, beside the owner of a run and root."""

    service_uid: int = 0  # the daemon's own account
    admin_gid: int | None = None  # members may change every run


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request and what is known about it."""

    request: Request
    name: str | None  # the run it is about; None: the whole service
    known: Run | None  # what the ledger has of that run
    now: datetime
    rights: Rights


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The answer, and what is to be committed before it is given."""

    reply: dict[str, Any] = field(default_factory=dict)
    run: Run | None = None
    why: str = ""  # for the history of the run
    is_paused: bool | None = None

    @property
    def changes(self) -> bool:
        """True when there is something to commit."""
        return self.run is not None or self.is_paused is not None


def handle(request: Request, ledger: RequestLedger, now: datetime, rights: Rights) -> dict[str, Any]:
    """The answer to one request, after its effect is committed.

    A ledger that can't be written now (disk full, locked) is an answer too: nothing was changed, the service goes on.
    """
    name = _run_name(request)
    try:
        known = ledger.load_run(name) if name else None
        decision = decide(Asked(request=request, name=name, known=known, now=now, rights=rights))
        if decision.changes and not _is_dry_run(request):
            _commit(request, decision, ledger, now, is_new=known is None)
    except LedgerUnusable as error:
        return failure(LEDGER, f"nothing was changed: {error}")
    return decision.reply


def _commit(request: Request, decision: Decision, ledger: RequestLedger, now: datetime, *, is_new: bool) -> None:
    text = f"{request.verb} {decision.run.name}" if decision.run else request.verb
    if decision.run is not None and is_new:
        ledger.add_run(decision.run, now)
    elif decision.run is not None:
        ledger.set_run(decision.run, now, decision.why)
    if decision.is_paused is not None:
        ledger.set_paused(decision.is_paused, now, _by(request))
    ledger.record_request(request.peer.uid, text, now)


def decide(asked: Asked) -> Decision:
    """What a request means."""
    request = asked.request
    verb = _VERBS.get(request.verb)
    if verb is None:
        return _refuse(BAD_INPUT, f'there is no verb "{request.verb[:40]}"; known: {", ".join(_VERBS)}')
    return verb(asked)


def authorise(verb: str, peer: Peer, owner_uid: int | None, rights: Rights) -> bool:
    """Whether `peer` may do `verb` to a run of `owner_uid` (None: to the whole service).

    Anyone may ask whether the daemon is there and submit as himself; the owner of a run, root, the daemon's own
    account and the admin group may change it.
    """
    if verb in {"ping", "submit"}:
        return True
    if peer.uid in {0, rights.service_uid, owner_uid}:
        return True
    return rights.admin_gid is not None and rights.admin_gid in peer.groups


# ---------------------------------------------------------------- one function per verb


def _ping(_: Asked) -> Decision:
    return Decision(reply={"ok": True, "message": "the daemon is running"})


def _submit(asked: Asked) -> Decision:
    request, known = asked.request, asked.known
    text, path = request.body.get("text"), request.body.get("path")
    if not isinstance(text, str) or not isinstance(path, str) or not path.startswith("/") or "\0" in path:
        return _refuse(BAD_INPUT, "submit needs the text of a run file and its absolute path")
    if len(text) > MAX_RUN_FILE_CHARS:
        return _refuse(BAD_INPUT, f"the run file has more than {MAX_RUN_FILE_CHARS} characters")
    try:
        spec = parse_run_file(text, path=Path(path))
    except ConfigError as error:
        return _refuse(BAD_INPUT, str(error))
    if known is not None:
        return _refuse(NAME_IN_USE, _in_use(known))
    owner = _owner(request, asked.rights)
    if isinstance(owner, Decision):
        return owner
    uid, gid = owner
    run = Run(
        spec=spec,
        reason=_by(request),
        owner_uid=uid,
        owner_gid=gid,
        created_at=asked.now,
        changed_at=asked.now,
    )
    return Decision(run=run, why=run.reason, reply=_granted(request, run, f"run {run.name} is submitted"))


def _stop(asked: Asked) -> Decision:
    run = _changeable(asked)
    if isinstance(run, Decision):
        return run
    if run.state is RunState.STOPPING:
        return _nothing_to_do(asked.request, run, "stopping already")
    if run.state in _ENDED:
        return _refuse(CONFLICT, f"run {run.name} is {run.state} already")
    changes = {"state": RunState.STOPPING, "is_paused": False, "reason": _by(asked.request)}
    return _change(asked, run, f"run {run.name} is stopping", **changes)


def _release(asked: Asked) -> Decision:
    run = _changeable(asked)
    if isinstance(run, Decision):
        return run
    if run.state not in {RunState.HELD, RunState.STOPPED}:
        paused = f"; `supervisor resume {run.name}` ends its pause" if run.is_paused else ""
        return _refuse(CONFLICT, f"run {run.name} is {run.state}: only a held or a stopped run can be released{paused}")
    changes = {"state": RunState.ACTIVE, "released_at": asked.now, "reason": ""}
    return _change(asked, run, f"run {run.name} is released", **changes)


def _pause(asked: Asked) -> Decision:
    return _set_pause(asked, is_paused=True)


def _resume(asked: Asked) -> Decision:
    return _set_pause(asked, is_paused=False)


def _set_pause(asked: Asked, *, is_paused: bool) -> Decision:
    request = asked.request
    if "run" not in request.body or request.body["run"] is None:
        return _pause_service(asked, is_paused=is_paused)
    run = _changeable(asked)
    if isinstance(run, Decision):
        return run
    if run.state in _ENDED:
        return _refuse(CONFLICT, f"run {run.name} is {run.state}{_way_on(run)}")
    if run.is_paused == is_paused:
        return _nothing_to_do(request, run, "paused already" if is_paused else f"not paused{_way_on(run)}")
    # Why a run is held stays said; what was true of a pause must not stand as the reason of a run that goes on.
    reason = run.reason if run.state is not RunState.ACTIVE else _by(request) if is_paused else ""
    word = f"paused: {_PAUSED}" if is_paused else f"resumed{_way_on(run)}"
    return _change(asked, run, f"run {run.name} is {word}", is_paused=is_paused, reason=reason)


def _pause_service(asked: Asked, *, is_paused: bool) -> Decision:
    request = asked.request
    if not authorise(request.verb, request.peer, None, asked.rights):
        return _not_allowed(request, "the whole service")
    message = f"the service is paused: {_PAUSED}" if is_paused else "the service is resumed"
    if _is_dry_run(request):
        message = f"dry run: would {request.verb} the whole service"
    return Decision(is_paused=is_paused, reply={"ok": True, "run": None, "message": message})


def _way_on(run: Run) -> str:
    """How a run goes on that waits for a person; empty for one that does not."""
    if run.state not in {RunState.HELD, RunState.STOPPED}:
        return ""
    return f"; it is {run.state}: `supervisor release {run.name}` starts it again"


_PAUSED = "running jobs go on, nothing is submitted, cancelled or drained"
_ENDED = frozenset({RunState.STOPPED, RunState.FINISHED})
_Verb = Callable[[Asked], Decision]
_VERBS: Mapping[str, _Verb] = {
    "ping": _ping,
    "submit": _submit,
    "stop": _stop,
    "pause": _pause,
    "resume": _resume,
    "release": _release,
}


# ---------------------------------------------------------------- parts


def _run_name(request: Request) -> str | None:
    """The run a request is about: named, or in the text of a run file."""
    name = request.body.get("run")
    if request.verb == "submit":
        try:
            name = load_toml(str(request.body.get("text", ""))[: MAX_RUN_FILE_CHARS + 1], "run file").get("name")
        except ConfigError:
            return None
    return name if isinstance(name, str) and is_run_name(name) else None


def _changeable(asked: Asked) -> Run | Decision:
    """The run, when it is there and the peer may change it; else the refusal."""
    request, known = asked.request, asked.known
    if asked.name is None:
        return _refuse(BAD_INPUT, f"{request.verb} needs the name of a run")
    if known is None:
        return _refuse(UNKNOWN_RUN, f'there is no run "{asked.name}"; `supervisor status` lists them')
    if not authorise(request.verb, request.peer, known.owner_uid, asked.rights):
        return _not_allowed(request, f"run {known.name}")
    return known


def _change(asked: Asked, run: Run, message: str, **changes: Any) -> Decision:
    changed = dataclasses.replace(run, changed_at=asked.now, **changes)
    return Decision(run=changed, why=_by(asked.request), reply=_granted(asked.request, changed, message))


def _nothing_to_do(request: Request, run: Run, state: str) -> Decision:
    message = f"run {run.name} is {state}"
    if _is_dry_run(request):
        message = f"dry run: nothing would change: {message}"
    return Decision(reply=_answer(run, message))


_DONE_WORDS = {"stop": "stopped", "submit": "submitted"}


def _by(request: Request) -> str:
    """What was done, and who did it."""
    return f"{_DONE_WORDS.get(request.verb, f'{request.verb}d')} by {user_name(request.peer.uid)}"


def _owner(request: Request, rights: Rights) -> tuple[int, int] | Decision:
    """(uid, gid) that the run belongs to: the peer, or whom root names."""
    uid, gid = request.body.get("uid", request.peer.uid), request.body.get("gid", request.peer.gid)
    if not _is_id(uid) or not _is_id(gid):
        return _refuse(BAD_INPUT, "uid and gid are whole numbers")
    if (uid, gid) != (request.peer.uid, request.peer.gid) and request.peer.uid != 0:
        return _refuse(NOT_ALLOWED, "only root may submit for another user")
    if rights.service_uid not in {0, uid}:
        return _refuse(
            NOT_ALLOWED,
            f"this service runs as {user_name(rights.service_uid)} and can submit only that account's jobs, not those "
            f"of {user_name(uid)}",
        )
    return uid, gid


def _is_id(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**32 - 1


def _granted(request: Request, run: Run, message: str) -> dict[str, Any]:
    if _is_dry_run(request):
        message = f"dry run: would {request.verb} run {run.name}"
    return _answer(run, message)


def _answer(run: Run, message: str) -> dict[str, Any]:
    return {"ok": True, "run": run.name, "state": str(run.state), "run_dir": str(run.spec.run_dir), "message": message}


def _in_use(known: Run) -> str:
    way = f", or `supervisor release {known.name}` starts that run again" if _way_on(known) else ""
    return (
        f'the name "{known.name}" is in use: that run is {known.state} since {known.changed_at:%Y-%m-%d %H:%M} UTC. '
        f"A name is used once: choose another{way}"
    )


def _not_allowed(request: Request, what: str) -> Decision:
    return _refuse(
        NOT_ALLOWED,
        f"{user_name(request.peer.uid)} may not {request.verb} {what}: its owner, root and the admin group may",
    )


def _refuse(code: str, message: str) -> Decision:
    return Decision(reply=failure(code, message))


def _is_dry_run(request: Request) -> bool:
    return bool(request.body.get("dry_run"))
