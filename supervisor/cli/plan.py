"""`supervisor plan`: how often to save, before anything has run, or as a run has measured it."""

from __future__ import annotations

import dataclasses

import click

from supervisor.cli.main import EXIT_BAD_INPUT, CommandError
from supervisor.cli.options import config_option, json_option, now
from supervisor.config import Settings
from supervisor.core.reliability import SavePlan, plan_saves
from supervisor.model import CheckpointSpec
from supervisor.reports.table import render_json


@click.command()
@click.option("--gpus", type=int, help="GPUs of the whole training.")
@click.option("--save-s", type=float, help="Seconds that one save blocks the training.")
@click.option("--restart-s", type=float, help="Seconds from a failure to the first new step.")
@click.option("--run", metavar="RUN", help="In their place: a run, with what it has measured and its own failures.")
@json_option
@config_option
def plan(
    *,
    gpus: int | None,
    save_s: float | None,
    restart_s: float | None,
    run: str | None,
    as_json: bool,
    settings: Settings,
) -> None:
    """How often to save, and what failures will cost.

    Young's formula, with the rate at which Llama 3's training was interrupted: 419 unexpected interruptions in 54 days
    on 16,384 GPUs. With --run: the interval that the service works out for that run, by Daly's formula, from the cost
    of its saves and its own failures.
    """
    numbers = (("gpus", gpus), ("save-s", save_s), ("restart-s", restart_s))
    if run is not None:
        if beside := [f"'--{name}'" for name, value in numbers if value is not None]:
            raise click.UsageError(f"{', '.join(beside)} can't be given with '--run': the run has its own.")
        _show_run(settings, run, as_json=as_json)
        return
    missing = [f"'--{name}'" for name, value in numbers if value is None]
    if gpus is None or save_s is None or restart_s is None:
        raise click.UsageError(f"Missing option{'s' if len(missing) > 1 else ''} {', '.join(missing)}.")
    answer = plan_saves(gpus, save_s, restart_s)
    click.echo(render_json(_as_json(answer)) if as_json else _words(answer))


def _show_run(settings: Settings, name: str, *, as_json: bool) -> None:
    from supervisor.core.interval import judge_interval
    from supervisor.reports.saves import interval_as_json, judge_saves, save_lines
    from supervisor.store import Store

    with Store.open_readonly(settings.ledger.path) as store, store.reading():
        run, attempts, history = store.load_run(name), store.load_attempts(name), store.load_interruptions(name)
    if run is None:
        raise CommandError(f'there is no run "{name}"; `supervisor status` lists them', EXIT_BAD_INPUT)
    at = now()
    if as_json:
        click.echo(render_json({"run": name, **interval_as_json(judge_interval(run.spec, attempts, at, history))}))
        return
    for line in save_lines(judge_saves(run, attempts, (), at, step=None, history=history), at):
        click.echo(line)


def _as_json(answer: SavePlan) -> dict[str, object]:
    numbers = dataclasses.asdict(answer)
    numbers["mtbf_h"] = round(answer.mtbf_h, 1)
    numbers["interval_min"] = round(answer.interval_min) if answer.interval_min >= 10 else round(answer.interval_min, 1)
    numbers["every_s"] = round(answer.interval_min * 60)
    numbers["lost_percent"] = round(answer.lost_percent, 1)
    return numbers


def _words(answer: SavePlan) -> str:
    rough = "\nThis is rough: a save or a restart is long against the time between failures." if answer.is_rough else ""
    most_min = CheckpointSpec().every_max_s / 60
    capped = f"\nA service that chooses by itself saves every {most_min:g} min at the latest (checkpoint.every_max_s)."
    return (
        f"{answer.gpus} GPUs: a failure every {answer.mtbf_h:.1f} h\n"
        f"save every {_span(answer.interval_min)} (checkpoint.every_s = {answer.interval_min * 60:.0f})\n"
        f"lost to saves, repeated work and restarts: {answer.lost_percent:.1f} %{rough}"
        f"{capped if answer.interval_min > most_min else ''}"
    )


def _span(minutes: float) -> str:
    if minutes < 10 * 60:
        return f"{minutes:.3g} min"
    hours = minutes / 60
    return f"{hours:.1f} h" if hours < 48 else f"{hours / 24:,.0f} days"
