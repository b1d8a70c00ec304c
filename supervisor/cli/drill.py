"""`supervisor drill`: make a failure on purpose, watch the recovery, and say whether it was as it must be."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import click

from slurm.sandbox import Sandbox
from supervisor.cli.liveness import fetch_liveness
from supervisor.cli.main import EXIT_BAD_INPUT, EXIT_DAEMON_DOWN, EXIT_FAILED, EXIT_REFUSED, CommandError
from supervisor.cli.options import config_option, dry_run_option, json_option, start_hint
from supervisor.config import Settings
from supervisor.drill import KINDS
from supervisor.drillmake import CannotMake, Failure, find_sandbox, plan_by_service, plan_in_sandbox
from supervisor.drillrun import LOOK_EVERY_S, DrillRun
from supervisor.drillwatch import Sight, look
from supervisor.model import AttemptState, RunState
from supervisor.reports.drill import drill_as_json, drill_text
from supervisor.reports.table import render_json

_SAY_EVERY_S = 2.0
_OF_A_NODE = frozenset({"node", "network"})


@click.command()
@click.argument("run")
@click.option("--kill", "kind", type=click.Choice(list(KINDS)), required=True, help="What fails.")
@click.option("--at-step", type=click.IntRange(1), help="Not before this step is done; default: now.")
@click.option("--node", help="Where; default: one that trains and is not the launcher's own.")
@click.option("--yes", is_flag=True, help="On a real cluster: do not ask.")
@click.option("--by-agents", is_flag=True, help="On a sandbox: make it as on a real cluster.")
@click.option(
    "--timeout-s",
    type=click.FloatRange(1),
    default=600.0,
    show_default=True,
    help="For --at-step's step, and for the recovery.",
)
@click.option(
    "--report", type=click.Path(path_type=Path, file_okay=False), help="Folder of the report; default: RUN_DIR/drills."
)
@dry_run_option
@json_option
@config_option
def drill(
    *,
    run: str,
    kind: str,
    at_step: int | None,
    node: str | None,
    yes: bool,
    by_agents: bool,
    timeout_s: float,
    report: Path | None,
    dry_run: bool,
    as_json: bool,
    settings: Settings,
) -> int:
    """Make a failure of RUN's training on purpose, watch the recovery, and check it.

    On a sandbox (supervisor sandbox) it is the real thing: a node's power or cable is cut, a rank gets SIGKILL or
    SIGSTOP. On a real cluster the agent of the node makes it, after a question; only the run's owner and
    administrators may ask for it. What is checked: that it recovered, and how fast; that it began from a verified
    checkpoint no older than the newest one; loss and samples of the steps that were done twice; which node was named;
    and that the ledger holds one interruption. The report goes to the run directory, as text and JSON.

    Exit codes: 0 every check passed; 1 one failed, or it did not recover in time; 2 the input is wrong; 3 the daemon
    is not running; 4 refused; 130 interrupted: what was made stays made.
    """
    say = _Say(is_quiet=as_json)
    _require_daemon(settings)
    sight = _require_training(settings, run)
    sandbox = None if by_agents else find_sandbox(settings.slurm.conf, os.environ)
    _require_ahead(sight, at_step)
    failure, chosen = _choose(settings, sight, kind, node, sandbox)
    failure.check()
    if dry_run:
        _tell_plan(sight, kind, chosen, failure, as_json=as_json)
        return 0
    if not failure.is_sandbox and not yes:
        _confirm(_plan_words(sight, failure, is_jobs_end=_is_jobs_end(sight, kind, chosen)), sight.run.name)
    sight = _await_step(settings, sight, at_step, say, timeout_s)
    try:
        outcome = DrillRun(settings.ledger.path, say, timeout_s).run(sight, kind, chosen, failure)
    except CannotMake as error:
        raise CommandError(f"no drill: {error}", EXIT_REFUSED) from None
    found, text = drill_as_json(outcome), drill_text(outcome)
    click.echo(render_json(found) if as_json else f"\n{text}", nl=as_json)
    stamp = f"{outcome.before.made_at:%Y%m%dT%H%M%S}-{kind}"
    _write(report or sight.run.spec.run_dir / "drills", stamp, render_json(found), text, say)
    return 0 if outcome.is_passed else EXIT_FAILED


class _Say:
    """Lines about what goes on, on standard error, with the seconds since the command began."""

    def __init__(self, *, is_quiet: bool) -> None:
        self._is_quiet = is_quiet
        self._began = self._said = time.monotonic()

    def __call__(self, text: str) -> None:
        self._said = time.monotonic()
        if not self._is_quiet:
            click.echo(f"[{self._said - self._began:6.1f} s] {text}", err=True)

    def now_and_then(self, text: str) -> None:
        if time.monotonic() - self._said >= _SAY_EVERY_S:
            self(text)


# ---------------------------------------------------------------- before


def _require_daemon(settings: Settings) -> None:
    liveness = fetch_liveness(settings)
    if not liveness.is_there:
        raise CommandError(f"{liveness.why}: without it nobody would notice all of the failure", EXIT_DAEMON_DOWN)


def _require_training(settings: Settings, name: str) -> Sight:
    sight = look(settings.ledger.path, name)
    if sight is None:
        raise CommandError(f'there is no run "{name}"; `supervisor status` lists them', EXIT_BAD_INPUT)
    attempt = sight.attempt
    rows = (
        (sight.run.state is not RunState.ACTIVE, f"{name} is {sight.run.state}"),
        (sight.run.is_paused, f"{name} is paused: nothing would be started again"),
        (
            sight.run.script is not None,
            f"{name} is a batch script of its own: it has no launcher of ours to recover it",
        ),
        (attempt is None or attempt.state is not AttemptState.RUNNING, f"{name} is not running"),
        (sight.launch is None or not sight.launch.training, f"the launcher of {name} has not said which nodes train"),
        (sight.launch is not None and sight.launch.phase != "running", f"{name} is not training yet, or recovering"),
        (
            sight.progress is None,
            f"{name} writes no progress file: when it has recovered could not be told (docs/drills.md: what is needed)",
        ),
        (sight.step is None, f"{name} has not done a step yet, or not since its last start"),
        (not sight.verified, f"{name} has no verified checkpoint: all its steps would be lost (see `supervisor save`)"),
    )
    for is_so, why in rows:
        if is_so:
            raise CommandError(f"no drill: {why}", EXIT_REFUSED)
    return sight


def _require_ahead(sight: Sight, at_step: int | None) -> None:
    final = sight.progress.final_step if sight.progress is not None else None
    if at_step is not None and final is not None and at_step >= final:
        raise CommandError(
            f"--at-step {at_step}: {sight.run.name} ends with step {final}, and something must be left to do",
            EXIT_BAD_INPUT,
        )


def _choose(
    settings: Settings, sight: Sight, kind: str, node: str | None, sandbox: Sandbox | None
) -> tuple[Failure, str]:
    """How the failure is made, and on which node."""
    launch = sight.launch
    assert launch is not None
    if node is not None and node not in launch.training:
        raise CommandError(f"{node} does not train; {', '.join(launch.training)} do", EXIT_BAD_INPUT)
    chosen = node or next((n for n in reversed(launch.training) if n != launch.host), "")
    if not chosen:
        if kind in _OF_A_NODE:
            raise CommandError(
                f"no drill: {launch.host} alone trains, and the launcher runs on it: the job would be over, and a new "
                f"one needed; say --node {launch.host} if that is what is to be seen",
                EXIT_REFUSED,
            )
        chosen = launch.host
    name = sight.run.name
    if sandbox is None:
        return plan_by_service(settings.control.socket, name, kind, chosen, start_hint=start_hint()), chosen
    if os.geteuid() not in {0, sight.run.owner_uid}:
        raise CommandError(f"no drill: {name} belongs to another account", EXIT_REFUSED)
    try:
        socket = settings.control.socket
        return plan_in_sandbox(sandbox, name, kind, chosen, socket=socket, start_hint=start_hint()), chosen
    except CannotMake as error:
        raise CommandError(f"no drill: {error}", EXIT_REFUSED) from None


def _plan_words(sight: Sight, failure: Failure, *, is_jobs_end: bool) -> str:
    lost = max(0, (sight.step or 0) - max(sight.verified, default=0))
    host = "; the launcher runs there: the job would be lost, and a new one queued" if is_jobs_end else ""
    where = "on a sandbox" if failure.is_sandbox else "on a REAL cluster"
    return (
        f"{sight.run.name}, {where}: {failure.how}. Newest verified checkpoint: step {max(sight.verified, default=0)}; "
        f"{lost} steps would be done again{host}"
    )


def _tell_plan(sight: Sight, kind: str, node: str, failure: Failure, *, as_json: bool) -> None:
    if not as_json:
        words = _plan_words(sight, failure, is_jobs_end=_is_jobs_end(sight, kind, node))
        click.echo(f"would do: {words}")
        return
    plan = {
        "dry_run": True,
        "run": sight.run.name,
        "kill": kind,
        "node": node,
        "how": failure.how,
        "sandbox": failure.is_sandbox,
        "job_lost": _is_jobs_end(sight, kind, node),
        "step": sight.step,
        "verified_step": max(sight.verified, default=0),
    }
    click.echo(render_json(plan))


def _is_jobs_end(sight: Sight, kind: str, node: str) -> bool:
    return kind in _OF_A_NODE and sight.launch is not None and sight.launch.host == node


def _confirm(words: str, name: str) -> None:
    if not sys.stdin.isatty():
        raise CommandError("no drill: on a real cluster it needs --yes, or somebody who answers", EXIT_REFUSED)
    click.echo(words)
    if click.prompt("Type the run's name to do it", default="", show_default=False) != name:
        raise CommandError("no drill: not confirmed", EXIT_REFUSED)


def _await_step(settings: Settings, sight: Sight, at_step: int | None, say: _Say, timeout_s: float) -> Sight:
    name, until = sight.run.name, time.monotonic() + timeout_s
    while at_step is not None and (sight.step or 0) < at_step:
        if time.monotonic() > until:
            raise CommandError(f"step {at_step} did not come within {timeout_s:g} s; nothing was done", EXIT_FAILED)
        say.now_and_then(f"waiting for step {at_step}: at {sight.step}")
        time.sleep(LOOK_EVERY_S)
        sight = _require_training(settings, name)
    return sight


# ---------------------------------------------------------------- after


def _write(folder: Path, stamp: str, found: str, text: str, say: _Say) -> None:
    """Keep the report; where that can't be done it was printed at least."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{stamp}.json").write_text(found + "\n")
        (folder / f"{stamp}.txt").write_text(text)
    except OSError as error:
        raise CommandError(f"the report is not written to {folder}: {error.strerror or error}", EXIT_FAILED) from None
    say(f"report: {folder / stamp}.txt and .json")
