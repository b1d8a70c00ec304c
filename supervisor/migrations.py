"""The ledger's schema, as recorded steps. A released step is never edited: a change is a new step at the end.

Each step runs in one transaction with its record (name, applied_at) and the new schema version, so a daemon that is
killed half-way leaves the version before or the version after. The schema version is SQLite's user_version and equals
the number of applied steps. Columns are the fields of supervisor.model's records (see supervisor.rows).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING

from supervisor.rows import to_text

if TYPE_CHECKING:
    from sqlite_utils import Database

APPLICATION_ID = 0x534C5356  # "SLSV": tells a ledger from any other SQLite file


def migrate(db: Database, now: datetime) -> tuple[str, ...]:
    """Names of the steps that were applied, in order; none when the schema is up to date. No transaction may be open.

    The caller has made sure that the schema is not newer than ours.
    """
    return tuple(_apply(db, version, step, now) for version, step in _pending(db))


def schema_version(db: Database | sqlite3.Connection) -> int:
    """Version of the schema in the file; 0 for an empty database."""
    return int(db.execute("PRAGMA user_version").fetchone()[0])


def _pending(db: Database) -> list[tuple[int, Callable[[Database], None]]]:
    return list(enumerate(STEPS, start=1))[schema_version(db) :]


def _apply(db: Database, version: int, step: Callable[[Database], None], now: datetime) -> str:
    db.execute("BEGIN IMMEDIATE")  # not Database.atomic(): its deferred BEGIN may fail later, in the middle
    try:
        step(db)
        db.execute("INSERT INTO migrations VALUES (?, ?, ?)", [version, step.__name__, to_text(now)])
        db.execute(f"PRAGMA user_version = {version:d}")
        db.commit()
    except BaseException:
        db.rollback()
        raise
    return step.__name__


def initial(db: Database) -> None:
    """Everything that the first release keeps."""
    db.execute(f"PRAGMA application_id = {APPLICATION_ID:d}")
    db.executescript(_INITIAL)


STEPS: tuple[Callable[[Database], None], ...] = (initial,)

_INITIAL = """
CREATE TABLE migrations (
  version INTEGER PRIMARY KEY,
  name TEXT NOT NULL,
  applied_at TEXT NOT NULL
);

CREATE TABLE runs (
  name TEXT PRIMARY KEY NOT NULL,
  spec TEXT NOT NULL,
  script TEXT,
  state TEXT NOT NULL,
  reason TEXT NOT NULL,
  is_paused INTEGER NOT NULL,
  owner_uid INTEGER NOT NULL,
  owner_gid INTEGER NOT NULL,
  inherited TEXT NOT NULL,
  created_at TEXT NOT NULL,
  changed_at TEXT NOT NULL,
  released_at TEXT,
  save_asked_at TEXT,
  drill TEXT,
  skips_released_at TEXT,
  final_step INTEGER
);

CREATE TABLE attempts (
  run TEXT NOT NULL REFERENCES runs (name),
  number INTEGER NOT NULL,
  token TEXT NOT NULL,
  state TEXT NOT NULL,
  nodes_wanted INTEGER NOT NULL,
  spares INTEGER NOT NULL,
  exclude TEXT NOT NULL,
  resume_step INTEGER NOT NULL,
  resume_path TEXT NOT NULL,
  job_id INTEGER,
  nodes TEXT NOT NULL,
  planned_at TEXT NOT NULL,
  submitted_at TEXT,
  started_at TEXT,
  stepped_at TEXT,
  over_at TEXT,
  "end" TEXT,
  end_detail TEXT NOT NULL,
  exit_code INTEGER,
  is_job_gone INTEGER NOT NULL,
  first_step INTEGER,
  last_step INTEGER,
  phase TEXT NOT NULL,
  progress_at TEXT,
  slurm_restarts INTEGER NOT NULL,
  log_offset INTEGER NOT NULL,
  slurm_submit_at TEXT,
  slurm_user TEXT NOT NULL,
  checkpoint_every_s REAL NOT NULL,
  advice_seq INTEGER NOT NULL,
  save_requests INTEGER NOT NULL,
  save_asked_at TEXT,
  save_costs_s TEXT NOT NULL,
  save_total_s REAL,
  saved_step INTEGER,
  save_failures INTEGER NOT NULL,
  save_error TEXT NOT NULL,
  uploaded TEXT NOT NULL,
  upload_failures INTEGER NOT NULL,
  upload_error TEXT NOT NULL,
  unshared_nodes TEXT NOT NULL,
  skip_samples TEXT NOT NULL,
  loss_fault TEXT,
  launch INTEGER NOT NULL,
  launched_at TEXT,
  launch_step INTEGER,
  training TEXT NOT NULL,
  recovering TEXT NOT NULL,
  recovering_at TEXT,
  interruptions_read INTEGER NOT NULL,
  stragglers TEXT NOT NULL,
  advised_path TEXT NOT NULL,
  advised_step INTEGER NOT NULL,
  drill TEXT,
  planned INTEGER NOT NULL,
  PRIMARY KEY (run, number)
);
-- Two live attempts of a run would train and publish side by side: the database itself refuses the second one. One that
-- is queued ahead does not begin before it has become the live one.
CREATE UNIQUE INDEX one_live_attempt ON attempts (run) WHERE state NOT IN ('over', 'ahead');
CREATE UNIQUE INDEX one_attempt_ahead ON attempts (run) WHERE state = 'ahead';
CREATE UNIQUE INDEX one_attempt_per_token ON attempts (token);

