"""Why an attempt ended. Pure.

`judge_end` is an ordered table: the first row that matches says how the attempt ended. Its order matters: our own stop
comes before everything, then a person's cancel, the launcher's own record before Slurm's word (Slurm shows FAILED where
the launcher knows "saved, resubmit me"), and silence only while neither has spoken.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from slurm.pending import explain_start_failure, is_launch_failure
from slurm.sbatch_options import REQUEUE
from slurm.types import JobFlag, JobRecord, JobState
from supervisor.core.divergence import describe_fault, read_fault
from supervisor.core.launches import HARD_KINDS, REPORT_EVERY_S, is_in_hand, is_most, overdue_s
from supervisor.core.sight import SECOND_LOOK_S, Sight, is_alive
from supervisor.core.stalls import judge_stall
from supervisor.model import (
    AttemptEnd,
    AttemptState,
    Run,
    RunState,
)
from trainer import contract

SIGTERM_EXIT = 143
SILENCE_WAIT_S = 8.0  # how long a second sign is waited for when the launcher gave up a silent node
SIGTERM_WAIT_S = 20.0  # how long Slurm's own word for a terminated job is waited for
WORD_WAIT_S = 12.0  # how long a launcher is silent at most before Slurm's word on its job is waited for no more
COMPLETING_WAIT_S = 900.0  # above the usual SlurmdTimeout, after which a completing job shows how it ended
FOLDER_WAIT_S = 60.0
ACCOUNTING_LAG_S = 60.0  # how long accounting may be behind on the end of a job that the controller has forgotten


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How an attempt ended, with its evidence."""

    end: AttemptEnd
    detail: str
    nodes: tuple[str, ...] = ()  # the nodes that the evidence names
    hint: str | None = None  # a node that is named without proof: kept in the story, not condemned
    evidence: tuple[str, ...] = ()
    exit_code: int | None = None
    is_curable: bool = True


def judge_end(sight: Sight, *, is_paused: bool = False) -> Ended | None:
    """How the attempt ended, or None while it goes on (or while nobody can tell).

    While paused only ends that have happened count: nothing that still runs is given up. While the launcher lives, a
    node that is lost is its business: it goes on without it.
    """
    left_out = (_GIVING_UP if is_paused else frozenset()) | (_OF_THE_LAUNCHER if is_in_hand(sight) else frozenset())
    rows = [row for row in _END_ROWS if row not in left_out]
    ended = next((ended for row in rows if (ended := row(sight)) is not None), None)
    if ended is not None and ended.end is not AttemptEnd.STOPPED and _awaits_folder(sight):
        return None
    if ended is None:
        return None
    return _judge_divergence(sight, _judge_planned_work(sight, replace(ended, nodes=_own_nodes(sight, ended.nodes))))


def _judge_divergence(sight: Sight, ended: Ended) -> Ended:
    """An end of a training that has found its loss wrong is that, whatever its exit code; a person's own stop stays.

    No node is to blame for it. One that has shown by itself that it is gone is still named.
    """
    record = sight.view.divergence if sight.view is not None else None
    if ended.end in _BY_A_PERSON or (record is None and ended.end is not AttemptEnd.DIVERGED):
        return ended
    gone = {s.node for s in (*sight.silent, *sight.failed_by_slurm)}
    return replace(
        ended,
        end=AttemptEnd.DIVERGED,
        detail=describe_fault(read_fault(record)),
        nodes=tuple(node for node in ended.nodes if node in gone),
        hint=None,
        evidence=(*_describe_record(record), f"ended: {ended.detail}", *ended.evidence),
        is_curable=True,
    )


_BY_A_PERSON = frozenset({AttemptEnd.STOPPED, AttemptEnd.CANCELLED})


def _describe_record(record: contract.Divergence | None) -> tuple[str, ...]:
    if record is None:
        return ()
    loss = "not a finite number" if record.loss is None else f"{record.loss:.6g}"
    score = "" if record.score is None else f", score {record.score:.3g}"
    samples = f"samples {record.first_sample} to {record.end_sample - 1}" if record.end_sample else "samples not named"
    return (f"divergence.json: {record.kind[:40]} since step {record.onset_step}, loss {loss}{score}, {samples}",)


