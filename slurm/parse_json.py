"""JSON of squeue, scontrol, sinfo and sacct to records. Pure, and total: nothing raises but `JsonUnusable`.

Shapes are read, not versions. A value may be a string, a number, `{set, infinite, number}`, a list, null or `{}`:

- a job's state is a word (22.05, 23.02) or a list of words; a node's is a word with `state_flags` beside it (22.05), or
  a list;
- an exit code is a wait(2) status (22.05), the same as a number object (23.02), or `{status, return_code, signal}`;
- a job's nodes are a string, or only in `job_resources`, whose list of them has had three shapes;
- empty values are `""`, `[]`, `{}` and null in turn.

An optional field that is missing is empty. A row without what makes it a job or a node is reported and dropped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar

from slurm.hostlist import expand_nodes
from slurm.jobs import merge_rows
from slurm.parse import comment_of_submit_line, read_reason
from slurm.states import judge_job_words, parse_node_state
from slurm.types import ENDED_STATES, JobFlag, JobListing, JobRecord, JobState, NodeListing, NodeRecord, Unreadable
from slurm.values import (
    MAX_JOB_ID,
    ExitCode,
    StepId,
    is_number,
    parse_job_id,
    parse_step_id,
    parse_time,
    plain_text,
    split_wait_status,
    unreadable_row,
)

NEWEST_TESTED = (26, 5)  # releases after this one are read by shape too, with a warning

_LAST_INSTANT = 253_402_300_799  # end of the year 9999
_MAX_NUMBER = 2**63
_TELLING_KEYS = ("job_id", "name", "comment", "submit_line")

Row = Mapping[str, Any]
T = TypeVar("T")


class JsonUnusable(ValueError):
    """The text holds no JSON document of the kind that was asked for; the message says why."""


class JsonError(JsonUnusable):
    """The document is Slurm's report of an error: there was no answer, and there may be one next time."""


# ---------------------------------------------------------------- documents


def load_document(text: str, key: str) -> Row:
    """The JSON object in a tool's output, whose `key` is a list; a notice before it is passed over.

    Raises:
        JsonError: Slurm's own report of an error. 22.05's tools print it with exit 0 and an empty list when the
            controller is down.
        JsonUnusable: no JSON, or something else than what was asked for.
    """
    document = _find_object(text)
    errors = document.get("errors")
    if errors:
        raise JsonError(f"it reports errors: {_first_words(errors)}")
    if not isinstance(document.get(key), list):
        raise JsonUnusable(f"it holds no list {key!r}")
    return document


_OBJECT_START = re.compile(r"^\s*\{", re.MULTILINE)


def _find_object(text: str) -> Row:
    start = _OBJECT_START.search(text)
    if start is None:
        raise JsonUnusable(f"no JSON in {text[:80]!r}")
    try:
        document, _end = json.JSONDecoder().raw_decode(text, start.end() - 1)
    except (ValueError, RecursionError) as error:
        raise JsonUnusable(f"not valid JSON: {str(error)[:200]}") from None
    assert isinstance(document, dict)
    return document


def read_release(document: Row) -> tuple[int, int] | None:
    """The Slurm release that wrote the document, e.g. (24, 11); None when it does not say."""
    meta = _object(document.get("meta"))
    version = _object(_object(meta.get("slurm") or meta.get("Slurm")).get("version"))
    major, minor = _number(version.get("major")), _number(version.get("minor"))
    return None if major is None or minor is None else (major, minor)


# ---------------------------------------------------------------- jobs


def parse_squeue_json(document: Row) -> JobListing:
    """Jobs of `squeue --json`: all in the controller's memory, ended ones too, one record for each job id.

    Components of a heterogeneous job stand under the job's id, as one.
    """
    jobs, unreadable = _read_rows(document["jobs"], _squeue_job)
    return JobListing(jobs=merge_rows(jobs), unreadable=unreadable)


def parse_sacct_json(document: Row) -> JobListing:
    """Jobs of `sacct --json`, one record for each run of a requeued job; exit statuses are whole (137 stays 137)."""
    jobs, unreadable = _read_rows(document["jobs"], _sacct_job)
    return JobListing(jobs=jobs, unreadable=unreadable)


def is_accounting_complete(document: Row) -> bool:
    """False when `sacct --json` leaves out what the text has: the submit line (22.05), exit statuses (to 23.02)."""
    rows = [row for row in document["jobs"] if isinstance(row, dict)]
    return all("submit_line" in row and _is_whole_exit(row.get("exit_code")) for row in rows)


def _is_whole_exit(value: Any) -> bool:
    """Up to 23.02 any exit status was written as SUCCESS with 0; a number object there is of a later release."""
    return isinstance(_object(value).get("return_code"), dict)


