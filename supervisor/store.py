"""The ledger: what was asked for, what happened and what is meant, in one SQLite file. Every SQL statement is here.

One writer (the daemon's loop, one thread) and any number of readers. Each change is one transaction that begins with
BEGIN IMMEDIATE and is on disk when the call returns (WAL, synchronous=FULL). Nothing is called out to while a
transaction is open. Files, damage and backups: supervisor.ledger; rows: supervisor.rows; schema: supervisor.migrations.
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import cache, cached_property
from pathlib import Path
from socket import gethostname
from typing import TYPE_CHECKING, Any, Self, TypeVar

from supervisor import ledger
from supervisor.ledger import (
    LedgerDamaged,
    LedgerError,
    LedgerForeign,
    LedgerMissing,
    LedgerOnNetworkFileSystem,
    LedgerTakenOver,
    LedgerTooNew,
    LedgerTooOld,
    LedgerUnusable,
)
from supervisor.migrations import STEPS, migrate, schema_version
from supervisor.model import (
    Attempt,
    Checkpoint,
    Fact,
    Intent,
    IntentState,
    Interruption,
    NodeEvent,
    NodeMemory,
    Plan,
    Record,
    Run,
    RunState,
    World,
)
from supervisor.rows import Row, from_row, storable, to_row, to_text

if TYPE_CHECKING:
    from sqlite_utils import Database

    from supervisor.model import CheckRow

__all__ = [
    "DaemonRow",
    "IntentSettled",
    "LedgerDamaged",
    "LedgerError",
    "LedgerForeign",
    "LedgerMissing",
    "LedgerOnNetworkFileSystem",
    "LedgerTakenOver",
    "LedgerTooNew",
    "LedgerTooOld",
    "LedgerUnusable",
    "NameInUse",
    "RequestRow",
    "RunChange",
    "Store",
    "TokenInUse",
    "TwoLiveAttempts",
]

SETTLED_WINDOW = timedelta(hours=6)  # how far back the core sees settled intents
HEARTBEAT_S = 10.0  # a row a second would only wear the disk
LEASE_S = 60.0  # a daemon of another host that has not beaten for this long no longer owns the ledger
KEPT_BACKUPS = 5

R = TypeVar("R")


class NameInUse(Exception):
    """A run of this name exists already."""


class TwoLiveAttempts(Exception):
    """The plan would leave a run with two attempts that are not over; nothing of it was written."""


class TokenInUse(Exception):
    """An attempt's token belongs to another attempt already; nothing of the plan was written."""


