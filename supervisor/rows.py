"""Records of the model as rows of the ledger and back: one mapping for all of them, derived from their fields.

A field is a column of the same name. Text, whole numbers, numbers and None stand as they are; a bool is 0 or 1, an
enum its word, an instant ISO 8601 in UTC with microseconds (so that text order is time order), a path its text, and
everything else (tuples, nested records) JSON. A NaN has no place in SQL: it comes back as None.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

Value = str | int | float | None
Row = dict[str, Value]
R = TypeVar("R")


def to_row(record: object) -> Row:
    """One row: column name to value, in the order of the record's fields. ValueError for a naive datetime."""
    return {column.name: column.encode(getattr(record, column.name)) for column in _columns(type(record))}


def from_row(kind: type[R], row: Mapping[str, Any]) -> R:
    """The record of type `kind` that `to_row` made `row` from; columns that are no field of it are ignored."""
    return kind(**{column.name: column.decode(row[column.name]) for column in _columns(kind)})


def to_text(at: datetime) -> str:
    """An instant as the ledger writes it. ValueError when it does not say its time zone."""
    if at.tzinfo is None:
        raise ValueError(f"{at!r} has no time zone: instants are aware")
    return at.astimezone(UTC).isoformat(timespec="microseconds")


def storable(text: str) -> str:
    """Text that SQLite takes: bytes of logs and file names that are no UTF-8 (lone surrogates here) are spelled out."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "backslashreplace").decode()
    return text


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Column:
    name: str
    encode: Callable[[Any], Value]
    decode: Callable[[Any], Any]


_COLUMNS: dict[Any, tuple[_Column, ...]] = {}


def _columns(kind: Any) -> tuple[_Column, ...]:
    if kind not in _COLUMNS:
        hints = typing.get_type_hints(kind)
        _COLUMNS[kind] = tuple(_column(field.name, hints[field.name]) for field in dataclasses.fields(kind))
    return _COLUMNS[kind]


def _column(name: str, hint: Any) -> _Column:
    inner = _without_none(hint)
    encode, decode = _codec(inner)
    if inner is hint:
        return _Column(name=name, encode=encode, decode=decode)
    return _Column(
        name=name,
        encode=lambda value: None if value is None else encode(value),
        decode=lambda value: None if value is None else decode(value),
    )


def _without_none(hint: Any) -> Any:
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        options = [option for option in typing.get_args(hint) if option is not type(None)]
        if len(options) == 1:
            return options[0]
    return hint


def _codec(hint: Any) -> tuple[Callable[[Any], Value], Callable[[Any], Any]]:
    if hint is bool:
        return int, bool
    if hint is str:
        return storable, str
    if hint is int:
        return int, int
    if hint is float:
        return float, float
    if hint is datetime:
        return to_text, _to_instant
    if hint is Path:
        return str, Path
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return str, hint
    return _to_json, _json_decoder(hint)


def _to_instant(text: str) -> datetime:
    return datetime.fromisoformat(text).astimezone(UTC)


def _to_json(value: object) -> str:
    import msgspec  # what only reads the ledger starts sooner without it

    try:
        return msgspec.json.encode(value, enc_hook=_plain).decode()
    except UnicodeEncodeError:
        return msgspec.json.encode(_storable_parts(msgspec.to_builtins(value, enc_hook=_plain))).decode()


def _storable_parts(value: Any) -> Any:
    if isinstance(value, str):
        return storable(value)
    if isinstance(value, dict):
        return {_storable_parts(key): _storable_parts(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_storable_parts(item) for item in value]
    return value


def _plain(value: object) -> str:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"{type(value).__name__} has no JSON form")


def _json_decoder(hint: Any) -> Callable[[str], Any]:
    build = _builder(hint)
    return lambda text: build(() if text == "[]" else json.loads(text))  # most lists are empty, in every row of nodes


def _builder(hint: Any) -> Callable[[Any], Any]:
    """Makes a value of type `hint` from what JSON holds of it. TypeError for a type that no record has."""
    inner = _without_none(hint)
    if inner is not hint:
        build = _builder(inner)
        return lambda value: None if value is None else build(value)
    if typing.get_origin(hint) is tuple and typing.get_args(hint)[1:] == (...,):
        build = _builder(typing.get_args(hint)[0])
        return tuple if build is _as_it_is else lambda value: tuple(build(item) for item in value)
    if typing.get_origin(hint) is typing.Literal or hint in (str, int, bool):
        return _as_it_is
    if hint in (float, Path) or (isinstance(hint, type) and issubclass(hint, StrEnum)):
        return typing.cast("Callable[[Any], Any]", hint)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _record_builder(hint)
    raise TypeError(f"{hint} has no form in JSON")


def _as_it_is(value: Any) -> Any:
    return value


def _record_builder(kind: type) -> Callable[[Any], Any]:
    """Keys that are no field are ignored, missing ones have their default: an older or newer release wrote them."""
    hints = typing.get_type_hints(kind)
    builders = [(field.name, _builder(hints[field.name])) for field in dataclasses.fields(kind)]
    return lambda value: kind(**{name: build(value[name]) for name, build in builders if name in value})