def _awaits_folder(sight: Sight) -> bool:
    """Its launcher has ended, and the folder of its checkpoints can't be looked at just now.

    Over means fenced: what it published since the last look must be seen first, though not be waited for for ever.
    """
    view = sight.view
    if view is None or view.exit is None or view.exit.attempt != sight.attempt.number:
        return False
    return bool(view.checkpoints_unknown) and view.checkpoints_unknown_s < FOLDER_WAIT_S


def _judge_planned_work(sight: Sight, ended: Ended) -> Ended:
    """An end that planned work brought about is nobody's failure, and no person has cancelled the run."""
    if ended.end not in _BY_PLANNED_WORK or not sight.taken or not sight.taken >= set(ended.nodes):
        return ended
    detail = f"planned work on {', '.join(sorted(sight.taken))}: {ended.detail}"
    return replace(ended, end=AttemptEnd.MAINTENANCE, detail=detail, nodes=())


_BY_PLANNED_WORK = frozenset({AttemptEnd.CANCELLED, AttemptEnd.NODE_FAILED, AttemptEnd.NODE_SILENT})


def _own_nodes(sight: Sight, named: tuple[str, ...]) -> tuple[str, ...]:
    """Those that Slurm gave the attempt: files of a run are its owner's, and could name anybody's node."""
    own = {*sight.attempt.nodes, *(sight.job.nodes if sight.job is not None else ())}
    return tuple(node for node in named if node in own)


def _stopped(sight: Sight) -> Ended | None:
    if sight.run.state is not RunState.STOPPING or sight.attempt.state is AttemptState.PLANNED:
        return None
    return Ended(end=AttemptEnd.STOPPED, detail=sight.run.reason or "stopped by a person")


def _cancelled(sight: Sight) -> Ended | None:
    """A person's cancel, whatever happened to the nodes at that time: of a failed node Slurm says NODE_FAIL.

    Slurm itself cancels what it could not launch. What the service cancels is over before. A training that has ended
    in order has done so first.
    """
    job = sight.accounting if sight.job is None and sight.is_absent else sight.job
    if job is None or job.state is not JobState.CANCELLED or sight.is_blind or _was_never_launched(sight, job):
        return None
    record = sight.view.exit if sight.view is not None else None
    if record is not None and record.attempt == sight.attempt.number and record.exit_code in _IN_ORDER:
        return None
    detail = f"Slurm: job {sight.attempt.job_id} {job.raw_state}{explain_start_failure(job.reason)}"
    return Ended(end=AttemptEnd.CANCELLED, detail=detail, evidence=_evidence(sight, detail), exit_code=job.exit_code)


_IN_ORDER = frozenset({contract.EXIT_FINISHED, contract.EXIT_RESUBMIT, contract.EXIT_DO_NOT_RESTART})
_EXIT_ENDS: dict[int, AttemptEnd] = {
    contract.EXIT_FINISHED: AttemptEnd.FINISHED,
    contract.EXIT_RESUBMIT: AttemptEnd.SAVED,
    contract.EXIT_DO_NOT_RESTART: AttemptEnd.DO_NOT_RESTART,
    contract.EXIT_NODE_CHECK_FAILED: AttemptEnd.NODE_CHECK,
    contract.EXIT_CHECKPOINT_REJECTED: AttemptEnd.CHECKPOINT_REJECTED,
    contract.EXIT_DIVERGED: AttemptEnd.DIVERGED,
    contract.EXIT_HUNG: AttemptEnd.STALLED,
}


def _ended_by_launcher(sight: Sight) -> Ended | None:
    """The launcher's own record, except where it only says that somebody terminated it."""
    record = sight.view.exit if sight.view is not None else None
    if record is None or record.attempt != sight.attempt.number or record.exit_code == SIGTERM_EXIT:
        return None
    ended = _judge_exit(sight, record)
    if ended is None or record.next != "hold":
        return ended
    said = ended.detail if _reason(record) in ended.detail else f"{ended.detail} ({_reason(record)})"
    return replace(ended, detail=said, is_curable=False)  # the same start failed again and again inside the job