class IntentSettled(Exception):
    """The intent is not open any more: its act must not be done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonRow:
    """The daemon that owns the ledger, or the last one that did."""

    pid: int
    host: str
    version: str
    started_at: datetime
    cycle_at: datetime  # last sign of life, at most HEARTBEAT_S behind while it lives
    cycle: int
    summary: str
    ended_at: datetime | None = None  # set by a clean stop


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRow:
    """One accepted control request."""

    at: datetime
    who_uid: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunChange:
    """One change of what is wanted of a run."""

    run: str
    at: datetime
    state: RunState
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Table:
    name: str
    key: tuple[str, ...] = ()  # natural key; none: rows are appended


# By the record's class, in the order in which facts are written: what is referred to comes first.
_TABLES: Mapping[str, _Table] = {
    "Run": _Table(name="runs", key=("name",)),
    "Attempt": _Table(name="attempts", key=("run", "number")),
    "Checkpoint": _Table(name="checkpoints", key=("run", "step", "attempt")),
    "Interruption": _Table(name="interruptions", key=("run", "attempt", "launch")),
    "NodeMemory": _Table(name="nodes", key=("node",)),
    "NodeEvent": _Table(name="node_events"),
    "CheckRow": _Table(name="checks"),
}
_RANK = {kind: rank for rank, kind in enumerate(_TABLES)}


class Store:
    """The open ledger. For one thread; close it, or use it as a context manager."""

    def __init__(self, path: Path, connection: sqlite3.Connection, *, recovered_from: str | None = None) -> None:
        self.path = path
        self.recovered_from = recovered_from
        self._connection = connection
        self._file = path.stat().st_ino
        self._owner: tuple[int, str, str] | None = None
        self._beaten_at: datetime | None = None

    # ------------------------------------------------------------ opening and closing

    @classmethod
    def open(
        cls, path: Path, *, now: datetime, force_network: bool = False, mountinfo: Path = ledger.MOUNTINFO
    ) -> Self:
        """The ledger for writing: created or migrated, and restored from its newest backup when it is damaged or gone.

        `recovered_from` then names the backup. `force_network` allows a network file system, with a rollback journal
        in place of WAL. Raises the errors drawn in supervisor.ledger.
        """
        with ledger.named_file_errors(path):
            if not force_network:
                ledger.refuse_network(path, mountinfo.read_text(errors="replace"))
            path.parent.mkdir(parents=True, exist_ok=True)
            recovered_from = ledger.recover(path, now)
            if not path.exists():
                _create(path, now)
            store = cls(path, ledger.connect(path), recovered_from=recovered_from)
            try:
                store._prepare(now, wal=not force_network)
            except BaseException:
                store.close()
                raise
        return store

    @classmethod
    def open_readonly(cls, path: Path) -> Self:
        """The ledger for reading, whether or not a daemon writes it.

        Raises LedgerMissing, LedgerTooNew, LedgerTooOld, LedgerDamaged, LedgerUnusable.
        """
        with ledger.named_file_errors(path):
            if not path.exists():
                raise LedgerMissing(
                    f"there is no ledger at {path}: start the daemon (it makes one), or name the configuration that "
                    "sets ledger.path, with --config or in SUPERVISOR_CONFIG"
                )
            store = cls(path, ledger.connect_readonly(path))
            try:
                store._connection.execute("PRAGMA query_only=ON")
                _refuse_other_version(path, schema_version(store._connection), is_migrated_later=False)
            except BaseException:
                store.close()
                raise
        return store

    def _prepare(self, now: datetime, *, wal: bool) -> None:
        _refuse_other_version(self.path, schema_version(self._connection), is_migrated_later=True)
        _set_up(self._db, wal=wal)
        migrate(self._db, now)

    def close(self) -> None:
        """Closes the file; the store is of no further use."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @cached_property
    def _db(self) -> Database:
        """For what writes. Reading goes without: importing sqlite-utils takes longer than `supervisor status` may."""
        from sqlite_utils import Database

        # Plugins of sqlite-utils that happen to be installed have no business in the ledger.
        return Database(self._connection, execute_plugins=False)

    # ------------------------------------------------------------ transactions

    @contextmanager
    def reading(self) -> Iterator[None]:
        """All reads inside see one and the same state of the ledger. Nests."""
        with ledger.named_errors(self.path):
            if self._connection.in_transaction:
                yield
                return
            self._connection.execute("BEGIN")
            try:
                yield
            finally:
                self._connection.rollback()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        with ledger.named_errors(self.path):
            # IMMEDIATE: a deferred transaction may find the file locked only at its first write.
            self._db.execute("BEGIN IMMEDIATE")
            try:
                self._refuse_if_taken_over()
                yield
                self._db.commit()
            except BaseException:
                self._db.rollback()
                raise

    def _rows(self, sql: str, *parameters: object) -> list[dict[str, Any]]:
        with self.reading():
            cursor = self._connection.execute(sql, parameters)
            names = [column[0] for column in cursor.description]
            return [dict(zip(names, row, strict=True)) for row in cursor]

    def _records(self, kind: type[R], sql: str, *parameters: object) -> tuple[R, ...]:
        return tuple(from_row(kind, row) for row in self._rows(sql, *parameters))

    # ------------------------------------------------------------ the loop: load, commit, settle

    def load_world(self, now: datetime) -> World:
        """What the core decides on: live runs with their past, nodes, pause, intents open and settled lately."""
        with self.reading():
            runs = self._records(Run, _LIVE_RUNS)
            names = json.dumps([run.name for run in runs])
            attempts = self._records(Attempt, _ATTEMPTS_OF, names)
            return World(
                is_paused=self.load_paused(),
                runs=runs,
                attempts=_by_run(runs, [a for a in attempts if not a.is_aside]),
                aside=_by_run(runs, [a for a in attempts if a.is_aside]),
                checkpoints=_by_run(runs, self._records(Checkpoint, _CHECKPOINTS_OF, names)),
                interruptions=self._records(Interruption, _NOT_CAUGHT_UP, names),
                nodes={memory.node: memory for memory in self.load_nodes()},
                open_intents=self._load_open_intents(),
                settled_intents=self._records(Intent, _SETTLED_SINCE, to_text(now - SETTLED_WINDOW)),
            )

    def commit(self, plan: Plan, now: datetime) -> tuple[Intent, ...]:
        """Writes what was learnt and what is meant, all or nothing; returns all open intents, oldest first.

        An intent whose key is open already is left as it is; a withdrawn one that has been tried stays open, and an
        outcome observed of one that is not open any more is dropped. An empty plan writes nothing. Raises
        TwoLiveAttempts, TokenInUse, LedgerUnusable.
        """
        if plan.facts or plan.intents or plan.withdrawn or plan.settled:
            with self._writing():
                self._write_facts(plan.facts, now)
                for intent in plan.settled:
                    self._note_outcome(intent, intent.state, intent.outcome, now)
                for intent in plan.withdrawn:
                    self._withdraw(intent, now)
                self._insert_intents(plan.intents, now)
        return self._load_open_intents()

    def mark_tried(self, intent: Intent, now: datetime) -> Intent:
        """Commits that the act is about to be done; returns the intent as it is now. Raises IntentSettled."""
        with self._writing():
            if not self._update_open(intent, "tries = tries + 1, tried_at = ?", to_text(now)):
                raise _no_longer_open(intent)
            return self._records(Intent, "SELECT * FROM intents WHERE key = ? AND state = 'open'", intent.key)[0]

    def settle(
        self, intent: Intent, state: IntentState, outcome: str, now: datetime, *, facts: tuple[Fact, ...] = ()
    ) -> None:
        """Writes an act's outcome with what was learnt by it, all or nothing.

        State OPEN means unconfirmed: the outcome is noted and the intent stays open. Raises IntentSettled.
        """
        with self._writing():
            if not self._note_outcome(intent, state, outcome, now):
                raise _no_longer_open(intent)
            self._write_facts(facts, now)

    def _load_open_intents(self) -> tuple[Intent, ...]:
        return self._records(Intent, "SELECT * FROM intents WHERE state = 'open' ORDER BY id")

    def _note_outcome(self, intent: Intent, state: IntentState, outcome: str, now: datetime) -> bool:
        settled_at = None if state is IntentState.OPEN else to_text(now)
        return self._update_open(intent, "state = ?, outcome = ?, settled_at = ?", state, storable(outcome), settled_at)

    def _update_open(self, intent: Intent, assignments: str, *values: object) -> bool:
        """True when the intent was open. Found by its key: a caller may hold an intent that has no id yet."""
        sql = f"UPDATE intents SET {assignments} WHERE key = ? AND id = ifnull(?, id) AND state = 'open'"  # noqa: S608 - our own constants
        return self._db.execute(sql, [*values, intent.key, intent.id]).rowcount == 1

    def _withdraw(self, intent: Intent, now: datetime) -> None:
        # What was tried may have happened: it stays open until its outcome is known.
        self._db.execute(
            "UPDATE intents SET state = 'withdrawn', settled_at = ?, outcome = 'no longer wanted' "
            "WHERE key = ? AND id = ifnull(?, id) AND state = 'open' AND tries = 0",
            [to_text(now), intent.key, intent.id],
        )

    def _insert_intents(self, intents: Iterable[Intent], now: datetime) -> None:
        open_keys = {row["key"] for row in self._rows("SELECT key FROM intents WHERE state = 'open'")}
        for intent in intents:
            if intent.key not in open_keys:
                self._put("intents", to_row(replace(intent, id=None, created_at=now)))
                open_keys.add(intent.key)

    # ------------------------------------------------------------ facts

    def _write_facts(self, facts: Iterable[Fact], now: datetime) -> None:
        for fact in _in_writing_order(facts):
            if isinstance(fact.record, Run):
                self._note_change(fact.record, now, fact.reason)
            self._write(fact.record)

    def _write(self, record: Record) -> None:
        table = _TABLES[type(record).__name__]
        try:
            self._put(table.name, _row_of(record), key=table.key)
        except sqlite3.IntegrityError as error:
            raise _named(error, record) from error

    def _note_change(self, run: Run, now: datetime, why: str) -> None:
        stored = self._rows("SELECT state FROM runs WHERE name = ?", run.name)
        if stored and stored[0]["state"] != run.state:
            self._append_change(run, now, why)

    def _append_change(self, run: Run, now: datetime, why: str) -> None:
        self._put("run_changes", to_row(RunChange(run=run.name, at=now, state=run.state, why=why)))

    def _put(self, table: str, row: Row, *, key: tuple[str, ...] = ()) -> None:
        """One row: new, or in place of the one with the same values in `key`.

        Not Table.upsert of sqlite-utils 4.2: it probes the file for ON CONFLICT by a table of its own, and when the
        probe fails (disk full), it goes on for good with INSERT OR IGNORE, which drops rows without a word.
        """
        self._db.execute(_put_sql(table, tuple(row), key), list(row.values()))

    # ------------------------------------------------------------ what people ask for

    def add_run(
        self,
        run: Run,
        now: datetime,
        *,
        attempts: tuple[Attempt, ...] = (),
        intents: tuple[Intent, ...] = (),
        in_place_of: Run | None = None,
    ) -> Run:
        """A new run, as stored, with what is known and meant of it already.

        `in_place_of`: a stopped run of this name that never had a job; nothing of it is kept. Raises NameInUse, also
        for the name of a finished or stopped run.
        """
        new = replace(run, created_at=now, changed_at=now)
        with self._writing():
            old = self.load_run(run.name)
            if old is not None and old == in_place_of and old.state is RunState.STOPPED:
                for table, key in (("attempts", "run"), ("run_changes", "run"), ("runs", "name")):
                    self._db.execute(f"DELETE FROM {table} WHERE {key} = ?", [run.name])  # noqa: S608 - our own names
            elif old is not None:
                raise NameInUse(
                    f"the name {run.name!r} is in use by a run that is {old.state} (since {_people(old.changed_at)}); "
                    "names are not used twice, because checkpoints and history go by them: choose another"
                )
            self._write(new)
            self._append_change(new, now, "submitted")
            for attempt in attempts:
                self._write(attempt)
            self._insert_intents(intents, now)
        return new

    def load_run(self, name: str) -> Run | None:
        """The run of this name, whatever its state."""
        return next(iter(self._records(Run, "SELECT * FROM runs WHERE name = ?", name)), None)

    def set_run(self, run: Run, now: datetime, why: str) -> Run:
        """Writes what is wanted of a run from now on, as stored; `why` goes to its history."""
        changed = replace(run, changed_at=now)
        with self._writing():
            self._write(changed)
            self._append_change(changed, now, why)
        return changed

    def set_paused(self, is_paused: bool, now: datetime, who: str) -> None:
        """Pauses or resumes the whole service; `who` is a sentence for people."""
        with self._writing():
            self._write_pause(is_paused, now, who)

    def _write_pause(self, is_paused: bool, now: datetime, who: str) -> None:
        row: Row = {"id": 1, "is_paused": int(is_paused), "changed_at": to_text(now), "who": storable(who)}
        self._put("pause", row, key=("id",))

    def load_paused(self) -> bool:
        """Whether all of the service is paused."""
        return any(row["is_paused"] for row in self._rows("SELECT is_paused FROM pause"))

    def record_request(self, who_uid: int, text: str, now: datetime) -> None:
        """Keeps an accepted control request."""
        with self._writing():
            self._put("requests", to_row(RequestRow(at=now, who_uid=who_uid, text=text)))

    # ------------------------------------------------------------ the daemon itself

    def claim(self, now: datetime, *, pid: int, host: str = "", version: str = "") -> None:
        """Makes this daemon the ledger's owner; every later write of this store makes sure that it still is.

        On one machine the lock file decides who runs (supervisor.runlock), so a row of this host is taken over. A row
        of another host holds until it ends or has not beaten for LEASE_S: LedgerTakenOver until then.
        """
        host = host or gethostname()
        row = DaemonRow(
            pid=pid, host=host, version=version or _version(), started_at=now, cycle_at=now, cycle=0, summary="starting"
        )
        with self._writing():
            other = self.load_daemon()
            if other is not None and other.host != host and _is_alive(other, now):
                raise LedgerTakenOver(f"{self.path} is owned by {_owner_text(other)}: stop that daemon first")
            self._put("daemon", {"id": 1, **to_row(row)}, key=("id",))
        self._owner = (pid, host, to_text(now))
        self._beaten_at = now

    def heartbeat(self, now: datetime, *, cycle: int, summary: str, pid: int, is_news: bool = False) -> None:
        """Shows that the daemon lives: written every HEARTBEAT_S, and at once with news. The first one claims."""
        if self._owner is None:
            self.claim(now, pid=pid)
        elif not is_news and self._beaten_at is not None and 0 <= (now - self._beaten_at).total_seconds() < HEARTBEAT_S:
            return
        self._update_daemon("cycle_at = ?, cycle = ?, summary = ?", to_text(now), cycle, storable(summary))
        self._beaten_at = now

    def end(self, now: datetime) -> None:
        """Says that the owner stops in good order, so that another host need not wait for the lease to run out."""
        if self._owner is not None:
            self._update_daemon("cycle_at = ?, ended_at = ?", to_text(now), to_text(now))

    def load_daemon(self) -> DaemonRow | None:
        """The newest owner; None when no daemon has ever run."""
        return next(iter(self._records(DaemonRow, "SELECT * FROM daemon")), None)

    def _update_daemon(self, assignments: str, *values: object) -> None:
        with self._writing():
            self._db.execute(f"UPDATE daemon SET {assignments} WHERE id = 1", list(values))  # noqa: S608 - our own constants

    def _refuse_if_taken_over(self) -> None:
        """Fences the writer: two head nodes on one file must not both submit."""
        if self._owner is None:
            return
        other = self.load_daemon()
        if other is None or (other.pid, other.host, to_text(other.started_at)) != self._owner:
            raise LedgerTakenOver(f"{self.path} was taken over by {_owner_text(other)}: this daemon stops")

    # ------------------------------------------------------------ reports

    def load_runs(self, all: bool = True) -> tuple[Run, ...]:  # noqa: A002 - reads well where it is called
        """Runs in the order of their submission; with all=False only those that are not finished or stopped."""
        where = "" if all else "WHERE state NOT IN ('finished', 'stopped')"
        return self._records(Run, f"SELECT * FROM runs {where} ORDER BY created_at, name")  # noqa: S608 - our own constants

    def load_attempts(self, run: str) -> tuple[Attempt, ...]:
        """The attempts of a run, ascending, without those that are or were queued ahead and never trained."""
        return tuple(a for a in self._load_all_attempts(run) if not a.is_aside)

    def load_aside(self, run: str) -> tuple[Attempt, ...]:
        """The attempts of a run that are queued ahead, or were and were not needed, ascending."""
        return tuple(a for a in self._load_all_attempts(run) if a.is_aside)

    def _load_all_attempts(self, run: str) -> tuple[Attempt, ...]:
        return self._records(Attempt, "SELECT * FROM attempts WHERE run = ? ORDER BY number", run)

    def load_checkpoints(self, run: str) -> tuple[Checkpoint, ...]:
        """All checkpoints of a run, pruned ones too, by step."""
        return self._records(Checkpoint, "SELECT * FROM checkpoints WHERE run = ? ORDER BY step, attempt", run)

    def load_interruptions(self, run: str | None = None, since: datetime | None = None) -> tuple[Interruption, ...]:
        """Interruptions of one run or of all, noticed at `since` or later, in the order of notice."""
        return self._records(
            Interruption,
            "SELECT * FROM interruptions WHERE (?1 IS NULL OR run = ?1) AND (?2 IS NULL OR detected_at >= ?2) "
            "ORDER BY detected_at, run, attempt, launch",
            run,
            None if since is None else to_text(since),
        )

    def load_nodes(self) -> tuple[NodeMemory, ...]:
        """What is remembered of every node, by name."""
        return self._records(NodeMemory, "SELECT * FROM nodes ORDER BY node")

    def load_node_events(self, node: str | None = None, limit: int = 200) -> tuple[NodeEvent, ...]:
        """The newest `limit` events of one node or of all, newest last."""
        return self._records(
            NodeEvent,
            "SELECT * FROM (SELECT * FROM node_events WHERE (?1 IS NULL OR node = ?1) "
            "ORDER BY at DESC, id DESC LIMIT ?2) ORDER BY at, id",
            node,
            limit,
        )

    def load_checks(self, node: str, limit: int = 1000) -> tuple[CheckRow, ...]:
        """The newest `limit` check results of a node, newest last."""
        from supervisor.model import CheckRow

        return self._records(
            CheckRow,
            "SELECT * FROM (SELECT * FROM checks WHERE node = ? ORDER BY at DESC, id DESC LIMIT ?) ORDER BY at, id",
            node,
            limit,
        )

    def load_intents(self, state: IntentState | None = None, limit: int = 200) -> tuple[Intent, ...]:
        """The newest `limit` intents of one state or of all, newest last."""
        return self._records(
            Intent,
            "SELECT * FROM (SELECT * FROM intents WHERE (?1 IS NULL OR state = ?1) "
            "ORDER BY id DESC LIMIT ?2) ORDER BY id",
            state,
            limit,
        )

    def load_requests(self, limit: int = 200) -> tuple[RequestRow, ...]:
        """The newest `limit` accepted control requests, newest last."""
        return self._records(
            RequestRow, "SELECT * FROM (SELECT * FROM requests ORDER BY id DESC LIMIT ?) ORDER BY id", limit
        )

    def load_run_changes(self, run: str) -> tuple[RunChange, ...]:
        """Every change of what was wanted of a run, oldest first."""
        return self._records(RunChange, "SELECT * FROM run_changes WHERE run = ? ORDER BY id", run)

    # ------------------------------------------------------------ care of the file

    def backup(self, path: Path) -> None:
        """A whole, checked copy of the ledger at `path`, made while it is in use."""
        with ledger.named_errors(self.path):
            ledger.write_backup(self._connection, path)

    def backup_beside(self, now: datetime, keep: int = KEPT_BACKUPS) -> Path:
        """A backup where a later start finds it; the newest `keep` are kept. Returns its path."""
        path = ledger.backup_path(self.path, now)
        self.backup(path)
        ledger.remove_old_backups(self.path, keep)
        return path

    def backup_age_s(self, now: datetime) -> float:
        """Seconds since the newest backup beside the ledger; infinite without one."""
        newest = ledger.list_backups(self.path)[-1:]
        return now.timestamp() - newest[0].stat().st_mtime if newest else math.inf

    def find_displacement(self) -> str | None:
        """Whether the open file or its -wal was removed or replaced under the daemon: quick, for every cycle."""
        try:
            if self.path.stat().st_ino != self._file:
                return f"{self.path} was replaced by another file while it was open"
        except FileNotFoundError:
            return f"{self.path} was removed while it was open"
        mode = self._rows("PRAGMA journal_mode")[0]["journal_mode"]
        if mode == "wal" and not self.path.with_name(self.path.name + "-wal").exists():
            return f"{self.path.name}-wal was removed while the ledger was open"
        return None

    def find_damage(self) -> str | None:
        """What is wrong with the open file, or None: reads all of it, for a periodic check."""
        displacement = self.find_displacement()
        if displacement is not None:
            return displacement
        found = [next(iter(row.values())) for row in self._rows("PRAGMA quick_check(3)")]
        return None if found == ["ok"] else "; ".join(found)

    def prune_history(self, now: datetime, keep_days: int) -> int:
        """Removes what only grows: node events, check results, requests and settled intents older than `keep_days`.

        Runs, attempts, interruptions and checkpoints stay: rates and costs are computed from them. Returns the number
        of rows removed.
        """
        before = now - max(timedelta(days=keep_days), SETTLED_WINDOW)
        with self._writing():
            return sum(self._db.execute(sql, [to_text(before)]).rowcount for sql in _PRUNE)