CREATE TABLE checkpoints (
  run TEXT NOT NULL REFERENCES runs (name),
  step INTEGER NOT NULL,
  attempt INTEGER NOT NULL,
  state TEXT NOT NULL,
  path TEXT NOT NULL,
  size_bytes INTEGER NOT NULL,
  files INTEGER NOT NULL,
  samples INTEGER NOT NULL,
  world_size INTEGER NOT NULL,
  is_elastic INTEGER NOT NULL,
  first_seen_at TEXT NOT NULL,
  verified_at TEXT,
  verified_by TEXT NOT NULL,
  load_failures INTEGER NOT NULL,
  detail TEXT NOT NULL,
  stamp TEXT NOT NULL,
  PRIMARY KEY (run, step, attempt)
);

CREATE TABLE interruptions (
  run TEXT NOT NULL,
  attempt INTEGER NOT NULL,
  launch INTEGER NOT NULL,
  is_in_job INTEGER NOT NULL,
  kind TEXT NOT NULL,
  cause TEXT NOT NULL,
  node TEXT,
  nodes TEXT NOT NULL,
  is_planned INTEGER NOT NULL,
  detected_at TEXT NOT NULL,
  resumed_at TEXT,
  caught_up_at TEXT,
  last_step INTEGER,
  resume_step INTEGER,
  evidence TEXT NOT NULL,
  parts TEXT NOT NULL,
  drill TEXT NOT NULL,
  PRIMARY KEY (run, attempt, launch),
  FOREIGN KEY (run, attempt) REFERENCES attempts (run, number)
);
CREATE INDEX interruptions_by_time ON interruptions (detected_at);

CREATE TABLE nodes (
  node TEXT PRIMARY KEY NOT NULL,
  verdict TEXT NOT NULL,
  reason TEXT NOT NULL,
  since_at TEXT NOT NULL,
  failing TEXT NOT NULL,
  failed_sweeps INTEGER NOT NULL,
  checked_at TEXT,
  is_drained_by_us INTEGER NOT NULL,
  drain_reason TEXT NOT NULL,
  drained_at TEXT,
  boot_at TEXT NOT NULL
);

CREATE TABLE node_events (
  id INTEGER PRIMARY KEY,
  node TEXT NOT NULL,
  at TEXT NOT NULL,
  event TEXT NOT NULL,
  detail TEXT NOT NULL,
  run TEXT NOT NULL,
  attempt INTEGER
);
CREATE INDEX node_events_by_node ON node_events (node, at);
CREATE INDEX node_events_by_time ON node_events (at);

CREATE TABLE checks (
  id INTEGER PRIMARY KEY,
  node TEXT NOT NULL,
  at TEXT NOT NULL,
  result TEXT NOT NULL
);
CREATE INDEX checks_by_node ON checks (node, at);
CREATE INDEX checks_by_time ON checks (at);

CREATE TABLE intents (
  id INTEGER PRIMARY KEY AUTOINCREMENT,
  kind TEXT NOT NULL,
  key TEXT NOT NULL,
  reason TEXT NOT NULL,
  run TEXT NOT NULL,
  attempt INTEGER,
  job_id INTEGER,
  node TEXT NOT NULL,
  step INTEGER,
  text TEXT NOT NULL,
  state TEXT NOT NULL,
  created_at TEXT NOT NULL,
  tries INTEGER NOT NULL,
  tried_at TEXT,
  settled_at TEXT,
  outcome TEXT NOT NULL
);
-- A plan that is applied twice means one act.
CREATE UNIQUE INDEX one_open_intent_per_key ON intents (key) WHERE state = 'open';
CREATE INDEX intents_by_settling ON intents (settled_at);

-- One row: is the whole service paused, since when, by whom.
CREATE TABLE pause (
  id INTEGER PRIMARY KEY CHECK (id = 1),
  is_paused INTEGER NOT NULL,
  changed_at TEXT NOT NULL,
  who TEXT NOT NULL
);

-- One row: the daemon that owns this ledger, and when it last showed that it lives.
CREATE TABLE daemon (
  id INTEGER PRIMARY KEY CHECK (id = 1),
  pid INTEGER NOT NULL,
  host TEXT NOT NULL,
  version TEXT NOT NULL,
  started_at TEXT NOT NULL,
  cycle_at TEXT NOT NULL,
  cycle INTEGER NOT NULL,
  summary TEXT NOT NULL,
  ended_at TEXT
);

CREATE TABLE requests (
  id INTEGER PRIMARY KEY,
  at TEXT NOT NULL,
  who_uid INTEGER NOT NULL,
  text TEXT NOT NULL
);
CREATE INDEX requests_by_time ON requests (at);

-- What was wanted of each run, over time, and why.
CREATE TABLE run_changes (
  id INTEGER PRIMARY KEY,
  run TEXT NOT NULL REFERENCES runs (name),
  at TEXT NOT NULL,
  state TEXT NOT NULL,
  why TEXT NOT NULL
);
CREATE INDEX run_changes_by_run ON run_changes (run, at);
"""
