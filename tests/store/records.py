"""Built and drawn records for the tests of the ledger."""

from __future__ import annotations

import dataclasses
import types
import typing
from dataclasses import replace
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from supervisor.model import (
    Attempt,
    AttemptState,
    Checkpoint,
    CheckpointState,
    Fact,
    Intent,
    IntentKind,
    Interruption,
    NodeEvent,
    NodesSpec,
    Plan,
    Record,
    Run,
    RunSpec,
    RunState,
)

NOW = datetime(2026, 11, 30, 3, 0, tzinfo=UTC)


def run(name: str = "gpt", state: RunState = RunState.ACTIVE) -> Run:
    spec = RunSpec(name=name, command=("train.py",), root=Path("/shared/runs"), nodes=NodesSpec(min=2, max=3))
    return Run(spec=spec, state=state)


def attempt(number: int = 1, state: AttemptState = AttemptState.RUNNING, *, of: str = "gpt") -> Attempt:
    return Attempt(run=of, number=number, token=f"{of}-{number}", state=state, nodes_wanted=3, planned_at=NOW)


def checkpoint(step: int, *, of: str = "gpt", state: CheckpointState = CheckpointState.VERIFIED) -> Checkpoint:
    return Checkpoint(run=of, step=step, attempt=1, state=state, path=f"/shared/step-{step}.a1", first_seen_at=NOW)


def interruption(number: int = 1, *, of: str = "gpt") -> Interruption:
    return Interruption(
        run=of,
        attempt=number,
        kind="node_silent",
        cause="n2 is silent",
        node="n2",
        is_planned=False,
        detected_at=NOW,
    )


def event(node: str = "n2", at: datetime = NOW) -> NodeEvent:
    return NodeEvent(node=node, at=at, event="node.drained")


def intent(key: str = "submit:gpt:1", kind: IntentKind = IntentKind.SUBMIT) -> Intent:
    return Intent(kind=kind, key=key, reason="because", run="gpt", attempt=1)


def facts(*records: Record) -> tuple[Fact, ...]:
    return tuple(Fact(record=record, reason="seen") for record in records)


def plan(*records: Record, intents: tuple[Intent, ...] = ()) -> Plan:
    return Plan(facts=facts(*records), intents=intents)


def drawn(kind: type) -> st.SearchStrategy[Any]:
    """Any record of this type."""
    hints = typing.get_type_hints(kind)
    return st.builds(kind, **{field.name: _value(hints[field.name]) for field in dataclasses.fields(kind)})


def _value(hint: Any) -> st.SearchStrategy[Any]:
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return st.one_of(*(_value(option) for option in typing.get_args(hint)))
    if typing.get_origin(hint) is typing.Literal:
        return st.sampled_from(typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return st.lists(_value(typing.get_args(hint)[0]), max_size=3).map(tuple)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return drawn(hint)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return st.sampled_from(hint)
    return _SCALARS[hint]


_SCALARS: dict[Any, st.SearchStrategy[Any]] = {
    str: st.text(max_size=20),
    int: st.integers(min_value=-(2**63), max_value=2**63 - 1),
    float: st.floats(allow_nan=False, allow_infinity=False),
    bool: st.booleans(),
    datetime: st.datetimes(timezones=st.just(UTC)),
    Path: st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=20).map(Path),
    type(None): st.none(),
}


@st.composite
def histories(draw: st.DrawFn) -> tuple[Record, ...]:
    """The records of a few runs as they may stand in a ledger: at most the last attempt of each is live."""
    names = draw(st.lists(st.sampled_from(["a", "b", "c"]), unique=True, max_size=3))
    return tuple(record for name in names for record in _history(draw, name))


def _history(draw: st.DrawFn, name: str) -> list[Record]:
    asked = draw(drawn(Run))
    records: list[Record] = [replace(asked, spec=replace(asked.spec, name=name))]
    count = draw(st.integers(0, 3))
    for number in range(1, count + 1):
        one: Attempt = replace(draw(drawn(Attempt)), run=name, number=number, token=f"{name}.{number}")
        records.append(one if number == count else replace(one, state=AttemptState.OVER))
        if draw(st.booleans()):
            records.append(replace(draw(drawn(Interruption)), run=name, attempt=number))
    steps = range(draw(st.integers(0, 3)))
    return records + [replace(draw(drawn(Checkpoint)), run=name, step=step, attempt=1) for step in steps]