def _judge_exit(sight: Sight, record: contract.ExitRecord) -> Ended | None:
    blamed = _blamed_nodes(sight, record)
    if record.exit_code == contract.EXIT_NODE_SILENT:
        return _blamed_by_launcher(sight, record, blamed) if blamed else _given_up_by_launcher(sight, record)
    end = _EXIT_ENDS.get(record.exit_code)
    if end is not None:
        return Ended(
            end=end,
            detail=_reason(record),
            nodes=_failing_nodes(sight, record) or (blamed if end is AttemptEnd.NODE_CHECK else ()),
            hint=record.node,
            evidence=_outcome_evidence(sight, record),
            exit_code=record.exit_code,
            is_curable=end is not AttemptEnd.DO_NOT_RESTART,
        )
    if blamed and record.next == "resubmit":
        return _blamed_by_launcher(sight, record, blamed)
    return _crashed(sight, _reason(record), exit_code=record.exit_code, node=record.node)


def _blamed_nodes(sight: Sight, record: contract.ExitRecord) -> tuple[str, ...]:
    """Nodes that the launcher blames for this end and that can't be used; none where it blames most of them.

    Of a node whose agent was killed, or whose rank hung, the interruption's own record says so: that condemns nobody.
    """
    interrupted = sight.view.interruptions if sight.view is not None else ()
    soft = {n for r in interrupted if r.launch >= record.launches - 1 and r.kind not in HARD_KINDS for n in r.nodes}
    own = _own_nodes(sight, tuple(dict.fromkeys(record.bad_nodes)))
    blamed = tuple(n for n in own if n not in soft and not _agent_crashed(record, n))
    return () if is_most(blamed, sight.attempt) else blamed


def _blamed_by_launcher(sight: Sight, record: contract.ExitRecord, blamed: tuple[str, ...]) -> Ended:
    """Too few nodes are left in the job for another start: the ones that are gone are named by the launcher's proof."""
    is_silent = record.exit_code == contract.EXIT_NODE_SILENT
    line = f"exit record: code {record.exit_code}: {record.reason}"
    return Ended(
        end=AttemptEnd.NODE_SILENT if is_silent else AttemptEnd.NODE_FAILED,
        detail=_reason(record),
        nodes=blamed,
        hint=record.node,
        evidence=_evidence(sight, line),
        exit_code=record.exit_code,
    )


def _given_up_by_launcher(sight: Sight, record: contract.ExitRecord) -> Ended | None:
    """The launcher gave a silent node up. Heartbeats alone condemn nobody: a second sign is waited for, for a while."""
    line = f"exit record: code {record.exit_code}: {record.reason}"
    if sight.silent or sight.failed_by_slurm:
        confirmed = (*sight.silent, *sight.failed_by_slurm)
        return Ended(
            end=AttemptEnd.NODE_SILENT,
            detail="; ".join(s.evidence for s in confirmed),
            nodes=tuple(s.node for s in confirmed),
            evidence=_evidence(sight, line),
            exit_code=record.exit_code,
        )
    if _awaits_second_sign(sight):
        return None
    return Ended(
        end=AttemptEnd.NODE_SILENT,
        detail=_reason(record),
        hint=record.node,
        evidence=(line, "its slurmd port answers, and Slurm calls it responding"),
        exit_code=record.exit_code,
    )


def _reason(record: contract.ExitRecord) -> str:
    return record.reason or f"exit code {record.exit_code}"  # the job wrote the file: it may say nothing


def _awaits_second_sign(sight: Sight) -> bool:
    """The launcher gave a silent node up just now, and nothing else has said so yet."""
    record = sight.view.exit if sight.view is not None else None
    if record is None or record.attempt != sight.attempt.number or record.exit_code != contract.EXIT_NODE_SILENT:
        return False
    launch = sight.view.launch if sight.view is not None else None
    return launch is not None and launch.unchanged_s < SILENCE_WAIT_S


def _failing_nodes(sight: Sight, record: contract.ExitRecord) -> tuple[str, ...]:
    """Every node whose own report holds a failed check; else the one that the launcher names.

    Only where checks failed: a rank that ended first with a word of its own (saved, do not restart, checkpoint
    rejected) says nothing against its node.
    """
    if record.exit_code != contract.EXIT_NODE_CHECK_FAILED:
        return ()
    if sight.view is not None:
        failing = tuple(r.node for r in sight.view.node_reports if any(c.ok is False for c in r.checks))
        if len(failing) > 1 and len(failing) * 2 > len(sight.attempt.nodes):
            return ()  # most nodes at once: what they share, or the check, is suspected
        if failing:
            return failing
    return (record.node,) if record.node and not _agent_crashed(record, record.node) else ()


