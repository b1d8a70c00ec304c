"""`supervisor status`: what each run is doing."""

from __future__ import annotations

import sys
import time

import click

from supervisor.cli.liveness import fetch_liveness
from supervisor.cli.main import EXIT_BAD_INPUT, CommandError
from supervisor.cli.options import config_option, json_option, now
from supervisor.config import Settings
from supervisor.reports.status import (
    Status,
    daemon_line,
    find_log_of,
    find_saves_of,
    read_status,
    start_lines,
    status_as_json,
    status_table,
)
from supervisor.reports.table import print_table, render_json
from supervisor.store import Store

WATCH_S = 2.0


@click.command()
@click.argument("run", required=False)
@json_option
@click.option("--watch", is_flag=True, help="Draw again every 2 s until Ctrl-C.")
@config_option
def status(*, run: str | None, as_json: bool, watch: bool, settings: Settings) -> None:
    """What each run is doing, or one RUN. Works while the daemon is down, and says so.

    States: pending, starting, running, recovering, waiting (too few healthy nodes), paused, held (needs `supervisor
    release`), stopping, stopped, finished.
    """
    if not watch:
        _show(_read(settings, run), as_json=as_json, has_log=run is not None)
        return
    try:
        while True:
            report = _read(settings, run)
            if sys.stdout.isatty() and not as_json:
                click.clear()
            _show(report, as_json=as_json, is_compact=True, has_log=run is not None)
            sys.stdout.flush()
            time.sleep(WATCH_S)
    except KeyboardInterrupt:
        return


def _read(settings: Settings, run: str | None) -> Status:
    liveness = fetch_liveness(settings)
    with Store.open_readonly(settings.ledger.path) as store:
        report = read_status(store, liveness, now(), name=run)
    if run is not None and not report.runs:
        raise CommandError(f'there is no run "{run}"; `supervisor status` lists them', EXIT_BAD_INPUT)
    return report


def _show_starts(report: Status) -> None:
    """Which nodes train, what the job has survived, and who is slow; nothing where there is nothing to say."""
    for line in start_lines(report.runs[0]):
        click.echo(line)


def _show_saves(report: Status) -> None:
    from supervisor.reports.saves import save_lines

    click.echo()
    for line in save_lines(find_saves_of(report.runs[0], report.now), report.now):
        click.echo(line)


def _show(report: Status, *, as_json: bool, is_compact: bool = False, has_log: bool = False) -> None:
    if as_json:
        click.echo(render_json(status_as_json(report), is_compact=is_compact))
        return
    click.echo(daemon_line(report))
    if report.runs:
        click.echo()
        print_table(status_table(report))
        if has_log and report.runs[0].attempt is not None:
            _show_starts(report)
            _show_saves(report)
        if has_log and (log := find_log_of(report.runs[0])) is not None:
            click.echo(f"\nlog of the newest attempt: {log}")
    else:
        click.echo("no runs; submit one with `supervisor submit RUN.toml` or `supervisor sbatch SCRIPT`")
