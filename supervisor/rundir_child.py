"""The process that touches run directories, as their owner: reads what the contract defines, writes attempts, prunes.

Run by supervisor.rundir as `python -m supervisor.rundir_child`. Knows no ledger and no policy. What it finds is bounded
before it is parsed; a file that is not what the contract says is named in `unreadable` and counts as unknown.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import sys
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import msgspec
import xxhash

from supervisor.child import Wire, serve
from supervisor.flightread import read_last_start
from supervisor.jobfiles import NotAFile, list_folder, open_folder, open_own_folder, open_parent, read_bounded, read_end
from supervisor.layouts.survey import NoFolder, Survey
from supervisor.logsteps import LogSteps, find_step
from supervisor.model import UNFINISHED_MARKERS, CheckpointView, LogFile
from supervisor.observed import FlightView
from trainer import contract
from trainer.contract import (
    MANIFEST_NAME,
    VERIFIED_NAME,
    ContractError,
    Divergence,
    ExitRecord,
    InterruptionRecord,
    LaunchReport,
    Manifest,
    NodeReport,
    Outcome,
    Progress,
    ReadLease,
    RunPaths,
    UploadReport,
    VerificationRecord,
)
from trainer.format.manifest import parse_manifest

SMALL_BYTES = 64 * 1024
LAUNCH_BYTES = 1024 * 1024  # one entry per node
NODE_REPORT_BYTES = 256 * 1024
NODE_REPORTS_BYTES = 16 * 1024 * 1024  # of log tails kept in one view
LOG_TAIL_BYTES = 256 * 1024
MAX_NODE_REPORTS = 4096
MAX_NAMES = 20_000
MAX_LOGS = 100
MAX_INTERRUPTIONS = 32  # read at once, the oldest first
MAX_UPLOAD_REPORTS = 64  # read where the copying fails
MAX_CHECKPOINTS = 256  # newest steps
RECHECK_S = 60.0  # between two looks at the sizes of an unchanged checkpoint's files

T = TypeVar("T")
Key = tuple[int, int]  # step, attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What the parent asks. `do`: read, write, link, prune, tail, survey, steps or logs."""

    do: str
    path: str  # run directory; with tail and steps the file, with survey and logs the folder
    attempt: int = 0
    step: int = 0
    is_final: bool = False
    budget_s: float = 1.0  # looking at checkpoints stops after this; the rest is looked at next time
    files: Mapping[str, str] = field(default_factory=dict)  # with write: base64
    max_bytes: int = LOG_TAIL_BYTES
    log_path: str = ""  # with read: the job's log, where it is not the attempt's own
    offset: int = 0  # with read and steps: the log before it is of earlier attempts, or known
    layout: str = "supervisor"  # with read and survey; "supervisor": the checkpoints of our own layout are read
    target: str = ""  # with link: the checkpoint
    marks: tuple[str, ...] = UNFINISHED_MARKERS  # with survey: of checkpoints that are not finished
    interruptions_from: int = 0  # with read: records of starts of the training before this one are known
    pattern: str = ""  # with steps, and with logs: of their names, its group being the job's id


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """A hash of a file's bytes (to see it change) and whether it could be read."""

    digest: str
    is_there: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """Answer to `read`: RunView without the ages, which the parent keeps."""

    progress: Progress | None = None
    progress_content: Content
    launch: LaunchReport | None = None
    launch_content: Content
    log_bytes: int | None = None  # size of the job's log
    exit: ExitRecord | None = None
    interruptions: tuple[InterruptionRecord, ...] = ()
    outcome: Outcome | None = None
    divergence: Divergence | None = None
    node_reports: tuple[NodeReport, ...] = ()
    log_tail: str = ""
    flight: FlightView | None = None
    checkpoints: tuple[CheckpointView, ...] = ()
    unknown_checkpoints: tuple[Key, ...] = ()
    leased: tuple[str, ...] = ()
    is_lease_unreadable: bool = False
    uploads: tuple[UploadReport, ...] = ()
    unreadable: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Surveyed:
    """Answer to `survey`: what lies in a folder of checkpoints of a foreign layout."""

    has_folder: bool = True
    views: tuple[CheckpointView, ...] = ()
    unknown: tuple[str, ...] = ()
    unsettled: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    digest: str = ""
    layout: str = ""
    entries: int = 0
    marks: tuple[str, ...] = ()


# ---------------------------------------------------------------- reading


