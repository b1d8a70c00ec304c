"""What each verb of the control socket means: checked, authorised, decided. Pure but for the names of accounts.

Nothing that the client says is believed: what it hands in is parsed again, the owner is who the kernel says, and no
file of a user is opened here (the daemon may be root). supervisor.requests reads and commits around it.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from slurm.inherited import Inherited, check_inherited
from slurm.sbatch_options import BadSubmission
from slurm.types import JobRecord
from supervisor.accounts import find_account, user_name
from supervisor.config import ConfigError, parse_run_file
from supervisor.control import Peer, Request, failure
from supervisor.core.restarts import REFUSED
from supervisor.model import (
    DRILLS,
    Attempt,
    AttemptState,
    Drill,
    Fresh,
    Intent,
    IntentKind,
    Run,
    RunSpec,
    RunState,
    Stale,
)
from supervisor.scripts import Handed, NotSupervised, Script, read_handed, read_script, settle_names
from supervisor.submissions import Submission
from supervisor.tomlfile import load_toml
from trainer.contract import is_run_name

# Codes of answers; the command line maps them to exit codes.
BAD_INPUT = "bad_input"
NAME_IN_USE = "name_in_use"
UNKNOWN_RUN = "unknown_run"
NOT_ALLOWED = "not_allowed"
CONFLICT = "conflict"
LEDGER = "ledger"
LOOK_AGAIN = "look_again"  # Slurm is being asked: the same request again, soon
UNKNOWN_JOB = "unknown_job"
SLURM = "slurm"  # Slurm does not answer
INTERNAL = "internal"  # a defect of this program
SBATCH = "sbatch"  # what sbatch itself refuses: `stderr` and `exit_code` are its own

MAX_RUN_FILE_CHARS = 128 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Rights:
    """Who may change what, beside the owner of a run and root."""

    service_uid: int = 0  # the daemon's own account
    admin_gid: int | None = None  # members may change every run


Jobs = Fresh[Mapping[int, JobRecord]] | Stale


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request and what is known about it."""

    request: Request
    name: str | None  # the run it is about; None: the whole service
    known: Run | None  # what the ledger has of that run
    now: datetime
    rights: Rights
    runs: tuple[Run, ...] = ()  # all of them, where names are given
    attempts: tuple[Attempt, ...] = ()  # of the run; of all that go on, where names are given
    refusals: tuple[Intent, ...] = ()  # acts of the run that Slurm refused
    jobs: Jobs | None = None  # Slurm's newest answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The answer, and what is to be committed before it is given."""

    reply: dict[str, Any] = field(default_factory=dict)
    run: Run | None = None
    why: str = ""  # for the history of the run
    is_paused: bool | None = None
    submission: Submission | None = None  # to be kept beside the ledger before the run is
    attempts: tuple[Attempt, ...] = ()  # with the run
    intents: tuple[Intent, ...] = ()

    @property
    def changes(self) -> bool:
        """True when there is something to commit."""
        return self.run is not None or self.is_paused is not None


def decide(asked: Asked) -> Decision:
    """What a request means."""
    request = asked.request
    verb = _VERBS.get(request.verb)
    if verb is None:
        return refuse(BAD_INPUT, f'there is no verb "{request.verb[:40]}"; known: {", ".join(_VERBS)}')
    return verb(asked)


