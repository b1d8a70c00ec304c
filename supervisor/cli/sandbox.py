"""`supervisor sandbox`: a private, real Slurm cluster on this machine, for trying things out."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path
from typing import Literal

import click

from slurm.sandbox import Sandbox, SandboxError

_DIRECTORY = click.option(
    "--directory",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(".sandbox"),
    show_default=True,
    help="Where the cluster keeps its configuration, state and logs; it names the sandbox.",
)
_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
_ANSWER_S = 10


class _Refused(click.ClickException):
    exit_code = 2


@click.group()
def sandbox() -> None:
    """A private, real Slurm cluster on this machine."""


@sandbox.command()
@click.option("--nodes", type=click.IntRange(1, 200), default=4, show_default=True, help="How many nodes.")
@click.option(
    "--mode",
    type=click.Choice(["auto", "isolated", "loopback"]),
    default="auto",
    show_default=True,
    help="isolated: nodes with their own network, processes and disk (root); loopback: slurmd side by side.",
)
@click.option("--gpus-per-node", type=click.IntRange(0, 64), default=0, help="GPUs that are only files.")
@click.option("--accounting", is_flag=True, help="Run slurmdbd on a private MariaDB, so that sacct answers.")
@_DIRECTORY
@_JSON
def up(
    *,
    nodes: int,
    mode: Literal["auto", "isolated", "loopback"],
    gpus_per_node: int,
    accounting: bool,
    directory: Path,
    as_json: bool,
) -> None:
    """Start a cluster; it runs until `supervisor sandbox down`."""
    try:
        started = Sandbox.start(
            nodes=nodes,
            mode=mode,
            gpus_per_node=gpus_per_node,
            accounting=accounting,
            directory=directory,
            keep=True,
        )
    except SandboxError as error:
        raise _Refused(str(error)) from None
    if as_json:
        click.echo(json.dumps(_facts(started)))
        return
    click.echo(
        f"{len(started.node_names)} {started.mode} nodes ({started.mode_reason}), idle after {started.cold_start_s} s"
    )
    click.echo(f'To use it: eval "$(supervisor sandbox env --directory {shlex.quote(str(directory))})"')


@sandbox.command()
@_DIRECTORY
@_JSON
def down(*, directory: Path, as_json: bool) -> None:
    """End the cluster; its logs stay. One that does not run is no error."""
    try:
        running = Sandbox.attach(directory)
    except SandboxError:
        stopped = False
        Sandbox.sweep_leftovers()
    else:
        running.stop()
        stopped = True
    if as_json:
        click.echo(json.dumps({"stopped": stopped}))
    else:
        click.echo(f"stopped; logs are in {directory / 'log'}" if stopped else f"no sandbox is running in {directory}")


@sandbox.command()
@_DIRECTORY
@_JSON
def status(*, directory: Path, as_json: bool) -> None:
    """Say whether the cluster runs, and what Slurm says of its nodes. Exit code 1 when it does not run."""
    try:
        running = Sandbox.attach(directory)
    except SandboxError as error:
        if as_json:
            click.echo(json.dumps({"running": False, "reason": str(error)}))
        else:
            click.echo(str(error))
        raise SystemExit(1) from None
    states = _node_states(running)
    if as_json:
        click.echo(json.dumps({"running": True, **_facts(running), "states": states}))
        return
    click.echo(f"{running.mode} ({running.mode_reason}) in {running.directory}")
    for node in running.node_names:
        click.echo(f"{node}  {'unknown: slurmctld does not answer' if states is None else states.get(node, 'unknown')}")


@sandbox.command()
@_DIRECTORY
@_JSON
def env(*, directory: Path, as_json: bool) -> None:
    """Print the variables for Slurm's commands, for `eval`."""
    try:
        variables = Sandbox.attach(directory).env
    except SandboxError as error:
        raise _Refused(str(error)) from None
    if as_json:
        click.echo(json.dumps(variables))
        return
    for name, value in variables.items():
        click.echo(f"export {name}={shlex.quote(value)}")


def _facts(running: Sandbox) -> dict[str, object]:
    return {
        "directory": str(running.directory),
        "mode": running.mode,
        "mode_reason": running.mode_reason,
        "nodes": list(running.node_names),
        "cold_start_s": running.cold_start_s,
        "env": running.env,
    }


def _node_states(running: Sandbox) -> dict[str, str] | None:
    try:
        shown = running.run("sinfo", "-h", "-N", "-o", "%N %T", timeout_s=_ANSWER_S)
    except subprocess.TimeoutExpired:
        return None
    if shown.returncode != 0:
        return None
    return dict(line.split(maxsplit=1) for line in shown.stdout.splitlines())
