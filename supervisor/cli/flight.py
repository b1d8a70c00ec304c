"""`supervisor flight-recorder`: who keeps a collective from ending, by the dumps of its ranks; without the service."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from supervisor.cli.main import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_UNREAD, CommandError
from supervisor.cli.options import config_option, json_option
from supervisor.config import Settings
from supervisor.flightread import Start, find_attempts, find_starts, list_dumps, read_files
from supervisor.reports.table import Table, one_line, print_table, render_json
from supervisor.store import Store
from trainer.contract import RunPaths
from trainer.flight.analyse import Finding, analyse_reading
from trainer.flight.calls import Call, describe
from trainer.flight.files import MAX_TOTAL_BYTES, DumpFile, Reading, name_file
from trainer.flight.groups import Stuck
from trainer.flight.words import call_place, name_call, name_ranks

_LIMIT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Given:
    """What is to be read."""

    title: str
    files: tuple[DumpFile, ...]
    start: Start | None = None  # None: the files are not of a run that we know


@click.command("flight-recorder")
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@click.option("--attempt", type=click.IntRange(1), help="Of a run: this attempt; default: the newest with dumps.")
@click.option("--launch", type=click.IntRange(0), help="This start within the attempt; default: the newest with dumps.")
@click.option(
    "--world-size", type=click.IntRange(1), help="How many ranks there were; default: as the run or they tell."
)
@json_option
@config_option
def flight_recorder(
    *,
    paths: tuple[str, ...],
    attempt: int | None,
    launch: int | None,
    world_size: int | None,
    as_json: bool,
    settings: Settings,
) -> int:
    """Which ranks keep a collective from ending, by the Flight Recorder dumps that PATH has.

    PATH is a folder of dumps, the dumps themselves (the last number of a name is the rank), a run directory or one of
    its attempts' folders, or the name of a run. A dump is read without running anything of it.

    Exit codes: 0 no rank waits; 1 a collective is stuck, or the ranks disagree; 2 there are no dumps; 6 none of them
    could be read, which says nothing of the training.
    """
    try:
        given = _find(paths, attempt, launch, settings)
        reading = read_files(given.files, limit_s=_LIMIT_S, max_total_bytes=MAX_TOTAL_BYTES)
    except OSError as error:
        what = error.filename or paths[0]
        raise CommandError(f"{what} could not be read: {error.strerror or error}", EXIT_UNREAD) from None
    if not reading.dumps:
        raise CommandError(f"no dump could be read: {'; '.join(reading.unreadable[:3])}", EXIT_UNREAD)
    world = world_size or (given.start.world_size if given.start is not None else 0)
    finding = analyse_reading(reading, world)
    if as_json:
        click.echo(render_json(_as_json(given, reading, finding, world)))
    else:
        _tell(given, reading, finding)
    return 0 if finding.kind == "none" else EXIT_FAILED


# ---------------------------------------------------------------- what is meant


def _find(paths: Sequence[str], attempt: int | None, launch: int | None, settings: Settings) -> _Given:
    first = Path(paths[0])
    if len(paths) > 1 or first.is_file():
        return _Given(title=f"{len(paths)} files", files=tuple(_name(Path(path)) for path in paths))
    if not first.exists():
        return _of_run(paths[0], attempt, launch, settings)
    if (first / "attempts").is_dir():
        return _of_attempts(str(first), first, attempt, launch)
    if (first / "evidence").is_dir() and first.name.isdecimal():
        return _of_attempts(str(first.parent.parent), first.absolute().parent.parent, int(first.name), launch)
    place = first.absolute()
    if place.parent.name == "evidence" and place.name.isdecimal() and place.parent.parent.name.isdecimal():
        run_dir = place.parents[3]
        return _of_attempts(str(run_dir), run_dir, int(place.parent.parent.name), int(place.name))
    files = list_dumps(first)
    if not files:
        raise CommandError(f"{first} holds no Flight Recorder dumps, and is no run directory", EXIT_BAD_INPUT)
    return _Given(title=str(first), files=files)


def _name(path: Path) -> DumpFile:
    file = name_file(path)
    if file is None:
        raise CommandError(f"{path}: its name ends in no number, which would be its rank", EXIT_BAD_INPUT)
    return file


def _of_run(name: str, attempt: int | None, launch: int | None, settings: Settings) -> _Given:
    if "/" in name or not settings.ledger.path.exists():
        raise CommandError(f"{name} does not exist", EXIT_BAD_INPUT)
    with Store.open_readonly(settings.ledger.path) as store:
        run = store.load_run(name)
    if run is None:
        raise CommandError(f'there is no file, folder or run "{name}"; `supervisor status` lists runs', EXIT_BAD_INPUT)
    return _of_attempts(name, run.spec.run_dir, attempt, launch)


def _of_attempts(title: str, run_dir: Path, attempt: int | None, launch: int | None) -> _Given:
    """The newest start with dumps, of those that are asked for."""
    for number in (attempt,) if attempt is not None else reversed(find_attempts(run_dir)):
        for start in reversed(find_starts(run_dir, number)):
            files = list_dumps(start.folder) if launch in (None, start.launch) else ()
            if files:
                return _Given(title=f"{title}, attempt {number}, start {start.launch}", files=files, start=start)
    where = RunPaths(run_dir).evidence(attempt, launch or 0).parent if attempt is not None else run_dir / "attempts"
    asked = f" of start {launch}" if launch is not None else ""
    raise CommandError(f"there are no Flight Recorder dumps{asked} in {where}", EXIT_BAD_INPUT)


# ---------------------------------------------------------------- telling


def _tell(given: _Given, reading: Reading, finding: Finding) -> None:
    told = len(reading.dumps) + len(finding.no_dump)
    click.echo(f"{given.title}: dumps of {len(reading.dumps)} of {told} ranks")
    click.echo(one_line(finding.sentence, 4000))
    if finding.kind != "none":
        click.echo(f"confidence: {finding.confidence}{'; a fault of the program' * finding.is_program_fault}")
    places = _places(given, reading, finding.culprits)
    if places:
        click.echo("look at: " + ", ".join(f"rank {rank} on {place}" for rank, place in list(places.items())[:16]))
    if finding.stuck:
        click.echo()
        print_table(_table(finding.stuck))
    for note in finding.notes:
        click.echo(one_line(f"note: {note}", 1000))


def _places(given: _Given, reading: Reading, ranks: Sequence[int]) -> dict[int, str]:
    """The nodes (or hosts, as file names tell them) of these ranks, where they are known."""
    found: dict[int, str] = {}
    for rank in ranks:
        node = given.start.node_of(rank) if given.start is not None else None
        place = node or (reading.files[rank].host if rank in reading.files else "")
        if place:
            found[rank] = place
    return found


def _table(stuck: Sequence[Stuck]) -> Table:
    rows = tuple(
        (
            one_line(name_call(one), 80),
            *(_ranks(ranks) for ranks in (one.waiting, one.absent, one.differing, one.no_dump)),
            "-" if one.first is None else str(one.first),
            "-" if one.first_ns is None else f"{_instant(one.first_ns):%H:%M:%S}",
        )
        for one in stuck[:50]
    )
    return Table(columns=("collective", "waiting", "not called", "called else", "no dump", "first", "since"), rows=rows)


def _ranks(ranks: Sequence[int]) -> str:
    return name_ranks(ranks).partition(" ")[2] if ranks else "-"


def _instant(ns: int) -> datetime:
    return datetime.fromtimestamp(ns / 1e9, UTC)


def _as_json(given: _Given, reading: Reading, finding: Finding, world: int) -> dict[str, Any]:
    places = _places(given, reading, finding.culprits)
    return {
        "what": given.title,
        "attempt": given.start.attempt if given.start is not None else None,
        "launch": given.start.launch if given.start is not None else None,
        "world_size": world or None,
        "ranks": sorted(reading.dumps),
        "kind": finding.kind,
        "sentence": finding.sentence,
        "confidence": finding.confidence,
        "program_fault": finding.is_program_fault,
        "culprits": [{"rank": rank, "node": places.get(rank)} for rank in finding.culprits],
        "no_dump": list(finding.no_dump),
        "stuck": [_stuck_as_json(one) for one in finding.stuck],
        "unreadable": list(reading.unreadable),
        "notes": list(finding.notes),
    }


def _stuck_as_json(one: Stuck) -> dict[str, Any]:
    return {
        "group": one.group,
        "seq": one.seq,
        "op": one.most.op if one.most is not None else None,
        "p2p": one.is_p2p,
        "pending": one.is_pending,
        "waiting": list(one.waiting),
        "not_called": list(one.absent),
        "no_dump": list(one.no_dump),
        "differing": list(one.differing),
        "differing_seq": one.differing_at,
        "blocked": list(one.blocked),
        "done": list(one.done),
        "first_rank": one.first,
        "first_at": _instant(one.first_ns).isoformat() if one.first_ns is not None else None,
        "calls": _calls_as_json(one.different or one.calls),
    }


def _calls_as_json(calls: Mapping[int, Call]) -> list[dict[str, Any]]:
    """What was called, each thing once, with the ranks that called it."""
    by_what: dict[tuple[str, str], list[int]] = {}
    for rank, call in sorted(calls.items()):
        by_what.setdefault((describe(call), call_place(call)), []).append(rank)
    return [{"call": what, "at": place or None, "ranks": ranks} for (what, place), ranks in by_what.items()]