def _squeue_job(row: Row) -> JobRecord:
    words = _words(row.get("job_state"))
    state, flags = judge_job_words(words)
    is_over = _is_over(state, flags)
    nodes = _job_nodes(row) if state is not JobState.PENDING else ()
    exit_code, exit_signal = read_exit(row.get("exit_code")).pair if is_over else (None, None)
    return JobRecord(
        job_id=_number(row.get("het_job_id")) or _job_id(row.get("job_id")),
        state=state,
        raw_state="+".join(words),
        flags=flags,
        name=_text(row.get("name")),
        user=_text(row.get("user_name")),
        partition=_text(row.get("partition")),
        comment=_text(row.get("comment")),
        reason=read_reason(_text(row.get("state_description")) or _text(row.get("state_reason"))),
        nodes=nodes,
        submit_at=_instant(row.get("submit_time")),
        # As with text: without nodes it never started, and the end of one that runs is that of its time limit.
        start_at=_instant(row.get("start_time")) if nodes else None,
        end_at=_instant(row.get("end_time")) if is_over else None,
        limit_at=_instant(row.get("end_time")) if state is JobState.RUNNING and not is_over else None,
        exit_code=exit_code,
        exit_signal=exit_signal,
        restarts=_number(row.get("restart_cnt")) or 0,
    )


def _sacct_job(row: Row) -> JobRecord:
    words = _words(_object(row.get("state")).get("current"))
    state, flags = judge_job_words(words)
    time = _object(row.get("time"))
    is_over = _is_over(state, flags)
    exit_code, exit_signal = read_exit(row.get("exit_code")).pair if is_over else (None, None)
    if state is JobState.FAILED and exit_code == 0 and not exit_signal:
        exit_code = None  # it was not 0 (see `is_accounting_complete`)
    return JobRecord(
        job_id=_job_id(row.get("job_id")),
        state=state,
        raw_state="+".join(words),
        flags=flags,
        name=_text(row.get("name")),
        user=_text(row.get("user")),
        partition=_text(row.get("partition")),
        comment=_text(_object(row.get("comment")).get("job")) or comment_of_submit_line(_text(row.get("submit_line"))),
        nodes=_job_nodes(row),
        submit_at=_instant(time.get("submission")),
        start_at=_instant(time.get("start")),
        end_at=_instant(time.get("end")) if is_over else None,
        exit_code=exit_code,
        exit_signal=exit_signal,
        restarts=_number(row.get("restart_cnt")) or 0,
    )


def _is_over(state: JobState | None, flags: frozenset[JobFlag]) -> bool:
    return state in ENDED_STATES or JobFlag.COMPLETING in flags


def _job_nodes(row: Row) -> tuple[str, ...]:
    nodes = _text(row.get("nodes"))
    if nodes:
        return expand_nodes(nodes)
    allocated = _object(row.get("job_resources")).get("nodes")
    if isinstance(allocated, str):
        return expand_nodes(allocated)
    return expand_nodes(_text(_object(allocated).get("list")))


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """An exit code with Slurm's word for it (SUCCESS, ERROR, SIGNALED, PENDING, ...; empty where there is none)."""

    code: int | None
    signal: int | None
    word: str = ""

    @property
    def pair(self) -> ExitCode:
        """(exit status, signal)."""
        return self.code, self.signal


def read_exit(value: Any) -> Exit:
    """An exit code in any of its shapes; a signal that is missing or not set is 0."""
    raw = _number(value)
    if raw is not None:
        code, signal = split_wait_status(raw)
        return Exit(code=code, signal=signal)
    parts = _object(value)
    word = "+".join(_words(parts.get("status")))
    by = _object(parts.get("signal"))
    signal = _bounded(_number(by.get("id")) or _number(by.get("signal_id")), 1000) or 0
    code = _bounded(_number(parts.get("return_code")), 256)
    return Exit(
        code=0 if signal and code is None else code, signal=signal if signal or code is not None else None, word=word
    )


def _bounded(value: int | None, limit: int) -> int | None:
    return value if value is not None and 0 <= value < limit else None


def read_step_id(value: Any) -> StepId | None:
    """The step of `"55.0"` (23.11 on) or `{"job_id": 55, "step_id": "0"}` (23.02), or of an object with it as `id`."""
    if isinstance(value, str):
        return parse_step_id(value)
    parts = _object(value)
    if "id" in parts:
        inner = parts["id"]
        return read_step_id(inner) if isinstance(inner, str) or "id" not in _object(inner) else None
    job_id, component = _number(parts.get("job_id")), _number(parts.get("step_het_component"))
    name = parts.get("step_id")
    text = name if isinstance(name, str) else _number(name)
    return parse_step_id(f"{job_id}{'' if component is None else f'+{component}'}.{str(text).lower()}")


# ---------------------------------------------------------------- nodes


