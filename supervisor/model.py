"""Domain types of the service: what was asked for, what happened, what is known, what is meant. Values only.

Instants are aware UTC datetimes and end in `_at`; durations are seconds and end in `_s`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from slurm.inherited import AS_THE_SERVICE, Inherited

if TYPE_CHECKING:  # handed on; see __getattr__
    from supervisor.observed import Cause as Cause  # noqa: PLC0414
    from supervisor.observed import CheckpointView as CheckpointView  # noqa: PLC0414
    from supervisor.observed import CheckRow as CheckRow  # noqa: PLC0414
    from supervisor.observed import Fresh as Fresh  # noqa: PLC0414
    from supervisor.observed import LogFile as LogFile  # noqa: PLC0414
    from supervisor.observed import NodeChecks as NodeChecks  # noqa: PLC0414
    from supervisor.observed import PortProbe as PortProbe  # noqa: PLC0414
    from supervisor.observed import RunView as RunView  # noqa: PLC0414
    from supervisor.observed import Seen as Seen  # noqa: PLC0414
    from supervisor.observed import Snapshot as Snapshot  # noqa: PLC0414
    from supervisor.observed import Stale as Stale  # noqa: PLC0414
    from supervisor.observed import Verification as Verification  # noqa: PLC0414
    from trainer.contract import RunPaths
else:

    def __getattr__(name: str) -> Any:
        """A name of supervisor.observed, which is imported when the first of them is asked for."""
        if name.startswith("__"):
            raise AttributeError(name)
        from supervisor import observed

        return getattr(observed, name)


EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

# ---------------------------------------------------------------- what was asked for (run file)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesSpec:
    """How many nodes a run may use."""

    min: int  # fewer healthy nodes than this: the run waits
    max: int  # the run takes this many when they are there
    multiple_of: int = 1  # node counts that the training can use, e.g. 2 for pipeline pairs
    spares: int = 0  # allocated beside the training nodes; one takes the place of a node that fails its start checks
    procs_per_node: int | None = None  # default: gpus_per_node, or 1
    elastic: bool | None = None  # the data loader can go on with another number of nodes; default: as checkpoints tell
    start_checks: bool = True  # nodes run the host probes before each start of the training; not inside a pyxis image


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmSpec:
    """What goes to sbatch as it stands."""

    partition: str | None = None  # as --partition
    account: str | None = None  # as --account
    qos: str | None = None  # as --qos
    time_limit: str | None = None  # as --time, e.g. "2-00:00:00"
    gpus_per_node: int | None = None  # as --gpus-per-node
    warn_before_limit_s: int = 120  # so long before its limit the training is asked to save and end; 0: never
    options: tuple[str, ...] = ()  # further options of sbatch, as it takes them


MAX_WARNING_S = 65_535  # what sbatch --signal takes

LAYOUTS = ("supervisor", "auto", "dcp", "torchtitan", "megatron", "huggingface", "lightning", "deepspeed")
Layout = Literal["supervisor", "auto", "dcp", "torchtitan", "megatron", "huggingface", "lightning", "deepspeed"]


MARK_PREFIX = ".supervisor-a"  # of a file that a node leaves in a checkpoint folder; the attempt, a dash, the node

# Marks that frameworks put beside a checkpoint that they write or remove.
UNFINISHED_MARKERS = ("-unfinished", ".unfinished", ".incomplete", ".in_progress")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSpec:
    """How often to save, what to keep, what counts."""

    directory: Path | None = None  # where a training that knows nothing of us saves; default: in the run directory
    layout: Layout = "supervisor"  # how checkpoints lie there; auto: found out by their names

    every_s: float = 600.0  # between two saves, told to the training; with interval = "auto": where it starts
    interval: Literal["auto", "fixed"] = "auto"  # auto: recomputed while it runs; fixed where every_s alone is given
    every_min_s: float = 60.0  # auto: saves are never advised closer together (nor than one takes until it is durable)
    every_max_s: float = 1800.0  # auto: saves are never advised further apart
    alert_after_s: float = 0.0  # someone is told when no save was verified for this long; 0: three intervals
    unfinished_markers: tuple[str, ...] = UNFINISHED_MARKERS  # a file of a checkpoint's name with this end: not whole
    keep_last: int = 3  # verified ones; never fewer than 2
    local_dir: str = ""  # folder on each node's own disk that is written first, $VARIABLES of the job allowed; "": none
    object_url: str = ""  # where verified ones are copied to, for fsspec, e.g. "s3://bucket/prefix"; "": nowhere
    object_keep_last: int = 3  # of this run there; never fewer than 2
    upload_mb_per_s: float = 0.0  # bound of each node's copying there; 0: none
    resume_from_complete: bool = False  # fall back to an unverified, complete checkpoint when none is verified
    verify_on_head_max_bytes: int = 20 * 1024**3  # larger ones are verified by the job's own nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressSpec:
    """Bounds of the silence limit of each phase, seconds. A maximum of 0 turns that phase's detection off."""

    pattern: str = ""  # finds the step in the log of a training that writes no progress file; one group, the number

    start_min_s: float = 60.0  # start: until the first step
    start_max_s: float = 3600.0  # a start that is silent for longer has hung, whatever was learnt
    restore_min_s: float = 60.0  # restore: while a checkpoint is read
    restore_max_s: float = 3600.0  # a restore that takes longer has hung
    compile_min_s: float = 60.0  # compile: where the training says that it compiles
    compile_max_s: float = 3600.0  # a compilation that takes longer has hung
    step_min_s: float = 7.0  # step: between two steps
    step_max_s: float = 900.0  # no step for this long: hung
    save_min_s: float = 60.0  # save: while a checkpoint is written
    save_max_s: float = 1800.0  # a save that takes longer has hung
    eval_min_s: float = 60.0  # eval: while the training evaluates
    eval_max_s: float = 3600.0  # an evaluation that takes longer has hung
    end_min_s: float = 300.0  # end: from the last step until the job ends
    end_max_s: float = 1800.0  # an end that takes longer has hung

    def bounds(self, phase: str) -> tuple[float, float]:
        """(min, max) of a phase of trainer.contract.PHASES."""
        return getattr(self, f"{phase}_min_s"), getattr(self, f"{phase}_max_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartSpec:
    """When to try again and when to hold."""

    max_without_progress: int = 3  # attempts in a row that end without a newer verified checkpoint; then hold
    max_node_failures: int = 10  # the same for attempts lost with a node: they don't use up the budget above
    backoff_s: float = 15.0  # before the second restart without progress; doubles
    backoff_max_s: float = 600.0  # the longest pause that doubling leads to
    in_job: bool = True  # the training is started again inside its job as long as that can help; false: by a new job
    worker_start: Literal["direct", "torchrun", "warm"] = "direct"  # how a node starts its ranks; warm: torch is loaded
    stop_grace_s: float = 2.0  # from SIGTERM to SIGKILL when a training is stopped to be started again
    queue_ahead_s: float = 0.0  # so long before the time limit the next job is queued behind the running one; 0: never


@dataclass(frozen=True, slots=True, kw_only=True)
class DivergenceSpec:
    """What becomes of a run whose loss went wrong. Its checkpoints since then are never resumed from."""

    on_nan: Literal["hold", "rollback"] = "hold"  # the loss is no number any more
    on_spike: Literal["hold", "rollback"] = "hold"  # the loss has jumped
    rollback_checkpoints: int = 1  # rollback: go back to this verified checkpoint before the onset; 1: the newest
    max_rollbacks: int = 2  # at one place; then the run is held
    skip: bool = True  # rollback: leave out the batches since the onset
    spike_score: float = 0.0  # told to the training: robust z-score that counts as a spike; 0: none is looked for
    spike_window: int = 128  # told to the training: steps that a loss is compared with


@dataclass(frozen=True, slots=True, kw_only=True)
class LivenessSpec:
    """How quickly a node of the run is suspected, and given up."""

    timeout_s: float = 10.0  # no heartbeat for this long: the node is given up, whatever its slurmd says
    beat_interval_s: float = 1.0  # between two heartbeats of a node
    suspect_after_s: float = 3.0  # no heartbeat for this long: suspect; given up once slurmd is silent too
    confirm_s: float = 1.5  # slurmd's port silent for this long: confirmed


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerSpec:
    """Ranks that are slower than the others."""

    ratio: float = 1.5  # slower than the median of all ranks by this factor: a straggler; 0: none is looked for
    window_steps: int = 50  # over so many steps
    action: Literal["report", "replace"] = "report"  # replace: its node gives way to a spare at the next checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerSpec:
    """A container that the ranks run in; the options go to srun, or in front of each rank's program."""

    runtime: Literal["none", "pyxis", "apptainer"] = "none"  # pyxis: Slurm's plugin for enroot
    image: str = ""  # as the runtime takes it: a path, or with pyxis also "registry#image:tag"
    mounts: tuple[str, ...] = ()  # "/source:/target" or "/source:/target:flags" each; the run directory is mounted too
    options: tuple[str, ...] = ()  # further options of the runtime: of srun with pyxis, else of `apptainer exec`


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptSpec:
    """A batch script that was handed in with `supervisor sbatch` or whose job was adopted.

    Its text and the environment of the first submission are kept beside the ledger (supervisor.submissions), readable
    by the service alone: environments hold secrets.
    """

    path: str  # as it was given, for people; "-": from standard input, "--wrap": a wrapped command
    digest: str  # xxh3-128 of the text: what is submitted is what was checked
    arguments: tuple[str, ...] = ()  # of the script; may hold placeholders
    options: tuple[str, ...] = ()  # sbatch's, from the command line and SBATCH_*: "--name=value" or "--name" each
    job_name: str = ""  # constant over all attempts
    nodes_given: bool = True  # False: neither the script nor a person said how many nodes; Slurm works it out
    exclude: str = ""  # the person's own --exclude
    dependency: str = ""  # the person's own --dependency, for the first attempt
    export: str = "ALL"  # the person's own --export
    submit_dir: Path = Path("/")  # where sbatch is run: SLURM_SUBMIT_DIR
    output: str = ""  # pattern of the job's standard output, absolute; empty: not known


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """A run file, checked (see supervisor.config.parse_run_file)."""

    name: str  # letters, digits, dot, dash and underscore; used once, also after the run is over
    command: tuple[str, ...]  # the training script and its arguments, as a list
    root: Path  # holds the run's directory; on a file system that head and compute nodes share
    nodes: NodesSpec
    workdir: Path = Path("/")  # working directory of the training
    environment: tuple[str, ...] = ()  # further variables of the ranks, "NAME=text" each; they win over the launcher's
    slurm: SlurmSpec = field(default_factory=SlurmSpec)
    checkpoint: CheckpointSpec = field(default_factory=CheckpointSpec)
    progress: ProgressSpec = field(default_factory=ProgressSpec)
    restart: RestartSpec = field(default_factory=RestartSpec)
    divergence: DivergenceSpec = field(default_factory=DivergenceSpec)
    liveness: LivenessSpec = field(default_factory=LivenessSpec)
    straggler: StragglerSpec = field(default_factory=StragglerSpec)
    container: ContainerSpec = field(default_factory=ContainerSpec)

    @property
    def run_dir(self) -> Path:
        return self.root / self.name

    @property
    def paths(self) -> RunPaths:
        from trainer.contract import RunPaths

        return RunPaths(self.run_dir)

    @property
    def procs_per_node(self) -> int:
        return self.nodes.procs_per_node or self.slurm.gpus_per_node or 1


# ---------------------------------------------------------------- what happened (ledger)


class RunState(StrEnum):
    """What is wanted of a run now."""

    ACTIVE = "active"
    HELD = "held"  # needs a person: `supervisor release`
    STOPPING = "stopping"
    STOPPED = "stopped"
    FINISHED = "finished"


DRILLS = ("node", "process", "network", "hang")


@dataclass(frozen=True, slots=True, kw_only=True)
class Drill:
    """A failure that a person wants to see recovered from (as trainer.contract.DrillRequest)."""

    id: str  # each is made once
    kind: str  # one of DRILLS
    node: str = ""  # empty: the launcher chooses one that trains and is not its own
    at_step: int | None = None  # not before this step is done; None: now
    attempt: int = 0  # that it is for: none other makes it
    is_made: bool = False  # by whoever asked, on a sandbox: nobody is told to make it
    is_seen: bool = False  # the interruption that it led to is in the ledger
    asked_at: float = field(default=0.0, compare=False)  # seconds since the epoch, the service's clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What was asked for, and what is wanted of it now."""

    spec: RunSpec
    script: ScriptSpec | None = None  # a batch script of the person's own, in place of spec.command and our launcher
    state: RunState = RunState.ACTIVE
    reason: str = ""  # why it is in this state
    is_paused: bool = False
    owner_uid: int = 0
    owner_gid: int = 0
    inherited: Inherited = AS_THE_SERVICE  # umask and limits of the shell that it was handed in from; its jobs get them
    created_at: datetime = EPOCH
    changed_at: datetime = EPOCH
    released_at: datetime | None = None  # restarts before this are forgiven
    save_asked_at: datetime | None = None  # when a person last asked for a save now
    drill: Drill | None = None  # the newest failure that a person wants to see recovered from
    skips_released_at: datetime | None = None  # batches at which the loss went wrong before this are left out
    final_step: int | None = None

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def job_name(self) -> str:
        """Of all its jobs: Slurm's singleton keeps two of them from running at once by it."""
        return self.script.job_name or self.name if self.script is not None else self.name

    def token(self, number: int) -> str:
        """What the job of attempt `number` is known by in Slurm."""
        return f"sup:{self.name}:{number}:{int(self.created_at.timestamp()):x}"


UNREPORTED = "unreported"  # the phase of an attempt that runs and tells no steps


class AttemptState(StrEnum):
    """Life of one attempt. Only OVER attempts are fenced; a run has at most one that is neither OVER nor AHEAD."""

    AHEAD = "ahead"  # submitted to start when the running attempt's job has ended; it waits to be told to begin
    PLANNED = "planned"  # the intent to submit is committed; the job may or may not exist
    SUBMITTED = "submitted"  # the job id is known
    RUNNING = "running"
    OVER = "over"  # nothing that it publishes from now on counts


class AttemptEnd(StrEnum):
    """Why an attempt is over."""

    FINISHED = "finished"
    SAVED = "saved"  # exit 75: saved and wants to be resubmitted
    NODE_SILENT = "node_silent"  # a node stopped answering
    NODE_FAILED = "node_failed"  # Slurm turned a node down, or the log shows that its hardware failed
    NODE_CHECK = "node_check"  # a node failed its start checks
    STALLED = "stalled"  # no progress within the phase's limit
    CRASHED = "crashed"  # the training ended with an error
    HOST_MEMORY = "host_memory"
    TIME_LIMIT = "time_limit"
    PREEMPTED = "preempted"
    CHECKPOINT_REJECTED = "checkpoint_rejected"  # exit 78
    DIVERGED = "diverged"  # exit 79: the loss went wrong; no node's fault
    DO_NOT_RESTART = "do_not_restart"  # exit 93, or a cause that a restart can't cure
    CANCELLED = "cancelled"  # by a person through Slurm
    STOPPED = "stopped"  # by a person through the supervisor
    REFUSED = "refused"  # sbatch said no
    VANISHED = "vanished"  # gone from Slurm without a trace
    MAINTENANCE = "maintenance"  # its nodes were taken for planned work: a maintenance reservation, a reboot
    RESIZED = "resized"  # waited in the queue for more nodes than are healthy
    LOST = "lost"  # a second job of the same attempt
    NOT_NEEDED = "not_needed"  # was queued ahead, and the run went on in another way or not at all


PLANNED_ENDS = frozenset(
    {
        AttemptEnd.FINISHED,
        AttemptEnd.SAVED,
        AttemptEnd.TIME_LIMIT,
        AttemptEnd.STOPPED,
        AttemptEnd.CANCELLED,
        AttemptEnd.RESIZED,
        AttemptEnd.MAINTENANCE,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedSamples:
    """Global sample positions [first, end) that the training leaves out."""

    first: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LossFault:
    """How the loss of an attempt went wrong, as the training found, and what was decided."""

    kind: str  # "nan" or "spike"
    onset_step: int | None = None  # None: the training did not say since when
    step: int | None = None  # at which it was noticed
    first_sample: int = 0  # of the batches since the onset: [first_sample, end_sample)
    end_sample: int = 0
    repeats: int = 0  # how often it had gone wrong at this place before
    is_rolled_back: bool = False  # False: the run is held
    decision: str = ""  # what was decided, and why, for people


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One submission of a run = one job."""

    run: str
    number: int
    token: str
    state: AttemptState = AttemptState.PLANNED
    nodes_wanted: int  # to train on
    spares: int = 0  # allocated beside them
    exclude: tuple[str, ...] = ()
    resume_step: int = 0
    resume_path: str = ""
    job_id: int | None = None
    nodes: tuple[str, ...] = ()  # as Slurm allocated them
    planned_at: datetime
    submitted_at: datetime | None = None
    started_at: datetime | None = None  # first seen running
    stepped_at: datetime | None = None  # first new step seen
    over_at: datetime | None = None
    end: AttemptEnd | None = None
    end_detail: str = ""
    exit_code: int | None = None
    is_job_gone: bool = False  # Slurm runs nothing of it any more (COMPLETING counts as gone)
    first_step: int | None = None  # the first that its log tells, where steps are read from the log
    last_step: int | None = None  # newest step seen
    phase: str = ""
    progress_at: datetime | None = None  # when the newest progress was stored
    slurm_restarts: int = 0  # how often Slurm itself has started the job again, as it counts (RestartCnt)
    log_offset: int = 0  # bytes of the log that earlier attempts wrote, where all write to one file
    slurm_submit_at: datetime | None = None  # when the job was submitted, as Slurm says; a requeue moves it
    slurm_user: str = ""  # whose job it is: whom it was submitted as, then as Slurm says
    checkpoint_every_s: float = 0.0  # interval between saves that it was last told; 0: the run file's
    advice_seq: int = 0  # how often it was told something while it runs
    save_requests: int = 0  # saves that a person asked for, and that it was told
    save_asked_at: datetime | None = None  # the newest request among them
    save_costs_s: tuple[float, ...] = ()  # how long its last saves blocked the training, oldest first
    save_total_s: float | None = None  # how long the last one took until it was durable and verified
    saved_step: int | None = None  # newest step that the training says it has saved and verified
    save_failures: int = 0  # failed saves in a row
    save_error: str = ""  # of the newest failed one
    uploaded: str = ""  # folder name of the newest checkpoint that it has put into object storage
    upload_failures: int = 0  # failed tries in a row to copy there
    upload_error: str = ""  # of the newest failed one
    unshared_nodes: tuple[str, ...] = ()  # whose mark in the checkpoint folder was never seen from here
    skip_samples: tuple[SkippedSamples, ...] = ()  # what it leaves out, in order
    loss_fault: LossFault | None = None
    launch: int = 0  # which start of the training within its job is the present one, from 0
    launched_at: datetime | None = None  # when that one was first seen; None while it is the first
    launch_step: int | None = None  # that it began from; None: `resume_step`
    training: tuple[str, ...] = ()  # nodes that train, by rank; empty: not known (yet)
    recovering: str = ""  # why the training is being started again inside its job; empty: it is not
    recovering_at: datetime | None = None  # since when
    interruptions_read: int = 0  # starts before this one are settled: their records are not read again
    stragglers: tuple[str, ...] = ()  # ranks that are slower than the others now, in words
    advised_path: str = ""  # newest checkpoint that it was told of while it runs
    advised_step: int = 0
    drill: Drill | None = None  # the newest failure on purpose that it was told to make
    planned: int = 0  # its interruptions that were planned or made on purpose: no failures

    @property
    def spare_nodes(self) -> tuple[str, ...]:
        """Nodes of the job that do not train: spares, and those that were left out."""
        return tuple(node for node in self.nodes if node not in self.training) if self.training else ()

    @property
    def is_adopted(self) -> bool:
        """True for a job that ran before it was ours: `submitted_at` is then Slurm's own submission time."""
        return self.submitted_at is not None and self.submitted_at < self.planned_at

    @property
    def is_over(self) -> bool:
        return self.state is AttemptState.OVER

    @property
    def is_aside(self) -> bool:
        """True for one that is queued ahead, or was and never trained: no part of the run's course."""
        return self.state is AttemptState.AHEAD or self.end is AttemptEnd.NOT_NEEDED


class CheckpointState(StrEnum):
    """What may be believed of a checkpoint."""

    COMPLETE = "complete"  # manifest there, every file has its recorded size
    VERIFIED = "verified"  # every byte was read back and its checksum matches
    CORRUPT = "corrupt"
    FENCED = "fenced"  # published after its attempt was declared over: never counts
    SUSPECT = "suspect"  # whole, and made when the loss had gone wrong: never resumed from
    PRUNED = "pruned"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """One published checkpoint folder."""

    run: str
    step: int
    attempt: int
    state: CheckpointState
    path: str
    size_bytes: int = 0
    files: int = 0
    samples: int = 0
    world_size: int = 0  # ranks that made it, data-parallel ones in a foreign layout; 0: not known
    is_elastic: bool = True  # False: its position in the data is one for each rank, no other number of nodes can use it
    first_seen_at: datetime
    verified_at: datetime | None = None  # newest time that all bytes were read back
    verified_by: str = ""  # "nodes" or "head"
    load_failures: int = 0
    detail: str = ""
    stamp: str = ""  # changes when a training that names folders by step alone writes the same step again

    @property
    def key(self) -> tuple[int, int]:
        """(step, attempt): unique within a run, ordered by step."""
        return (self.step, self.attempt)

    @property
    def is_usable(self) -> bool:
        """Whole, and neither refused, suspect, fenced nor removed."""
        return self.state in (CheckpointState.COMPLETE, CheckpointState.VERIFIED)

    @property
    def is_kept(self) -> bool:
        """Verified; or whole, of a layout (it has a stamp) that may have nothing better to offer."""
        return self.state is CheckpointState.VERIFIED or (bool(self.stamp) and self.is_usable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part of the time that an interruption took."""

    name: str  # e.g. "stop", "checks", "start"
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Interruption:
    """An unplanned end or stall of one attempt, or (is_planned) an end that costs time but is nobody's fault.

    Or (is_in_job) the end of one start of the training that was followed by another one in the same job.
    """

    run: str
    attempt: int
    launch: int = 0  # the start of the training within the attempt that was interrupted
    is_in_job: bool = False  # another one followed in the same job
    kind: str  # AttemptEnd's word; inside a job one of trainer.contract.INTERRUPTION_KINDS
    cause: str  # one sentence for people
    node: str | None
    nodes: tuple[str, ...] = ()  # inside a job: all that are named by evidence
    is_planned: bool
    detected_at: datetime
    resumed_at: datetime | None = None  # first new step after it: the down time ends
    caught_up_at: datetime | None = None  # the step that it had reached is reached again
    last_step: int | None = None
    resume_step: int | None = None
    evidence: tuple[str, ...] = ()
    parts: tuple[Part, ...] = ()  # where the time inside the job went, as the launcher says
    drill: str = ""  # the drill that made it; such a one is planned

    @property
    def detection_s(self) -> float | None:
        """Inside a job: seconds from the last sign of life to the notice, as the launcher says."""
        return next((part.seconds for part in self.parts if part.name == "detect"), None)

    @property
    def recovery_s(self) -> float | None:
        """Seconds from notice to the first new step; None while it is not resumed."""
        return max(0.0, (self.resumed_at - self.detected_at).total_seconds()) if self.resumed_at else None

    @property
    def lost_steps(self) -> int | None:
        """Steps done again: last step seen minus the step resumed from."""
        if self.last_step is None or self.resume_step is None:
            return None
        return max(0, self.last_step - self.resume_step)


class Verdict(StrEnum):
    """What we hold of a node."""

    HEALTHY = "healthy"
    SUSPECT = "suspect"  # failed, not yet often enough
    BROKEN = "broken"  # excluded from our jobs, and drained where the budget and our rights allow


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMemory:
    """What is remembered of one node between cycles."""

    node: str
    verdict: Verdict = Verdict.HEALTHY
    reason: str = ""
    since_at: datetime = EPOCH
    failing: tuple[str, ...] = ()  # checks that failed in the newest sweep
    failed_sweeps: int = 0  # in a row
    checked_at: datetime | None = None
    is_drained_by_us: bool = False
    drain_reason: str = ""
    drained_at: datetime | None = None
    boot_at: str = ""  # at the drain: another value later means rebooted or replaced


DRAIN_WITHHELD = "drain.withheld"  # a broken node that is not drained, for the bounds of what may be


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEvent:
    """One line of a node's history."""

    node: str
    at: datetime
    event: str  # noun.past_participle, e.g. "node.drained"
    detail: str = ""
    run: str = ""
    attempt: int | None = None


# ---------------------------------------------------------------- what is meant


class IntentKind(StrEnum):
    """The side effects that the service may have; each is committed before it is done."""

    SUBMIT = "submit"
    CANCEL = "cancel"
    ADVISE = "advise"  # tell a running training how often to save, or to save now
    PROMOTE = "promote"  # tell the job that was queued ahead from where to begin
    CLAIM = "claim"  # put our token on an adopted job, and keep Slurm from requeueing it
    DRAIN = "drain"
    VERIFY = "verify"  # read a checkpoint back; the result is an observation of a later cycle
    PRUNE = "prune"
    NOTIFY = "notify"


class IntentState(StrEnum):
    """OPEN until its outcome is known."""

    OPEN = "open"
    DONE = "done"
    REFUSED = "refused"
    WITHDRAWN = "withdrawn"  # never tried, no longer wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class Intent:
    """One meant side effect. `key` is unique among open intents, so a plan applied twice means one act."""

    kind: IntentKind
    key: str
    reason: str
    run: str = ""
    attempt: int | None = None
    job_id: int | None = None
    node: str = ""
    step: int | None = None  # with VERIFY and PRUNE: which checkpoint (step, attempt)
    text: str = ""  # drain reason, notification text
    state: IntentState = IntentState.OPEN
    id: int | None = None  # given by the store
    created_at: datetime = EPOCH
    tries: int = 0  # committed before each try
    tried_at: datetime | None = None
    settled_at: datetime | None = None
    outcome: str = ""


# ---------------------------------------------------------------- what the core sees and says


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What the ledger knows: desired and remembered."""

    is_paused: bool = False
    runs: tuple[Run, ...] = ()  # not finished or stopped, and those whose last job is not gone yet
    attempts: Mapping[str, tuple[Attempt, ...]] = field(default_factory=dict)  # by run, ascending
    aside: Mapping[str, tuple[Attempt, ...]] = field(default_factory=dict)  # queued ahead, by run, ascending
    checkpoints: Mapping[str, tuple[Checkpoint, ...]] = field(default_factory=dict)  # by run, not pruned
    interruptions: tuple[Interruption, ...] = ()  # not caught up yet
    nodes: Mapping[str, NodeMemory] = field(default_factory=dict)
    open_intents: tuple[Intent, ...] = ()
    settled_intents: tuple[Intent, ...] = ()  # of the last hours, newest last: drains for the budget, cancels


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainPolicy:
    """Bounds of what may be drained."""

    is_enabled: bool = True
    max_nodes: int = 5  # drains by us per window
    max_fraction: float = 0.1  # of the cluster's nodes, per window; at least one node
    window_s: float = 3600.0
    sweeps_to_drain: int = 2  # failed sweeps in a row before a check drains a node


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Settings of the service that decisions depend on."""

    drain: DrainPolicy = field(default_factory=DrainPolicy)
    is_observe_only: bool = False  # plan and record, act on nothing
    poll_interval_s: float = 15.0  # between questions to Slurm when nothing is suspected
    cycle_interval_s: float = 1.0  # between readings of the run directories
    idle_interval_s: float = 15.0  # between cycles when no attempt is live
    submit_lookup_wait_s: float = 15.0  # after a lost answer: MessageTimeout and a margin
    owner_tag: str = "supervisor"  # first word of our drain reasons


Record: TypeAlias = "Run | Attempt | Interruption | Checkpoint | NodeMemory | NodeEvent | CheckRow"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """Something learnt: the record as it is now, and why."""

    record: Record
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What was learnt and what is meant; every item carries its reason."""

    facts: tuple[Fact, ...] = ()
    intents: tuple[Intent, ...] = ()
    withdrawn: tuple[Intent, ...] = ()  # open intents that are no longer wanted and were never tried
    settled: tuple[Intent, ...] = ()  # open intents whose outcome was observed: state and outcome as they are now
    probe: frozenset[str] = frozenset()  # nodes whose slurmd port should be watched closely
    ask_slurm: bool = False  # the next cycle wants a new answer from Slurm
    wake_after_s: float = 1.0
    notes: tuple[str, ...] = ()  # why a rule stayed silent
