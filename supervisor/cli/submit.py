"""`supervisor submit`: whatever can be wrong with a run is found now, as its owner, before anything is queued."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import click

from slurm.client import CliClient
from slurm.errors import SlurmError
from supervisor.cli.main import EXIT_BAD_INPUT, CommandError
from supervisor.cli.nodes import slurm_client
from supervisor.cli.options import config_option, dry_run_option, json_option
from supervisor.config import Settings, read_run_file, render_run_file
from supervisor.control import DaemonDown, DaemonSilent, ask
from supervisor.model import RunSpec
from supervisor.reports.table import render_json
from supervisor.visibility import Visibility, check_visibility
from trainer.contract import write_bytes

_SLURM_TIMEOUT_S = 10.0
_RUN_FILE = "run.toml"


@click.command()
@click.argument("run_file", metavar="RUN.toml", type=click.Path(path_type=Path))
@dry_run_option
@click.option("--no-visibility-check", is_flag=True, help="Don't ask a node whether it sees the run directory.")
@json_option
@config_option
def submit(*, run_file: Path, dry_run: bool, no_visibility_check: bool, as_json: bool, settings: Settings) -> None:
    """Hand a run to the service.

    Checks the run file, the script, the partition, and that the nodes see the run directory; makes the run directory;
    then asks the daemon. When anything is wrong nothing is left behind.
    """
    spec = read_run_file(run_file)
    request = {"verb": "submit", "text": render_run_file(spec), "path": str(spec.run_dir / _RUN_FILE)}
    client = slurm_client(settings, timeout_s=_SLURM_TIMEOUT_S)
    if dry_run:
        _refuse_used_directory(spec)
        _tell_dry_run(spec, [*_ask_in_vain(settings, request), *_check_partition(client, spec)], as_json=as_json)
        return
    # Asked first without effect: a name in use, a missing right, a daemon that is down end it before anything is made.
    ask(settings.control.socket, {**request, "dry_run": True})
    notes = _check_partition(client, spec)
    with _run_directory(spec):
        if not no_visibility_check:
            notes += _check_visible(client, spec, settings)
        reply = ask(settings.control.socket, request)
    _tell(reply, notes, as_json=as_json)


# ---------------------------------------------------------------- checks


def _ask_in_vain(settings: Settings, request: dict[str, Any]) -> list[str]:
    """What the daemon would say; a note when nobody is there to ask."""
    try:
        ask(settings.control.socket, {**request, "dry_run": True})
    except DaemonDown as error:
        return [f"name and rights not checked: {error}"]
    return []


def _check_partition(client: CliClient, spec: RunSpec) -> list[str]:
    """Notes about what could not be checked. Raises CommandError for a partition that is not there."""
    try:
        known = client.fetch_cluster().partitions
    except SlurmError as error:
        return [f"partition not checked: Slurm does not answer ({error}); the daemon waits for it"]
    for name in spec.slurm.partition.split(",") if spec.slurm.partition else []:
        if name not in known:
            raise CommandError(f'there is no partition "{name}"; there are: {", ".join(known)}', EXIT_BAD_INPUT)
    return []


def _check_visible(client: CliClient, spec: RunSpec, settings: Settings) -> list[str]:
    env = {**os.environ, **({"SLURM_CONF": str(settings.slurm.conf)} if settings.slurm.conf else {})}
    seen: Visibility = check_visibility(spec.run_dir, spec, client, env)
    if seen.is_seen is False:
        raise CommandError(
            f"run directory: {seen.why}; root must lie on storage that head and nodes share", EXIT_BAD_INPUT
        )
    if seen.is_seen is None:
        return [f"run directory not checked: {seen.why}"]
    return [f"run directory {spec.run_dir} is visible from node {seen.node}"]


def _refuse_used_directory(spec: RunSpec) -> None:
    run_dir = spec.run_dir
    if not os.path.lexists(run_dir):
        return
    if run_dir.is_dir() and not run_dir.is_symlink() and not any(run_dir.iterdir()):
        return
    raise CommandError(
        f"the run directory {run_dir} is there already and not empty: choose another name or root", EXIT_BAD_INPUT
    )


# ---------------------------------------------------------------- the run directory


@contextmanager
def _run_directory(spec: RunSpec) -> Iterator[None]:
    """The run directory with its run file; taken away again, with every folder that was made, when the body fails.

    A daemon that has not answered may have accepted the run: then everything stays.
    """
    _refuse_used_directory(spec)
    made: list[Path] = []
    try:
        try:
            _make_folders(spec.run_dir, made)
            write_bytes(spec.run_dir / _RUN_FILE, render_run_file(spec).encode())
        except OSError as error:
            raise CommandError(f"run directory {spec.run_dir}: {error.strerror or error}", EXIT_BAD_INPUT) from None
        yield
    except DaemonSilent:
        raise
    except BaseException:
        with suppress(OSError):
            (spec.run_dir / _RUN_FILE).unlink(missing_ok=True)
            for folder in reversed(made):
                folder.rmdir()  # refuses a folder that somebody has put something into
        raise


def _make_folders(folder: Path, made: list[Path]) -> None:
    """Make a folder and those above it; each one that was not there is noted as soon as it is."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir()
        made.append(path)


# ---------------------------------------------------------------- answers


def _tell(reply: dict[str, Any], notes: list[str], *, as_json: bool) -> None:
    if as_json:
        click.echo(render_json({**reply, "notes": notes}))
        return
    for note in notes:
        click.echo(note)
    click.echo(f"{reply.get('message')}; follow it with `supervisor status {reply.get('run')}`")


def _tell_dry_run(spec: RunSpec, notes: list[str], *, as_json: bool) -> None:
    if as_json:
        report = {"ok": True, "dry_run": True, "run": spec.name, "run_dir": str(spec.run_dir), "notes": notes}
        click.echo(render_json({**report, "run_file": render_run_file(spec)}))
        return
    for note in notes:
        click.echo(note)
    click.echo(f"dry run: would make {spec.run_dir} and submit\n\n{render_run_file(spec)}", nl=False)