class Notes:
    """Collects what could not be read, named relative to the run directory."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self.lines: list[str] = []

    def add(self, path: Path, why: object) -> None:
        if len(self.lines) < 100:
            name = path.relative_to(self._run_dir) if path.is_relative_to(self._run_dir) else path
            line = f"{name}: {why}".encode("utf-8", "replace").decode()  # a name may be no UTF-8
            self.lines.append(line[:500])


def read_run(question: Question, cache: CheckpointCache) -> Findings:
    """Everything that a cycle wants to know of one run; raises OSError when the run directory itself can't be read."""
    run_dir = Path(question.path)
    with open_own_folder(run_dir) as before:
        findings = _read_contents(question, run_dir, cache)
        with open_own_folder(run_dir) as after:
            if not os.path.sameopenfile(before, after):
                raise NotAFile(f"{run_dir}: another folder has its name now")
    return findings


def _read_contents(question: Question, run_dir: Path, cache: CheckpointCache) -> Findings:
    paths, attempt, notes = RunPaths(run_dir), question.attempt, Notes(run_dir)
    progress, progress_content = _read_record(Progress, paths.progress(attempt), SMALL_BYTES, attempt, notes)
    launch, launch_content = _read_record(LaunchReport, paths.launch_report(attempt), LAUNCH_BYTES, attempt, notes)
    exit_record, _ = _read_record(ExitRecord, paths.exit_record(attempt), LAUNCH_BYTES, attempt, notes)
    divergence, _ = _read_record(Divergence, paths.divergence(attempt), SMALL_BYTES, attempt, notes)
    views: tuple[CheckpointView, ...] = ()
    unknown: tuple[Key, ...] = ()
    if question.layout == "supervisor":
        views, unknown = cache.look(paths, time.monotonic() + question.budget_s, notes)
    leases = _read_leases(paths, attempt, notes)
    log = Path(question.log_path) if question.log_path else paths.attempt_dir(attempt) / "job.log"
    findings = Findings(
        progress=progress,
        progress_content=progress_content,
        launch=launch,
        launch_content=launch_content,
        log_bytes=_read_size(log, question.offset),
        exit=exit_record,
        interruptions=tuple(_read_interruptions(paths, attempt, question.interruptions_from, notes)),
        divergence=divergence,
        checkpoints=views,
        unknown_checkpoints=unknown,
        leased=tuple(name for lease in leases if lease is not None for name in lease.checkpoints),
        is_lease_unreadable=None in leases,
        uploads=tuple(_read_uploads(paths, attempt, notes)),
    )
    if question.is_final:
        findings = _add_last_words(findings, paths, attempt, notes)
        findings = replace(findings, log_tail=_read_log_tail(log, question.offset, notes))
    return replace(findings, unreadable=tuple(notes.lines))


def _read_leases(paths: RunPaths, attempt: int, notes: Notes) -> list[ReadLease | None]:
    """The leases that are there; None for one that does not tell what it is about."""
    found = []
    for path in (paths.read_lease(attempt), paths.upload_lease(attempt)):
        lease, content = _read_record(ReadLease, path, SMALL_BYTES, attempt, notes)
        if content.is_there:
            found.append(lease)
    return found


def _read_uploads(paths: RunPaths, attempt: int, notes: Notes) -> Iterator[UploadReport]:
    """The first node's report, which leads; when it fails, those of other nodes that fail, too."""
    leader, _ = _read_record(UploadReport, paths.upload_report(attempt, 0), SMALL_BYTES, attempt, notes)
    if leader is None:
        return
    yield leader
    if not leader.failures:
        return
    folder = paths.upload_report(attempt, 0).parent
    numbers = sorted(
        int(n[:-5]) for n in _list(folder, MAX_NODE_REPORTS, notes) if re.fullmatch(r"[1-9]\d{0,6}\.json", n)
    )
    for node in numbers[:MAX_UPLOAD_REPORTS]:
        report, _ = _read_record(UploadReport, paths.upload_report(attempt, node), SMALL_BYTES, attempt, notes)
        if report is not None and report.failures:
            yield report


def _read_interruptions(paths: RunPaths, attempt: int, first: int, notes: Notes) -> Iterator[InterruptionRecord]:
    """Records of interrupted starts of the training inside the job, from number `first` on, ascending, some at once."""
    folder = paths.interruption(attempt, 0).parent
    if folder.is_symlink():
        notes.add(folder, "is a link")
        return
    names = (n for n in _list(folder, MAX_NAMES, notes) if _INTERRUPTION_NAME.fullmatch(n))
    numbers = sorted(number for name in names if (number := int(name[:-5])) >= first)
    for launch in numbers[:MAX_INTERRUPTIONS]:
        path = paths.interruption(attempt, launch)
        record, _ = _read_record(InterruptionRecord, path, SMALL_BYTES, attempt, notes)
        if record is not None and record.launch != launch:
            notes.add(path, f"of start {record.launch}, not {launch}")
        elif record is not None:
            yield record


