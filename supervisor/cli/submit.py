"""`supervisor submit`: whatever can be wrong with a run is found now, as its owner, before anything is queued."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import click

from slurm.client import CliClient
from slurm.inherited import read_inherited
from supervisor.cli.acceptance import check_acceptance
from supervisor.cli.main import EXIT_BAD_INPUT, CommandError
from supervisor.cli.nodes import slurm_client
from supervisor.cli.options import config_option, dry_run_option, json_option, start_hint
from supervisor.cli.sbatch import describe_shell
from supervisor.config import Settings, read_run_file, render_run_file
from supervisor.control import DaemonDown, DaemonSilent, ask
from supervisor.model import RunSpec
from supervisor.reports.table import render_json
from supervisor.storageurl import describe_storage
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

    Checks the run file, the script, the name, whether Slurm would take the job, and whether the nodes see the run
    directory; makes the run directory; then asks the daemon. When anything is wrong nothing is left behind.
    """
    spec = read_run_file(run_file)
    request = {
        "verb": "submit",
        "text": render_run_file(spec),
        "path": str(spec.run_dir / _RUN_FILE),
        **describe_shell(read_inherited()),
    }
    client = slurm_client(settings, timeout_s=_SLURM_TIMEOUT_S)
    # Asked first without effect: a name in use, a missing right, a daemon that is down end it before anything is made.
    notes = _ask_in_vain(settings, request, may_be_down=dry_run)
    _refuse_root(spec)
    _refuse_used_directory(spec)
    notes += [*check_acceptance(client, spec), *describe_storage(spec.checkpoint.object_url)]
    if dry_run:
        _tell_dry_run(spec, notes, as_json=as_json)
        return
    with _run_directory(spec):
        if not no_visibility_check:
            notes += _check_visible(client, spec, settings)
        reply = ask(settings.control.socket, request, start_hint=start_hint())
    _tell(reply, notes, as_json=as_json)


# ---------------------------------------------------------------- checks


def _ask_in_vain(settings: Settings, request: dict[str, Any], *, may_be_down: bool) -> list[str]:
    """What the daemon would refuse, it refuses now; a note when nobody is there to ask and that is no error."""
    try:
        reply = ask(settings.control.socket, {**request, "dry_run": True}, start_hint=start_hint())
    except DaemonDown as error:
        if not may_be_down:
            raise
        return [f"name and rights not checked: {error}"]
    return [str(note) for note in reply.get("notes", ())]


def _check_visible(client: CliClient, spec: RunSpec, settings: Settings) -> list[str]:
    env = {**os.environ, **({"SLURM_CONF": str(settings.slurm.conf)} if settings.slurm.conf else {})}
    seen: Visibility = check_visibility(spec.run_dir, spec, client, env)
    if seen.is_seen is False:
        raise CommandError(
            f"run directory: {seen.why}; root must lie on storage that head and nodes share", EXIT_BAD_INPUT
        )
    if seen.is_seen is None:
        return [f"run directory not checked: {seen.why}", *_describe_saves(spec, None)]
    saves = spec.checkpoint.directory
    note = f"run directory {spec.run_dir} is visible from node {seen.node}"
    if saves is None or not saves.is_dir():
        return [note, *_describe_saves(spec, None)]
    try:
        return [note, *_describe_saves(spec, check_visibility(saves, spec, client, env))]
    except OSError as error:
        raise CommandError(f"[checkpoint] directory {saves}: {error.strerror or error}", EXIT_BAD_INPUT) from None


def _describe_saves(spec: RunSpec, seen: Visibility | None) -> list[str]:
    """What is known of the folder that the training itself saves in; raises CommandError when nodes see another one."""
    saves = spec.checkpoint.directory
    if saves is None:
        return []
    if seen is not None and seen.is_seen is False:
        raise CommandError(
            f"[checkpoint] directory: {seen.why}; checkpoints there could not be found again: it must lie on storage "
            "that head and nodes share",
            EXIT_BAD_INPUT,
        )
    if seen is not None and seen.is_seen:
        return [f"checkpoint directory {saves} is visible from node {seen.node}"]
    why = seen.why if seen is not None else "not there yet" if not saves.is_dir() else "see above"
    return [f"checkpoint directory {saves} not checked: {why}; the start checks leave a mark there"]


def _refuse_root(spec: RunSpec) -> None:
    """A root that is made by accident lies on the head node's own disk more often than not."""
    if not spec.root.exists():
        raise CommandError(
            f"root {spec.root} does not exist: create it on a file system that the head node and all nodes share",
            EXIT_BAD_INPUT,
        )
    if not spec.root.is_dir():
        raise CommandError(f"root {spec.root} is not a directory", EXIT_BAD_INPUT)


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
    """The run directory with its run file; taken away again when the body fails.

    A daemon that has not answered may have accepted the run: then everything stays.
    """
    is_made = not spec.run_dir.exists()
    try:
        try:
            spec.run_dir.mkdir(exist_ok=True)
            write_bytes(spec.run_dir / _RUN_FILE, render_run_file(spec).encode())
        except OSError as error:
            raise CommandError(f"run directory {spec.run_dir}: {error.strerror or error}", EXIT_BAD_INPUT) from None
        yield
    except DaemonSilent:
        raise
    except BaseException:
        with suppress(OSError):
            (spec.run_dir / _RUN_FILE).unlink(missing_ok=True)
            if is_made:
                spec.run_dir.rmdir()  # refuses a folder that somebody has put something into
        raise


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
