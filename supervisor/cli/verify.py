"""`supervisor verify`: whether a checkpoint, or each one in a folder, is whole; from anywhere, without the service."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from supervisor.cli.main import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_UNREAD, CommandError
from supervisor.cli.options import json_option
from supervisor.layouts.bulk import READERS
from supervisor.layouts.given import OWN, NoCheckpoint, Verdict, find_given, judge, look_at, read_all
from supervisor.layouts.registry import LAYOUTS
from supervisor.reports.table import Table, one_line, print_table, render_json

_LINE_EVERY_S = 5.0  # of progress, where nobody looks at a terminal
_DRAW_EVERY_S = 0.1


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--full", is_flag=True, help="Read every byte, and compare with the checksums that there are.")
@click.option(
    "--cached",
    is_flag=True,
    help="With --full: believe what this machine has in memory. Faster, and says nothing of the storage.",
)
@click.option(
    "--layout",
    type=click.Choice([OWN, *LAYOUTS]),
    help="How the checkpoints are laid out; default: told by their names and files.",
)
@json_option
def verify(*, path: Path, full: bool, cached: bool, layout: str | None, as_json: bool) -> int:
    """Whether the checkpoint at PATH is whole, or each one in the folder (or the run directory) that PATH is.

    Without --full: the manifest or the metadata, the sizes of all files, and whether what is described is covered by
    them: complete, or what is wrong. With --full every byte is read: verified, when all of them match checksums of the
    manifest; a checkpoint of another framework gets the strongest check that its layout allows (the CRC32 of its zip
    files), and stays complete. Nothing is changed, and nothing of a checkpoint is run.

    Exit codes: 0 good; 1 damaged or never finished; 2 there is no checkpoint; 6 it could not be read, which says
    nothing of it. In a folder, an unfinished one is no damage while another one is good.
    """
    try:
        given = find_given(path, layout)
    except NoCheckpoint as error:
        raise CommandError(str(error), EXIT_BAD_INPUT) from None
    except OSError as error:
        what = error.filename or path
        raise CommandError(f"{what} could not be read: {error.strerror or error}", EXIT_UNREAD) from None
    verdicts = [look_at(one) for one in given]
    if full:
        verdicts = _read(verdicts, is_cached=cached)
    is_ok = judge(verdicts)
    if as_json:
        click.echo(render_json(_as_json(path, verdicts, is_ok=is_ok, is_full=full)))
    else:
        print_table(_table(verdicts))
        if full:
            click.echo(_summary(verdicts))
    return {True: 0, False: EXIT_FAILED, None: EXIT_UNREAD}[is_ok]


# ---------------------------------------------------------------- reading, with progress


def _read(verdicts: Sequence[Verdict], *, is_cached: bool) -> list[Verdict]:
    total = sum(v.size_bytes for v in verdicts if v.is_good)
    with _progress(total) as on_bytes:
        return [
            read_all(v, on_bytes=on_bytes, readers=READERS, is_cached=is_cached) if v.is_good else v for v in verdicts
        ]


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """Where the bytes that were read are told: a bar on a terminal, a line now and then elsewhere (standard error)."""
    if not sys.stderr.isatty():
        yield _Batches(_Lines(total).tell, _LINE_EVERY_S).count
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading", total=total)
        yield _Batches(lambda count: bar.advance(task, count), _DRAW_EVERY_S).count


class _Batches:
    """Hands counts on now and then: who is told of each portion costs more than the reading."""

    def __init__(self, tell: Callable[[int], None], every_s: float) -> None:
        self._tell, self._every_s = tell, every_s
        self._lock = threading.Lock()
        self._count, self._next = 0, time.monotonic() + every_s

    def count(self, count: int) -> None:
        with self._lock:
            self._count += count
            now = time.monotonic()
            if now < self._next:
                return
            self._next = now + self._every_s
            count, self._count = self._count, 0
        self._tell(count)


class _Lines:
    def __init__(self, total: int) -> None:
        self._total, self._done = total, 0
        self._began = time.monotonic()

    def tell(self, count: int) -> None:
        self._done += count
        speed = self._done / max(1e-9, time.monotonic() - self._began)
        click.echo(f"{_gb(self._done)} of {_gb(self._total)} GB read, {_gb(speed)} GB/s", err=True)


# ---------------------------------------------------------------- telling


def _table(verdicts: Sequence[Verdict]) -> Table:
    rows = tuple(
        (
            v.given.path.name,
            v.given.layout,
            "-" if v.given.step is None else str(v.given.step),
            f"{v.size_bytes / 1e9:.3f}",
            v.condition.value,
            one_line(v.detail, 500),
        )
        for v in verdicts
    )
    columns = ("checkpoint", "layout", "step", "GB", "state", "detail")
    return Table(columns=columns, rows=rows, numeric=frozenset({"step", "GB"}))


def _summary(verdicts: Sequence[Verdict]) -> str:
    size, seconds = _totals(verdicts)
    return f"read {size} bytes in {seconds:.2f} s: {_gb(size / seconds if seconds else 0)} GB/s"


def _totals(verdicts: Sequence[Verdict]) -> tuple[int, float]:
    return sum(v.read_bytes for v in verdicts), sum(v.seconds for v in verdicts)


def _as_json(path: Path, verdicts: Sequence[Verdict], *, is_ok: bool | None, is_full: bool) -> dict[str, Any]:
    size, seconds = _totals(verdicts)
    return {
        "path": str(path),
        "full": is_full,
        "ok": is_ok,
        "bytes": size,
        "seconds": round(seconds, 6),
        "gb_per_s": round(size / seconds / 1e9, 3) if seconds else None,
        "checkpoints": [
            {
                "path": str(v.given.path),
                "layout": v.given.layout,
                "step": v.given.step,
                "attempt": v.given.attempt,
                "state": v.condition.value,
                "detail": v.detail,
                "size_bytes": v.size_bytes,
                "files": v.files,
                "read_bytes": v.read_bytes,
                "seconds": round(v.seconds, 6),
            }
            for v in verdicts
        ],
    }


def _gb(count: float) -> str:
    return f"{count / 1e9:.2f}"
