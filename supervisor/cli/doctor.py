"""`supervisor doctor`: what is installed, what answers, and what is in the way."""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata

import click

from slurm.pyslurm_client import PyslurmClient, choose_client
from supervisor.cli.doctor_slurm import look_at_slurm, look_at_submissions, make_bench
from supervisor.cli.findings import Finding, warning
from supervisor.cli.liveness import fetch_liveness
from supervisor.cli.main import EXIT_FAILED
from supervisor.cli.nodes import slurm_client
from supervisor.cli.options import config_option, json_option
from supervisor.config import Settings, check_slurm_conf
from supervisor.ledger import LedgerError
from supervisor.reports.table import Table, print_table, render_json
from supervisor.store import Store

_SLURM_TIMEOUT_S = 5.0
_PACKAGES = ("slurm", "supervisor", "trainer")
_DISTRIBUTIONS = ("slurm-supervisor", "click", "msgspec", "sqlite-utils", "structlog", "submitit", "torch", "pyslurm")


@click.command()
@json_option
@config_option
def doctor(*, as_json: bool, settings: Settings) -> int:
    """What is installed, what answers, and what is in the way.

    Which files were imported, whether the launcher's Python can train, whether Slurm, the ledger and the daemon answer,
    of which release Slurm's commands are, and what this account may do there: run it as the service's. Each line says
    what to do. Nothing is changed or tried.

    Exit code 1 when something that the service needs is missing; what may be as it is meant to be is a warning.
    """
    check_slurm_conf(settings)
    kept = look_at_submissions(settings.ledger.path, uid=os.geteuid())
    slurm = look_at_slurm(make_bench(settings))
    findings = (*_read_installation(), *slurm, *(look(settings) for look in _LOOKS), kept)
    is_ok = all(finding.ok is not False for finding in findings)
    if as_json:
        checks = [
            {"what": f.what, "ok": f.ok, "warning": f.is_warning, "status": f.status, "detail": f.detail}
            for f in findings
        ]
        click.echo(render_json({"ok": is_ok, "checks": checks}))
    else:
        print_table(Table(columns=("what", "", "detail"), rows=tuple((f.what, f.word, f.detail) for f in findings)))
    return 0 if is_ok else EXIT_FAILED


def _read_installation() -> tuple[Finding, ...]:
    python = Finding(what="python", ok=None, detail=f"{platform.python_version()} {sys.executable}")
    return (python, *(_read_package(name) for name in _PACKAGES), *(_read_version(name) for name in _DISTRIBUTIONS))


def _read_package(name: str) -> Finding:
    """Other projects on PyPI are called supervisor and trainer: which files did we get?"""
    folder = os.path.dirname(importlib.import_module(name).__file__ or "")  # noqa: PTH120 - text, not a path to open
    ours = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # noqa: PTH100, PTH120
    is_ours = os.path.dirname(folder) == ours  # noqa: PTH120
    return Finding(what=f"package {name}", ok=is_ours, detail=folder + ("" if is_ours else ": NOT this project's"))


def _read_version(name: str) -> Finding:
    try:
        return Finding(what=name, ok=None, detail=metadata.version(name))
    except metadata.PackageNotFoundError:
        return Finding(what=name, ok=None, detail="not installed")


def _look_at_client(settings: Settings) -> Finding:
    """How the daemon would read Slurm; the command line in place of a pyslurm that was asked for is a fault."""
    wanted = settings.slurm.client
    conf = {"SLURM_CONF": str(settings.slurm.conf)} if settings.slurm.conf else {}
    cli = slurm_client(settings, timeout_s=_SLURM_TIMEOUT_S)
    choice = choose_client(wanted, cli=cli, parent={**os.environ, **conf}, timeout_s=_SLURM_TIMEOUT_S)
    if isinstance(choice.client, PyslurmClient):
        choice.client.close()
    word = {"cli": "commands", "pyslurm": "pyslurm"}[choice.kind]
    return Finding(
        what="slurm client",
        ok=False if wanted not in {"auto", choice.kind} else None,
        detail=f"{word}: {choice.reason}",
    )


def _look_at_launcher(settings: Settings) -> Finding:
    """Whether the Python that starts the training can: it must be there, and torch must be found by it.

    Asked on this machine and without importing torch; the nodes see the same path, and a run may name another Python.
    """
    python = settings.launcher.python
    if shutil.which(python) is None:
        return Finding(
            what="launcher.python", ok=False, detail=f"{python} is not there: set [launcher] python to one on all nodes"
        )
    env = {**os.environ, "PYTHONPATH": settings.launcher.pythonpath or os.environ.get("PYTHONPATH", "")}
    try:
        asked = subprocess.run(
            [python, "-P", "-c", _FIND_PARTS], capture_output=True, text=True, check=False, timeout=_PYTHON_S, env=env
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding(what="launcher.python", ok=False, detail=f"{python}: {error}")
    missing = asked.stdout.split()
    if asked.returncode != 0 or "trainer" in missing:
        said = asked.stderr.strip().splitlines()[-1:] or ["this project is not installed in it (pip install .)"]
        return Finding(what="launcher.python", ok=False, detail=f"{python}: {said[0]}")
    if "torch" in missing:
        return warning("launcher.python", f"{python} has no torch: {_TORCH_CURE}")
    return Finding(what="launcher.python", ok=True, detail=f"{python}, with torch")


_PYTHON_S = 20.0
_FIND_PARTS = "import importlib.util as u; print(*(n for n in ('trainer', 'torch') if u.find_spec(n) is None))"
_TORCH_CURE = (
    "pip install '.[train]' there, or begin each run's command with the path of a Python that has it: "
    '["/envs/llm/bin/python", "train.py"]'
)


def _look_at_ledger(settings: Settings) -> Finding:
    try:
        with Store.open_readonly(settings.ledger.path) as store:
            damage = store.find_damage()
            count = len(store.load_runs())
    except LedgerError as error:
        return Finding(what="ledger", ok=False, detail=str(error))
    return Finding(what="ledger", ok=damage is None, detail=damage or f"{settings.ledger.path}, {count} runs")


def _look_at_daemon(settings: Settings) -> Finding:
    liveness = fetch_liveness(settings)
    detail = f"answers at {settings.control.socket}" if liveness.is_answering else liveness.why
    return Finding(what="daemon", ok=liveness.is_answering, detail=detail)


_LOOKS: tuple[Callable[[Settings], Finding], ...] = (
    _look_at_client,
    _look_at_launcher,
    _look_at_ledger,
    _look_at_daemon,
)