def authorise(verb: str, peer: Peer, owner_uid: int | None, rights: Rights) -> bool:
    """Whether `peer` may do `verb` to a run of `owner_uid` (None: to the whole service).

    Anyone may ask whether the daemon is there and submit as himself; the owner of a run, root, the daemon's own
    account and the admin group may change it.
    """
    if verb in {"ping", "submit", "sbatch", "adopt", "job"}:
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
        return refuse(BAD_INPUT, "submit needs the text of a run file and its absolute path")
    if len(text) > MAX_RUN_FILE_CHARS:
        return refuse(BAD_INPUT, f"the run file has more than {MAX_RUN_FILE_CHARS} characters")
    try:
        spec = parse_run_file(text, path=Path(path))
    except ConfigError as error:
        return refuse(BAD_INPUT, str(error))
    try:
        inherited = check_inherited(request.body.get("umask"), request.body.get("limits"))
    except ValueError as error:
        return refuse(BAD_INPUT, str(error))
    if known is not None:
        return refuse(NAME_IN_USE, _in_use(known))
    owner = _owner(request, asked.rights)
    if isinstance(owner, Decision):
        return owner
    uid, gid = owner
    run = Run(
        spec=spec,
        inherited=inherited,
        reason=by(request),
        owner_uid=uid,
        owner_gid=gid,
        created_at=asked.now,
        changed_at=asked.now,
    )
    reply = {**_granted(request, run, f"run {run.name} is submitted"), "notes": _sharing_notes(asked, spec)}
    return Decision(run=run, why=run.reason, reply=reply)


def _sbatch(asked: Asked) -> Decision:
    """A person's own batch script: read again as the command has read it, named, and kept."""
    request = asked.request
    owner = _owner(request, asked.rights)
    if isinstance(owner, Decision):
        return owner
    read = _read_script(request)
    if isinstance(read, Decision):
        return read
    handed, script = read
    named = _name_script(asked, script, owner[0])
    if isinstance(named, Decision):
        return named
    run = _script_run(asked, named, owner, handed.inherited)
    reply = {
        **_granted(request, run, f"run {run.name} is submitted"),
        "job_name": run.job_name,
        "notes": [*named.notes, *_dependency_notes(asked, named), *_sharing_notes(asked, named.spec)],
    }
    submission = Submission(text=handed.text, environment=script.environment)
    return Decision(run=run, why=run.reason, reply=reply, submission=submission)


def _dependency_notes(asked: Asked, script: Script) -> list[str]:
    """Jobs that are waited for and belong to runs: Slurm knows the job, and nothing of the run."""
    waited_for = {int(number) for number in re.findall(r":([0-9]{1,10})(?![0-9])", script.script.dependency)}
    return [
        f"--dependency: job {attempt.job_id} is attempt {attempt.number} of run {attempt.run}. When it fails, the run "
        "goes on in another job, which this dependency does not wait for; `supervisor sbatch --wait` waits for a whole "
        "run"
        for attempt in asked.attempts
        if attempt.job_id in waited_for
    ]


def _sharing_notes(asked: Asked, spec: RunSpec) -> list[str]:
    """Live runs that save in the same folder: each would take the other's checkpoints for its own."""
    folder = spec.checkpoint.directory
    if folder is None:
        return []
    place = os.path.normpath(folder)
    return [
        f"checkpoint directory {folder}: run {run.name}, which is {run.state}, saves there too: each would resume from "
        "what the other has saved"
        for run in asked.runs
        if run.state not in ENDED and run.name != spec.name and run.spec.checkpoint.directory is not None
        if os.path.normpath(run.spec.checkpoint.directory) == place
    ]


def _read_script(request: Request) -> tuple[Handed, Script] | Decision:
    try:
        handed = read_handed(request.body)
        return handed, read_script(handed)
    except BadSubmission as error:
        says = {"stderr": error.stderr, "exit_code": error.exit_code}
        return Decision(reply={**failure(SBATCH, str(error)), **says})
    except NotSupervised as error:
        return refuse(BAD_INPUT, str(error))


def _name_script(asked: Asked, script: Script, owner_uid: int) -> Script | Decision:
    taken = {run.name: run for run in asked.runs if not _was_refused(run, owner_uid)}
    if script.has_name and script.spec.name in taken:
        return refuse(NAME_IN_USE, _in_use(taken[script.spec.name]))
    busy = {run.job_name: run for run in asked.runs if run.owner_uid == owner_uid and run.state not in ENDED}
    return settle_names(script, taken=taken.keys(), job_names=busy)


def _was_refused(run: Run, owner_uid: int) -> bool:
    """True for a script of this owner that sbatch has refused: there was no job, and the name is free for the next."""
    is_refused = run.script is not None and run.state is RunState.STOPPED and run.reason.startswith(REFUSED)
    return is_refused and run.owner_uid == owner_uid


