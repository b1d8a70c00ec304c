"""What is observed of the world outside: answers, fresh or stale, and what they hold. Values only.

A part of supervisor.model, which hands these names on and is where everybody imports them from. It stands by itself
because it needs the records of Slurm and of the contract: a command that only reads the ledger starts without them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Generic, TypeVar

from slurm.types import JobRecord, NodeRecord
from trainer.contract import (
    CheckResult,
    Divergence,
    ExitRecord,
    InterruptionRecord,
    LaunchReport,
    NodeReport,
    Outcome,
    Progress,
    UploadReport,
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fresh(Generic[T]):
    """An answer. `asked_at`: when the question was put (what happened later cannot be in it)."""

    value: T
    asked_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Stale:
    """No answer: unknown. Rules that need this source stay silent."""

    why: str
    since_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen(Generic[T]):
    """The content of a file and for how long it has not changed, on the observer's monotonic clock."""

    value: T
    unchanged_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFile:
    """A file that may be the log of a script's job."""

    name: str
    job_id: int | None  # as its name tells
    size_bytes: int
    changed_at_s: float  # seconds since the epoch, by the clock of the file system


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointView:
    """One checkpoint folder with a manifest, as it lies on disk."""

    step: int
    attempt: int
    path: str
    size_bytes: int = 0
    files: int = 0
    samples: int = 0
    world_size: int = 0  # ranks that made it, data-parallel ones in a foreign layout; 0: not known
    is_elastic: bool = True  # False: its position in the data is one for each rank
    is_complete: bool = False  # every file has its recorded size
    is_verified_by_nodes: bool = False  # VERIFIED.json says ok and names this very manifest
    is_rejected_by_nodes: bool = False  # VERIFIED.json says not ok
    detail: str = ""
    stamp: str = ""  # of a checkpoint whose name holds no attempt: another stamp, another publication
    is_unfinished: bool = False  # it never was a whole one: its save did not end


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightView:
    """What the Flight Recorder dumps of one start of the training tell (trainer.flight)."""

    launch: int
    kind: str  # of trainer.flight.analyse.KINDS
    sentence: str
    confidence: str  # "high", "medium" or "low"
    ranks: tuple[int, ...] = ()  # to look at
    nodes: tuple[str, ...] = ()  # that these ran on, where that is known
    is_program_fault: bool = False  # the ranks call different things
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """What the run directory says of one run and its newest attempt. Missing files are None."""

    attempt: int
    progress: Seen[Progress] | None = None
    first_step: int | None = None  # the first that the log tells, where progress is read from the log
    launch: Seen[LaunchReport] | None = None
    log: Seen[int] | None = None  # size of the job's log, bytes: the sign of life of a script that reports no progress
    exit: ExitRecord | None = None
    interruptions: tuple[InterruptionRecord, ...] = ()  # of starts inside the job, those that were asked for
    outcome: Outcome | None = None
    divergence: Divergence | None = None  # the training's finding that its loss went wrong
    node_reports: tuple[NodeReport, ...] = ()  # read once the attempt has ended
    log_tail: str = ""  # end of the job's log, read once the attempt has ended
    flight: FlightView | None = None  # what the Flight Recorder dumps of the last start tell, read at the end too
    checkpoints: tuple[CheckpointView, ...] = ()
    unknown_checkpoints: tuple[tuple[int, int], ...] = ()  # (step, attempt): there, but could not be looked at
    leased: tuple[str, ...] = ()  # folder names of checkpoints that this attempt reads or copies now
    is_lease_unreadable: bool = False  # a lease is there and does not tell which
    uploads: tuple[UploadReport, ...] = ()  # of copying to object storage: the first node's, then those that fail
    unreadable: tuple[str, ...] = ()  # files that are not what the contract says
    checkpoints_unknown: str = ""  # why the folder of a foreign layout can't be looked at; empty: it could
    checkpoints_unknown_s: float = 0.0  # for how long
    has_checkpoint_folder: bool = True  # False: there is none (yet, or its file system is not there)
    unknown_paths: tuple[str, ...] = ()  # checkpoints of a foreign layout that are there and could not be looked at
    unsettled_paths: tuple[str, ...] = ()  # ...that seem whole and may still be written: known in a few seconds
    node_marks: tuple[str, ...] = ()  # "<attempt>-<node>": that nodes left in that folder when they began
    unrecognised: str = ""  # what lies in the folder of a foreign layout where no checkpoint is whole
    unrecognised_s: float = 0.0  # for how long
    warnings: tuple[str, ...] = ()  # what a person should be told, once


@dataclass(frozen=True, slots=True, kw_only=True)
class PortProbe:
    """TCP connects to a node's slurmd port. `silent_s`: how long in a row it has not answered; 0 when it answers."""

    node: str
    address: str
    silent_s: float
    failures: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeChecks:
    """Results of one sweep for one node; `is_complete` False when the node did not answer in time."""

    node: str
    at: datetime
    results: tuple[CheckResult, ...]
    is_complete: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The outcome of reading one checkpoint back; `ok` None when it could not be read (unknown, tried again).

    `is_covered` False: every byte could be read, but not every byte carries a checksum.
    """

    run: str
    step: int
    attempt: int
    ok: bool | None
    detail: str
    started_at: datetime
    is_covered: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """What attribution makes of an ended attempt's evidence, best evidence first."""

    kind: str  # e.g. "python_traceback", "gpu", "network", "host_memory", "disk_full", "configuration", "unknown"
    sentence: str
    node: str | None = None
    evidence: tuple[str, ...] = ()
    is_curable: bool = True  # False: a restart can't help (configuration, command not found)
    blames_node: bool = False  # True only for hardware evidence on `node`


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One frozen picture of the world outside; every source Fresh or Stale."""

    jobs: Fresh[Mapping[int, JobRecord]] | Stale
    nodes: Fresh[Mapping[str, NodeRecord]] | Stale
    runs: Mapping[str, Fresh[RunView] | Stale] = field(default_factory=dict)
    ended: Fresh[Mapping[int, JobRecord]] | Stale | None = None  # accounting; None: there is none
    absent_s: Mapping[int, float] = field(default_factory=dict)  # by job id: for how long answers have not held it
    causes: Mapping[str, Cause] = field(default_factory=dict)  # by run, for attempts whose end has been seen
    ports: Mapping[str, PortProbe] = field(default_factory=dict)
    sweeps: tuple[NodeChecks, ...] = ()  # new since the last cycle
    verifications: tuple[Verification, ...] = ()  # new since the last cycle
    default_partition: str | None = None  # where jobs without a partition go; None: not known


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRow:
    """One result of one check on one node, as the ledger keeps it (changes and failures only)."""

    node: str
    at: datetime
    result: CheckResult
