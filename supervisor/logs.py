"""Log lines of the service: one event a line, JSON where a program reads them, readable on a terminal.

Events are `noun.past_participle`; the fields are run, attempt, job_id, node, cycle, reason. Logs go to standard error
and are no record of truth: a line that can't be written is lost, the loop goes on.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator, MutableMapping
from typing import Any, TextIO

import structlog

LEVELS = ("debug", "info", "warning", "error")

_FIRST = ("timestamp", "level", "event", "cycle", "run", "attempt", "job_id", "node")


def configure_logs(*, level: str = "info", stream: TextIO | None = None, as_json: bool | None = None) -> None:
    """Send every logger's events to `stream` (standard error); JSON unless it is a terminal or `as_json` says so."""
    target = sys.stderr if stream is None else stream
    is_json = not target.isatty() if as_json is None else as_json
    render = (
        structlog.processors.JSONRenderer(sort_keys=False)
        if is_json
        else structlog.processors.LogfmtRenderer(key_order=list(_FIRST), drop_missing=True, bool_as_flag=False)
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            _drop_unset,
            _first_things_first,
            render,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=lambda *_: _StreamLogger(target),
        cache_logger_on_first_use=False,  # loggers that were made before this call obey it too
    )


@contextlib.contextmanager
def about(**fields: object) -> Iterator[None]:
    """Every event inside carries these fields."""
    with structlog.contextvars.bound_contextvars(**fields):
        yield


class _StreamLogger:
    """Writes lines; a reader that has gone away or a full disk ends nobody's work."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def msg(self, message: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(message + "\n")
            self._stream.flush()

    debug = info = warning = error = critical = exception = msg


def _drop_unset(_: object, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Fields without a value say nothing."""
    return {key: value for key, value in event.items() if value is not None and value != ""}


def _first_things_first(_: object, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    return {**{key: event[key] for key in _FIRST if key in event}, **event}