def _script_run(asked: Asked, script: Script, owner: tuple[int, int], inherited: Inherited) -> Run:
    return Run(
        spec=script.spec,
        script=script.script,
        inherited=inherited,
        reason=by(asked.request),
        owner_uid=owner[0],
        owner_gid=owner[1],
        created_at=asked.now,
        changed_at=asked.now,
    )


# ---- adopt

_ANSWER_MAX_AGE_S = 4.0  # a job is adopted by what Slurm says now
_MAX_WAITED_S = 3600


def _adopt(asked: Asked) -> Decision:
    """A job that is there already: checked against Slurm's own answer, then a run with its first attempt."""
    request = asked.request
    job = _find_job(asked)
    if isinstance(job, Decision):
        return job
    owner = _owner_of_job(asked, job)
    if isinstance(owner, Decision):
        return owner
    read = _read_script(request)
    if isinstance(read, Decision):
        return read
    handed, script = read
    # Its jobs keep the name that the job has: singleton must see it.
    script = dataclasses.replace(script, script=dataclasses.replace(script.script, job_name=job.name))
    named = _name_script(asked, script, owner[0])
    if isinstance(named, Decision):
        return named
    run = _script_run(asked, named, owner, handed.inherited)
    attempt = _adopted_attempt(run, job, asked.now)
    claim = Intent(
        kind=IntentKind.CLAIM,
        key=f"claim:{job.job_id}:{run.name}",
        reason=f"job {job.job_id} is adopted",
        run=run.name,
        attempt=attempt.number,
        job_id=job.job_id,
    )
    reply = {
        **_granted(request, run, f"job {job.job_id} is adopted as run {run.name}"),
        "job_id": job.job_id,
        "notes": [*named.notes, *_sharing_notes(asked, named.spec)],
    }
    submission = Submission(text=handed.text, environment=script.environment)
    return Decision(run=run, why=run.reason, reply=reply, submission=submission, attempts=(attempt,), intents=(claim,))


def _find_job(asked: Asked) -> JobRecord | Decision:
    job_id, jobs = asked.request.body.get("job_id"), asked.jobs
    if type(job_id) is not int or not 0 < job_id < 2**32:
        return refuse(BAD_INPUT, "adopt needs the number of a job")
    if jobs is None or isinstance(jobs, Stale):
        why = f": {jobs.why}" if jobs is not None else ""
        return refuse(SLURM, f"Slurm does not answer now, so no job can be adopted{why}")
    waited_s = asked.request.body.get("waited_s", 0)
    if not _is_wait(waited_s):
        return refuse(BAD_INPUT, f"waited_s is a number of seconds from 0 to {_MAX_WAITED_S}")
    # An answer that was asked for before the request was may not hold a job that the person has seen already.
    if (asked.now - jobs.asked_at).total_seconds() > min(waited_s, _ANSWER_MAX_AGE_S):
        return refuse(LOOK_AGAIN, "Slurm is being asked")
    job = jobs.value.get(job_id)
    if job is None:
        return refuse(UNKNOWN_JOB, f"Slurm knows no job {job_id}")
    if job.is_ended:
        return refuse(CONFLICT, f"job {job_id} has ended already ({job.raw_state}): submit it with `supervisor sbatch`")
    ours = next((a for a in asked.attempts if a.job_id == job_id or a.token == job.comment), None)
    if ours is not None:
        return refuse(CONFLICT, f"job {job_id} is supervised already: it is attempt {ours.number} of run {ours.run}")
    return job


def _owner_of_job(asked: Asked, job: JobRecord) -> tuple[int, int] | Decision:
    account = find_account(job.user)
    if account is None:
        return refuse(BAD_INPUT, f"job {job.job_id} belongs to {job.user!r}, whom this host does not know")
    if asked.request.peer.uid not in {0, account[0]}:
        # The admin group neither: the script and the environment that come with the request run as the job's owner.
        return refuse(
            NOT_ALLOWED,
            f"job {job.job_id} belongs to {job.user}: {user_name(asked.request.peer.uid)} may not adopt it; its owner "
            "and root may",
        )
    if asked.rights.service_uid not in {0, account[0]}:
        return refuse(NOT_ALLOWED, _one_account(asked.rights, account[0]))
    return account


