"""`supervisor nodes`: what Slurm says of each node beside what the service remembers."""

from __future__ import annotations

import os

import click

from slurm.client import CliClient
from slurm.errors import SlurmError
from slurm.types import NodeRecord
from supervisor.cli.main import EXIT_BAD_INPUT, CommandError
from supervisor.cli.options import config_option, json_option, now
from supervisor.config import Settings
from supervisor.reports.nodes import events_table, nodes_as_json, nodes_table, read_nodes, repairs_table
from supervisor.reports.table import print_table, render_json
from supervisor.store import Store

_SLURM_TIMEOUT_S = 2.0  # what we remember must not wait long for what Slurm says


@click.command()
@click.argument("node", required=False)
@json_option
@config_option
def nodes(*, node: str | None, as_json: bool, settings: Settings) -> None:
    """All nodes, or one NODE with its history.

    Slurm's state and our verdict side by side, the runs that use the node, and the reason.
    """
    records, silence = _ask_slurm(settings)
    with Store.open_readonly(settings.ledger.path) as store:
        report = read_nodes(store, records, now(), node=node, slurm_silence=silence)
    if node is not None and not report.nodes and not report.events:
        silence_too = "; Slurm, which may know it, does not answer" if silence else ""
        raise CommandError(f'there is no node "{node}"; `supervisor nodes` lists them{silence_too}', EXIT_BAD_INPUT)
    if as_json:
        click.echo(render_json(nodes_as_json(report)))
        return
    if silence:
        click.echo(f"Slurm does not answer; what follows is what we remember. {silence}\n")
    print_table(nodes_table(report))
    if node is not None and report.events:
        click.echo()
        print_table(events_table(report))
    if node is not None and report.repairs:
        click.echo()
        print_table(repairs_table(report))


def _ask_slurm(settings: Settings) -> tuple[tuple[NodeRecord, ...], str]:
    try:
        return slurm_client(settings, timeout_s=_SLURM_TIMEOUT_S).fetch_nodes().nodes, ""
    except SlurmError as error:
        return (), str(error)


def slurm_client(settings: Settings, *, timeout_s: float) -> CliClient:
    """Slurm's commands, on the cluster that the settings name."""
    conf = {"SLURM_CONF": str(settings.slurm.conf)} if settings.slurm.conf else {}
    return CliClient(timeout_s=timeout_s, parent={**os.environ, **conf})