# ---------------------------------------------------------------- statements

_LIVE_RUNS = """
SELECT * FROM runs
WHERE state NOT IN ('finished', 'stopped')
   OR EXISTS (SELECT 1 FROM attempts WHERE run = runs.name AND is_job_gone = 0)
ORDER BY created_at, name
"""
_ATTEMPTS_OF = "SELECT * FROM attempts WHERE run IN (SELECT value FROM json_each(?)) ORDER BY run, number"
_CHECKPOINTS_OF = """
SELECT * FROM checkpoints WHERE run IN (SELECT value FROM json_each(?)) AND state <> 'pruned'
ORDER BY run, step, attempt
"""
_NOT_CAUGHT_UP = """
SELECT * FROM interruptions WHERE run IN (SELECT value FROM json_each(?)) AND caught_up_at IS NULL
ORDER BY detected_at, run, attempt
"""
_SETTLED_SINCE = "SELECT * FROM intents WHERE settled_at >= ? AND state <> 'open' ORDER BY settled_at, id"
_PRUNE = (
    "DELETE FROM node_events WHERE at < ?",
    "DELETE FROM checks WHERE at < ?",
    "DELETE FROM requests WHERE at < ?",
    "DELETE FROM intents WHERE settled_at < ? AND state <> 'open'",
)


