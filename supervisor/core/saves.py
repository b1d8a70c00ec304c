"""How safe the work of a run is: what is saved, since when nothing was, and why a save failed. Pure."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from datetime import datetime
from itertools import pairwise

from supervisor.core.interval import first_every_s
from supervisor.model import Attempt, Checkpoint, CheckpointSpec

ALERT_INTERVALS = 3  # without a verified checkpoint, before someone is told
_OWN_LAYOUT = "supervisor"

# What a training says of a save that failed; the first that fits.
_ERRORS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"Disk quota exceeded|Errno 122|EDQUOT"), "filesystem (quota)"),
    (re.compile(r"No space left on device|Errno 28\b|ENOSPC"), "filesystem (full)"),
    (re.compile(r"Read-only file system|Errno 30\b|EROFS"), "filesystem (read-only)"),
    (re.compile(r"Permission denied|Errno 13\b|EACCES"), "filesystem (rights)"),
    (re.compile(r"Stale file handle|Errno 116\b|ESTALE"), "filesystem (stale handle)"),
    (re.compile(r"Input/output error|Errno 5\b|EIO\b|Transport endpoint"), "filesystem (I/O)"),
    (re.compile(r"(?i)time[d ]?-?\s?out|barrier"), "time-out"),
    (re.compile(r"(?i)writer (?:process )?(?:died|ended|is gone|was killed)|SIGKILL"), "writer"),
)


def classify_save_error(error: str) -> str:
    """The class of a failed save's error: filesystem (why), time-out, writer or other."""
    return next((kind for pattern, kind in _ERRORS if pattern.search(error)), "other")


def newest_kept(checkpoints: Sequence[Checkpoint]) -> Checkpoint | None:
    """The newest one that a restart may be sure of: verified, or whole where the layout has nothing better."""
    return max((c for c in checkpoints if c.is_kept), key=lambda c: c.key, default=None)


def steps_at_risk(last: Attempt | None, checkpoints: Sequence[Checkpoint], *, step: int | None) -> int | None:
    """Steps that would be done again if the run failed now; None where no step is known."""
    if last is None or step is None:
        return None
    newest = newest_kept(checkpoints)
    return max(0, step - (newest.step if newest is not None else 0))


SPACING_OF = 5  # newest saves, by which it is told how often a training saves
_SPACING_NEEDS = 3


def measure_spacing_s(last: Attempt, checkpoints: Sequence[Checkpoint]) -> float | None:
    """Seconds between the attempt's newest checkpoints as they were seen; None while there are too few to tell."""
    own = sorted((c for c in checkpoints if c.attempt == last.number), key=lambda c: c.step)[-SPACING_OF:]
    if len(own) < _SPACING_NEEDS:
        return None
    spacing_s = statistics.median((b.first_seen_at - a.first_seen_at).total_seconds() for a, b in pairwise(own))
    return spacing_s or None  # 0: all were found at once, by a service that was off


def is_kept_to(every_s: float, seen_s: float) -> bool:
    """True when saves come about as often as was asked: steps are long, and seen from outside every few seconds."""
    return every_s / 2 - _SEEN_WITHIN_S <= seen_s <= every_s * 2 + _SEEN_WITHIN_S


_SEEN_WITHIN_S = 5.0


def alert_limit_s(spec: CheckpointSpec, last: Attempt) -> float | None:
    """Seconds without a newly verified checkpoint, after which someone is told; None: never.

    A training of a foreign layout saves as often as it likes: only a limit that was given counts for it.
    """
    if spec.alert_after_s > 0:
        return spec.alert_after_s
    if spec.layout != _OWN_LAYOUT:
        return None
    every_s = last.checkpoint_every_s or first_every_s(spec)
    return ALERT_INTERVALS * (every_s + (last.save_total_s or 0.0))


def unsaved_since(last: Attempt, newest: Checkpoint | None) -> datetime | None:
    """Since when work has been made that no kept checkpoint holds; None before the first step."""
    if last.stepped_at is None:
        return None
    if newest is None or newest.attempt != last.number:
        return last.stepped_at
    return max(last.stepped_at, newest.first_seen_at)
