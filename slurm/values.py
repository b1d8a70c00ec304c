"""Slurm's small values as text: instants, exit codes, time limits, job and step ids, GRES and TRES. Pure and total.

Only `parse_time` and `parse_job_id` raise (ValueError), so that their row is reported; the others have a value for
"can't be read".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, tzinfo

from slurm.types import Unreadable

_EVIDENCE_CHARS = 4000  # a token in a long submit line must be seen in it
NOTHING = frozenset({"", "(null)", "n/a", "none", "unknown", "none assigned"})
MAX_JOB_ID = 2**32
_MAX_COUNT_DIGITS = 18


def unreadable_row(text: str, why: object) -> Unreadable:
    """The report of a row that is dropped, with as much of it as is worth keeping."""
    return Unreadable(text=text[:_EVIDENCE_CHARS], why=str(why)[:_EVIDENCE_CHARS])


def plain_text(value: str) -> str:
    """A text field without the words that Slurm prints for an empty one."""
    value = value.strip()
    return "" if value in {"(null)", "N/A"} else value


# ---------------------------------------------------------------- instants and durations


def parse_time(text: str, tz: tzinfo = UTC) -> datetime | None:
    """An instant in UTC from Slurm's standard form, printed in zone `tz`; None for Slurm's words for "not known".

    Raises:
        ValueError: any other form (a user's SLURM_TIME_FORMAT): an error, not "no start time".
    """
    text = text.strip()
    # The place of the separators is checked first: fromisoformat also reads week dates and zones of the same length.
    if len(text) == 19 and text[4] == text[7] == "-" and text[10] == "T" and text[13] == text[16] == ":":
        if tz is UTC:
            return datetime.fromisoformat(text + "+00:00")
        return datetime.fromisoformat(text).replace(tzinfo=tz).astimezone(UTC)
    if text.lower() in NOTHING:
        return None
    raise ValueError(f"{text[:40]!r} is not a time in Slurm's standard form")


def parse_duration_s(text: str) -> int | None:
    """Seconds of a time limit as sbatch reads it: minutes, m:s, h:m:s, d-h, d-h:m, d-h:m:s; None for any other.

    UNLIMITED and INFINITE are no number of seconds either: ask for them by name first.
    """
    found = re.fullmatch(r"(?:(\d{1,6})-)?(\d{1,9})(?::(\d{1,9}))?(?::(\d{1,9}))?", text.strip(), flags=re.ASCII)
    if found is None:
        return None
    days, first, second, third = (int(group) if group is not None else None for group in found.groups())
    if days is not None:
        return ((days * 24 + (first or 0)) * 60 + (second or 0)) * 60 + (third or 0)
    if third is not None:
        return ((first or 0) * 60 + (second or 0)) * 60 + third
    return (first or 0) * 60 + (second or 0)


# ---------------------------------------------------------------- exit codes

ExitCode = tuple[int | None, int | None]


def parse_exit_code(text: str) -> ExitCode:
    """(exit status, signal) of `A:B`, or of the wait(2) status word that squeue prints (35072 is exit status 137)."""
    status, colon, signal = text.strip().partition(":")
    if not is_number(status) or (colon and not is_number(signal)):
        return None, None
    if colon:
        return _in_range(int(status), 256), _in_range(int(signal), 1000)
    return split_wait_status(int(status))


def split_wait_status(raw: int) -> ExitCode:
    """(exit status, signal) of a wait(2) status word; nothing for a number that is none."""
    return (raw >> 8, raw & 0x7F) if 0 <= raw < 2**16 else (None, None)


def _in_range(value: int, limit: int) -> int | None:
    return value if value < limit else None


def is_number(text: str) -> bool:
    """True for a plain decimal number that is not absurdly long."""
    return len(text) <= _MAX_COUNT_DIGITS and text.isascii() and text.isdecimal()


# ---------------------------------------------------------------- jobs and steps


@dataclass(frozen=True, slots=True, kw_only=True)
class StepId:
    """One step of a job. `name`: a number as text, `batch`, `extern` or `interactive`."""

    job_id: int
    name: str
    component: int | None = None  # of a heterogeneous job
    element: int | None = None  # of an array


def parse_job_id(text: str) -> int:
    """The number of a job id; the leading one of `21+0` (heterogeneous job) and `7_3` (array element).

    Raises:
        ValueError: it is none.
    """
    if text.isascii() and text.isdecimal() and len(text) <= 10:  # nearly all
        job_id = int(text)
    else:
        found = _JOB.fullmatch(text.strip())
        job_id = int(found[1]) if found else 0
    if not 0 < job_id < MAX_JOB_ID:
        raise ValueError(f"{text[:40]!r} is not a job id")
    return job_id


_JOB = re.compile(r"(\d{1,10})(?:[+_]\S*)?", flags=re.ASCII)
_STEP = re.compile(r"(\d{1,10})(?:_(\d{1,10}))?(?:\+(\d{1,10}))?\.(\d{1,10}|[A-Za-z]+\+?)", flags=re.ASCII)
_STEP_WORDS = ("batch", "extern", "interactive")


def parse_step_id(text: str) -> StepId | None:
    """The step of `55.0`, `55.batch`, `21+0.0` or `7_3.extern`; None for anything else, a plain job id too.

    A word that a table of fixed width has cut is completed where it can only be one (`.bat+` is the batch step).
    """
    found = _STEP.fullmatch(text.strip())
    name = _complete(found[4]) if found else None
    if found is None or name is None or not 0 < int(found[1]) < MAX_JOB_ID:
        return None
    element, component = (int(group) if group is not None else None for group in (found[2], found[3]))
    return StepId(job_id=int(found[1]), name=name, component=component, element=element)


def _complete(word: str) -> str | None:
    if word.isdecimal():
        return str(int(word))
    lower = word.lower()
    meant = [w for w in _STEP_WORDS if w == lower or (lower.endswith("+") and w.startswith(lower[:-1]))]
    return meant[0] if len(meant) == 1 else None


# ---------------------------------------------------------------- GRES and TRES


@dataclass(frozen=True, slots=True, kw_only=True)
class Gres:
    """Generic resources of one kind on one node, e.g. eight GPUs of type h100."""

    name: str
    type: str = ""
    count: int = 1
    sockets: tuple[int, ...] = ()  # those that the devices hang on; empty: not said


_GRES = re.compile(
    r"(?:gres[:/])?([A-Za-z][\w.-]*)(?::(?!no_consume\b)([A-Za-z][\w.-]*))?(?::no_consume)?(?:[:=](\d{1,12})([KMGTP]?))?(?:\(([^()]*)\))?",
    flags=re.ASCII,
)
_FACTORS = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4, "P": 1024**5}


def parse_gres(text: str) -> tuple[Gres, ...]:
    """Resources of `gpu:h100:8(S:0-1),shard:16`, in the order written; what can't be read is left out.

    Also the spelling of TRES (`gres/gpu:h100=8`). `(IDX:…)`, which says which ones are in use, is not kept.
    """
    if text.strip().lower() in NOTHING or len(text) > _MAX_GRES_CHARS:
        return ()
    found = (_GRES.fullmatch(part.strip()) for part in _split_outside_parentheses(text))
    return tuple(
        Gres(
            name=match[1],
            type=match[2] or "",
            count=int(match[3]) * _FACTORS[match[4] or ""] if match[3] else 1,
            sockets=_sockets(match[5] or ""),
        )
        for match in found
        if match
    )


def count_gres(text: str, name: str) -> int:
    """How many of one name a node has, all types together: `count_gres("gpu:a100:4,gpu:h100:4", "gpu")` is 8."""
    return sum(gres.count for gres in parse_gres(text) if gres.name == name)


def _split_outside_parentheses(text: str) -> list[str]:
    return re.split(r",(?![^()]*\))", text)


def _sockets(text: str) -> tuple[int, ...]:
    kind, _, ranges = text.partition(":")
    if kind != "S":
        return ()
    sockets: list[int] = []
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        last = last or first
        if not is_number(first) or not is_number(last) or not 0 <= int(last) - int(first) < _MAX_SOCKETS:
            return ()
        sockets.extend(range(int(first), int(last) + 1))
    return tuple(sockets[:_MAX_SOCKETS])


_MAX_SOCKETS = 64
_MAX_GRES_CHARS = 4096  # more is no node's; splitting takes the square of it
_TRES_VALUE = re.compile(r"(\d{1,18})(?:\.\d+)?([KMGTP]?)", flags=re.ASCII)
_IN_MEBIBYTES = frozenset({"mem", "vmem"})


def parse_tres(text: str) -> Mapping[str, int]:
    """Counts by name of `billing=128,cpu=128,mem=500G,gres/gpu=8,gres/gpu:h100=8`; what can't be read is left out.

    Memory is in MiB, Slurm's own unit: `500G` and `512000M` and `512000` are the same.
    """
    counts: dict[str, int] = {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        found = _TRES_VALUE.fullmatch(value)
        if equals and name and found:
            counts[name] = _scale(int(found[1]), found[2], is_memory=name in _IN_MEBIBYTES)
    return counts


def _scale(number: int, suffix: str, *, is_memory: bool) -> int:
    if is_memory:
        return number * _FACTORS[suffix] // _FACTORS["M"] if suffix else number
    return number * _FACTORS[suffix]
