"""The contract between the service and the job: environment, files, exit codes. Standard library only.

Both sides import this module; neither imports the other. Layout of a run directory (`<root>/<run>/`):

    run.toml                          the run file as submitted
    attempts/<n>/attempt.json         AttemptSpec, written by the service before it submits
    attempts/<n>/batch.sh, job.log    what was submitted; the job's output (appended, one file per attempt)
    attempts/<n>/launch.json          LaunchReport, rewritten once a second by trainer.launch
    attempts/<n>/launcher.json        which process launches the attempt, see trainer.launching.claim
    attempts/<n>/interruptions/<k>.json  InterruptionRecord of the k-th start of the training (from 0), which was
                                      interrupted and followed by another one in the same allocation
    attempts/<n>/evidence/<k>/        what was collected of start k: stacks, Flight Recorder dumps, last log lines
    attempts/<n>/nodes/<node>.cut.json  CutOff, written by a node that lives and has lost the launcher
    attempts/<n>/exit.json            ExitRecord, written once by trainer.launch when the training step is over
    attempts/<n>/outcome.json         Outcome, written by the training script before exit codes that torchrun hides
    attempts/<n>/advice.json          Advice, rewritten by the service while the attempt runs
    attempts/<n>/divergence.json      Divergence, written by the training script when its loss went wrong
    attempts/<n>/claim.json           which start of the training publishes as attempt n, see trainer.session.claims
    attempts/<n>/reading.json         ReadLease, there while the training reads a checkpoint
    attempts/<n>/uploading.json       ReadLease of the checkpoint that is being copied to object storage
    attempts/<n>/uploads/<k>.json     UploadReport of node k, rewritten while it copies to object storage
    attempts/<n>/fetched/             files that came from object storage because the run directory's were bad
    attempts/<n>/nodes/<node>.json    NodeReport: start checks, exit code and the end of the log of one node
    attempts/<n>/logs/                the ranks' output, by node
    progress/a<n>.json                Progress of attempt n, written by rank 0
    checkpoints/step-<k>.a<n>/        shards; MANIFEST.json last (COMPLETE); VERIFIED.json when read back;
                                      OBJECT.json when all of it is in object storage, too

Every JSON file is published by `write_json`: temporary name, fsync, rename, fsync of the directory. Readers use
`parse_*`, which accept bytes of any origin and raise `ContractError` on anything that is not the documented shape.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

CONTRACT_VERSION = 1
MAX_JSON_BYTES = 64 * 1024 * 1024  # manifests of large jobs list one file per rank; everything else is far smaller

EXIT_FINISHED = 0
EXIT_RESUBMIT = 75  # saved and wants to be resubmitted
EXIT_DO_NOT_RESTART = 93  # used by another launcher: a restart can't cure it
EXIT_NODE_CHECK_FAILED = 76  # trainer.node: this node failed its checks before training started
EXIT_NODE_SILENT = 77  # trainer.launch: a node went silent
EXIT_CHECKPOINT_REJECTED = 78  # the checkpoint to resume from did not load or did not match its checksums
EXIT_DIVERGED = 79  # the loss is no number any more, or jumped: divergence.json says since when
EXIT_ALREADY_LAUNCHED = 80  # trainer.launch: another launcher has this attempt; nothing was touched
EXIT_HUNG = 81  # trainer.launch: the ranks made no progress and did not die, and starting again did not help

ENV_RUN = "SUPERVISOR_RUN"
ENV_ATTEMPT = "SUPERVISOR_ATTEMPT"
ENV_RUN_DIR = "SUPERVISOR_RUN_DIR"
ENV_RESUME_FROM = "SUPERVISOR_RESUME_FROM"
ENV_RESUME_STEP = "SUPERVISOR_RESUME_STEP"
ENV_CHECKPOINT_EVERY_S = "SUPERVISOR_CHECKPOINT_EVERY_S"
ENV_SKIP_SAMPLES = "SUPERVISOR_SKIP_SAMPLES"  # "first-end,first-end": global sample positions to leave out
ENV_SPIKE_SCORE = "SUPERVISOR_SPIKE_SCORE"  # robust z-score of the loss that counts as a spike; absent or 0: off
ENV_SPIKE_WINDOW = "SUPERVISOR_SPIKE_WINDOW"  # steps that a loss is compared with
ENV_LOCAL_DIR = "SUPERVISOR_LOCAL_DIR"
ENV_OBJECT_URL = "SUPERVISOR_OBJECT_URL"
ENV_UPLOAD_BYTES_PER_S = "SUPERVISOR_UPLOAD_BYTES_PER_S"
ENV_OBJECT_KEEP_LAST = "SUPERVISOR_OBJECT_KEEP_LAST"
ENV_LAUNCHER = "SUPERVISOR_LAUNCHER"  # host:port of trainer.launch, for trainer.node only
ENV_AGENT_LOG = "SUPERVISOR_AGENT_LOG"  # file that trainer.node speaks into: no srun passes its words on
ENV_LAUNCH = "SUPERVISOR_LAUNCH"  # number of this start of the training within the attempt, from 0
ENV_NODE_SOCKET = "SUPERVISOR_NODE_SOCKET"  # Unix socket on which each rank tells trainer.node of its progress
ENV_LAUNCHER_SECRET = "SUPERVISOR_LAUNCHER_SECRET"  # noqa: S105 - a variable's name

PHASES = ("start", "restore", "compile", "step", "save", "eval", "end")

_CHECKPOINT_NAME = re.compile(
    r"^step-(0|[1-9][0-9]{0,14})\.a(0|[1-9][0-9]{0,8})\Z"  # one spelling a checkpoint; "$" would allow a newline
)
_RUN_NAME = re.compile(r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,99}\Z")


class ContractError(ValueError):
    """A file of the contract does not have the documented shape; the message says where and why."""


# ---------------------------------------------------------------- records


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRange:
    """Global sample positions [first, end)."""

    first: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptSpec:
    """What the service asks of one attempt."""

    version: int = CONTRACT_VERSION
    run: str
    attempt: int
    command: tuple[str, ...]  # the training program, as the run file has it
    nodes: int  # number of nodes to train on; the allocation may hold spares beyond it
    procs_per_node: int = 1
    resume_from: str = ""  # path of a verified checkpoint, or empty
    resume_step: int = 0
    checkpoint_every_s: float = 600.0
    # The command with its placeholders ({resume_from}, {resume_step}, …) unfilled: each start fills them anew. Empty:
    # `command` as it is.
    command_template: tuple[str, ...] = ()
    in_job: bool = True  # the training is started again inside the allocation as long as that can help
    nodes_min: int = 0  # a start inside the allocation takes no fewer nodes; 0: `nodes`
    node_multiple: int = 1  # ... and a multiple of this many
    max_without_progress: int = 3  # starts in a row without a newer verified checkpoint, then the attempt ends
    backoff_s: float = 15.0  # before the second start without progress in a row; doubles
    stop_grace_s: float = 2.0  # from SIGTERM to SIGKILL when a start is stopped
    worker_start: str = "direct"  # "direct", "torchrun" or "warm": how trainer.node starts the ranks
    beat_interval_s: float = 0.5
    suspect_after_s: float = 3.0  # a node without a beat for this long is suspect, and lost if its port is silent too
    liveness_timeout_s: float = 10.0  # a node without a beat for this long is lost, whatever its port says
    phase_bounds_s: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # phase: (min, max); max 0: off
    straggler_ratio: float = 0.0  # a rank slower than the median by this factor is a straggler; 0: none is looked for
    straggler_window: int = 50  # over so many steps
    straggler_action: str = "report"  # or "replace": its node is replaced at the next checkpoint
    srun_options: tuple[str, ...] = ()  # further options of the training step's srun, e.g. a container's
    command_prefix: tuple[str, ...] = ()  # put in front of each rank's program, e.g. ("apptainer", "exec", "x.sif")
    start_checks: tuple[str, ...] = ()  # argv of the node probes, run before training; empty: none
    start_checks_timeout_s: float = 20.0
    environment: Mapping[str, str] = field(default_factory=dict)  # further variables for the training program
    # Global sample positions that are left out, [from, to): what a rollback skips. In order, not overlapping.
    skip_samples: tuple[SampleRange, ...] = ()
    local_dir: str = ""  # node-local folder that checkpoints are written to first; empty: none
    object_url: str = ""  # fsspec URL of the object storage that checkpoints are copied to; empty: none
    upload_bytes_per_s: float = 0.0  # bound of each node's copies to slower tiers; 0: none
    object_keep_last: int = 3  # checkpoints of this run that stay in object storage; never fewer than 2
    is_ahead: bool = False  # queued behind a running attempt: it begins when this file says False


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where the training is. `limit_s`: silence longer than this, in this phase, is a stall (announced by the job)."""

    version: int = CONTRACT_VERSION
    attempt: int
    step: int  # last finished optimizer step; -1 before the first one of a fresh run
    final_step: int | None = None
    loss: float | None = None
    phase: str = "start"  # one of PHASES
    limit_s: float | None = None
    time: float  # the writer's clock, seconds since the epoch: for people, never for ages
    seq: int = 0  # grows with every write
    save_blocking_s: float | None = None  # blocking time of the last save
    samples: int | None = None  # global samples consumed
    saved_step: int | None = None  # newest checkpoint that this attempt has verified
    save_total_s: float | None = None  # until the last save was durable and verified
    save_failures: int = 0  # failed saves in a row
    save_error: str = ""  # of the newest failed save, while it is the newest
    is_elastic: bool = True  # False: the data loader can't change the number of ranks
    launch: int | None = None  # start of the training within the attempt that wrote this; None: the writer can't tell


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillRequest:
    """A failure that somebody wants to see recovered from."""

    id: str  # each is made once
    kind: str  # "node", "process", "network" or "hang"
    node: str = ""  # empty: the launcher chooses one that trains and isn't its own
    at_step: int | None = None  # not before this step is done; None: now


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What the service tells a running training; rewritten in place, read again every few seconds."""

    version: int = CONTRACT_VERSION
    attempt: int
    seq: int  # grows with every write
    checkpoint_every_s: float
    save_requests: int = 0  # a save is made now when it has grown
    resume_from: str = ""  # newest verified checkpoint that the service knows of: where a start in the job begins
    resume_step: int = 0
    drill: DrillRequest | None = None  # a failure to be made on purpose, once


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The training's own finding that its loss went wrong; written once, before it ends with 79."""

    version: int = CONTRACT_VERSION
    attempt: int
    kind: str  # "nan" or "spike"
    onset_step: int  # first step whose loss was wrong: checkpoints of this step and later are suspect
    step: int  # the step at which it was noticed
    loss: float | None = None  # None: not a finite number
    score: float | None = None  # of a spike: robust z-score
    first_sample: int = 0  # global positions of the batches since the onset, [first_sample, end_sample)
    end_sample: int = 0
    time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadLease:
    """A training that reads a checkpoint: nothing is pruned under it while its attempt lives."""

    version: int = CONTRACT_VERSION
    attempt: int
    checkpoints: tuple[str, ...]  # folder names
    time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadReport:
    """What one node's copying to object storage is at. Node 0 leads, the others copy their part of what it chose."""

    version: int = CONTRACT_VERSION
    attempt: int
    node: int
    checkpoint: str = ""  # folder name of the one that is or was copied last
    is_done: bool = False  # this node's part of it is there, compared byte by byte
    uploaded: str = ""  # of node 0: the newest one that is there as a whole
    pending: int = 0  # of node 0: verified ones that are waiting
    failures: int = 0  # failed tries in a row
    error: str = ""  # of the newest failed try, while it is the newest
    bytes_sent: int = 0  # since the attempt began
    time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectRecord:
    """A checkpoint is in object storage as a whole: its files were compared, its manifest was put there last."""

    version: int = CONTRACT_VERSION
    attempt: int
    step: int
    url: str
    manifest_xxh3_128: str  # of MANIFEST.json's bytes
    size_bytes: int
    time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeBeat:
    """What trainer.launch knows of one node of the step."""

    state: str  # "starting", "checking", "running", "ready", "ended", "spare", "lost"
    age_s: float  # since the last beat, on the launcher's monotonic clock
    exit_code: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchReport:
    """Rewritten once a second by trainer.launch; its silence means that the batch host is gone or frozen."""

    version: int = CONTRACT_VERSION
    attempt: int
    job_id: int
    seq: int
    time: float
    host: str  # the node that runs trainer.launch
    phase: str  # "starting", "checking", "running", "recovering", "ending"
    nodes: Mapping[str, NodeBeat]
    silent: tuple[str, ...] = ()  # nodes without a beat for longer than suspect_after_s
    launch: int = 0  # number of the current start of the training within the attempt, from 0
    training: tuple[str, ...] = ()  # nodes of that start, in rank order
    resume_step: int = 0  # that it began from
    why: str = ""  # while recovering: what is being recovered from
    stragglers: tuple[Straggler, ...] = ()  # as judged now


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A rank that is slower than the others."""

    node: str
    rank: int
    ratio: float  # its own time per step / the median of all ranks
    detail: str  # the figures, for people


@dataclass(frozen=True, slots=True, kw_only=True)
class InterruptionRecord:
    """One start of the training that was interrupted, and what followed inside the allocation."""

    version: int = CONTRACT_VERSION
    attempt: int
    launch: int  # the start that was interrupted, from 0
    kind: str  # one of INTERRUPTION_KINDS
    cause: str  # one sentence for people
    # To blame, by evidence. One that comes back and is sound is used again only where nodes would be short otherwise.
    nodes: tuple[str, ...] = ()
    hint: str = ""  # a node that is named without proof
    evidence: tuple[str, ...] = ()
    last_step: int | None = None  # newest step known of the start that was interrupted
    trained: tuple[str, ...] = ()  # nodes of the start that was interrupted, in rank order
    resume_step: int = 0  # of the start that follows
    training: tuple[str, ...] = ()  # nodes of the start that follows; empty: none followed
    detected_at: float  # seconds since the epoch
    resumed_at: float | None = None  # first new step of the start that follows
    parts_s: Mapping[str, float] = field(default_factory=dict)  # where the time went: stop, checks, start, …


INTERRUPTION_KINDS = (
    "process",  # a rank ended with an error or by a signal; the node is healthy
    "node_lost",  # no beat and nothing of the node answers: a power cut, or a cable and the storage with it
    "node_cut_off",  # no beat, and the node has left word elsewhere that it lives: the cable
    "node_frozen",  # no beat though its kernel accepts connections
    "agent_killed",  # its kernel closed the agent's connection and answers still
    "check_failed",  # a node failed its checks before a start
    "hang",  # a rank makes no progress and does not die
    "straggler",  # a slow node was replaced
    "start_failed",  # the ranks could not be started or find each other
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CutOff:
    """Left where the others may read it by a node that has lost the launcher and has stopped its ranks."""

    version: int = CONTRACT_VERSION
    attempt: int
    node: str
    boot_id: str
    since_s: float  # how long it had not heard the launcher
    time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitRecord:
    """How the training step of one attempt ended, as trainer.launch saw it."""

    version: int = CONTRACT_VERSION
    attempt: int
    job_id: int
    exit_code: int  # 0, 75, 93, 76, 77, 78, or the first failing node's code
    reason: str
    node: str | None = None  # the node that is named by the evidence
    time: float
    nodes: Mapping[str, int | None] = field(default_factory=dict)  # exit code of each node, None: never reported
    bad_nodes: tuple[str, ...] = ()  # to blame by evidence for this end
    launches: int = 1  # starts of the training in this attempt
    # What is left to do: "" (as the code says), "resubmit" (a new job can help: nodes are short here), "hold" (the same
    # step failed again and again)
    next: str = ""
    # Slurm sent SIGTERM to the step and not to the launcher: how a preemption with a grace time begins.
    is_step_terminated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Written by the training script before it exits with a code that torchrun would hide (it exits 1 for all)."""

    version: int = CONTRACT_VERSION
    attempt: int
    exit_code: int
    message: str = ""
    checkpoint: str = ""  # with 78: the path that was rejected


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """One node check: `ok` is None when the check could not tell (a time-out is unknown, not a failure)."""

    check: str
    ok: bool | None
    detail: str = ""
    value: float | None = None
    limit: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """What trainer.node found on one node."""

    version: int = CONTRACT_VERSION
    attempt: int
    node: str
    host: str
    time: float
    checks: tuple[CheckResult, ...] = ()
    exit_code: int | None = None
    log_tail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestFile:
    """One file of a checkpoint. `xxh3_128`: 32 hex digits over the whole file."""

    path: str  # relative, no "..", no leading "/"
    size_bytes: int
    xxh3_128: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Published last: a checkpoint without it is WRITING, with it COMPLETE."""

    version: int = CONTRACT_VERSION
    run: str
    attempt: int
    step: int
    samples: int  # global samples consumed up to and including `step`
    world_size: int
    time: float
    format: str = "dcp"
    tokens: int | None = None  # global tokens consumed, where the training counts them
    # False: the position in the data can't be carried to another number of ranks, so the number of nodes must stay
    is_elastic: bool = True
    libraries: Mapping[str, str] = field(default_factory=dict)  # versions of what wrote it: python, torch, numpy …
    files: tuple[ManifestFile, ...]
    self_xxh3_128: str = ""  # of the manifest itself; the last field, see trainer.format.manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class VerificationRecord:
    """Every byte was read back by a process other than its writer and matched the manifest."""

    version: int = CONTRACT_VERSION
    attempt: int
    step: int
    ok: bool
    manifest_xxh3_128: str  # of MANIFEST.json's bytes: ties the record to one manifest
    bad_files: tuple[str, ...] = ()
    time: float


# ---------------------------------------------------------------- paths


@dataclass(frozen=True, slots=True)
class RunPaths:
    """Where each file of a run directory stands."""

    run_dir: Path

    def attempt_dir(self, attempt: int) -> Path:
        return self.run_dir / "attempts" / str(attempt)

    def attempt_spec(self, attempt: int) -> Path:
        return self.attempt_dir(attempt) / "attempt.json"

    def launch_report(self, attempt: int) -> Path:
        return self.attempt_dir(attempt) / "launch.json"

    def exit_record(self, attempt: int) -> Path:
        return self.attempt_dir(attempt) / "exit.json"

    def interruption(self, attempt: int, launch: int) -> Path:
        return self.attempt_dir(attempt) / "interruptions" / f"{launch}.json"

    def evidence(self, attempt: int, launch: int) -> Path:
        return self.attempt_dir(attempt) / "evidence" / str(launch)

    def cut_off(self, attempt: int, node: str) -> Path:
        return self.attempt_dir(attempt) / "nodes" / f"{node}.cut.json"

    def outcome(self, attempt: int) -> Path:
        return self.attempt_dir(attempt) / "outcome.json"

    def resume_link(self, attempt: int) -> Path:
        """Of a script whose job is queued ahead: a link to the checkpoint that it begins from, once there is one."""
        return self.attempt_dir(attempt) / RESUME_LINK

    def node_report(self, attempt: int, node: str) -> Path:
        return self.attempt_dir(attempt) / "nodes" / f"{node}.json"

    def logs(self, attempt: int) -> Path:
        return self.attempt_dir(attempt) / "logs"

    def progress(self, attempt: int) -> Path:
        return self.run_dir / "progress" / f"a{attempt}.json"

    def advice(self, attempt: int) -> Path:
        return self.attempt_dir(attempt) / "advice.json"

    def divergence(self, attempt: int) -> Path:
        return self.attempt_dir(attempt) / "divergence.json"

    def claim(self, attempt: int) -> Path:
        return self.attempt_dir(attempt) / "claim.json"

    def read_lease(self, attempt: int) -> Path:
        return self.attempt_dir(attempt) / "reading.json"

    def upload_lease(self, attempt: int) -> Path:
        return self.attempt_dir(attempt) / "uploading.json"

    def upload_report(self, attempt: int, node: int) -> Path:
        return self.attempt_dir(attempt) / "uploads" / f"{node}.json"

    def fetched(self, attempt: int) -> Path:
        return self.attempt_dir(attempt) / "fetched"

    def run_name(self) -> Path:
        """Which run this directory is, wherever it is moved to."""
        return self.run_dir / "run.json"

    def checkpoints(self) -> Path:
        return self.run_dir / "checkpoints"

    def checkpoint(self, step: int, attempt: int) -> Path:
        return self.checkpoints() / checkpoint_name(step, attempt)


RESUME_LINK = "resume"
MANIFEST_NAME = "MANIFEST.json"
VERIFIED_NAME = "VERIFIED.json"
OBJECT_NAME = "OBJECT.json"


def checkpoint_name(step: int, attempt: int) -> str:
    """Name of the folder that attempt `attempt` publishes step `step` under."""
    return f"step-{step}.a{attempt}"


def parse_checkpoint_name(name: str) -> tuple[int, int] | None:
    """(step, attempt) of a checkpoint folder's name, or None for any other name."""
    found = _CHECKPOINT_NAME.match(name)
    return (int(found[1]), int(found[2])) if found else None


