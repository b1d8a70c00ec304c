"""The Flight Recorder dumps that an attempt left behind: where they lie, of which start, and what they tell.

Each start of the training in an attempt has a folder of its own (attempts/<n>/evidence/<k>). Ranks have numbers; the
nodes they ran on are told by what the launcher wrote of that start.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from supervisor.jobfiles import NotAFile, list_folder, read_bounded
from supervisor.observed import FlightView
from trainer import contract
from trainer.contract import AttemptSpec, ContractError, InterruptionRecord, LaunchReport, RunPaths
from trainer.flight.analyse import Finding, analyse_reading
from trainer.flight.files import DumpFile, Reading, parse_name, read_dumps

_T = TypeVar("_T")

MAX_NAMES = 100_000
_SPEC_BYTES = 4 * 1024 * 1024
_RECORD_BYTES = 1024 * 1024
_NUMBER = re.compile(r"(?:0|[1-9]\d{0,8})\Z")
_FINAL_LIMIT_S = 0.5  # of the two seconds that a cycle waits for all that an attempt left behind
_FINAL_BYTES = 64 * 1024 * 1024
_FINAL_FILE_BYTES = 1024 * 1024  # of one dump: it is read in a third of a second
_FINAL_ENTRIES = 20_000  # of one dump


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One start of the training in an attempt, and where its evidence lies."""

    folder: Path
    attempt: int
    launch: int
    nodes: tuple[str, ...] = ()  # that trained, in rank order; empty: not told
    procs_per_node: int = 0  # 0: not told

    @property
    def world_size(self) -> int:
        """Ranks of that start; 0: not told."""
        return len(self.nodes) * self.procs_per_node

    def node_of(self, rank: int) -> str | None:
        """The node that a rank ran on, where that is known."""
        place = rank // self.procs_per_node if self.procs_per_node else len(self.nodes)
        return self.nodes[place] if place < len(self.nodes) else None


def find_starts(run_dir: Path, attempt: int) -> tuple[Start, ...]:
    """The starts of an attempt that have a folder for their evidence, oldest first. Raises OSError."""
    paths = RunPaths(run_dir)
    try:
        names, _ = list_folder(paths.evidence(attempt, 0).parent, MAX_NAMES)
    except FileNotFoundError:
        return ()
    spec = _read(AttemptSpec, paths.attempt_spec(attempt), _SPEC_BYTES)
    report = _read(LaunchReport, paths.launch_report(attempt), _RECORD_BYTES)
    return tuple(
        Start(
            folder=paths.evidence(attempt, launch),
            attempt=attempt,
            launch=launch,
            nodes=_find_nodes(paths, attempt, launch, report),
            procs_per_node=spec.procs_per_node if spec is not None else 0,
        )
        for launch in sorted(int(name) for name in names if _NUMBER.match(name))
    )


def find_attempts(run_dir: Path) -> tuple[int, ...]:
    """The attempts that the run directory has folders of. Raises OSError."""
    names, _ = list_folder(RunPaths(run_dir).attempt_dir(1).parent, MAX_NAMES)
    return tuple(sorted(int(name) for name in names if _NUMBER.match(name)))


def _find_nodes(paths: RunPaths, attempt: int, launch: int, report: LaunchReport | None) -> tuple[str, ...]:
    if report is not None and report.launch == launch:
        return report.training
    own = _read(InterruptionRecord, paths.interruption(attempt, launch), _RECORD_BYTES)
    if own is not None and own.trained:
        return own.trained
    before = _read(InterruptionRecord, paths.interruption(attempt, launch - 1), _RECORD_BYTES) if launch else None
    return before.training if before is not None else ()


def _read(kind: type[_T], path: Path, max_bytes: int) -> _T | None:
    with suppress(OSError, NotAFile, ContractError):
        return contract.parse(kind, read_bounded(path, max_bytes))
    return None


def list_dumps(folder: Path) -> tuple[DumpFile, ...]:
    """The files of a folder that are dumps by their names. Raises OSError."""
    names, _ = list_folder(folder, MAX_NAMES)
    return tuple(file for name in sorted(names) if (file := parse_name(folder / name)) is not None)


def read_files(files: tuple[DumpFile, ...], *, limit_s: float, max_total_bytes: int) -> Reading:
    """The dumps of these files: regular ones only, no link is followed."""
    return read_dumps(files, limit_s=limit_s, max_total_bytes=max_total_bytes, read=_read_dump)


def _read_quickly(files: tuple[DumpFile, ...]) -> Reading:
    """The same in the time that a cycle has: the short dumps, and none that is large."""
    return read_dumps(
        files,
        limit_s=_FINAL_LIMIT_S,
        max_total_bytes=_FINAL_BYTES,
        max_entries=_FINAL_ENTRIES,
        prefers_short=True,
        read=lambda path, _: _read_dump(path, _FINAL_FILE_BYTES),
    )


def _read_dump(path: Path, max_bytes: int) -> bytes:
    try:
        return read_bounded(path, max_bytes)
    except NotAFile as error:
        raise OSError(str(error)) from None


def read_last_start(run_dir: Path, attempt: int, launch: int | None) -> FlightView | None:
    """What the dumps of an attempt's last start tell; None without any. `launch`: its number, where it is known."""
    starts = find_starts(run_dir, attempt)
    if not starts or (launch is not None and starts[-1].launch != launch):
        return None
    start = starts[-1]
    reading = _read_quickly(list_dumps(start.folder))
    return view_finding(analyse_reading(reading, start.world_size), start) if reading.dumps else None


def view_finding(finding: Finding, start: Start) -> FlightView:
    """A finding with the nodes of the ranks that it names."""
    nodes = [node for rank in finding.culprits if (node := start.node_of(rank)) is not None]
    return FlightView(
        launch=start.launch,
        kind=finding.kind,
        sentence=finding.sentence[:2000],
        confidence=finding.confidence,
        ranks=finding.culprits[:1000],
        nodes=tuple(dict.fromkeys(nodes))[:1000],
        is_program_fault=finding.is_program_fault,
        notes=tuple(note[:300] for note in finding.notes[:10]),
    )