_INTERRUPTION_NAME = re.compile(r"(0|[1-9][0-9]{0,6})\.json")


def _read_size(path: Path, since: int) -> int | None:
    """Bytes in a file after an offset (all, when it has become shorter); None when there is none to be seen."""
    try:
        found = path.lstat()
    except OSError:
        return None
    if not stat.S_ISREG(found.st_mode):
        return None
    return found.st_size - since if found.st_size >= since else found.st_size


def _add_last_words(findings: Findings, paths: RunPaths, attempt: int, notes: Notes) -> Findings:
    outcome, _ = _read_record(Outcome, paths.outcome(attempt), SMALL_BYTES, attempt, notes)
    return replace(
        findings,
        outcome=outcome,
        node_reports=_read_node_reports(paths, attempt, notes),
        flight=_read_flight(findings, paths, attempt, notes),
    )


def _read_flight(findings: Findings, paths: RunPaths, attempt: int, notes: Notes) -> FlightView | None:
    launch = findings.exit.launches - 1 if findings.exit is not None else None
    try:
        return read_last_start(paths.run_dir, attempt, launch)
    except OSError as error:
        notes.add(paths.evidence(attempt, 0).parent, error.strerror)
    return None


def _read_record(kind: type[T], path: Path, max_bytes: int, attempt: int, notes: Notes) -> tuple[T | None, Content]:
    data, is_there = _read_file(path, max_bytes, notes)
    if data is None:
        return None, Content(digest="", is_there=is_there)
    content = Content(digest=xxhash.xxh3_128_hexdigest(data), is_there=True)
    try:
        record = _of_attempt(parse_record(kind, data), attempt)
    except ContractError as error:
        notes.add(path, error)
        return None, content
    return record, content


def _of_attempt(record: T, attempt: int) -> T:
    if getattr(record, "attempt", attempt) != attempt:
        raise ContractError(f"of attempt {getattr(record, 'attempt', None)}, not {attempt}")
    return record


def parse_record(kind: type[T], data: bytes) -> T:
    """contract.parse, and the record can be handed on (JSON's escapes can spell text that is no Unicode)."""
    return check_portable(contract.parse(kind, data))


def check_portable(record: T) -> T:
    """The record, if it can be handed on; raises ContractError."""
    try:
        msgspec.json.encode(record)
    except (UnicodeEncodeError, ValueError, OverflowError) as error:
        raise ContractError(f"{type(record).__name__}: {error}") from None
    return record


def _read_file(path: Path, max_bytes: int, notes: Notes) -> tuple[bytes | None, bool]:
    """Content, None when it can't be read; and whether anything is there."""
    try:
        return read_bounded(path, max_bytes), True
    except FileNotFoundError:
        return None, False
    except NotAFile as error:
        notes.add(path, error)
    except OSError as error:
        notes.add(path, error.strerror)
    return None, True


def _read_log_tail(path: Path, since: int, notes: Notes) -> str:
    try:
        return read_end(path, LOG_TAIL_BYTES, since=since).decode("utf-8", "replace")
    except FileNotFoundError:
        return ""
    except NotAFile as error:
        notes.add(path, error)
    except OSError as error:
        notes.add(path, error.strerror)
    return ""


def _read_node_reports(paths: RunPaths, attempt: int, notes: Notes) -> tuple[NodeReport, ...]:
    folder = paths.attempt_dir(attempt) / "nodes"
    names = _list(folder, MAX_NODE_REPORTS, notes)
    reports: list[NodeReport] = []
    for name in sorted(n for n in names if n.endswith(".json") and not n.startswith(".")):
        report, _ = _read_record(NodeReport, folder / name, NODE_REPORT_BYTES, attempt, notes)
        if report is not None and f"{report.node}.json" != name:
            notes.add(folder / name, f"names another node, {report.node!r}")
        elif report is not None:
            reports.append(report)
    return _bound_log_tails(reports)