def _adopted_attempt(run: Run, job: JobRecord, now: datetime) -> Attempt:
    submit_at = job.submit_at or now
    return Attempt(
        run=run.name,
        number=1,
        token=f"sup:{run.name}:1:{int(run.created_at.timestamp()):x}",
        state=AttemptState.SUBMITTED,
        job_id=job.job_id,
        nodes_wanted=len(job.nodes) or run.spec.nodes.max,
        planned_at=max(now, submit_at + timedelta(microseconds=1)),
        submitted_at=submit_at,
    )


def _job(asked: Asked) -> Decision:
    """What has become of a run's newest submission: what `supervisor sbatch` waits for."""
    if asked.known is None or asked.name is None:
        return refuse(UNKNOWN_RUN, f'there is no run "{asked.name}"')
    run, last = asked.known, asked.attempts[-1] if asked.attempts else None
    submits = [i for i in asked.refusals if i.key == f"submit:{run.name}:1" and i.created_at >= run.created_at]
    report = {
        "attempt": last.number if last else 0,
        "job_id": last.job_id if last else None,
        "end": str(last.end) if last and last.end else None,
        "exit_code": last.exit_code if last else None,
        "reason": run.reason,
        "outcome": submits[-1].outcome if submits else "",
    }
    return Decision(reply={**_answer(run, f"run {run.name} is {run.state}"), **report})


def _stop(asked: Asked) -> Decision:
    run = _changeable(asked)
    if isinstance(run, Decision):
        return run
    if run.state is RunState.STOPPING:
        return _nothing_to_do(asked.request, run, "stopping already")
    if run.state in ENDED:
        return refuse(CONFLICT, f"run {run.name} is {run.state} already")
    changes = {"state": RunState.STOPPING, "is_paused": False, "reason": by(asked.request)}
    return _change(asked, run, f"run {run.name} is stopping", **changes)


def _release(asked: Asked) -> Decision:
    run = _changeable(asked)
    if isinstance(run, Decision):
        return run
    if run.state not in {RunState.HELD, RunState.STOPPED}:
        paused = f"; `supervisor resume {run.name}` ends its pause" if run.is_paused else ""
        return refuse(CONFLICT, f"run {run.name} is {run.state}: only a held or a stopped run can be released{paused}")
    changes = {"state": RunState.ACTIVE, "released_at": asked.now, "reason": ""}
    if not asked.request.body.get("skip_batches"):
        return _change(asked, run, f"run {run.name} is released", **changes)
    message = f"run {run.name} is released, and leaves out the batches at which its loss went wrong"
    return _change(asked, run, message, skips_released_at=asked.now, **changes)


def _save(asked: Asked) -> Decision:
    """Have the running training save now; it is told within a cycle, and saves at its next step."""
    run = _changeable(asked)
    if isinstance(run, Decision):
        return run
    last = max(asked.attempts, key=lambda a: a.number, default=None)
    if last is None or last.state is not AttemptState.RUNNING:
        return refuse(CONFLICT, f"run {run.name} does not run now: there is nothing to save")
    is_silent = not last.save_costs_s and last.saved_step is None and not last.save_failures
    doubt = "; it has told of no save yet, and saves now only if it looks at its advice.json" if is_silent else ""
    message = f"run {run.name} is asked to save now, after step {last.last_step or 0}{doubt}"
    return _change(asked, run, message, save_asked_at=asked.now)