def is_run_name(name: str) -> bool:
    """True for letters, digits, dot, dash and underscore, not starting with a dot or dash, at most 100 characters."""
    return bool(_RUN_NAME.match(name)) and ".." not in name


def attempt_environment(spec: AttemptSpec, run_dir: Path) -> dict[str, str]:
    """The contract's variables for one attempt."""
    return {
        ENV_RUN: spec.run,
        ENV_ATTEMPT: str(spec.attempt),
        ENV_RUN_DIR: str(run_dir),
        ENV_RESUME_FROM: spec.resume_from,
        ENV_RESUME_STEP: str(spec.resume_step),
        ENV_CHECKPOINT_EVERY_S: f"{spec.checkpoint_every_s:g}",
        ENV_SKIP_SAMPLES: ",".join(f"{part.first}-{part.end}" for part in spec.skip_samples),
        ENV_LOCAL_DIR: spec.local_dir,
        ENV_OBJECT_URL: spec.object_url,
        ENV_UPLOAD_BYTES_PER_S: f"{spec.upload_bytes_per_s:.0f}",
        ENV_OBJECT_KEEP_LAST: str(spec.object_keep_last),
    }


# ---------------------------------------------------------------- writing


def write_json(path: Path, record: object) -> None:
    """Publish a record: temporary name in the same folder, flush, fsync, rename, fsync of the folder."""
    write_bytes(path, render_json(record))


