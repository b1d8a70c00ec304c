"""Slurm's records as frozen values: jobs, nodes and submissions. No I/O, no policy.

A word that this module does not know is kept raw (`JobState.UNRECOGNIZED` with `raw_state`, `NodeRecord.raw_flags`),
never dropped: what Slurm may say is an open set.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from pathlib import Path

from slurm.inherited import AS_THE_SERVICE, Inherited


class JobState(StrEnum):
    """The base state of a job, in Slurm's long words; `UNRECOGNIZED` for a word this release does not know."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    SUSPENDED = "SUSPENDED"
    COMPLETED = "COMPLETED"
    CANCELLED = "CANCELLED"
    FAILED = "FAILED"
    TIMEOUT = "TIMEOUT"
    NODE_FAIL = "NODE_FAIL"
    PREEMPTED = "PREEMPTED"
    BOOT_FAIL = "BOOT_FAIL"
    DEADLINE = "DEADLINE"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    UNRECOGNIZED = "UNRECOGNIZED"


class JobFlag(StrEnum):
    """State flags that squeue prints in place of the base state."""

    COMPLETING = "COMPLETING"
    CONFIGURING = "CONFIGURING"
    REQUEUED = "REQUEUED"
    REQUEUE_HOLD = "REQUEUE_HOLD"
    REQUEUE_FED = "REQUEUE_FED"
    SPECIAL_EXIT = "SPECIAL_EXIT"
    RESV_DEL_HOLD = "RESV_DEL_HOLD"
    STAGE_OUT = "STAGE_OUT"
    RESIZING = "RESIZING"
    STOPPED = "STOPPED"
    SIGNALING = "SIGNALING"
    REVOKED = "REVOKED"
    EXPEDITING = "EXPEDITING"
    LAUNCH_FAILED = "LAUNCH_FAILED"  # this and what follows is never shown alone, only in JSON
    RECONFIG_FAIL = "RECONFIG_FAIL"
    POWER_UP_NODE = "POWER_UP_NODE"
    GETENV_FAILED = "GETENV_FAILED"