def _bound_log_tails(reports: list[NodeReport]) -> tuple[NodeReport, ...]:
    """Drop log tails beyond the bound, those of nodes that ended well first."""
    left = NODE_REPORTS_BYTES
    kept: dict[str, NodeReport] = {}
    for report in sorted(reports, key=lambda r: not r.exit_code):
        left -= len(report.log_tail)
        kept[report.node] = report if left >= 0 else replace(report, log_tail="")
    return tuple(kept[report.node] for report in reports)


def _list(folder: Path, max_names: int, notes: Notes) -> list[str]:
    try:
        names, is_cut = list_folder(folder, max_names)
    except FileNotFoundError:
        return []
    except OSError as error:
        notes.add(folder, error.strerror)
        return []
    if is_cut:
        notes.add(folder, f"more than {max_names} names; the rest is not looked at")
    return names


# ---------------------------------------------------------------- checkpoints

Signature = tuple[int, int, int] | None  # mtime_ns, size, inode; None: not there


@dataclass(frozen=True, slots=True, kw_only=True)
class _Looked:
    view: CheckpointView
    manifest: Signature
    record: Signature
    looked_at: float  # monotonic: sizes of all files


class _Unknown(Exception):
    """A checkpoint is there by name, and could not be looked at."""


class CheckpointCache:
    """Views of checkpoint folders; an unchanged one costs two stats, and its files are looked at once a minute."""

    def __init__(self, *, recheck_s: float = RECHECK_S) -> None:
        self._recheck_s = recheck_s
        self._looked: dict[Path, _Looked] = {}

    def look(self, paths: RunPaths, until: float, notes: Notes) -> tuple[tuple[CheckpointView, ...], tuple[Key, ...]]:
        """Views of the newest checkpoints that have a manifest, and the keys of those that could not be looked at.

        Both ascending. After `until` no more are opened. Raises OSError when the list itself can't be read: an empty
        answer to a failed question would say that all checkpoints are gone.
        """
        folder = paths.checkpoints()
        names, is_cut = list_folder(folder, MAX_NAMES)
        if is_cut:
            raise OSError(errno.E2BIG, f"more than {MAX_NAMES:,} names", str(folder))
        keys = sorted(_checkpoint_keys(names))
        looked: dict[Key, CheckpointView | None] = {}
        for key in reversed(keys[-MAX_CHECKPOINTS:]):
            with suppress(_Unknown):
                looked[key] = self._look_at(paths.checkpoint(*key), key, until, notes)
        self._forget(folder, {paths.checkpoint(*key) for key in looked})
        views = [looked.get(key) for key in keys]
        return tuple(v for v in views if v is not None), tuple(key for key in keys if key not in looked)

    def _forget(self, folder: Path, wanted: set[Path]) -> None:
        for path in [p for p in self._looked if p.parent == folder and p not in wanted]:
            del self._looked[path]

    def _look_at(self, path: Path, key: Key, until: float, notes: Notes) -> CheckpointView | None:
        """The view, or None without a manifest; raises _Unknown."""
        known = self._looked.get(path)
        try:
            manifest, record = _signature(path / MANIFEST_NAME), _signature(path / VERIFIED_NAME)
            if manifest is None:
                return None
            now = time.monotonic()
            if known is not None and (known.manifest, known.record) == (manifest, record):
                # beyond the budget an old look is better than a late answer
                if now - known.looked_at < self._recheck_s or now > until:
                    return known.view
            elif now > until and known is None:
                raise _Unknown
            view = inspect_checkpoint(path, *key)
        except (OSError, NotAFile) as error:
            notes.add(path, error)
            if known is None:
                raise _Unknown from None
            return known.view  # could not look is not "gone"
        self._looked[path] = _Looked(view=view, manifest=manifest, record=record, looked_at=now)
        return view


def _checkpoint_keys(names: list[str]) -> set[Key]:
    parsed = {name: contract.parse_checkpoint_name(name) for name in names}
    # the name must be the one that a writer gives: "step-007.a1" would be a second folder of step 7
    return {key for name, key in parsed.items() if key is not None and contract.checkpoint_name(*key) == name}