def parse_nodes_json(document: Row) -> NodeListing:
    """Nodes of `scontrol show nodes --json`, or of 22.05's `sinfo --json`. One that is listed twice counts once."""
    records, unreadable = _read_rows(document["nodes"], _node)
    nodes: dict[str, NodeRecord] = {}
    for node in records:
        nodes.setdefault(node.name, node)
    again = [node.name for node in records if nodes[node.name] is not node]
    twice = (unreadable_row(name, f"node {name} is listed twice") for name in again)
    return NodeListing(nodes=tuple(nodes.values()), unreadable=(*unreadable, *twice))


def _node(row: Row) -> NodeRecord:
    name = _text(row.get("name"))
    words = [*_words(row.get("state")), *_words(row.get("state_flags"))]
    if not name or not words:
        raise ValueError("no name or no state")
    base, flags = parse_node_state("+".join(words))
    reason = " ".join(_text(row.get("reason")).split())
    return NodeRecord(
        name=name,
        base=base,
        flags=flags,
        raw_state="+".join(words),
        address=_text(row.get("address")),
        host_name=_text(row.get("hostname")),
        port=_number(row.get("port")),
        partitions=tuple(_names(row.get("partitions"))),
        reason=reason,
        reason_user=_text(row.get("reason_set_by_user")) if reason else "",
        reason_at=_printed(row.get("reason_changed_at")) if reason else "",
        cpus=_number(row.get("cpus")) or 0,
        memory_mb=_number(row.get("real_memory")) or 0,
        gres=_text(row.get("gres")),
        boot_at=_printed(row.get("boot_time")),
        version=_text(row.get("version")) or _text(row.get("slurmd_version")),
    )


# ---------------------------------------------------------------- rows and values


def _read_rows(rows: Iterable[Any], build: Callable[[Row], T]) -> tuple[tuple[T, ...], tuple[Unreadable, ...]]:
    records: list[T] = []
    unreadable: list[Unreadable] = []
    for row in rows:
        try:
            records.append(build(row) if isinstance(row, dict) else _refuse(row))
        except (ValueError, OverflowError) as error:
            unreadable.append(unreadable_row(_shown(row), error))
    return tuple(records), tuple(unreadable)


def _refuse(row: Any) -> Any:
    raise ValueError(f"{type(row).__name__} where an object was expected")


def _shown(row: Any) -> str:
    """What of a row helps to find it; free text too, so that a token in it is found."""
    if not isinstance(row, dict):
        return _brief(row)
    return ", ".join(f"{key}: {_brief(row[key])}" for key in _TELLING_KEYS if key in row)


def _brief(value: Any) -> str:
    """A plain value as text, of another its type: one that is nested deeply can't even be printed."""
    return str(value) if isinstance(value, str | int | float) or value is None else type(value).__name__


def _first_words(errors: Any) -> str:
    first = errors[0] if isinstance(errors, list) else errors
    said = first.values() if isinstance(first, dict) else (first,)
    return ", ".join(_brief(value) for value in said)[:200]


def _object(value: Any) -> Row:
    return value if isinstance(value, dict) else {}


def _number(value: Any) -> int | None:
    """A number as such, as text, or as `{set, infinite, number}`; None when it is not set, infinite, or none."""
    if isinstance(value, dict):
        is_said = value.get("set", True) is True and value.get("infinite", False) is not True
        inner = value.get("number")
        return _number(inner) if is_said and not isinstance(inner, dict) else None
    if isinstance(value, str):
        return int(value) if is_number(value) else None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if -_MAX_NUMBER < value < _MAX_NUMBER else None


def _job_id(value: Any) -> int:
    if isinstance(value, str):
        return parse_job_id(value)
    job_id = _number(value)
    if job_id is None or not 0 < job_id < MAX_JOB_ID:
        raise ValueError(f"{_brief(value)[:40]!r} is not a job id")
    return job_id


def _text(value: Any) -> str:
    return plain_text(value) if isinstance(value, str) else ""


def _words(value: Any) -> list[str]:
    """Flag words in capitals, of a list or of one string; a string is never taken apart into characters."""
    return [word.upper() for item in _strings(value) for word in re.split(r"[+,\s]+", item) if word]


def _names(value: Any) -> list[str]:
    return [name.strip() for item in _strings(value) for name in item.split(",") if name.strip()]


def _strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def _instant(value: Any) -> datetime | None:
    """Seconds since 1970 in any shape, or text in Slurm's standard form; 0 and unset are "not known"."""
    seconds = _number(value)
    if seconds is None:
        return parse_time(value) if isinstance(value, str) else None
    if not 0 <= seconds <= _LAST_INSTANT:
        raise ValueError(f"{seconds} is not a time")
    return datetime.fromtimestamp(seconds, UTC) if seconds else None


def _printed(value: Any) -> str:
    """An instant as scontrol prints it when it runs with TZ=UTC."""
    at = _instant(value)
    return "" if at is None else at.strftime("%Y-%m-%dT%H:%M:%S")
