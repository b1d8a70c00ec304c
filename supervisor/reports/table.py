"""Tables for people: aligned text that never wraps for pipes and files, drawn by rich on a terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TextIO

_SENTENCE_WIDTH = 24  # narrower, a reason is a column of single words


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of text under headings. Columns of numbers stand to the right."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: frozenset[str] = frozenset()


def render_plain(table: Table) -> str:
    """The table as aligned lines, as wide as its content, without blanks at the ends of lines."""
    lines = [tuple(column.upper() for column in table.columns), *table.rows]
    widths = _widths(table)
    is_right = [column in table.numeric for column in table.columns]
    return "\n".join(_plain_line(line, widths, is_right) for line in lines)


def _plain_line(cells: Sequence[str], widths: Sequence[int], is_right: Sequence[bool]) -> str:
    parts = (
        cell.rjust(width) if right else cell.ljust(width)
        for cell, width, right in zip(cells, widths, is_right, strict=True)
    )
    return "  ".join(parts).rstrip()


def print_table(table: Table, stream: TextIO | None = None) -> None:
    """Draw the table where the reader is a person at a terminal, else write it as plain text."""
    target = sys.stdout if stream is None else stream
    if not target.isatty():
        target.write(render_plain(table) + "\n")
        return
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    drawn = RichTable(box=None, pad_edge=False, header_style="bold")
    *columns, last = table.columns
    for column in columns:
        drawn.add_column(column, justify="right" if column in table.numeric else "left", no_wrap=True)
    drawn.add_column(last, overflow="fold")  # only the sentence at the end may take several lines
    for row in table.rows:
        drawn.add_row(*(Text(cell) for cell in row))  # Text: brackets in a reason are no markup
    needed = sum(width + 2 for width in _widths(table)[:-1]) + _SENTENCE_WIDTH
    console = Console(file=target)
    console.width = max(console.width, needed)
    console.print(drawn)


def _widths(table: Table) -> list[int]:
    return [max(len(line[i]) for line in (table.columns, *table.rows)) for i in range(len(table.columns))]


def render_json(report: Mapping[str, Any], *, is_compact: bool = False) -> str:
    """A report as JSON, instants as ISO 8601 in UTC."""
    return json.dumps(report, indent=None if is_compact else 2, default=_plain, allow_nan=False)


def _plain(value: object) -> object:
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    if isinstance(value, frozenset | set):
        return sorted(value)
    return str(value)


# ---------------------------------------------------------------- words for values


def instant(at: datetime | None) -> str:
    """An instant for people, in UTC; "-" for none."""
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S}" if at else "-"


def duration(seconds: float | None) -> str:
    """A duration in the unit that fits; "-" for none."""
    if seconds is None:
        return "-"
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if abs(seconds) >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"


def number(value: float | None, digits: int = 0) -> str:
    """A number; "-" for none."""
    return "-" if value is None else f"{value:.{digits}f}"


def one_line(text: str, limit: int = 200) -> str:
    """Text as it can stand in a table: no line breaks, no control characters, bounded."""
    clean = "".join(char if char.isprintable() else " " for char in text)
    line = " ".join(clean.split())
    return line if len(line) <= limit else f"{line[: limit - 3]}..."
