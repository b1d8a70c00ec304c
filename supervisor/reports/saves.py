"""What `supervisor status` says of a run's saves: how often, what that rests on, what would be lost now. Read-only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from supervisor.core.interval import Interval, first_every_s, judge_interval
from supervisor.core.saves import is_kept_to, measure_spacing_s, newest_kept, steps_at_risk
from supervisor.model import Attempt, Checkpoint, CheckpointState, Interruption, Run
from supervisor.reports.table import duration


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveStatus:
    """The saves of one run now."""

    every_s: float  # as the training was last told
    is_fixed: bool
    seen_s: float | None  # between its newest checkpoints; None: too few to tell
    interval: Interval | None  # None: no save was measured yet
    newest: Checkpoint | None  # that a restart may be sure of
    at_risk: int | None  # steps that would be done again
    failures: int = 0  # failed saves in a row
    error: str = ""
    suspect: int = 0  # checkpoints that are not believed since the loss went wrong
    object_url: str = ""  # where verified ones are copied to; "": nowhere
    uploaded: str = ""  # the newest that is there
    upload_failures: int = 0  # failed tries in a row
    upload_error: str = ""


def judge_saves(
    run: Run,
    attempts: Sequence[Attempt],
    checkpoints: Sequence[Checkpoint],
    now: datetime,
    *,
    step: int | None,
    history: Sequence[Interruption] = (),
) -> SaveStatus:
    """What the ledger knows of the saves; `step`: the newest one that the run is known to have made."""
    spec, last = run.spec.checkpoint, max(attempts, key=lambda a: a.number, default=None)
    told_s = last.checkpoint_every_s if last is not None else 0.0
    is_live = last is not None and not last.is_over
    return SaveStatus(
        every_s=told_s or first_every_s(spec),
        is_fixed=spec.interval == "fixed",
        seen_s=measure_spacing_s(last, checkpoints) if last is not None else None,
        interval=judge_interval(run.spec, attempts, now, history),
        newest=newest_kept(checkpoints),
        at_risk=steps_at_risk(last, checkpoints, step=step) if is_live else None,
        failures=last.save_failures if last is not None and is_live else 0,
        error=last.save_error if last is not None and is_live else "",
        suspect=sum(1 for c in checkpoints if c.state is CheckpointState.SUSPECT),
        object_url=spec.object_url,
        uploaded=next((a.uploaded for a in sorted(attempts, key=lambda a: -a.number) if a.uploaded), ""),
        upload_failures=last.upload_failures if last is not None else 0,
        upload_error=last.upload_error if last is not None else "",
    )


def saves_as_json(saves: SaveStatus) -> dict[str, Any]:
    """The part "saves" of a run in `supervisor status --json`; seconds, and shares of all time from 0 to 1."""
    return {
        "every_s": saves.every_s,
        "fixed": saves.is_fixed,
        "seen_s": saves.seen_s,
        "failures": saves.failures,
        "error": saves.error or None,
        "suspect": saves.suspect,
        "object_storage": _uploads_as_json(saves),
        **interval_as_json(saves.interval),
    }


def _uploads_as_json(saves: SaveStatus) -> dict[str, Any] | None:
    if not saves.object_url:
        return None
    return {
        "url": saves.object_url,
        "newest": saves.uploaded or None,
        "failures": saves.upload_failures,
        "error": saves.upload_error or None,
    }


def interval_as_json(interval: Interval | None) -> dict[str, Any]:
    """The interval that the formula gives, what it rests on and what it costs; None each before it was measured."""
    loss = interval.loss if interval else None
    return {
        "chosen_s": interval.every_s if interval else None,
        "best_s": interval.best_s if interval else None,
        "bound": (interval.bound or None) if interval else None,
        "blocking_s": interval.costs.save_s if interval else None,
        "durable_s": interval.costs.durable_s if interval else None,
        "restart_s": interval.costs.restart_s if interval else None,
        "mtbf_h": interval.rate.mtbf_s / 3600 if interval else None,
        "failures_seen": interval.rate.failures if interval else None,
        "prior_share": interval.rate.prior_share if interval else None,
        "loss": loss.total if loss else None,
        "loss_saving": loss.saving if loss else None,
        "loss_repeated": loss.repeated if loss else None,
        "loss_restarts": loss.restarts if loss else None,
    }


def save_lines(saves: SaveStatus, now: datetime) -> tuple[str, ...]:
    """For people: what `supervisor status RUN` shows below its table."""
    return (*_interval_lines(saves), *_risk_lines(saves, now), *_upload_lines(saves))


def _interval_lines(saves: SaveStatus) -> tuple[str, ...]:
    how = _describe_choice(saves)
    if saves.interval is None:
        return (f"saves: every {duration(saves.every_s)} ({how}; what a save costs was not measured yet)",)
    loss, costs, rate = saves.interval.loss, saves.interval.costs, saves.interval.rate
    bound = f", {saves.interval.bound}" if saves.interval.bound and not saves.is_fixed else ""
    better = f"; least would be lost with {duration(saves.interval.best_s)}" if saves.is_fixed else ""
    every = f"saves: every {duration(saves.every_s)} ({how}{bound}{better})"
    parts = f"saving {loss.saving:.2%}, work done again {loss.repeated:.2%}, restarts {loss.restarts:.2%}"
    return (
        f"{every}; a save blocks for {costs.save_s:.3g} s and is durable after {costs.durable_s:.3g} s",
        f"  expected loss {loss.total:.2%}: {parts} ({duration(costs.restart_s)} each)",
        f"  a failure every {duration(rate.mtbf_s)}: {rate.basis}",
    )


def _describe_choice(saves: SaveStatus) -> str:
    """Whose interval it is. A script may have a schedule of its own: only what is seen shows that it keeps to this."""
    is_kept = saves.seen_s is not None and is_kept_to(saves.every_s, saves.seen_s)
    how = "fixed by the run file" if saves.is_fixed else f"{'chosen' if is_kept else 'advised'} by the service"
    if saves.seen_s is None or is_kept:
        return how
    return f"{how}; the last ones came every {duration(saves.seen_s)}, as the script likes or was told before"


def _risk_lines(saves: SaveStatus, now: datetime) -> tuple[str, ...]:
    lines = []
    if saves.at_risk is not None:
        newest = saves.newest
        age = (
            f"step {newest.step}, seen {duration((now - newest.first_seen_at).total_seconds())} ago"
            if newest
            else "none"
        )
        lines.append(f"steps at risk: {saves.at_risk}; newest verified checkpoint: {age}")
    if saves.failures:
        lines.append(f"saves fail, {saves.failures} in a row: {saves.error}")
    if saves.suspect:
        lines.append(f"suspect checkpoints, made when the loss had gone wrong and never resumed from: {saves.suspect}")
    return tuple(lines)


def _upload_lines(saves: SaveStatus) -> tuple[str, ...]:
    if not saves.object_url:
        return ()
    line = f"object storage {saves.object_url}: newest there {saves.uploaded or 'none'}"
    if saves.upload_failures:
        line += f"; {saves.upload_failures} tries in a row failed: {saves.upload_error}"
    return (line,)