_AGENT_CODES = frozenset({None, 0, contract.EXIT_NODE_CHECK_FAILED, contract.EXIT_NODE_SILENT, 137, SIGTERM_EXIT})


def _agent_crashed(record: contract.ExitRecord, node: str) -> bool:
    """The agent ended by itself without a word: an installation that is broken says nothing against a node."""
    return record.nodes.get(node) not in _AGENT_CODES


def _outcome_evidence(sight: Sight, record: contract.ExitRecord) -> tuple[str, ...]:
    lines = [f"exit record: code {record.exit_code}: {record.reason}"]
    outcome = sight.view.outcome if sight.view is not None else None
    if outcome is not None and outcome.attempt == record.attempt and outcome.message:
        lines.append(f"outcome: {outcome.message}")
    if record.exit_code == contract.EXIT_NODE_CHECK_FAILED and sight.view is not None:
        lines += [
            f"{r.node}: {c.check}: {c.detail}" for r in sight.view.node_reports for c in r.checks if c.ok is False
        ]
    return tuple(lines)


def _crashed(
    sight: Sight, detail: str, *, exit_code: int | None, node: str | None, nodes: tuple[str, ...] = ()
) -> Ended:
    """`nodes` are named by proof of their own; `node` is where it was noticed first: usually a victim."""
    cause = sight.cause
    if cause is None:
        return Ended(
            end=AttemptEnd.CRASHED,
            detail=detail,
            nodes=nodes,
            hint=node,
            evidence=(detail,),
            exit_code=exit_code,
        )
    is_blamed = cause.blames_node and cause.node is not None
    end = AttemptEnd.NODE_FAILED if is_blamed else AttemptEnd.CRASHED  # the nodes' budget pays for broken hardware
    if cause.kind == "host_memory":
        end = AttemptEnd.HOST_MEMORY
    is_named = exit_code in _CANNOT_START and cause.kind == "configuration"  # the launcher names the program
    return Ended(
        end=end,
        detail=detail if is_named else cause.sentence,
        nodes=(cause.node,) if is_blamed and cause.node else nodes,
        hint=cause.node or node,
        evidence=(cause.sentence if is_named else detail, *cause.evidence),
        exit_code=exit_code,
        is_curable=cause.is_curable,
    )


_CANNOT_START = frozenset({126, 127})
_STATE_ENDS: dict[JobState, AttemptEnd] = {
    JobState.COMPLETED: AttemptEnd.FINISHED,
    JobState.CANCELLED: AttemptEnd.CANCELLED,
    JobState.TIMEOUT: AttemptEnd.TIME_LIMIT,
    JobState.NODE_FAIL: AttemptEnd.NODE_FAILED,
    JobState.BOOT_FAIL: AttemptEnd.NODE_FAILED,
    JobState.PREEMPTED: AttemptEnd.PREEMPTED,
    JobState.OUT_OF_MEMORY: AttemptEnd.HOST_MEMORY,
    JobState.DEADLINE: AttemptEnd.DO_NOT_RESTART,
}


_SLURM_EXIT_ENDS = {code: end for code, end in _EXIT_ENDS.items() if code != contract.EXIT_FINISHED} | {
    contract.EXIT_NODE_SILENT: AttemptEnd.NODE_SILENT
}


