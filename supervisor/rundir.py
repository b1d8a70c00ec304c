"""Run directories as the daemon sees them: read, written and pruned in child processes that run as the owner.

Jobs wrote the files (they may be anything), and shared file systems hang: so no file of a run directory is ever opened
in the daemon. A read that takes too long raises; the process that hangs is left, and the run stays unreadable until it
answers. Ages are kept here, on the monotonic clock, by the change of content: no wall clock and no file time.
"""

from __future__ import annotations

import threading
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from supervisor.child import Child, ChildGone, ChildLate
from supervisor.layouts.registry import AUTO, needs_of, pattern_of
from supervisor.logsteps import LogSteps
from supervisor.model import UNFINISHED_MARKERS, LogFile, RunView, Seen
from supervisor.rundir_child import LOG_TAIL_BYTES, Content, Findings, Question, Surveyed
from trainer.contract import LaunchReport, Progress, RunPaths

MAX_CHILDREN = 4  # per owner: as many run directories may hang before reads of others are refused
KILL_AFTER_S = 120.0  # a late child is killed then; one that the kernel holds stays, and stays counted
LOG_DEADLINE_S = 1.0  # a log that answers later loses its steps for this cycle, and nothing else
REST_S = 10.0  # a folder of checkpoints whose reading process died is left alone for so long
OWN_LAYOUT = "supervisor"

T = TypeVar("T")


class RunDirUnreadable(Exception):
    """The run directory could not be read or written in time: nothing is known, nothing may be concluded."""


class ReaderDied(RunDirUnreadable):
    """The reading process ended over the question."""


