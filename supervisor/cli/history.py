"""`supervisor history`: what interrupted runs, why, and what it cost."""

from __future__ import annotations

from datetime import datetime

import click

from supervisor.cli.main import EXIT_BAD_INPUT, CommandError
from supervisor.cli.options import config_option, json_option, now, since_option
from supervisor.config import Settings
from supervisor.reports.history import attempt_words, history_as_json, history_table, read_history, summary_line
from supervisor.reports.table import print_table, render_json
from supervisor.store import Store


@click.command()
@click.argument("run", required=False)
@since_option
@click.option("--evidence", is_flag=True, help="Show what each cause rests on.")
@json_option
@config_option
def history(*, run: str | None, since: datetime | None, evidence: bool, as_json: bool, settings: Settings) -> None:
    """What interrupted all runs, or one RUN, and what it cost.

    One line per interruption: when it was noticed, which node, how long the recovery took, how many steps were done
    again, and why.
    """
    with Store.open_readonly(settings.ledger.path) as store:
        if run is not None and store.load_run(run) is None:
            raise CommandError(f'there is no run "{run}"; `supervisor status` lists them', EXIT_BAD_INPUT)
        report = read_history(store, now(), name=run, since=since)
    if as_json:
        click.echo(render_json(history_as_json(report)))
        return
    click.echo(summary_line(report))
    if report.interruptions:
        click.echo()
        print_table(history_table(report))
    if evidence:
        for interruption in report.interruptions:
            click.echo(f"\n{interruption.run}, attempt {attempt_words(interruption)}: {interruption.cause}")
            for line in interruption.evidence:
                click.echo(f"  {line}")
