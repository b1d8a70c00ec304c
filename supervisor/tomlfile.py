"""TOML files to frozen records and back: strict, every mistake told in one line that names file, section and key.

ConfigError      a file that a person wrote is wrong
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

MAX_FILE_BYTES = 1024 * 1024
_MAX_DOTS = 128  # in one line; tomllib takes time quadratic in the parts of a dotted key
_MAX_HEADER_DOTS = 16  # each key below a header costs time for each of its parts
_MAX_NUMBER = 2**53  # larger whole numbers do not survive JSON readers, and no setting here needs them

R = TypeVar("R")
Problem = tuple[bool, str]  # (is it so, what to say)


class ConfigError(ValueError):
    """A run file or a configuration file is wrong. The message is one line for the person who wrote it."""


def read_text(path: Path) -> str:
    """The content of a file that a person named. Raises ConfigError when it can't be read or is no text."""
    try:
        if not path.exists():
            raise ConfigError(f"{path}: no such file")
        if not path.is_file():  # a pipe would block for ever
            raise ConfigError(f"{path}: not a regular file")
        with path.open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{path}: larger than {MAX_FILE_BYTES} bytes")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}: line {line}: not UTF-8 text") from None


def load_toml(text: str, source: str) -> dict[str, Any]:
    """The document in a TOML text. Raises ConfigError with the line of the mistake.

    The text may be anybody's: no text ends in another error or holds its reader up.
    """
    import tomllib  # most commands find no file to read

    for number, line in enumerate(text.split("\n"), start=1):
        limit = _MAX_HEADER_DOTS if line.lstrip().startswith("[") else _MAX_DOTS
        if line.count(".") > limit:
            raise ConfigError(f"{source}: line {number}: more than {limit} dots; write lists one element a line")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source}: not valid TOML: {one_line(str(error))}") from None
    except RecursionError:
        raise ConfigError(f"{source}: not valid TOML: nested too deeply") from None
    except ValueError as error:  # tomllib lets int()'s own pass: a number of thousands of digits
        raise ConfigError(f"{source}: not valid TOML: {one_line(str(error))}") from None


def convert_record(kind: type[R], raw: Mapping[str, Any], source: str) -> R:
    """A record of dataclass `kind` from a TOML document: unknown keys, wrong types and odd numbers are refused."""
    import msgspec

    _refuse_unknown_keys(kind, raw, source, ())
    try:
        return msgspec.convert(raw, type=kind, strict=True, dec_hook=_decode)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {_explain(str(error))}") from None


def refuse_first(source: str, problems: Iterable[Problem]) -> None:
    """Raise ConfigError with the first of the problems that is so."""
    for is_so, message in problems:
        if is_so:
            raise ConfigError(f"{source}: {message}")


def absolute(path: Path, base: Path, where: str) -> Path:
    """`path` seen from the folder `base`, without "..": links are not followed, nodes may not have them."""
    full = Path(os.path.normpath(base / path))
    if not full.is_absolute():
        raise ConfigError(f"{where}: {path} is not an absolute path")
    return full


def render_record(record: Any) -> str:
    """A record as TOML, every key written out; None is left out."""
    lines: list[str] = []
    _render_table(lines, record, "")
    return "\n".join(lines) + "\n"


def has_control(text: str) -> bool:
    """True when the text holds a control character (a line break included)."""
    return any(ord(char) < 32 or ord(char) == 127 for char in text)


def shown(text: str | None) -> str:
    """A person's text as it can stand in a one-line message: bounded, nothing unprintable."""
    return one_line(text or "")[:80]


def one_line(text: str) -> str:
    """The text without line breaks, runs of blanks and unprintable characters."""
    return "".join(char if char.isprintable() else "?" for char in " ".join(text.split()))


# ---------------------------------------------------------------- checking


def _decode(kind: type, value: object) -> object:
    if kind is Path and isinstance(value, str):
        if not value or "\0" in value:
            raise ValueError("a path is expected")
        if value[0] in "~$":
            raise ValueError(f"write the path in full: {value[0]} is not expanded")
        return Path(value)
    raise ValueError(f"a path is expected, not {type(value).__name__}")