def _ended_by_slurm(sight: Sight) -> Ended | None:
    """Slurm's word: the controller's while it remembers the job, else accounting's.

    Over means fenced, so a run directory that does not answer is waited for: what the attempt published meanwhile
    must be seen first.
    """
    if sight.is_blind or _awaits_second_sign(sight):
        return None
    job = sight.job if sight.job is not None and sight.job.is_ended else None
    if job is None and sight.is_absent and sight.accounting is not None and sight.accounting.is_ended:
        job = sight.accounting  # one that accounting still calls running has ended without it: it is behind
    if job is None or job.state is None:
        return None
    detail = f"Slurm: job {sight.attempt.job_id} {job.raw_state}{explain_start_failure(job.reason)}"
    nodes = tuple(s.node for s in (*sight.silent, *sight.failed_by_slurm))
    if job.state is JobState.CANCELLED and _was_never_launched(sight, job):
        node = min(sight.unlaunchable, default=job.nodes[0])
        detail = f"{detail}, and was never launched on {node}: Slurm gives up so what it may not requeue"
        return Ended(end=AttemptEnd.NODE_FAILED, detail=detail, hint=node, evidence=(detail,))
    end = _STATE_ENDS.get(job.state)
    if end is None and job.exit_code in _SLURM_EXIT_ENDS:  # the launcher's code; its record may show up later
        end = _SLURM_EXIT_ENDS[job.exit_code]
        is_curable = end is not AttemptEnd.DO_NOT_RESTART
        detail += f" with exit code {job.exit_code}"
        return Ended(end=end, detail=detail, evidence=(detail,), exit_code=job.exit_code, is_curable=is_curable)
    if end is None and _is_step_terminated(sight):
        return _preempted(detail)
    if end is None:
        return _crashed(sight, detail, exit_code=job.exit_code, node=None, nodes=nodes[:1])
    if end is AttemptEnd.NODE_FAILED:
        return Ended(end=end, detail=detail, nodes=nodes, evidence=_evidence(sight, detail), exit_code=job.exit_code)
    return Ended(end=end, detail=detail, evidence=(detail,), exit_code=job.exit_code)


def _is_step_terminated(sight: Sight) -> bool:
    record = sight.view.exit if sight.view is not None else None
    is_ours = record is not None and record.attempt == sight.attempt.number
    return is_ours and record is not None and record.is_step_terminated and record.exit_code == SIGTERM_EXIT


def _preempted(detail: str) -> Ended:
    """Of a preemption with a grace time only the step hears at first; a job that ends upon it is FAILED to Slurm."""
    line = "SIGTERM came to the step and not to the launcher: a preemption with a grace time (or scancel --signal)"
    return Ended(end=AttemptEnd.PREEMPTED, detail=f"{detail}: {line}", evidence=(line,), exit_code=SIGTERM_EXIT)


_LAUNCH_S = 1.0
_REFUSAL_BYTES = 200  # slurmd's own line in the job's log: "Error running slurm prolog: 1"


def _was_never_launched(sight: Sight, job: JobRecord) -> bool:
    """A job that slurmd could not launch is cancelled by Slurm itself, without a word of it in the job: no person did.

    At once where slurmd still knows the number from before the controller lost its state; once the prolog has failed,
    however long that took, with a node that Slurm drains for it (both seen on 22.05).
    """
    view = sight.view
    said = view.log.value if view is not None and view.log is not None else 0
    if view is None or view.launch is not None or view.exit is not None:
        return False
    if said > (_REFUSAL_BYTES if sight.unlaunchable else 0):
        return False
    if not job.nodes or job.start_at is None or job.end_at is None:
        return False
    return bool(sight.unlaunchable) or (job.end_at - job.start_at).total_seconds() <= _LAUNCH_S


def _requeued_by_slurm(sight: Sight) -> Ended | None:
    """A batch launch that fails is requeued in spite of --no-requeue: two owners of retries start two trainings."""
    job = sight.job
    if job is None or not (job.restarts > 0 or JobFlag.REQUEUED in job.flags or is_launch_failure(job.reason)):
        return None
    if sight.attempt.is_adopted and job.submit_at == sight.attempt.submitted_at:
        return None  # requeued before it was adopted; another requeue is another submission
    nodes = tuple(s.node for s in (*sight.silent, *sight.failed_by_slurm))
    if not nodes and _has_never_begun(sight) and (sight.lost or _began_just_now(sight)):
        return _failed_launch(sight, job)
    if _asks_for_requeue(sight.run) and not nodes and not is_launch_failure(job.reason):
        detail = f"job {job.job_id} was requeued, as its script asks Slurm for: it goes on as a new job"
        return Ended(end=AttemptEnd.SAVED, detail=detail, evidence=(detail,))
    if sight.attempt.started_at is not None and not nodes and not is_launch_failure(job.reason):
        detail = f"job {job.job_id} was requeued by an administrator or a preemption ({job.raw_state})"
        return Ended(end=AttemptEnd.PREEMPTED, detail=detail, evidence=(detail,))
    detail = f"Slurm requeued job {job.job_id} by itself ({job.raw_state} {job.reason}".rstrip() + ")"
    return Ended(end=AttemptEnd.NODE_FAILED, detail=detail, nodes=nodes, evidence=_evidence(sight, detail))