@cache
def _put_sql(table: str, columns: tuple[str, ...], key: tuple[str, ...]) -> str:
    names = ", ".join(f'"{column}"' for column in columns)
    marks = ", ".join("?" for _ in columns)
    sql = f"INSERT INTO {table} ({names}) VALUES ({marks})"  # noqa: S608 - names of our own records
    if not key:
        return sql
    changes = ", ".join(f'"{column}" = excluded."{column}"' for column in columns if column not in key)
    return f"{sql} ON CONFLICT ({', '.join(key)}) DO UPDATE SET {changes}"


# ---------------------------------------------------------------- opening


def _create(path: Path, now: datetime) -> None:
    """Makes the whole schema under another name: a file at `path` that is not a whole ledger is always damage."""
    temporary = path.with_name(path.name + ".new")
    for companion in ("", "-wal", "-shm", "-journal"):
        temporary.with_name(temporary.name + companion).unlink(missing_ok=True)
    from sqlite_utils import Database

    with closing(sqlite3.connect(temporary, isolation_level=None)) as connection:
        migrate(Database(connection, execute_plugins=False), now)
    ledger.publish(temporary, path)


def _set_up(db: Database, *, wal: bool) -> None:
    mode = db.execute(f"PRAGMA journal_mode={'WAL' if wal else 'DELETE'}").fetchone()[0]
    if wal and mode != "wal":
        raise LedgerUnusable(f"SQLite can't use WAL here (it says {mode!r}): set ledger.path to a file on a local disk")
    db.execute("PRAGMA synchronous=FULL")  # NORMAL may lose the newest intents at a power cut
    db.execute("PRAGMA foreign_keys=ON")
    db.execute(f"PRAGMA busy_timeout={ledger.BUSY_TIMEOUT_S * 1000:.0f}")
    db.execute("PRAGMA journal_size_limit=16777216")


