"""Starts of the training inside one job: what the launcher tells of them, and when it is left alone. Pure.

The launcher starts the training again by itself after most failures. What its files say is the run's owner's word:
bounded, and about the run's own nodes only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from supervisor.core.sight import Sight
from supervisor.model import Attempt, AttemptState, Interruption, Part, RestartSpec
from trainer.contract import INTERRUPTION_KINDS, ExitRecord, InterruptionRecord, LaunchReport, Straggler

REPORT_EVERY_S = 1.0  # the launcher rewrites its report this often
RECOVERY_LIMIT_S = 300.0  # beside its own pauses: a launcher that stops, checks and chooses for longer has failed
NEGLECT_S = 60.0  # a silent node that is not acted upon for so long after `liveness.timeout_s`
STALL_MARGIN_S = 60.0  # the launcher judges a stall by the same limits, and acts first
QUICK_LAUNCHES = 8  # starts that may follow each other at once
LAUNCH_EVERY_S = 10.0  # and one more for each such time that the job has run
UNDER_WAY_S = 10.0  # a start that tells no steps counts as under way after so long
MAX_LAUNCHES = 1000  # of one attempt that are kept account of
RECOVERING = "recovering"
NOT_TRAINING = frozenset({"ended", "spare"})  # states of a node whose loss does not end the training

# A node that these name can't be used, whatever else it is; the others say more of the process than of the node.
HARD_KINDS = frozenset({"node_lost", "node_cut_off", "node_frozen", "check_failed"})
PLANNED_KINDS = frozenset({"straggler"})  # at a checkpoint, because the run file says so

_TEXT_CHARS = 500
_LINES = 20
_STRAGGLERS = 16


# ---------------------------------------------------------------- whose turn it is


def is_in_hand(sight: Sight) -> bool:
    """True while the launcher lives and deals with what happens to its nodes and ranks: nothing is given up here.

    Its report is the sign; it is rewritten in every phase. A recovery that never ends is no sign of life.
    """
    run, attempt, view = sight.run, sight.attempt, sight.view
    if run.script is not None or not run.spec.restart.in_job or attempt.state is not AttemptState.RUNNING:
        return False
    if view is None or view.launch is None or view.exit is not None:
        return False
    is_silent = view.launch.unchanged_s > run.spec.liveness.suspect_after_s + REPORT_EVERY_S
    return not is_silent and not _is_neglectful(sight, view.launch.value) and overdue_s(sight) is None


def _is_neglectful(sight: Sight, report: LaunchReport) -> bool:
    """The launcher has seen a node silent for long after it should have given it up, and does nothing about it."""
    if report.phase == RECOVERING:
        return False
    limit_s = sight.run.spec.liveness.timeout_s + NEGLECT_S
    beats = (report.nodes.get(node) for node in needed_nodes(sight.attempt, report))
    return any(beat is not None and beat.state not in NOT_TRAINING and beat.age_s > limit_s for beat in beats)


def overdue_s(sight: Sight) -> float | None:
    """For how long the launcher has been recovering, once that is longer than it may take; else None."""
    since = sight.attempt.recovering_at
    if since is None or sight.is_suspended:
        return None
    took_s = (sight.now - since).total_seconds()
    return took_s if took_s > recovery_limit_s(sight.run.spec.restart) else None


def recovery_limit_s(restart: RestartSpec) -> float:
    """Seconds from the end of one start to the next that a launcher may take, its own back-off included."""
    doublings = min(max(0, restart.max_without_progress - 1), 10)
    return RECOVERY_LIMIT_S + min(restart.backoff_s * 2.0**doublings, restart.backoff_max_s)


def needed_nodes(attempt: Attempt, report: LaunchReport) -> tuple[str, ...]:
    """Nodes whose loss ends the present start: those that train, and the batch host."""
    if not report.training:
        return attempt.nodes
    wanted = {*report.training, report.host}
    return tuple(node for node in attempt.nodes if node in wanted)


# ---------------------------------------------------------------- the present start


def fold_launch(attempt: Attempt, report: LaunchReport, now: datetime) -> Attempt:
    """The attempt with what the launcher reports of the present start and of a recovery."""
    if report.attempt != attempt.number:
        return attempt
    number = min(report.launch, _most_launches(attempt, now))
    if number > attempt.launch:
        step = max(0, report.resume_step)
        attempt = replace(
            attempt, launch=number, launched_at=now, launch_step=step, last_step=step, phase="start", recovering_at=None
        )
    is_recovering = report.phase == RECOVERING
    said = report.why or ("the training is started again" if is_recovering else "")
    since = (attempt.recovering_at or now) if is_recovering else None
    return replace(
        attempt,
        training=tuple(node for node in dict.fromkeys(report.training) if node in attempt.nodes),
        recovering=_text(said),
        recovering_at=since,
        stragglers=tuple(
            _text(f"{(who := _rank_words(s))}{s.ratio:.2f} x the median ({s.detail.removeprefix(who)})", 200)
            for s in report.stragglers[:_STRAGGLERS]
            if s.node in attempt.nodes
        ),
    )


def _rank_words(straggler: Straggler) -> str:
    return f"rank {straggler.rank} on {straggler.node}: "


def _most_launches(attempt: Attempt, now: datetime) -> int:
    """The highest number that a start may have by now: the launcher's report is the run's owner's word."""
    ran_s = (now - attempt.started_at).total_seconds() if attempt.started_at is not None else 0.0
    return min(MAX_LAUNCHES, QUICK_LAUNCHES + int(max(0.0, ran_s) / LAUNCH_EVERY_S))


