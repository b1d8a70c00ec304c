"""`supervisor daemon`: the service itself."""

from __future__ import annotations

import dataclasses

import click
import structlog

from supervisor.cli.main import EXIT_DEFECT, judge_error
from supervisor.cli.options import config_option
from supervisor.config import Settings, check_slurm_conf
from supervisor.logs import LEVELS, configure_logs


@click.command()
@config_option
@click.option("--once", is_flag=True, help="Turn the loop once, then end.")
@click.option("--dry-run", is_flag=True, help="Look once, print the plan as JSON, change nothing.")
@click.option("--observe-only", is_flag=True, help="Plan and record, act on nothing.")
@click.option("--log-level", type=click.Choice(LEVELS), default="info", show_default=True, help="Least level to log.")
def daemon(*, settings: Settings, once: bool, dry_run: bool, observe_only: bool, log_level: str) -> int:
    """Run the service until SIGTERM. Jobs go on without it; the next start adopts them."""
    configure_logs(level=log_level)
    check_slurm_conf(settings)
    if observe_only:
        settings = dataclasses.replace(settings, observe_only=True)
    try:
        from supervisor.daemon import run_daemon

        return run_daemon(settings, once=once, dry_run=dry_run)
    except Exception as error:
        if judge_error(error)[0] == EXIT_DEFECT:  # nobody sits at the terminal: the log is where it is looked for
            structlog.get_logger("daemon").exception("daemon.failed", reason=str(error))
        raise