def _refuse_other_version(path: Path, version: int, *, is_migrated_later: bool) -> None:
    ours = len(STEPS)
    if version > ours:
        raise LedgerTooNew(
            f"{path} has schema version {version}, this release of supervisor knows up to {ours}: "
            "start the newer release again, or set ledger.path to another file"
        )
    if version < ours and not is_migrated_later:
        raise LedgerTooOld(
            f"{path} has schema version {version}, this release of supervisor reads {ours}: "
            "restart the daemon, which migrates it"
        )


# ---------------------------------------------------------------- facts


def _in_writing_order(facts: Iterable[Fact]) -> list[Fact]:
    """The newest fact of each record: referred-to records first, and attempts that end before the ones that begin."""
    newest: dict[object, Fact] = {}
    for position, fact in enumerate(facts):
        newest[_identity(fact.record, position)] = fact
    return sorted(newest.values(), key=_writing_rank)


def _identity(record: Record, position: int) -> object:
    key = _TABLES[type(record).__name__].key
    values = tuple(getattr(record, name) for name in key) if key else (position,)
    return (type(record), *values)


def _writing_rank(fact: Fact) -> tuple[int, bool]:
    record = fact.record
    return (_RANK[type(record).__name__], isinstance(record, Attempt) and not record.is_over)