def settle_recovery(attempt: Attempt, *, tells_steps: bool, now: datetime) -> Attempt:
    """The attempt as under way again, where the launcher can't see that it is.

    It sees neither steps that are only in the log, nor those of a training that tells none: such a one is under way
    when it has run for a while. While the launcher stops, checks and chooses, it is not.
    """
    if not attempt.recovering or attempt.recovering_at is not None or attempt.launch == 0:
        return attempt
    has_stepped = (attempt.last_step or 0) > (attempt.launch_step or 0)
    has_run = not tells_steps and since_launch_s(attempt, now) >= UNDER_WAY_S
    return replace(attempt, recovering="") if has_stepped or has_run else attempt


def is_of_earlier_launch(attempt: Attempt, launch: int | None) -> bool:
    """Whether progress was written by a start before the present one; not where its writer can't tell."""
    return launch is not None and launch < attempt.launch


def since_launch_s(attempt: Attempt, now: datetime) -> float:
    """Seconds since the present start was first seen; infinite for the first one of the job."""
    return (now - attempt.launched_at).total_seconds() if attempt.launched_at is not None else float("inf")


# ---------------------------------------------------------------- interruptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Blame:
    """What an interruption says of one of the run's nodes. `is_hard`: it can't be used."""

    node: str
    reason: str
    is_hard: bool


def fold_record(
    record: InterruptionRecord, attempt: Attempt, known: Interruption | None, now: datetime
) -> Interruption:
    """The interruption that the launcher's record tells of, as the ledger keeps it."""
    kind = _kind(record)
    named = own_nodes(record.nodes, attempt)
    hint = record.hint if record.hint in attempt.nodes else None
    detected_at = _instant(record.detected_at, attempt.planned_at, now) if known is None else known.detected_at
    resumed_at = known.resumed_at if known is not None else None
    if record.resumed_at is not None:
        resumed_at = _instant(record.resumed_at, detected_at, now)
    return Interruption(
        run=attempt.run,
        attempt=attempt.number,
        launch=record.launch,
        is_in_job=True,
        kind=kind,
        cause=_text(record.cause) or kind,
        node=named[0] if named else hint,
        nodes=named,
        is_planned=kind in PLANNED_KINDS,
        detected_at=detected_at,
        resumed_at=resumed_at,
        caught_up_at=known.caught_up_at if known is not None else None,
        last_step=record.last_step,
        resume_step=record.resume_step,
        evidence=tuple(_text(line) for line in record.evidence[:_LINES]),
        parts=_parts(record.parts_s),
    )