class RunDirReader:
    """Access to run directories as one owner. Safe to use from several threads; `close` ends the children."""

    def __init__(
        self,
        uid: int | None = None,
        gid: int | None = None,
        *,
        max_children: int = MAX_CHILDREN,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = _Pool(uid, gid, max_children)
        self._clock = clock
        self._progress: dict[str, _Ages[Progress]] = {}
        self._launch: dict[str, _Ages[LaunchReport]] = {}
        self._log: dict[str, _Ages[int]] = {}
        self._decoder = msgspec.json.Decoder(Findings)
        self._survey_decoder = msgspec.json.Decoder(Surveyed)
        self._steps_decoder = msgspec.json.Decoder(LogSteps)
        self._logs_decoder = msgspec.json.Decoder(tuple[LogFile, ...])
        self._steps: dict[str, _LogReading] = {}
        self._blind: dict[str, _Blindness] = {}
        self._strange_since: dict[str, float] = {}  # by run: no checkpoint among what lies in its folder

    def read(
        self,
        run: str,
        run_dir: Path,
        attempt: int,
        *,
        is_final: bool,
        deadline_s: float,
        log_path: Path | None = None,
        log_offset: int = 0,
        pattern: str = "",
        checkpoint_directory: Path | None = None,
        layout: str = OWN_LAYOUT,
        unfinished_markers: tuple[str, ...] = UNFINISHED_MARKERS,
        interruptions_from: int = 0,
    ) -> RunView:
        """What the run directory says now; raises RunDirUnreadable after at most `deadline_s`.

        `log_path`, `log_offset`: the job's log, where it is not the attempt's own, and how much of it is older.
        With a `layout` other than our own the checkpoints are those in `checkpoint_directory` (default: the run
        directory's), without those that bear one of `unfinished_markers`: a folder that can't be looked at is told in
        the view, and takes up to `deadline_s` more. Attempt 0, before the first: nothing but them is read. `pattern`
        finds the step in the log where the training writes no progress file (default: the layout's own); that takes
        at most another second. Records of interruptions inside the job are read from `interruptions_from` on.
        """
        surveyed, strange = None, _NOT_STRANGE
        if attempt:
            question = Question(
                do="read",
                path=str(run_dir),
                attempt=attempt,
                is_final=is_final,
                budget_s=deadline_s * 0.5,
                log_path=str(log_path or ""),
                offset=log_offset,
                layout=layout,
                interruptions_from=interruptions_from,
            )
            data = self._pool.ask(f"read {run_dir}", question, deadline_s)
        if layout != OWN_LAYOUT:  # after the exit record: what was published before it is seen with it
            folder = checkpoint_directory or run_dir / "checkpoints"
            question = Question(
                do="survey",
                path=str(folder),
                is_final=is_final,
                budget_s=deadline_s * 0.5,
                layout=layout,
                marks=unfinished_markers,
            )
            surveyed = self._survey(run, question, deadline_s)
            strange = self._judge_strange(run, surveyed, folder, layout)
        if not attempt:
            return _add_survey(RunView(attempt=0), surveyed, strange)
        view = self._view(run, attempt, _decode(data, self._decoder, str(run_dir)), _growth(surveyed))
        finder = pattern or pattern_of(surveyed.layout if isinstance(surveyed, Surveyed) else layout)
        if view.progress is None and finder:
            log = log_path or RunPaths(run_dir).attempt_dir(attempt) / "job.log"
            view = self._add_steps(view, run, Question(do="steps", path=str(log), offset=log_offset, pattern=finder))
        return _add_survey(view, surveyed, strange)

    def write_attempt(
        self, run_dir: Path, attempt: int, files: Mapping[str, bytes], *, deadline_s: float = 10.0
    ) -> None:
        """Make an attempt's folders and publish `files` (names relative to attempts/<n>/), durable, as the owner."""
        texts = {name: b64encode(data).decode("ascii") for name, data in files.items()}
        question = Question(do="write", path=str(run_dir), attempt=attempt, files=texts)
        self._pool.ask(f"write {run_dir}", question, deadline_s)

    def link_resume(self, run_dir: Path, attempt: int, target: str, *, deadline_s: float = 10.0) -> None:
        """Have an attempt's link `resume` point at a checkpoint, as the owner; the link is replaced in one step."""
        question = Question(do="link", path=str(run_dir), attempt=attempt, target=target)
        self._pool.ask(f"link {run_dir}", question, deadline_s)

    def prune(self, run_dir: Path, step: int, attempt: int, *, deadline_s: float = 10.0) -> None:
        """Remove one checkpoint. Done again it does nothing; after a time-out the removal goes on: ask again later."""
        question = Question(do="prune", path=str(run_dir), step=step, attempt=attempt)
        self._pool.ask(f"prune {run_dir}", question, deadline_s)

    def read_tail(self, path: Path, *, max_bytes: int = LOG_TAIL_BYTES, deadline_s: float = 5.0) -> str:
        """The end of a text file of a run directory; raises RunDirUnreadable, also when it is not there."""
        question = Question(do="tail", path=str(path), max_bytes=max_bytes)
        return b64decode(self._pool.ask(f"tail {path}", question, deadline_s)).decode("utf-8", "replace")

    def find_logs(self, folder: Path, pattern: str, *, deadline_s: float = 5.0) -> tuple[LogFile, ...]:
        """Files of a folder whose names fit `pattern`, the newest first; its group, if any, is the job's id."""
        question = Question(do="logs", path=str(folder), pattern=pattern)
        data = self._pool.ask(f"logs {folder}", question, deadline_s)
        return _decode(data, self._logs_decoder, str(folder))

    def close(self) -> None:
        """End the children; one that hangs in the kernel is left behind and ends when the kernel lets it."""
        self._pool.close()

    def _survey(self, run: str, question: Question, deadline_s: float) -> Surveyed | _Blindness:
        before, now = self._blind.get(run), self._clock()
        if before is not None and now < before.rests_until:
            return replace(before, seconds=now - before.since)
        try:
            data = self._pool.ask(f"survey {question.path}", question, deadline_s)
            surveyed = _decode(data, self._survey_decoder, question.path)
        except RunDirUnreadable as error:
            since = before.since if before is not None else now
            # a folder that kills its reader would have one started in every cycle
            rests_until = now + REST_S if isinstance(error, ReaderDied) else now
            blind = _Blindness(why=str(error), since=since, rests_until=rests_until, seconds=now - since)
            self._blind[run] = blind
            return blind
        self._blind.pop(run, None)
        return surveyed

    def _judge_strange(self, run: str, surveyed: Surveyed | _Blindness, folder: Path, layout: str) -> _Strange:
        """What lies in a folder where nothing is a whole checkpoint, or may be one that is still looked at."""
        if isinstance(surveyed, _Blindness) or not _has_none(surveyed):
            self._strange_since.pop(run, None)
            return _NOT_STRANGE
        now = self._clock()
        return _describe_strange(surveyed, folder, layout, now - self._strange_since.setdefault(run, now))

    def _add_steps(self, view: RunView, run: str, question: Question) -> RunView:
        """The step that the log tells, as progress. A pattern that takes too long is not tried again."""
        known = self._steps.get(run)
        if known is None or known.attempt != view.attempt:
            known = self._steps[run] = _LogReading(attempt=view.attempt, offset=question.offset)
        if not known.fault:
            with suppress(RunDirUnreadable):
                data = self._pool.ask(f"log {question.path}", replace(question, offset=known.offset), LOG_DEADLINE_S)
                known.take(_decode(data, self._steps_decoder, question.path), self._clock())
        return known.add_to(view, self._clock())

    def _view(self, run: str, attempt: int, findings: Findings, growth: str) -> RunView:
        now = self._clock()
        progress = _of_attempt(self._progress, run, attempt)
        launch = _of_attempt(self._launch, run, attempt)
        log = _of_attempt(self._log, run, attempt)
        size = findings.log_bytes if findings.log_bytes is not None or not growth else 0
        log.note(Content(digest=f"{size} {growth}", is_there=size is not None), size, now, "job.log")
        lost = (
            progress.note(findings.progress_content, findings.progress, now, f"progress/a{attempt}.json"),
            launch.note(findings.launch_content, findings.launch, now, f"attempts/{attempt}/launch.json"),
        )
        return RunView(
            attempt=attempt,
            progress=progress.seen(now),
            launch=launch.seen(now),
            log=log.seen(now),
            exit=findings.exit,
            interruptions=findings.interruptions,
            outcome=findings.outcome,
            divergence=findings.divergence,
            node_reports=findings.node_reports,
            log_tail=findings.log_tail,
            flight=findings.flight,
            checkpoints=findings.checkpoints,
            unknown_checkpoints=findings.unknown_checkpoints,
            leased=findings.leased,
            is_lease_unreadable=findings.is_lease_unreadable,
            uploads=findings.uploads,
            unreadable=findings.unreadable + tuple(line for line in lost if line),
        )


# ---------------------------------------------------------------- trainings that know nothing of the contract


@dataclass(frozen=True, slots=True, kw_only=True)
class _Blindness:
    """A folder of checkpoints that can't be looked at."""

    why: str
    since: float
    rests_until: float
    seconds: float


@dataclass(slots=True, kw_only=True)
class _LogReading:
    """How far one attempt's log has been searched, the first step in it and the newest."""

    attempt: int
    offset: int
    first: int | None = None
    step: int | None = None
    since: float = 0.0
    seq: int = 0
    fault: str = ""

    def take(self, found: LogSteps, now: float) -> None:
        self.offset, self.fault = found.offset, found.fault
        if self.step is None:
            self.first = found.first
        if found.step is not None and found.step != self.step:
            self.step, self.since, self.seq = found.step, now, self.seq + 1

    def add_to(self, view: RunView, now: float) -> RunView:
        if self.fault:
            view = replace(view, warnings=(*view.warnings, self.fault))
        if self.step is None:
            return view
        progress = Progress(attempt=self.attempt, step=self.step, phase="step", time=time.time(), seq=self.seq)
        # Nobody says how rarely such a training prints its step, nor that it saves or evaluates: a log or a save that
        # grows is a sign of life too.
        ages = [now - self.since, *([view.log.unchanged_s] if view.log is not None else [])]
        newest = Seen(value=progress, unchanged_s=max(0.0, min(ages)))
        return replace(view, progress=newest, first_step=self.first)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Strange:
    """What lies in a folder of checkpoints and is none."""

    what: str = ""
    seconds: float = 0.0


_NOT_STRANGE = _Strange()


def _has_none(surveyed: Surveyed) -> bool:
    if not surveyed.entries or surveyed.unknown or surveyed.unsettled:
        return False
    return not any(view.is_complete for view in surveyed.views)


def _describe_strange(surveyed: Surveyed, folder: Path, layout: str, seconds: float) -> _Strange:
    count = "1 entry lies" if surveyed.entries == 1 else f"{surveyed.entries} entries lie"
    which = "a layout that is known" if layout == AUTO and not surveyed.views else f"layout {surveyed.layout}"
    newest = f"; {surveyed.views[-1].detail}" if surveyed.views else ""
    needs = needs_of(surveyed.layout)
    what = f"{count} in {folder}, none is a whole checkpoint of {which} ({surveyed.layout} needs {needs}){newest}"
    return _Strange(what=what, seconds=seconds)


def _growth(surveyed: Surveyed | _Blindness | None) -> str:
    return surveyed.digest if isinstance(surveyed, Surveyed) else ""


def _add_survey(view: RunView, surveyed: Surveyed | _Blindness | None, strange: _Strange) -> RunView:
    if surveyed is None:
        return view
    if isinstance(surveyed, _Blindness):
        return replace(view, checkpoints_unknown=surveyed.why, checkpoints_unknown_s=surveyed.seconds)
    return replace(
        view,
        checkpoints=surveyed.views,
        unknown_paths=surveyed.unknown,
        unsettled_paths=surveyed.unsettled,
        has_checkpoint_folder=surveyed.has_folder,
        node_marks=surveyed.marks,
        unrecognised=strange.what,
        unrecognised_s=strange.seconds,
        warnings=(*view.warnings, *surveyed.notes),
    )


def _decode(data: bytes, decoder: msgspec.json.Decoder[T], what: str) -> T:
    try:
        return decoder.decode(data)
    except msgspec.DecodeError as error:
        raise RunDirUnreadable(f"{what}: the reading process answered nonsense: {error}") from None


# ---------------------------------------------------------------- ages


class _Ages(Generic[T]):
    """The last good content of one file and since when it has not changed. Unreadable is not changed."""

    def __init__(self, attempt: int) -> None:
        self.attempt = attempt
        self._digest = ""
        self._value: T | None = None
        self._since = 0.0

    def note(self, content: Content, record: T | None, now: float, name: str) -> str:
        """Take in one reading; returns a line for `unreadable` when the file was there and is gone."""
        if record is not None and content.digest != self._digest:
            self._digest, self._value, self._since = content.digest, record, now
        return f"{name}: gone" if not content.is_there and self._value is not None else ""

    def seen(self, now: float) -> Seen[T] | None:
        return None if self._value is None else Seen(value=self._value, unchanged_s=max(0.0, now - self._since))


def _of_attempt(ages: dict[str, _Ages[T]], run: str, attempt: int) -> _Ages[T]:
    found = ages.get(run)
    if found is None or found.attempt != attempt:
        found = ages[run] = _Ages(attempt)
    return found


# ---------------------------------------------------------------- children


@dataclass(slots=True)
class _Member:
    child: Child
    key: str = ""  # what it was last asked for
    is_taken: bool = False


class _Pool:
    """A few children of one owner. A late one keeps its question: nobody else asks the same meanwhile."""

    def __init__(self, uid: int | None, gid: int | None, max_children: int) -> None:
        self._uid, self._gid, self._max = uid, gid, max_children
        self._members: list[_Member] = []
        self._lock = threading.Lock()
        self._is_closed = False
        with suppress(RunDirUnreadable):  # tried again, and said, by the first question
            self._members.append(self._start())  # comes up while the daemon goes on

    def ask(self, key: str, question: Question, deadline_s: float) -> bytes:
        member = self._take(key)
        try:
            answer = member.child.call(msgspec.json.encode(question), deadline_s=deadline_s)
        except ChildLate as error:
            raise RunDirUnreadable(f"{key}: {error}") from None
        except ChildGone as error:
            raise ReaderDied(f"{key}: {error}") from None
        finally:
            member.is_taken = False
        if answer[:1] != b"+":
            raise RunDirUnreadable(f"{key}: {answer[1:].decode('utf-8', 'replace')}")
        return answer[1:]

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            for member in self._members:
                member.child.close()
            self._members.clear()

    def _take(self, key: str) -> _Member:
        with self._lock:
            if self._is_closed:
                raise RunDirUnreadable(f"{key}: closed")
            self._tend()
            self._refuse_while_late(key)
            member = next((m for m in self._members if not m.is_taken and m.child.is_free()), None)
            if member is None:
                if len(self._members) >= self._max:
                    raise RunDirUnreadable(f"{key}: {len(self._members)} reading processes are waiting already")
                member = self._start()
                self._members.append(member)
            member.key, member.is_taken = key, True
            return member

    def _tend(self) -> None:
        """Reap what has ended, kill what has been late for too long."""
        for member in list(self._members):
            if member.is_taken:
                continue
            if not member.child.is_alive():
                member.child.close(wait_s=0.0)
                self._members.remove(member)
                continue
            late_since = member.child.late_since
            if late_since is not None and time.monotonic() - late_since > KILL_AFTER_S:
                member.child.kill()

    def _refuse_while_late(self, key: str) -> None:
        for member in self._members:
            if member.key == key and not member.is_taken and not member.child.is_free():
                since = member.child.late_since
                waited_s = time.monotonic() - since if since is not None else 0.0
                raise RunDirUnreadable(f"{key}: no answer for {waited_s:.1f} s")

    def _start(self) -> _Member:
        try:
            return _Member(child=Child("supervisor.rundir_child", uid=self._uid, gid=self._gid))
        except OSError as error:
            raise RunDirUnreadable(f"no reading process could be started: {error}") from None