def write_bytes(path: Path, data: bytes) -> None:
    """Publish bytes under `path`; a reader sees the old content or the new, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_dir(path.parent)


def fsync_dir(path: Path) -> None:
    """Make the names in a folder durable (fsync of a file does not)."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def render_json(record: object) -> bytes:
    """A record as JSON bytes, keys as in the dataclass."""
    return json.dumps(_plain(record), separators=(",", ":"), allow_nan=False).encode()


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float) and (not math.isfinite(value)):
        return None  # JSON has no NaN; a diverged loss reads as "no number"
    return value


# ---------------------------------------------------------------- reading

T = TypeVar("T")


def parse(kind: type[T], data: bytes) -> T:
    """A record of type `kind` from the bytes of a file of any origin.

    Unknown keys are ignored (a newer writer may add some); missing keys without a default, wrong types, a version
    other than ours and anything that is not JSON raise `ContractError`.
    """
    if len(data) > MAX_JSON_BYTES:
        raise ContractError(f"{kind.__name__}: {len(data)} bytes, more than {MAX_JSON_BYTES}")
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ContractError(f"{kind.__name__}: not JSON: {error}") from None
    record = _build(kind, raw, kind.__name__)
    version = getattr(record, "version", CONTRACT_VERSION)
    if version != CONTRACT_VERSION:
        raise ContractError(f"{kind.__name__}: version {version}, this release reads {CONTRACT_VERSION}")
    _check(record)
    return typing.cast("T", record)