def _row_of(record: Record) -> Row:
    row = to_row(record)
    return {"name": record.name, **row} if isinstance(record, Run) else row


def _no_longer_open(intent: Intent) -> IntentSettled:
    return IntentSettled(f"intent {intent.id} ({intent.key}) is not open any more: it must not be acted upon")


def _named(error: sqlite3.IntegrityError, record: Record) -> Exception:
    if isinstance(record, Attempt) and str(error).endswith(": attempts.run"):
        return TwoLiveAttempts(f"run {record.run!r}: attempt {record.number} would live beside one that is not over")
    if isinstance(record, Attempt) and str(error).endswith(": attempts.token"):
        return TokenInUse(f"run {record.run!r}: the token of attempt {record.number} belongs to another attempt")
    return error


def _by_run(runs: Iterable[Run], records: Iterable[R]) -> dict[str, tuple[R, ...]]:
    found: dict[str, list[R]] = {run.name: [] for run in runs}
    for record in records:
        found[record.run].append(record)  # type: ignore[attr-defined]
    return {name: tuple(items) for name, items in found.items()}


# ---------------------------------------------------------------- owner


def _is_alive(daemon: DaemonRow, now: datetime) -> bool:
    return daemon.ended_at is None and (now - daemon.cycle_at).total_seconds() < LEASE_S


def _owner_text(daemon: DaemonRow | None) -> str:
    if daemon is None:
        return "nobody known"
    return f"the daemon with pid {daemon.pid} on {daemon.host} (started {_people(daemon.started_at)})"


def _people(at: datetime) -> str:
    return at.strftime("%Y-%m-%d %H:%M:%S UTC")


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("slurm-supervisor")
    except metadata.PackageNotFoundError:
        return "0"
