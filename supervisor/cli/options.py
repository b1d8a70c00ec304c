"""Options and readings that several commands share."""

from __future__ import annotations

import os
import shlex
from datetime import UTC, datetime, timedelta
from pathlib import Path

import click

from supervisor.config import ENV_CONFIG, Settings, load_settings
from supervisor.control import START_HINT

_CONFIG_KEY = "supervisor.config"  # in click's notes: the configuration that was chosen by hand


def _load(context: click.Context, _: click.Parameter, value: Path | None) -> Settings:
    return load_chosen(context, value)


def load_chosen(context: click.Context, value: Path | None) -> Settings:
    """The service's configuration: the file, else the usual places. `start_hint` names what was chosen by hand."""
    context.meta[_CONFIG_KEY] = str(value or os.environ.get(ENV_CONFIG) or "")
    return load_settings(value, os.environ)


def start_hint() -> str:
    """How the daemon is started that the running command would speak to."""
    context = click.get_current_context(silent=True)
    chosen = context.meta.get(_CONFIG_KEY, "") if context else ""
    return f"start it with `supervisor daemon --config {shlex.quote(chosen)}`" if chosen else START_HINT


config_option = click.option(
    "--config",
    "settings",
    type=click.Path(path_type=Path),
    callback=_load,
    help="The service's configuration; default: $SUPERVISOR_CONFIG, /etc/supervisor/supervisor.toml, or built-in.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
dry_run_option = click.option("--dry-run", is_flag=True, help="Check everything and say what would happen; do nothing.")


def now() -> datetime:
    """The wall clock, UTC."""
    return datetime.now(UTC)


def parse_since(text: str, at: datetime) -> datetime | None:
    """The instant that a span back from `at` (12h, 7d, 30min) or a date (UTC unless it says) means; None: neither."""
    digits = text.rstrip("abcdefghijklmnopqrstuvwxyz")
    unit = text[len(digits) :]
    try:
        if unit in _UNITS_S:
            return at - timedelta(seconds=float(digits) * _UNITS_S[unit])
        date = datetime.fromisoformat(text)
    except (ValueError, OverflowError):
        return None
    return date if date.tzinfo else date.replace(tzinfo=UTC)


_UNITS_S = {"s": 1, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def _since(_: click.Context, __: click.Parameter, value: str | None) -> datetime | None:
    if value is None:
        return None
    at = parse_since(value, now())
    if at is None:
        raise click.BadParameter(f'"{value}" is no span (12h, 7d, 30min) and no date (2026-01-31, 2026-01-31T12:00)')
    return at


since_option = click.option(
    "--since", callback=_since, metavar="WHEN", help="Only what was noticed since then: 12h, 7d, or 2026-01-31."
)
