"""`supervisor sandbox`: a private, real Slurm cluster on this machine, for trying things out."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import click

from slurm.sandbox import Sandbox, SandboxError
from slurm.sandbox.spec import STATE_NAME
from supervisor.accounts import user_name

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
@click.option(
    "--slurm",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    metavar="PREFIX",
    help="The folder above the sbin and bin of another Slurm than the one on PATH.",
)
@_DIRECTORY
@_JSON
def up(
    *,
    nodes: int,
    mode: Literal["auto", "isolated", "loopback"],
    gpus_per_node: int,
    accounting: bool,
    slurm: Path | None,
    directory: Path,
    as_json: bool,
) -> None:
    """Start a cluster; it runs until `supervisor sandbox down`."""
    _refuse_second(directory)
    try:
        started = Sandbox.start(
            nodes=nodes,
            mode=mode,
            gpus_per_node=gpus_per_node,
            accounting=accounting,
            directory=directory,
            keep=True,
            slurm=slurm,
        )
    except SandboxError as error:
        raise _Refused(str(error)) from None
    if as_json:
        click.echo(json.dumps(_facts(started)))
        return
    click.echo(
        f"{len(started.node_names)} {started.mode} nodes ({started.mode_reason}), idle after {started.cold_start_s} s"
    )
    click.echo(f'To use it: eval "$({_own_command()} sandbox env --directory {shlex.quote(str(started.directory))})"')


@sandbox.command()
@_DIRECTORY
@_JSON
def down(*, directory: Path, as_json: bool) -> None:
    """End the cluster; its logs stay. One that has ended already is no error."""
    _refuse_strange(directory)
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
        _refuse_others(directory)
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


_NODE_FAULTS: Mapping[str, tuple[Callable[[Sandbox, str], None], str]] = {
    "power-cut": (Sandbox.power_cut, "has no power: its processes are gone"),
    "cable-cut": (Sandbox.cable_cut, "can reach nobody; its processes run on"),
    "freeze": (Sandbox.freeze, "is frozen: its processes stand still"),
    "revive": (Sandbox.revive, "is whole again; Slurm sees it within a few seconds"),
}
_CONTROLLER_FAULTS: Mapping[str, tuple[Callable[[Sandbox], None], str]] = {
    "freeze-controller": (Sandbox.freeze_controller, "slurmctld takes connections and answers nothing"),
    "thaw-controller": (Sandbox.thaw_controller, "slurmctld goes on"),
    "stop-controller": (Sandbox.stop_controller, "slurmctld has saved its state and ended"),
    "start-controller": (Sandbox.start_controller, "slurmctld runs again, from its saved state"),
}


@sandbox.command()
@click.argument("name", type=click.Choice([*_NODE_FAULTS, *_CONTROLLER_FAULTS]))
@click.argument("node", required=False)
@_DIRECTORY
@_JSON
def fault(*, name: str, node: str | None, directory: Path, as_json: bool) -> None:
    """Break a node or the controller, or mend it.

    Of a NODE: power-cut, cable-cut (isolated nodes only), freeze; revive undoes all three. Of the controller, without a
    NODE: freeze-controller and thaw-controller, stop-controller and start-controller.
    """
    try:
        done = _break(Sandbox.attach(directory), name, node)
    except SandboxError as error:
        raise _Refused(str(error)) from None
    click.echo(json.dumps({"fault": name, "node": node}) if as_json else done)


def _break(running: Sandbox, name: str, node: str | None) -> str:
    if name in _CONTROLLER_FAULTS:
        if node is not None:
            raise SandboxError(f"{name} is about the controller: it takes no node")
        act, words = _CONTROLLER_FAULTS[name]
        act(running)
        return words
    if node not in running.node_names:
        which = f"no node {node} in this sandbox" if node else f"{name} needs a node"
        raise SandboxError(f"{which}; it has {', '.join(running.node_names)}")
    act_on, words = _NODE_FAULTS[name]
    act_on(running, node)
    return f"{node} {words}"


def _refuse_second(directory: Path) -> None:
    try:
        _refuse_others(directory)
        running = Sandbox.attach(directory)
    except SandboxError:
        return
    raise _Refused(
        f"a sandbox runs in {running.directory} already; end it with `{_own_command()} sandbox down --directory "
        f"{shlex.quote(str(running.directory))}`"
    )


def _refuse_strange(directory: Path) -> None:
    """Refuse a folder that has never held a sandbox, or holds somebody else's."""
    try:
        _refuse_others(directory)
    except SandboxError as error:
        raise _Refused(str(error)) from None


def _refuse_others(directory: Path) -> None:
    """SandboxError for a folder without a sandbox, and for one that this account did not start."""
    path = directory.resolve() / STATE_NAME
    try:
        owner_uid = path.stat().st_uid
    except OSError:
        raise SandboxError(f"no sandbox in {directory}: there is no {path} to be seen") from None
    if owner_uid != os.geteuid():
        raise SandboxError(
            f"the sandbox in {directory} belongs to {user_name(owner_uid)}: only that account can use it"
        )


def _own_command() -> str:
    """How this command can be called again from any folder."""
    own = Path(sys.executable).with_name("supervisor")
    if not own.exists():
        return shlex.join([sys.executable, "-m", "supervisor"])
    found = shutil.which("supervisor")
    return "supervisor" if found and Path(found).resolve() == own.resolve() else shlex.quote(str(own))


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