def _check(record: object) -> None:
    if isinstance(record, Manifest):
        for file in record.files:
            parts = Path(file.path).parts
            if not parts or file.path.startswith("/") or ".." in parts or "\0" in file.path:
                raise ContractError(f"Manifest: path {file.path!r} leaves the checkpoint")
            if file.size_bytes < 0 or not re.fullmatch(r"[0-9a-f]{32}", file.xxh3_128):
                raise ContractError(f"Manifest: size or checksum of {file.path!r} is not one")
    if isinstance(record, Progress) and record.phase not in PHASES:
        raise ContractError(f"Progress: phase {record.phase!r} is none of {', '.join(PHASES)}")


_HINTS: dict[type, dict[str, Any]] = {}


def _build(kind: Any, raw: Any, where: str) -> Any:
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _build_record(kind, raw, where)
    origin = typing.get_origin(kind)
    if origin in (types.UnionType, typing.Union):
        options = typing.get_args(kind)
        if raw is None and type(None) in options:
            return None
        return _build(next(o for o in options if o is not type(None)), raw, where)
    if origin is tuple:
        if not isinstance(raw, list):
            raise ContractError(f"{where}: a list is expected")
        item = typing.get_args(kind)[0]
        return tuple(_build(item, value, f"{where}[{i}]") for i, value in enumerate(raw))
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(raw, dict):
            raise ContractError(f"{where}: an object is expected")
        item = typing.get_args(kind)[1]
        return {key: _build(item, value, f"{where}.{key}") for key, value in raw.items()}
    return _build_scalar(kind, raw, where)


def _build_record(kind: type, raw: Any, where: str) -> Any:
    if not isinstance(raw, dict):
        raise ContractError(f"{where}: an object is expected")
    hints = _HINTS.get(kind)
    if hints is None:
        hints = _HINTS[kind] = typing.get_type_hints(kind)
    values = {}
    for item in dataclasses.fields(kind):
        if item.name in raw:
            values[item.name] = _build(hints[item.name], raw[item.name], f"{where}.{item.name}")
        elif item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING:
            raise ContractError(f"{where}: {item.name} is missing")
    return kind(**values)


def _build_scalar(kind: Any, raw: Any, where: str) -> Any:
    if kind is float and type(raw) in (int, float):
        try:
            number = float(raw)
        except OverflowError:  # JSON's whole numbers have no bound
            raise ContractError(f"{where}: not a finite number") from None
        if not math.isfinite(number):
            raise ContractError(f"{where}: not a finite number")
        return number
    if kind is int and type(raw) is int and abs(raw) < 2**63:
        return raw
    if kind is bool and type(raw) is bool:
        return raw
    if kind is str and type(raw) is str:
        return raw
    raise ContractError(f"{where}: {kind.__name__} is expected, not {type(raw).__name__}")