ENDED_STATES = frozenset(
    {
        JobState.COMPLETED,
        JobState.CANCELLED,
        JobState.FAILED,
        JobState.TIMEOUT,
        JobState.NODE_FAIL,
        JobState.PREEMPTED,
        JobState.BOOT_FAIL,
        JobState.DEADLINE,
        JobState.OUT_OF_MEMORY,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """One job as Slurm reports it. `None` means that the source did not say."""

    job_id: int
    state: JobState | None  # None: only a flag was shown (squeue shows COMPLETING in place of the base state)
    raw_state: str  # the word(s) as printed
    flags: frozenset[JobFlag] = frozenset()
    name: str = ""
    user: str = ""
    partition: str = ""
    comment: str = ""
    reason: str = ""
    nodes: tuple[str, ...] = ()
    submit_at: datetime | None = None
    start_at: datetime | None = None
    end_at: datetime | None = None
    limit_at: datetime | None = None  # end of a running job's time limit; without one: in a year, or None (24.11)
    exit_code: int | None = None  # 0..255; 128 is never subtracted
    exit_signal: int | None = None
    restarts: int = 0

    @property
    def is_ended(self) -> bool:
        """True when the job will not run again: an ended base state and not requeued."""
        requeued = self.flags & {JobFlag.REQUEUED, JobFlag.REQUEUE_HOLD, JobFlag.SPECIAL_EXIT}
        return (self.state in ENDED_STATES or self.is_completing) and not requeued

    @property
    def is_completing(self) -> bool:
        """True while Slurm waits for nodes of a job that has already ended."""
        return JobFlag.COMPLETING in self.flags

    @property
    def is_live(self) -> bool:
        """True when the job runs or may still start (pending, running, suspended, requeued, unrecognized)."""
        return not self.is_ended

    @property
    def is_pending(self) -> bool:
        """True when the job waits in the queue."""
        return self.state is JobState.PENDING and not self.is_completing


class NodeBase(StrEnum):
    """The base state of a node; `UNRECOGNIZED` for a word this release does not know."""

    UNKNOWN = "UNKNOWN"
    DOWN = "DOWN"
    IDLE = "IDLE"
    ALLOCATED = "ALLOCATED"
    MIXED = "MIXED"
    ERROR = "ERROR"
    FUTURE = "FUTURE"
    UNRECOGNIZED = "UNRECOGNIZED"


class NodeAvailability(StrEnum):
    """What a node can be used for now, from base state and flags (never from sinfo's collapsed word)."""

    USABLE = "usable"  # idle, or busy and healthy
    DRAINING = "draining"
    DRAINED = "drained"
    DOWN = "down"
    UNAVAILABLE = "unavailable"  # maintenance, reboot, power-up, reserved for others, completing, unknown


_REASONS_OF_SLURM = (  # for setting a node DOWN, in releases 22.05 to 25.11
    "Not responding",
    "Node unexpectedly rebooted",
    "Node silently failed and came back",
    "ResumeTimeout reached",
    "reboot timed out",
    "Low ",
    "gres/",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """One node as `scontrol -o show node` reports it."""

    name: str
    base: NodeBase
    flags: frozenset[str] = frozenset()  # upper-case words as printed, e.g. DRAIN, NOT_RESPONDING; unknown ones stay
    raw_state: str = ""
    address: str = ""  # NodeAddr
    host_name: str = ""  # NodeHostName
    port: int | None = None  # slurmd's port
    partitions: tuple[str, ...] = ()
    reason: str = ""  # without the trailing [user@time]
    reason_user: str = ""
    reason_at: str = ""  # as printed: the controller's local time
    cpus: int = 0
    memory_mb: int = 0
    gres: str = ""
    boot_at: str = ""
    version: str = ""

    @property
    def gpus(self) -> int:
        """How many GPUs Slurm knows of, of all types together."""
        from slurm.values import count_gres

        return count_gres(self.gres, "gpu")

    @property
    def is_drain_set(self) -> bool:
        """True when DRAIN or FAIL is set, whoever set it."""
        return bool(self.flags & {"DRAIN", "FAIL"})

    @property
    def is_withdrawn(self) -> bool:
        """True when somebody has taken it out of service: drained it, or set it DOWN for a reason of his own."""
        return self.is_drain_set or self._is_down_by_hand

    @property
    def _is_down_by_hand(self) -> bool:
        # Slurm gives the controller's account as the author of its own reasons, so their words have to tell.
        is_answering_down = self.base is NodeBase.DOWN and "NOT_RESPONDING" not in self.flags
        return is_answering_down and bool(self.reason) and not self.reason.startswith(_REASONS_OF_SLURM)

    @property
    def is_responding(self) -> bool:
        """True unless Slurm itself says that slurmd does not answer."""
        return "NOT_RESPONDING" not in self.flags and self.base is not NodeBase.DOWN

    @property
    def is_idle(self) -> bool:
        """True when a job could start here now."""
        return self.base is NodeBase.IDLE and self.availability is NodeAvailability.USABLE

    @property
    def availability(self) -> NodeAvailability:
        """The class of `base` and `flags`; order as in docs/architecture.md, "Node states"."""
        from slurm.states import classify_node

        return classify_node(self.base, self.flags)


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The account that a command is run as, with what its processes inherit (see slurm.exec_as)."""

    uid: int
    gid: int
    umask: int = 0o022


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitRequest:
    """A batch script and the options that go on sbatch's command line.

    `token` is unique per attempt. It stands on the command line as `--comment`, so the job can be found again in
    squeue (comment) and in sacct (submit line) when sbatch's answer was lost.
    """

    script: Path
    token: str
    job_name: str
    nodes: int | None  # None: as the script and its options say
    output: Path | None  # log file, opened with --open-mode=append; None: as the script and its options say
    arguments: tuple[str, ...] = ()  # of the script
    chdir: Path | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time_limit: str | None = None  # as Slurm writes it: minutes, [days-]hours:minutes:seconds, UNLIMITED
    gpus_per_node: int | None = None
    exclude: tuple[str, ...] = ()
    options: tuple[str, ...] = ()  # further sbatch options, each one argv element, e.g. "--mem=0"
    dependency: str = "singleton"
    export: str = "ALL"  # as --export
    environment: Mapping[str, str] = field(default_factory=dict)  # set for the job; nothing else is exported
    is_own_environment: bool = False  # `environment` is a person's whole environment, and sbatch runs as that person
    may_requeue: bool = False  # Slurm may requeue the job: its own script asks for that
    submit_dir: Path | None = None  # where sbatch is run (SLURM_SUBMIT_DIR); None: where the service is
    identity: Identity | None = None  # run sbatch as this account (only root can); None: as ourselves
    inherited: Inherited = AS_THE_SERVICE  # umask and limits of sbatch, which are also the job's


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """sbatch accepted the job."""

    job_id: int
    warnings: str = ""  # sbatch's stderr, kept for the event log


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDescription:
    """What the controller says of one job that is to be adopted. Empty: not set. Texts are as Slurm prints them."""

    job_id: int
    name: str
    user: str
    uid: int
    state: JobState | None
    raw_state: str
    flags: frozenset[JobFlag] = frozenset()
    partition: str = ""
    account: str = ""
    qos: str = ""
    reservation: str = ""
    dependency: str = ""
    time_limit: str = ""  # as --time takes it; UNLIMITED, Partition_Limit
    nodes: int = 1  # the least, of a range
    node_list: str = ""  # host list of a job that runs
    batch_host: str = ""
    ntasks: int | None = None
    cpus_per_task: str = ""
    memory_per_node: str = ""  # "0": all of it, or not said
    features: str = ""  # --constraint
    exclude: str = ""  # host list
    node_list_asked: str = ""  # --nodelist
    tres_per_node: str = ""  # e.g. "gres/gpu:8"
    gpus_per_node: int | None = None
    work_dir: str = ""
    command: str = ""  # the script, in older releases with its arguments; empty: from standard input or --wrap
    submit_line: str = ""  # sbatch's whole line, its words joined by blanks; see `slurm.submitted`
    stdout: str = ""
    stderr: str = ""
    comment: str = ""
    is_requeue: bool = False  # Slurm may requeue it
    is_batch: bool = True  # False: of salloc or srun, without a script
    is_array: bool = False
    is_het: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreadable:
    """One row that could not be parsed: reported and dropped, never shifted into another."""

    text: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobListing:
    """Jobs in the controller's memory (ended ones too, until MinJobAge) and the rows that could not be read."""

    jobs: tuple[JobRecord, ...]
    unreadable: tuple[Unreadable, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeListing:
    """All nodes of the cluster and the rows that could not be read."""

    nodes: tuple[NodeRecord, ...]
    unreadable: tuple[Unreadable, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFacts:
    """What the cluster is: asked once at start and again after an outage."""

    cluster: str
    version: str  # e.g. "22.05.8"
    has_accounting: bool
    partitions: tuple[str, ...]
    slurmd_timeout_s: int | None
    min_job_age_s: int | None
    message_timeout_s: int | None
    default_partition: str | None = None  # where jobs without a partition go
    slurmd_port: int | None = None  # where slurmd listens on nodes that name no port of their own