_JUST_NOW_S = 10.0


def _has_never_begun(sight: Sight) -> bool:
    """Nothing of the job has written anything, though Slurm has shown it as running."""
    view = sight.view
    if sight.attempt.started_at is None or view is None or view.launch is not None or view.exit is not None:
        return False
    return view.progress is None and (view.log is None or view.log.value == 0)


def _began_just_now(sight: Sight) -> bool:
    started_at = sight.attempt.started_at
    return started_at is not None and (sight.now - started_at).total_seconds() <= _JUST_NOW_S


def _failed_launch(sight: Sight, job: JobRecord) -> Ended:
    """Slurm could not start the job on its batch host: nobody requeued it. A node that it calls lost is to blame."""
    says = tuple(s.evidence for s in sight.lost)
    detail = "; ".join((f"Slurm requeued job {job.job_id} before it had begun ({job.raw_state})", *says))
    named = tuple(s.node for s in sight.lost)
    own = sight.attempt.nodes or job.nodes
    hint = own[0] if len(own) == 1 else None
    return Ended(end=AttemptEnd.NODE_FAILED, detail=detail, nodes=named, hint=hint, evidence=(detail,))


def _asks_for_requeue(run: Run) -> bool:
    return run.script is not None and REQUEUE in run.script.options


def _evidence(sight: Sight, *first: str) -> tuple[str, ...]:
    return (*first, *(s.evidence for s in (*sight.silent, *sight.failed_by_slurm)))


def awaits_slurm(sight: Sight) -> bool:
    """A node seems lost, and Slurm has not said since that the job goes on: a person may have cancelled it just now.

    Its word is waited for, for a while: at most SIGTERM_WAIT_S where the launcher was terminated, WORD_WAIT_S else; of
    a job that completes, longer: nobody else ends a job whose nodes are all up to Slurm.
    """
    if not (sight.silent or sight.failed_by_slurm) or not sight.jobs_are_fresh or sight.is_absent:
        return False
    view = sight.view
    quiet_s = view.launch.unchanged_s if view is not None and view.launch is not None else None
    if quiet_s is None:
        return False
    if sight.job is not None and sight.job.is_ended:
        has_spoken = view is not None and view.exit is not None and not was_terminated(sight)
        is_explained = bool(sight.failed_by_slurm) and not was_terminated(sight)
        return _hides_its_end(sight) and not has_spoken and not is_explained
    if view is not None and view.exit is not None and view.exit.attempt == sight.attempt.number:
        return view.exit.exit_code == SIGTERM_EXIT and quiet_s < SIGTERM_WAIT_S
    if not _is_of_in_job(sight) or sight.jobs_asked_at is None or quiet_s > WORD_WAIT_S:
        return False
    return (sight.now - sight.jobs_asked_at).total_seconds() > max(0.0, quiet_s - REPORT_EVERY_S)


def _hides_its_end(sight: Sight) -> bool:
    """While a job completes squeue shows that in place of how it ended: with a node that is lost, until that is DOWN.

    Not for ever: processes that can't be killed hold a job in that state.
    """
    launch = sight.view.launch if sight.view is not None else None
    is_hidden = sight.job is not None and sight.job.is_ended and sight.job.state is None
    return is_hidden and launch is not None and launch.unchanged_s < COMPLETING_WAIT_S


def was_terminated(sight: Sight) -> bool:
    """The launcher was terminated, and Slurm has not said yet why."""
    record = sight.view.exit if sight.view is not None else None
    is_ours = record is not None and record.attempt == sight.attempt.number
    return is_ours and record is not None and record.exit_code == SIGTERM_EXIT


