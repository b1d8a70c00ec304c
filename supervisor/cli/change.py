"""Commands that ask the daemon to change a run, or the whole service."""

from __future__ import annotations

from typing import Any

import click

from supervisor.cli.options import config_option, dry_run_option, json_option, start_hint
from supervisor.config import Settings
from supervisor.control import ask
from supervisor.reports.table import render_json


@click.command()
@click.argument("run")
@dry_run_option
@json_option
@config_option
def stop(*, run: str, dry_run: bool, as_json: bool, settings: Settings) -> None:
    """End RUN; its checkpoints stay.

    Its job is cancelled and nothing is resubmitted. `supervisor release` starts it again.
    """
    _ask(settings, {"verb": "stop", "run": run, "dry_run": dry_run}, as_json=as_json)


@click.command()
@click.argument("run", required=False)
@dry_run_option
@json_option
@config_option
def pause(*, run: str | None, dry_run: bool, as_json: bool, settings: Settings) -> None:
    """Let RUN's job go on, but start nothing new for it.

    Without RUN: pause the whole service; then nothing is submitted, cancelled or drained for any run.
    """
    _ask(settings, {"verb": "pause", "run": run, "dry_run": dry_run}, as_json=as_json)


@click.command()
@click.argument("run", required=False)
@dry_run_option
@json_option
@config_option
def resume(*, run: str | None, dry_run: bool, as_json: bool, settings: Settings) -> None:
    """Undo `supervisor pause` of RUN, or of the whole service.

    Only what was paused: a held or stopped run goes on with `supervisor release`.
    """
    _ask(settings, {"verb": "resume", "run": run, "dry_run": dry_run}, as_json=as_json)


@click.command()
@click.argument("run")
@click.option(
    "--skip-batches", is_flag=True, help="Leave out the batches at which its loss went wrong, as a rollback does."
)
@dry_run_option
@json_option
@config_option
def release(*, run: str, skip_batches: bool, dry_run: bool, as_json: bool, settings: Settings) -> None:
    """Start a held or stopped RUN again.

    It goes on from its newest verified checkpoint that is not suspect; what failed before no longer counts against it.
    """
    request = {"verb": "release", "run": run, "dry_run": dry_run, "skip_batches": skip_batches}
    _ask(settings, request, as_json=as_json)


@click.command()
@click.argument("run")
@dry_run_option
@json_option
@config_option
def save(*, run: str, dry_run: bool, as_json: bool, settings: Settings) -> None:
    """Have RUN's training save a checkpoint now.

    It is told within a second or two and saves after its next step; `supervisor status` shows the step once it is
    verified. The training must look at the advice of the service, as the trainer's Checkpointer does.
    """
    _ask(settings, {"verb": "save", "run": run, "dry_run": dry_run}, as_json=as_json)


def _ask(settings: Settings, request: dict[str, Any], *, as_json: bool) -> None:
    reply = ask(settings.control.socket, request, start_hint=start_hint())
    click.echo(render_json(reply) if as_json else str(reply.get("message", "done")))