def find_blame(record: InterruptionRecord, attempt: Attempt, known: Interruption | None) -> tuple[Blame, ...]:
    """What a record says of the run's nodes that it did not say when it was `known`: the launcher learns more.

    When most of them are named at once, what they share is suspected.
    """
    named = own_nodes(record.nodes, attempt)
    if known is not None and (known.kind, known.nodes) == (_kind(record), named):
        return ()
    is_mass = is_most(named, attempt)
    is_hard = record.kind in HARD_KINDS and not is_mass
    why = _text(f"{_kind(record)}: {record.cause}")
    return tuple(Blame(node=node, reason=f"{node}: {why}", is_hard=is_hard) for node in named)


def _kind(record: InterruptionRecord) -> str:
    return record.kind if record.kind in INTERRUPTION_KINDS else "unknown"


def is_most(named: Iterable[str], attempt: Attempt) -> bool:
    """True for more than one node, and more than half of the attempt's."""
    count = len(tuple(named))
    return count > 1 and count * 2 > len(attempt.nodes)


def own_nodes(named: Iterable[str], attempt: Attempt) -> tuple[str, ...]:
    """Those that Slurm gave the attempt, each once: a file of a run could name anybody's node."""
    return tuple(node for node in dict.fromkeys(named) if node in attempt.nodes)


def choose_records(
    records: Iterable[InterruptionRecord], attempt: Attempt, ended: ExitRecord | None
) -> tuple[InterruptionRecord, ...]:
    """Those that are not settled, of starts that were: the present one may have been interrupted just now.

    A file for each of a thousand starts that never were would count as so many failures.
    """
    newest = min(attempt.launch, MAX_LAUNCHES - 1)
    if ended is not None and ended.attempt == attempt.number:
        newest = min(newest, ended.launches - 1)
    first = attempt.interruptions_read
    return tuple(r for r in records if r.attempt == attempt.number and first <= r.launch <= newest)


def find_left_out(attempt: Attempt, interruptions: Iterable[Interruption]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(lost, left out for another reason): nodes of the job that don't train because of what was found against them."""
    found = [i for i in interruptions if i.attempt == attempt.number and i.is_in_job]
    lost = {node for i in found if i.kind in HARD_KINDS for node in i.nodes}
    others = {node for i in found for node in i.nodes} - lost
    idle = attempt.spare_nodes
    return tuple(n for n in idle if n in lost), tuple(n for n in idle if n in others)


def count_settled(records: Iterable[InterruptionRecord], attempt: Attempt) -> int:
    """Before which start no record is read again: one is settled when the next start has stepped, or ended too."""
    settled = attempt.interruptions_read
    for record in records:
        settled = max(settled, record.launch + (1 if record.resumed_at is not None else 0))
    return min(settled, MAX_LAUNCHES)


def _parts(parts_s: Mapping[str, float]) -> tuple[Part, ...]:
    items = sorted(parts_s.items())[:_LINES]
    return tuple(Part(name=_text(name, 40), seconds=round(max(0.0, seconds), 3)) for name, seconds in items)


def _instant(seconds: float, earliest: datetime, latest: datetime) -> datetime:
    """An instant of the job's clock, kept within what is possible here."""
    try:
        at = datetime.fromtimestamp(seconds, UTC)
    except (OverflowError, ValueError, OSError):
        return latest
    return max(earliest, min(at, latest))


def _text(text: str, limit: int = _TEXT_CHARS) -> str:
    """A job's text as one line without control characters."""
    return "".join(c if c.isprintable() else " " for c in text[: 4 * limit]).strip()[:limit]