def _refuse_unknown_keys(kind: Any, raw: Mapping[str, Any], source: str, section: tuple[str, ...]) -> None:
    hints = typing.get_type_hints(kind)
    title = f"[{'.'.join(section)}]" if section else "the file"
    for key, value in raw.items():
        if key not in hints:
            raise ConfigError(f'{source}: {title} has no key "{shown(key)}"; {_nearest(kind, key, hints)}')
        choices = typing.get_args(hints[key]) if typing.get_origin(hints[key]) is typing.Literal else ()
        if choices and isinstance(value, str) and value not in choices:
            raise ConfigError(f'{source}: {_title((*section, key))} "{shown(value)}" is none of {", ".join(choices)}')
        table = _table_type(hints[key])
        if table is not None:
            if not isinstance(value, dict):
                name = ".".join((*section, key))
                raise ConfigError(f"{source}: {name} must be a table: write [{name}] and its keys below")
            _refuse_unknown_keys(table, value, source, (*section, key))
        else:
            _refuse_bad_numbers(value, f"{source}: {_title((*section, key))}")


def _nearest(kind: Any, key: str, hints: Mapping[str, Any]) -> str:
    import difflib  # only a mistake pays for it

    near = difflib.get_close_matches(key.lower(), hints, n=1, cutoff=0.5)
    if near:
        return f'did you mean "{near[0]}"?'
    homes = [
        f'"{key}" belongs in [{name}]'
        for name, hint in hints.items()
        if (table := _table_type(hint)) is not None and key in {f.name for f in dataclasses.fields(table)}
    ]
    return homes[0] if homes else f"known: {', '.join(f.name for f in dataclasses.fields(kind))}"


def _refuse_bad_numbers(value: object, where: str) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{where}: a finite number is expected, not {value}")
    if isinstance(value, int) and abs(value) > _MAX_NUMBER:
        raise ConfigError(f"{where}: {value} is out of range")


def _table_type(hint: Any) -> type | None:
    return hint if isinstance(hint, type) and dataclasses.is_dataclass(hint) else None


_EXPLAIN_AT = re.compile(r"^(?P<what>.*?)(?: - at `\$\.?(?P<where>[^`]*)`)?$", re.DOTALL)
_EXPLAIN_TYPE = re.compile(r"^Expected `(?P<want>[^`]+)`, got `(?P<got>[^`]+)`$")
_EXPLAIN_MISSING = re.compile(r"^Object missing required field `(?P<key>[^`]+)`$")
_TYPE_WORDS: Mapping[str, str] = {
    "str": "a text in quotes",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "array": "a list",
    "object": "a table",
}


def _explain(message: str) -> str:
    """A sentence of msgspec in the words of a TOML file."""
    found = _EXPLAIN_AT.match(one_line(message))
    what, where = (found["what"], found["where"] or "") if found else (message, "")
    parts = tuple(part for part in re.sub(r"\[[^\]]*\]", "", where).split(".") if part)
    if missing := _EXPLAIN_MISSING.match(what):
        return f"{_title((*parts, missing['key']))} is missing"
    if wrong := _EXPLAIN_TYPE.match(what):
        wanted = [_TYPE_WORDS.get(word, word) for word in wrong["want"].split(" | ") if word != "null"]
        inside = " (in the list)" if "[" in where else ""
        return f"{_title(parts)}{inside}: {' or '.join(wanted)} is expected, not {_got(wrong['got'])}"
    return f"{_title(parts)}: {what[:1].lower()}{what[1:]}"


def _got(word: str) -> str:
    return _TYPE_WORDS.get(word, f"a {word}")


def _title(parts: tuple[str, ...]) -> str:
    section, key = parts[:-1], parts[-1] if parts else ""
    return f"[{'.'.join(section)}] {key}" if section else key


# ---------------------------------------------------------------- writing TOML


def _render_table(lines: list[str], record: Any, name: str) -> None:
    tables = []
    if name:
        lines.extend(["", f"[{name}]"])
    for item in dataclasses.fields(record):
        value = getattr(record, item.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            tables.append((f"{name}.{item.name}" if name else item.name, value))
        elif value is not None:
            lines.append(f"{item.name} = {_render_value(value)}")
    for table, value in tables:
        _render_table(lines, value, table)


def _render_value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, tuple | list):
        return f"[{', '.join(_render_value(item) for item in value)}]"
    return f'"{"".join(_escape(char) for char in str(value))}"'


def _escape(char: str) -> str:
    if char in '"\\':
        return f"\\{char}"
    return f"\\u{ord(char):04X}" if ord(char) < 32 or ord(char) == 127 else char
