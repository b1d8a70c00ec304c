"""The `supervisor` command: its subcommands, loaded when they are called, and one way to tell every error.

Exit codes: 0 done, 1 failed, 2 the input is wrong, 3 the daemon is not running, 4 refused or not allowed, 5 it may have
been accepted, 6 it could not be read, 70 a defect of this program, 130 interrupted. Every error is one line on standard
error; `supervisor --debug COMMAND` shows where it came from.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import click

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_DAEMON_DOWN = 3
EXIT_REFUSED = 4
EXIT_MAY_BE_ACCEPTED = 5  # or is, and nothing has come of it yet: a retry might do it twice
EXIT_UNREAD = 6  # what was asked about could not be read: nothing is known of it
EXIT_DEFECT = 70  # as in sysexits.h: a defect of this program, not of its input
_EXIT_INTERRUPTED = 130

# Order of the help page. Modules are imported on use: `supervisor status` must not pay for the daemon or for submitit.
_COMMANDS: Mapping[str, str] = {
    "submit": "supervisor.cli.submit:submit",
    "sbatch": "supervisor.cli.sbatch:sbatch",
    "adopt": "supervisor.cli.adopt:adopt",
    "status": "supervisor.cli.status:status",
    "history": "supervisor.cli.history:history",
    "nodes": "supervisor.cli.nodes:nodes",
    "stop": "supervisor.cli.change:stop",
    "pause": "supervisor.cli.change:pause",
    "resume": "supervisor.cli.change:resume",
    "release": "supervisor.cli.change:release",
    "save": "supervisor.cli.change:save",
    "drill": "supervisor.cli.drill:drill",
    "plan": "supervisor.cli.plan:plan",
    "verify": "supervisor.cli.verify:verify",
    "flight-recorder": "supervisor.cli.flight:flight_recorder",
    "daemon": "supervisor.cli.daemon:daemon",
    "doctor": "supervisor.cli.doctor:doctor",
    "sandbox": "supervisor.cli.sandbox:sandbox",
}


class CommandError(Exception):
    """What a command could not do, in one line, with the exit code that says whose turn it is."""

    def __init__(self, message: str, exit_code: int = EXIT_FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class _Commands(click.Group):
    """Loads subcommands on use, and tells errors in one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - click's signature
        where = _COMMANDS.get(cmd_name)
        if where is None:
            return None
        module, _, name = where.partition(":")
        command = getattr(importlib.import_module(module), name)
        assert isinstance(command, click.Command)
        return command

    def main(self, args: Sequence[str] | None = None, *rest: Any, **extra: Any) -> Any:
        """Run; the exit code is told by SystemExit."""
        words = list(sys.argv[1:] if args is None else args)
        extra["standalone_mode"] = False
        try:  # --debug is looked for here: an error may come before click has read it
            result = super().main(words, *rest, **extra)
            sys.stdout.flush()
        except Exception as error:  # noqa: BLE001 - every error is told in one line
            if "--debug" in words[:1]:
                import traceback

                traceback.print_exception(error)
            sys.exit(_tell(error))
        except KeyboardInterrupt:
            sys.exit(_EXIT_INTERRUPTED)
        sys.exit(result if isinstance(result, int) else 0)


@click.group(
    cls=_Commands,
    no_args_is_help=True,
    context_settings={"max_content_width": 140},
)
@click.option("--debug", is_flag=True, help="Show where an error came from, instead of one line.")
@click.version_option(package_name="slurm-supervisor", prog_name="supervisor")
def main(*, debug: bool) -> None:
    """Keep large PyTorch training on Slurm running.

    Submits runs, notices failures, drains bad nodes, and resubmits from the last verified checkpoint. Reading commands
    work while the daemon is down; what changes something is asked of the daemon.

    Exit codes: 0 done, 1 failed, 2 the input is wrong, 3 the daemon is not running, 4 refused or not allowed,
    5 the daemon is there and does not answer: it may have been accepted, look with `supervisor status`,
    6 what was asked about could not be read, nothing is known of it, 70 a defect of this program, 130 interrupted by
    Ctrl-C. An error is one line on standard error, with --json too: standard output is empty then.
    """


