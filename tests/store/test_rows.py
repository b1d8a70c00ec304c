import dataclasses
import sqlite3
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.model import Attempt, Checkpoint, CheckRow, Intent, Interruption, NodeEvent, NodeMemory, Run
from supervisor.rows import from_row, to_row, to_text
from supervisor.store import DaemonRow, RequestRow, RunChange
from tests.store import records
from tests.store.records import NOW
from trainer.contract import CheckResult

KINDS = [
    Run,
    Attempt,
    Checkpoint,
    Interruption,
    NodeMemory,
    NodeEvent,
    CheckRow,
    Intent,
    DaemonRow,
    RequestRow,
    RunChange,
]


def through_sqlite(row: dict[str, Any]) -> dict[str, Any]:
    with sqlite3.connect(":memory:") as connection:
        names = [f'"{name}"' for name in row]
        values = connection.execute(f"SELECT {', '.join('?' for _ in names)}", list(row.values())).fetchone()
    connection.close()
    return dict(zip(row, values, strict=True))


@given(st.sampled_from(KINDS).flatmap(records.drawn))
def test_every_record_comes_back_from_its_row_as_it_was(record: Any) -> None:
    assert from_row(type(record), through_sqlite(to_row(record))) == record


@given(st.datetimes(timezones=st.timezones()), st.datetimes(timezones=st.timezones()))
def test_instants_sort_as_text_as_they_do_in_time(one: datetime, other: datetime) -> None:
    assert (to_text(one) < to_text(other)) == (one.astimezone(UTC) < other.astimezone(UTC))


def test_an_instant_of_another_zone_is_stored_in_utc() -> None:
    assert to_text(datetime(2026, 1, 1, 1, tzinfo=timezone(timedelta(hours=1)))) == "2026-01-01T00:00:00.000000+00:00"


def test_an_instant_without_a_zone_is_refused() -> None:
    with pytest.raises(ValueError, match="time zone"):
        to_row(records.event(at=datetime(2026, 1, 1)))  # noqa: DTZ001 - the fault under test


def test_text_that_is_no_utf8_is_stored_readably() -> None:
    event = dataclasses.replace(records.event(), detail="bad \udcff byte")
    assert from_row(NodeEvent, through_sqlite(to_row(event))).detail == r"bad \udcff byte"


def test_text_that_is_no_utf8_inside_a_list_is_stored_readably() -> None:
    broken = dataclasses.replace(records.interruption(), evidence=("ok", "\udc80"))
    assert from_row(Interruption, through_sqlite(to_row(broken))).evidence == ("ok", r"\udc80")


def test_a_nan_comes_back_as_none() -> None:
    row = CheckRow(node="n1", at=NOW, result=CheckResult(check="clock", ok=None, value=float("nan")))
    assert from_row(CheckRow, through_sqlite(to_row(row))).result.value is None


def test_a_run_file_of_an_older_release_gets_the_defaults_of_newer_fields() -> None:
    row = to_row(records.run())
    row["spec"] = '{"name": "gpt", "command": ["a"], "root": "/r", "nodes": {"min": 1, "max": 2}, "gone": 1}'
    assert from_row(Run, row).spec.root == Path("/r")