def _drill(asked: Asked) -> Decision:
    """Have the launcher of the running attempt make a failure, once; it is told within a cycle."""
    run = _changeable(asked)
    if isinstance(run, Decision):
        return run
    last = max(asked.attempts, key=lambda a: a.number, default=None)
    if last is None or last.state is not AttemptState.RUNNING:
        return refuse(CONFLICT, f"run {run.name} does not run now: nothing can fail on purpose")
    drill = _read_drill(asked.request.body, last)
    if isinstance(drill, str):
        return refuse(BAD_INPUT, drill)
    if not drill.is_made and (run.script is not None or not run.spec.restart.in_job):
        return refuse(CONFLICT, f"run {run.name} is not started again inside its job: no launcher takes a drill")
    if run.drill is not None and run.drill.id == drill.id:
        return _nothing_to_do(asked.request, run, f"drill {drill.id} was asked for already")
    where = f" on {drill.node}" if drill.node else ""
    when = f" once step {drill.at_step} is done" if drill.at_step is not None else " now"
    by_whom = ", by who asks for it" if drill.is_made else ""
    message = f"run {run.name}, attempt {last.number}: a failure of kind {drill.kind} is made{where}{when}{by_whom}"
    decision = _change(asked, run, message, drill=dataclasses.replace(drill, asked_at=asked.now.timestamp()))
    return dataclasses.replace(decision, reply={**decision.reply, "id": drill.id, "attempt": last.number})


def _read_drill(body: Mapping[str, Any], last: Attempt) -> Drill | str:
    """The drill that a request describes, or what is wrong with it."""
    kind, node, at_step, given, is_made = (body.get(key) for key in ("kind", "node", "at_step", "id", "is_made"))
    if kind not in DRILLS:
        return f"kind must be one of {', '.join(DRILLS)}"
    if not isinstance(given, str) or not re.fullmatch(r"[0-9a-f]{1,32}", given):
        return "id must be up to 32 hex digits"
    if at_step is not None and (type(at_step) is not int or not 0 <= at_step < 2**53):
        return "at_step must be a step, or null for now"
    if node is not None and not isinstance(node, str):
        return "node must be a name"
    if node and node not in last.nodes:
        return f'"{node[:80]}" is no node of attempt {last.number}, which has {", ".join(last.nodes[:20])}'
    if is_made is not None and type(is_made) is not bool:
        return "is_made must be true or false"
    return Drill(id=given, kind=kind, node=node or "", at_step=at_step, attempt=last.number, is_made=bool(is_made))


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
    if run.state in ENDED:
        return refuse(CONFLICT, _ended(run))
    if run.is_paused == is_paused:
        return _nothing_to_do(request, run, "paused already" if is_paused else f"not paused{_way_on(run)}")
    # Why a run is held stays said; what was true of a pause must not stand as the reason of a run that goes on.
    reason = run.reason if run.state is not RunState.ACTIVE else by(request) if is_paused else ""
    word = f"paused: {_PAUSED}" if is_paused else f"resumed{_way_on(run)}"
    return _change(asked, run, f"run {run.name} is {word}", is_paused=is_paused, reason=reason)


def _pause_service(asked: Asked, *, is_paused: bool) -> Decision:
    request = asked.request
    if not authorise(request.verb, request.peer, None, asked.rights):
        return _not_allowed(request, "the whole service", who="root, the service's own account and the admin group")
    message = f"the service is paused: {_PAUSED}" if is_paused else "the service is resumed"
    if is_dry_run(request):
        message = f"dry run: would {request.verb} the whole service"
    return Decision(is_paused=is_paused, reply={"ok": True, "run": None, "message": message})


def _ended(run: Run) -> str:
    way = f": `supervisor release {run.name}` starts it again" if run.state is RunState.STOPPED else ""
    return f"run {run.name} is {run.state}{way}"


def _way_on(run: Run) -> str:
    """How a run goes on that waits for a person; empty for one that does not."""
    if run.state not in {RunState.HELD, RunState.STOPPED}:
        return ""
    return f"; it is {run.state}: `supervisor release {run.name}` starts it again"