def _signature(path: Path) -> Signature:
    try:
        found = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def inspect_checkpoint(path: Path, step: int, attempt: int) -> CheckpointView:
    """What lies on disk under one checkpoint's name, by sizes; raises OSError when it can't be looked at."""
    with open_folder(path) as folder:
        view = CheckpointView(step=step, attempt=attempt, path=str(path))
        try:
            data = read_bounded(MANIFEST_NAME, contract.MAX_JSON_BYTES, dir_fd=folder)
            manifest = check_portable(parse_manifest(data))
        except (ContractError, NotAFile) as error:
            return replace(view, detail=f"{MANIFEST_NAME}: {error}")
        view = replace(
            view,
            size_bytes=sum(file.size_bytes for file in manifest.files),
            files=len(manifest.files),
            samples=manifest.samples,
            world_size=max(0, manifest.world_size),
            is_elastic=manifest.is_elastic,
        )
        fault = _find_fault(folder, manifest, path)
        if fault:
            return replace(view, detail=fault)
        return _add_verification(replace(view, is_complete=True), folder, xxhash.xxh3_128_hexdigest(data))


def _find_fault(folder: int, manifest: Manifest, path: Path) -> str:
    run = path.parents[1].name  # a run's folder has its name
    if manifest.run != run or contract.checkpoint_name(manifest.step, manifest.attempt) != path.name:
        return f"{MANIFEST_NAME} is of run {manifest.run}, step {manifest.step}, attempt {manifest.attempt}"[:500]
    for file in manifest.files:
        fault = _find_file_fault(folder, file)
        if fault:
            return fault
    return ""


def _find_file_fault(folder: int, file: contract.ManifestFile) -> str:
    try:
        with open_parent(folder, file.path) as (parent, name):
            found = os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return f"{file.path} is missing"
    except NotAFile as error:
        return f"{file.path}: {error}"
    if not stat.S_ISREG(found.st_mode):
        return f"{file.path} is not a regular file"
    if found.st_size != file.size_bytes:
        return f"{file.path} has {found.st_size} bytes instead of {file.size_bytes}"
    return ""


def _add_verification(view: CheckpointView, folder: int, manifest_digest: str) -> CheckpointView:
    try:
        record = parse_record(VerificationRecord, read_bounded(VERIFIED_NAME, SMALL_BYTES, dir_fd=folder))
    except FileNotFoundError:
        return view
    except (ContractError, NotAFile) as error:
        return replace(view, detail=f"{VERIFIED_NAME}: {error}")
    if record.manifest_xxh3_128 != manifest_digest or (record.step, record.attempt) != (view.step, view.attempt):
        return replace(view, detail=f"{VERIFIED_NAME} is of another manifest")
    if record.ok:
        return replace(view, is_verified_by_nodes=True)
    return replace(view, is_rejected_by_nodes=True, detail=f"bad: {', '.join(record.bad_files[:5])}")


# ---------------------------------------------------------------- writing and removing


def write_attempt(question: Question) -> bytes:
    """Make the folders of one attempt and publish its files (names relative to the attempt's folder).

    Every folder is entered by its descriptor: who can put others in their place meanwhile changes nothing.
    """
    run_dir = Path(question.path)
    run_dir.mkdir(parents=True, exist_ok=True)
    with open_own_folder(run_dir) as run_fd:
        for name in ("progress", "checkpoints"):
            with _made(run_fd, name):
                pass
        with _made(run_fd, "attempts") as attempts_fd, _made(attempts_fd, str(question.attempt)) as attempt_fd:
            for name in ("nodes", "logs"):
                with _made(attempt_fd, name):
                    pass
            for name, text in question.files.items():
                if "/" in name or name in {"", ".", ".."}:
                    raise ValueError(f"{name!r} leaves the attempt's folder")
                contract.write_bytes(Path(f"/proc/self/fd/{attempt_fd}", name), b64decode(text))
            os.fsync(attempts_fd)
        os.fsync(run_fd)
    with suppress(PermissionError):  # the folder above may be somebody else's
        contract.fsync_dir(run_dir.parent)
    return b""


def link_resume(question: Question) -> bytes:
    """Point an attempt's `resume` at a checkpoint, in one step: whoever reads it finds the old one or the new one.

    Raises ValueError for a target that is no absolute path, OSError where something else has the name.
    """
    if not question.target.startswith("/"):
        raise ValueError(f"{question.target!r} is no absolute path")
    Path(question.path).mkdir(parents=True, exist_ok=True)
    with (
        open_own_folder(question.path) as run_fd,
        _made(run_fd, "attempts") as attempts_fd,
        _made(attempts_fd, str(question.attempt)) as attempt_fd,
    ):
        _unlink(_NEW_LINK, attempt_fd)
        os.symlink(question.target, _NEW_LINK, dir_fd=attempt_fd)
        os.rename(_NEW_LINK, contract.RESUME_LINK, src_dir_fd=attempt_fd, dst_dir_fd=attempt_fd)
        os.fsync(attempt_fd)
    return b""