# ---------------------------------------------------------------- errors


def _tell(error: Exception) -> int:
    """Write one line about an error; the exit code it stands for."""
    if isinstance(error, BrokenPipeError):  # `supervisor status | head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    if isinstance(error, click.UsageError) and type(error).__name__ == "NoArgsIsHelpError":  # click 8.2 and later
        error.show()
        return EXIT_BAD_INPUT
    code, message = judge_error(error)
    click.echo(f"supervisor: {_one_line(message)}", err=True)
    return code


def judge_error(error: Exception) -> tuple[int, str]:
    """(exit code, message) of anything that a command can raise."""
    if isinstance(error, CommandError):
        return error.exit_code, str(error)
    if isinstance(error, click.UsageError):
        command = error.ctx.command_path if error.ctx else "supervisor"
        return EXIT_BAD_INPUT, f"{_name_missing(error) or error.format_message()} (see {command} --help)"
    if isinstance(error, click.ClickException):
        return error.exit_code, error.format_message()
    if isinstance(error, click.Abort):
        return _EXIT_INTERRUPTED, "interrupted"
    return _judge_service_error(error)


def _name_missing(error: click.UsageError) -> str:
    """All options that are missing, where click names only the first; else empty."""
    if not isinstance(error, click.MissingParameter) or error.ctx is None or not isinstance(error.param, click.Option):
        return ""
    options = [p for p in error.ctx.command.params if isinstance(p, click.Option) and p.required]
    # What was given is read first: whatever is not read yet is missing too.
    missing = [f"'{option.opts[0]}'" for option in options if option.name not in error.ctx.params]
    return f"Missing options {', '.join(missing)}." if len(missing) > 1 else ""


def _judge_service_error(error: Exception) -> tuple[int, str]:
    # Imported now: only an error pays for it.
    from slurm.errors import SlurmError, SlurmRefused
    from supervisor.control import ControlError, DaemonDown, DaemonSilent, Refused, SocketInUse
    from supervisor.core.reliability import PlanError
    from supervisor.ledger import LedgerError, LedgerMissing, LedgerTooNew
    from supervisor.runlock import AlreadyRunning
    from supervisor.tomlfile import ConfigError

    rows: tuple[tuple[type[Exception] | tuple[type[Exception], ...], int], ...] = (
        ((ConfigError, PlanError, LedgerTooNew, AlreadyRunning, SocketInUse), EXIT_BAD_INPUT),
        (DaemonSilent, EXIT_MAY_BE_ACCEPTED),  # before DaemonDown, of which it is one
        ((DaemonDown, LedgerMissing), EXIT_DAEMON_DOWN),
        ((ControlError, LedgerError, SlurmError), EXIT_FAILED),
    )
    if isinstance(error, Refused):
        return _REFUSALS.get(error.code, EXIT_REFUSED), error.message
    if isinstance(error, SlurmRefused):
        return EXIT_REFUSED, str(error)
    for kinds, code in rows:
        if isinstance(error, kinds):
            return code, str(error)
    if isinstance(error, OSError):
        what = f"{error.filename}: " if error.filename else ""
        return EXIT_FAILED, f"{what}{error.strerror or error}"
    return EXIT_DEFECT, f"{type(error).__name__}: {error} (a defect; supervisor --debug ... shows where)"


_REFUSALS: Mapping[str, int] = {
    "bad_input": EXIT_BAD_INPUT,
    "name_in_use": EXIT_BAD_INPUT,
    "unknown_run": EXIT_BAD_INPUT,
    "unknown_job": EXIT_BAD_INPUT,
    "sbatch": EXIT_BAD_INPUT,
    "slurm": EXIT_FAILED,
    "look_again": EXIT_FAILED,
    "ledger": EXIT_FAILED,
    "busy": EXIT_FAILED,
    "internal": EXIT_DEFECT,
}


def _one_line(text: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in " ".join(text.split()))