_PAUSED = "running jobs go on, nothing is submitted, cancelled or drained"
ENDED = frozenset({RunState.STOPPED, RunState.FINISHED})
_Verb = Callable[[Asked], Decision]
_VERBS: Mapping[str, _Verb] = {
    "ping": _ping,
    "job": _job,
    "submit": _submit,
    "sbatch": _sbatch,
    "adopt": _adopt,
    "stop": _stop,
    "pause": _pause,
    "resume": _resume,
    "release": _release,
    "save": _save,
    "drill": _drill,
}
NAMES_RUNS = frozenset({"sbatch", "adopt"})
HANDS_IN = NAMES_RUNS | {"submit"}
READING = frozenset({"ping", "job"})  # verbs that change nothing


# ---------------------------------------------------------------- parts


def choose_run_name(request: Request) -> str | None:
    """The run a request is about: named, or in the text of a run file."""
    name = request.body.get("run")
    if request.verb in NAMES_RUNS:
        return None  # chosen when it has been read
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
        return refuse(BAD_INPUT, f"{request.verb} needs the name of a run")
    if known is None:
        return refuse(UNKNOWN_RUN, f'there is no run "{asked.name}"; `supervisor status` lists them')
    if not authorise(request.verb, request.peer, known.owner_uid, asked.rights):
        return _not_allowed(request, f"run {known.name}")
    return known


def _change(asked: Asked, run: Run, message: str, **changes: Any) -> Decision:
    changed = dataclasses.replace(run, changed_at=asked.now, **changes)
    shown = run if is_dry_run(asked.request) else changed
    return Decision(run=changed, why=by(asked.request), reply=_granted(asked.request, shown, message))


def _nothing_to_do(request: Request, run: Run, state: str) -> Decision:
    message = f"run {run.name} is {state}"
    if is_dry_run(request):
        message = f"dry run: nothing would change: {message}"
    return Decision(reply=_answer(run, message))


_DONE_WORDS = {
    "save": "save asked for",
    "stop": "stopped",
    "submit": "submitted",
    "sbatch": "submitted",
    "adopt": "adopted",
}


def by(request: Request) -> str:
    """What was done, and who did it."""
    return f"{_DONE_WORDS.get(request.verb, f'{request.verb}d')} by {user_name(request.peer.uid)}"


def _owner(request: Request, rights: Rights) -> tuple[int, int] | Decision:
    """(uid, gid) that the run belongs to: the peer, or whom root names."""
    uid, peer = request.body.get("uid", request.peer.uid), request.peer
    gid = request.body.get("gid", peer.gid if uid == peer.uid else None)
    if not _is_id(uid) or not (gid is None or _is_id(gid)):
        return refuse(BAD_INPUT, "uid and gid are whole numbers")
    if (uid, gid) != (peer.uid, peer.gid) and peer.uid != 0:
        return refuse(NOT_ALLOWED, "only root may submit for another user")
    if gid is None:  # the account's own group: root's would come with root's rights to files
        account = find_account(str(uid))
        if account is None:
            return refuse(BAD_INPUT, f"this host knows no account with uid {uid}: give its gid too")
        gid = account[1]
    if rights.service_uid not in {0, uid}:
        return refuse(NOT_ALLOWED, _one_account(rights, uid))
    return uid, gid


def _one_account(rights: Rights, uid: int) -> str:
    return (
        f"this service runs as {user_name(rights.service_uid)} and can submit only that account's jobs, not those of "
        f"{user_name(uid)}"
    )


def _is_wait(value: object) -> bool:
    """False for NaN and infinity too, which JSON as Python reads it may hold; a bool is no number of seconds."""
    return type(value) in {int, float} and 0 <= value <= _MAX_WAITED_S  # type: ignore[operator]


def _is_id(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**32 - 1


def _granted(request: Request, run: Run, message: str) -> dict[str, Any]:
    if is_dry_run(request):
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


def _not_allowed(request: Request, what: str, *, who: str = "its owner, root and the admin group") -> Decision:
    return refuse(
        NOT_ALLOWED,
        f"{user_name(request.peer.uid)} may not {request.verb} {what}: {who} may",
    )


def refuse(code: str, message: str) -> Decision:
    return Decision(reply=failure(code, message))


def is_dry_run(request: Request) -> bool:
    return bool(request.body.get("dry_run"))