def _is_of_in_job(sight: Sight) -> bool:
    return sight.run.script is None and sight.run.spec.restart.in_job


def _silent(sight: Sight) -> Ended | None:
    if not sight.silent or awaits_slurm(sight):
        return None
    return Ended(
        end=AttemptEnd.NODE_SILENT,
        detail="; ".join(s.evidence for s in sight.silent),
        nodes=tuple(s.node for s in sight.silent),
        evidence=_evidence(sight),
    )


def _failed_by_slurm(sight: Sight) -> Ended | None:
    if not sight.failed_by_slurm or sight.is_blind or awaits_slurm(sight):
        return None
    return Ended(
        end=AttemptEnd.NODE_FAILED,
        detail="; ".join(s.evidence for s in sight.failed_by_slurm),
        nodes=tuple(s.node for s in sight.failed_by_slurm),
        evidence=_evidence(sight),
    )


def _terminated(sight: Sight) -> Ended | None:
    """The launcher was terminated and Slurm has not said why within a while."""
    record = sight.view.exit if sight.view is not None else None
    if record is None or record.attempt != sight.attempt.number or not sight.jobs_are_fresh:
        return None
    if sight.job is not None and not sight.job.is_ended:
        return None  # exit 143 with a running job: Slurm's word is on its way
    waited = sight.view.launch.unchanged_s if sight.view is not None and sight.view.launch is not None else 0.0
    if waited < SIGTERM_WAIT_S or _hides_its_end(sight):
        return None
    if _is_step_terminated(sight):
        return _preempted("terminated")
    return _crashed(sight, "terminated, and Slurm did not say why", exit_code=record.exit_code, node=record.node)


def _outgrown(sight: Sight) -> Ended | None:
    """The job waits for more nodes than are healthy, and fewer would do: it is submitted again, smaller."""
    if sight.job is None or not sight.job.is_pending or not sight.smaller:
        return None
    wanted = sight.attempt.nodes_wanted + sight.attempt.spares
    return Ended(
        end=AttemptEnd.RESIZED, detail=f"job {sight.job.job_id} waits for {wanted} nodes, {sight.smaller} can be had"
    )


def _vanished(sight: Sight) -> Ended | None:
    """Gone from the controller's memory; accounting has been asked, where there is one, and has nothing either.

    One answer is not enough: it may be half a list, or come from a controller that has lost its state and learns of
    its jobs only now. What is absent must stay so, and nothing of the attempt may be alive.
    """
    if not sight.is_absent or sight.accounting_is_stale or sight.is_blind or _awaits_second_sign(sight):
        return None
    if sight.absent_s < (ACCOUNTING_LAG_S if sight.has_accounting else SECOND_LOOK_S):
        return None
    if is_alive(sight.view, sight.attempt) or sight.is_unregistered:
        return None
    return Ended(
        end=AttemptEnd.VANISHED,
        detail=f"job {sight.attempt.job_id} is gone from Slurm and left no exit record",
        evidence=(f"squeue does not list job {sight.attempt.job_id}",),
    )


def _not_recovered(sight: Sight) -> Ended | None:
    """The launcher lives and has been recovering for longer than that can take."""
    took_s = overdue_s(sight)
    if took_s is None or sight.attempt.state is not AttemptState.RUNNING:
        return None
    detail = f"not started again inside the job for {took_s:.0f} s: {sight.attempt.recovering}"
    return Ended(end=AttemptEnd.STALLED, detail=detail, evidence=(detail,))


def _stalled(sight: Sight) -> Ended | None:
    silence = judge_stall(sight)
    if silence is None:
        return None
    return Ended(end=AttemptEnd.STALLED, detail=silence, evidence=(silence,))


_END_ROWS: tuple[Callable[[Sight], Ended | None], ...] = (
    _stopped,
    _cancelled,
    _ended_by_launcher,
    _silent,
    _ended_by_slurm,
    _requeued_by_slurm,
    _failed_by_slurm,
    _terminated,
    _outgrown,
    _vanished,
    _not_recovered,
    _stalled,
)
_GIVING_UP = frozenset({_silent, _failed_by_slurm, _outgrown, _not_recovered, _stalled})
_OF_THE_LAUNCHER = frozenset({_silent, _failed_by_slurm})