_NEW_LINK = f".{contract.RESUME_LINK}.new"


@contextmanager
def _made(parent: int, name: str) -> Iterator[int]:
    """A folder of this account's below another, made if it is not there."""
    with suppress(FileExistsError):
        os.mkdir(name, dir_fd=parent)
    with open_own_folder(name, dir_fd=parent) as fd:
        yield fd


def prune_checkpoint(question: Question) -> bytes:
    """Remove one checkpoint folder: the manifest first, so that a half-removed one is no checkpoint. Gone is done."""
    name = contract.checkpoint_name(question.step, question.attempt)
    try:
        with open_own_folder(question.path) as run_fd, open_folder("checkpoints", dir_fd=run_fd) as checkpoints:
            with open_folder(name, dir_fd=checkpoints) as folder:
                for published in (MANIFEST_NAME, VERIFIED_NAME):
                    _unlink(published, folder)
                os.fsync(folder)
            shutil.rmtree(name, dir_fd=checkpoints)  # refuses links, and follows none
            os.fsync(checkpoints)
    except FileNotFoundError:
        pass
    return b""


def _unlink(name: str, folder: int) -> None:
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)


# ---------------------------------------------------------------- trainings that know nothing of the contract


def survey_folder(question: Question, survey: Survey) -> Surveyed:
    """What lies in a folder of checkpoints; raises OSError when that can't be told."""
    until = time.monotonic() + question.budget_s
    try:
        sight = survey.look(
            Path(question.path), question.layout, until, is_final=question.is_final, marks=question.marks
        )
    except NoFolder:
        return Surveyed(has_folder=False)
    return Surveyed(
        views=sight.views,
        unknown=sight.unknown,
        unsettled=sight.unsettled,
        notes=sight.notes,
        digest=sight.digest,
        layout=sight.layout,
        entries=sight.entries,
        marks=sight.marks,
    )


def find_log_step(question: Question) -> LogSteps:
    """The newest step in the part of the log after an offset."""
    return find_step(question.path, question.pattern, since=question.offset)


def find_logs(question: Question) -> tuple[LogFile, ...]:
    """Files of a folder whose names fit a pattern, the newest first; none where there is no folder."""
    pattern = re.compile(question.pattern)
    try:
        names, _ = list_folder(question.path, MAX_NAMES)
    except FileNotFoundError:
        return ()
    matches = (match for name in names if (match := pattern.fullmatch(name)) is not None)
    found = [log for match in matches if (log := _look_at_log(Path(question.path), match)) is not None]
    return tuple(sorted(found, key=lambda log: log.changed_at_s, reverse=True)[:MAX_LOGS])


def _look_at_log(folder: Path, match: re.Match[str]) -> LogFile | None:
    try:
        found = (folder / match[0]).lstat()
    except OSError:
        return None
    if not stat.S_ISREG(found.st_mode) or not match[0].isprintable():
        return None
    job_id = int(match[1]) if match.re.groups and match[1] else None
    return LogFile(name=match[0], job_id=job_id, size_bytes=found.st_size, changed_at_s=found.st_mtime)


# ---------------------------------------------------------------- serving


class _Answers:
    def __init__(self) -> None:
        self._cache = CheckpointCache()
        self._survey = Survey()
        self._decoder = msgspec.json.Decoder(Question)

    def __call__(self, data: bytes, _wire: Wire) -> bytes:
        try:
            question = self._decoder.decode(data)
            return b"+" + self._handlers()[question.do](question)
        except (OSError, NotAFile, ValueError, KeyError, shutil.Error) as error:
            return b"-" + _say(error).encode("utf-8", "replace")[:2000]

    def _handlers(self) -> Mapping[str, Callable[[Question], bytes]]:
        return {
            "read": lambda q: msgspec.json.encode(read_run(q, self._cache)),
            "write": write_attempt,
            "link": link_resume,
            "prune": prune_checkpoint,
            "tail": lambda q: b64encode(read_end(q.path, q.max_bytes)),
            "survey": lambda q: msgspec.json.encode(survey_folder(q, self._survey)),
            "steps": lambda q: msgspec.json.encode(find_log_step(q)),
            "logs": lambda q: msgspec.json.encode(find_logs(q)),
        }


def _say(error: Exception) -> str:
    """What a person reads of it as the reason why nothing is known of a run: the number of an error says nothing."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) if isinstance(error, NotAFile) else f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    sys.exit(serve(_Answers(), sys.argv))
