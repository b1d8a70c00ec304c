"""A Slurm cluster and a clock in memory, for rules and simulations. The contract suite holds FakeSlurm to the real one.

Nothing here draws or sleeps: time moves when the test moves the clock, and everything that Slurm would have done by
then happens, in its order, at the next look.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import partial
from pathlib import Path

from slurm.commands import claim_argv, drain_argv, sbatch_argv, undrain_argv
from slurm.errors import SlurmRefused, SlurmUnavailable, SubmitUnconfirmed
from slurm.types import (
    ClusterFacts,
    Identity,
    JobDescription,
    JobFlag,
    JobListing,
    JobRecord,
    JobState,
    NodeBase,
    NodeListing,
    NodeRecord,
    SubmitRequest,
    Submitted,
)
from slurm.values import parse_duration_s

EPOCH = datetime(2026, 3, 2, 8, 0, 0, tzinfo=UTC)
_PING = timedelta(seconds=1)
_NO_LIMIT_S = 365 * 86400  # what Slurm shows as the end of a job without a time limit lies a year ahead
_FOREVER = datetime.max.replace(tzinfo=UTC)


class FakeClock:
    """A clock that stands still until it is moved."""

    def __init__(self, now: datetime = EPOCH) -> None:
        self._now = now

    def now(self) -> datetime:
        return self._now

    def advance(self, by: timedelta | float) -> datetime:
        """Move on by a duration or a number of seconds."""
        self._now += by if isinstance(by, timedelta) else timedelta(seconds=by)
        return self._now


class Fault(StrEnum):
    """What goes wrong with one call."""

    NONE = "none"
    UNAVAILABLE = "unavailable"  # the controller could not be reached; certainly nothing was done
    LOST_REPLY = "lost_reply"  # done, but the caller is told that there was no answer
    LOST_REQUEST = "lost_request"  # not done, and the caller can't know
    LATE = "late"  # like lost_reply, but a submission is accepted only `late_s` after the call
    REFUSED = "refused"


VERBS = (
    "fetch_cluster",
    "fetch_jobs",
    "fetch_nodes",
    "fetch_ended_jobs",
    "find_by_token",
    "submit",
    "cancel",
    "claim",
    "describe_job",
    "fetch_script",
    "drain",
    "undrain",
)


@dataclass(slots=True)
class _Job:
    record: JobRecord
    request: SubmitRequest
    eligible_at: datetime
    completing: set[str] = field(default_factory=set)  # nodes that have not cleaned up yet
    allocated: tuple[str, ...] = ()
    uid: int = 0
    is_requeue: bool = False

    @property
    def is_over(self) -> bool:
        return self.record.end_at is not None


@dataclass(slots=True)
class _Node:
    name: str
    is_down: bool = False
    silent_at: datetime | None = None  # when its power was cut
    is_noticed: bool = False  # Slurm says NOT_RESPONDING
    pinged_at: datetime | None = None  # when a node that answers loses NOT_RESPONDING
    is_drained: bool = False
    reason: str = ""
    reason_user: str = ""
    reason_at: datetime | None = None


class FakeSlurm:
    """`SlurmClient` in memory.

    Faults: `plan("submit", Fault.LOST_REPLY, Fault.NONE)` says what the next calls of a verb do; `outage` makes all of
    them unavailable while it is set. Truth, which never fails: `jobs()`, `node()`, `request_of()`. `calls` lists the
    verbs called. `on_start` is called with each job that starts.
    """

    def __init__(
        self,
        *,
        clock: FakeClock | None = None,
        nodes: int | Sequence[str] = 4,
        partitions: Sequence[str] = ("main",),
        has_accounting: bool = False,
        user: str = "root",
        start_delay_s: float = 1.0,
        completing_s: float = 1.0,
        slurmd_timeout_s: int = 10,
        min_job_age_s: int = 300,
        message_timeout_s: int = 10,
        late_s: float = 5.0,
        version: str = "22.05.8",
    ) -> None:
        self.clock = clock or FakeClock()
        self.outage = False
        self.calls: list[str] = []
        self.on_start: Callable[[JobRecord], None] | None = None
        self.next_job_id = 1
        self.user = user
        self.has_accounting = has_accounting
        self.partitions = tuple(partitions)
        self.version = version
        self.start_delay = timedelta(seconds=start_delay_s)
        self.completing_time = timedelta(seconds=completing_s)
        self.slurmd_timeout_s = slurmd_timeout_s
        self.min_job_age_s = min_job_age_s
        self.message_timeout_s = message_timeout_s
        self.late = timedelta(seconds=late_s)
        names = [f"n{i}" for i in range(1, nodes + 1)] if isinstance(nodes, int) else nodes
        self._nodes = {name: _Node(name) for name in names}
        self._jobs: dict[int, _Job] = {}  # all ever, by id
        self._active: list[_Job] = []  # not over, or still completing; in the order of their ids
        self._late: list[tuple[datetime, SubmitRequest]] = []
        self._faults: dict[str, deque[Fault]] = {verb: deque() for verb in VERBS}
        self._at = self.clock.now()

    # ------------------------------------------------------------ for tests

    def plan(self, verb: str, *faults: Fault | str) -> None:
        """What the next calls of `verb` do, one fault each, in order."""
        self._faults[verb].extend(Fault(fault) for fault in faults)

    def advance(self, by: timedelta | float) -> datetime:
        """Move the clock, and let everything happen that is due by then."""
        now = self.clock.advance(by)
        self._settle()
        return now

    def jobs(self, token: str | None = None) -> tuple[JobRecord, ...]:
        """The truth: every job ever accepted (with this token), forgotten ones too."""
        self._settle()
        return tuple(job.record for job in self._jobs.values() if token is None or job.record.comment == token)

    def add_job(self, request: SubmitRequest, *, user: str, uid: int = 0, is_requeue: bool = True) -> int:
        """Someone submits a job of their own, by hand; its comment is the request's token (which may be empty)."""
        self._settle()
        job_id = self._accept(request)
        job = self._jobs[job_id]
        job.record, job.uid, job.is_requeue = replace(job.record, user=user), uid, is_requeue
        self._settle()
        return job_id

    def job(self, job_id: int) -> JobRecord:
        """The truth about one job."""
        self._settle()
        return self._jobs[job_id].record

    def node(self, name: str) -> NodeRecord:
        """The truth about one node as the controller sees it."""
        self._settle()
        return self._node_record(self._nodes[name])

    def request_of(self, job_id: int) -> SubmitRequest:
        """What the job was submitted with."""
        return self._jobs[job_id].request

    def end_job(
        self, job_id: int, state: JobState = JobState.COMPLETED, exit_code: int = 0, exit_signal: int = 0
    ) -> None:
        """The job's batch script ends now."""
        self._settle()
        job = self._jobs[job_id]
        if not job.is_over:
            self._end(job, state, exit_code, exit_signal)
        self._settle()

    def power_cut(self, node: str) -> None:
        """The node is silent from now on; Slurm notices later, and the batch script is gone if it ran there."""
        self._settle()
        self._nodes[node].silent_at = self._at

    def revive(self, node: str) -> None:
        """The node answers again: it leaves DOWN (ReturnToService=2) and keeps a drain."""
        self._settle()
        state = self._nodes[node]
        if state.is_down and not state.is_drained:
            state.reason, state.reason_user, state.reason_at = "", "", None
        state.is_down, state.silent_at, state.is_noticed = False, None, False
        for job in self._active:
            job.completing.discard(node)
        self._settle()

    def set_drain(self, node: str, reason: str, *, user: str) -> None:
        """Someone else drains the node."""
        self._settle()
        self._drain(node, reason, user)

    # ------------------------------------------------------------ SlurmClient

    def fetch_cluster(self) -> ClusterFacts:
        self._call("fetch_cluster")
        return ClusterFacts(
            cluster="fake",
            version=self.version,
            has_accounting=self.has_accounting,
            partitions=self.partitions,
            slurmd_timeout_s=self.slurmd_timeout_s,
            min_job_age_s=self.min_job_age_s,
            message_timeout_s=self.message_timeout_s,
        )

    def fetch_jobs(self) -> JobListing:
        self._call("fetch_jobs")
        return JobListing(jobs=self._remembered())

    def fetch_nodes(self) -> NodeListing:
        self._call("fetch_nodes")
        return NodeListing(nodes=tuple(self._node_record(node) for node in self._nodes.values()))

    def fetch_ended_jobs(self, *, since: datetime) -> JobListing:
        self._call("fetch_ended_jobs")
        if not self.has_accounting:
            raise SlurmRefused("no accounting", stderr="Slurm accounting storage is disabled")
        return JobListing(jobs=self._accounted(since))

    def find_by_token(self, token: str, *, since: datetime) -> tuple[JobRecord, ...]:
        self._call("find_by_token")
        known = {job.job_id: job for job in self._accounted(since)} if self.has_accounting else {}
        known |= {job.job_id: job for job in self._remembered()}
        return tuple(known[job_id] for job_id in sorted(known) if known[job_id].comment == token)

    def submit(self, request: SubmitRequest) -> Submitted:
        argv = sbatch_argv(request)
        fault = self._call("submit", silent=(Fault.LOST_REPLY, Fault.LOST_REQUEST, Fault.LATE))
        if fault is Fault.LOST_REQUEST:
            raise SubmitUnconfirmed("no answer", argv=argv)
        if fault is Fault.LATE:
            self._late.append((self._at + self.late, request))
            raise SubmitUnconfirmed("no answer", argv=argv)
        job_id = self._accept(request)
        self._settle()
        if fault is Fault.LOST_REPLY:
            raise SubmitUnconfirmed("no answer", argv=argv)
        return Submitted(job_id=job_id)

    def cancel(self, job_id: int, identity: Identity | None = None) -> None:
        with self._change("cancel") as is_done:
            job = self._jobs.get(job_id)
            if identity is not None and job is not None and identity.uid not in (0, job.uid):
                raise SlurmRefused("Access/permission denied")
            if is_done and job is not None and not job.is_over:
                self._end(job, JobState.CANCELLED, 0, 15 if job.record.start_at else 0)

    def claim(self, job_id: int, token: str, identity: Identity | None = None, *, may_requeue: bool = False) -> None:
        claim_argv(job_id, token)
        with self._change("claim") as is_done:
            job = self._find(job_id)
            if identity is not None and identity.uid not in (0, job.uid):
                raise SlurmRefused("Invalid user id")
            if job.is_over:
                raise SlurmRefused("Job has already finished")
            if is_done:
                job.record, job.is_requeue = replace(job.record, comment=token), job.is_requeue and may_requeue

    def describe_job(self, job_id: int) -> JobDescription:
        self._call("describe_job")
        return self._describe(self._find(job_id))

    def fetch_script(self, job_id: int) -> str:
        self._call("fetch_script")
        return self._find(job_id).request.script.read_text()

    def drain(self, node: str, reason: str) -> None:
        drain_argv(node, reason)
        with self._change("drain") as is_done:
            self._require(node)
            if is_done:
                self._drain(node, reason, self.user)

    def undrain(self, node: str) -> None:
        undrain_argv(node)
        with self._change("undrain") as is_done:
            self._require(node)
            state = self._nodes[node]
            if is_done and state.is_drained:
                state.is_drained = False
                state.is_noticed, state.pinged_at = True, self._at + _PING
                if not state.is_down:
                    state.reason, state.reason_user, state.reason_at = "", "", None

    # ------------------------------------------------------------ faults

    def _call(self, verb: str, *, silent: Iterable[Fault] = ()) -> Fault:
        self.calls.append(verb)
        self._settle()
        planned = self._faults[verb]
        fault = planned.popleft() if planned else Fault.NONE
        if fault is Fault.REFUSED:
            raise SlurmRefused("refused by plan")
        if self.outage or (fault is not Fault.NONE and fault not in silent):
            raise SlurmUnavailable("no answer")
        return fault

    @contextmanager
    def _change(self, verb: str) -> Iterator[bool]:
        """Gives whether the request arrives; raises afterwards when its answer does not."""
        fault = self._call(verb, silent=(Fault.LOST_REPLY, Fault.LOST_REQUEST))
        yield fault is not Fault.LOST_REQUEST
        self._settle()
        if fault is not Fault.NONE:
            raise SlurmUnavailable("no answer")

    def _require(self, node: str) -> None:
        if node not in self._nodes:
            raise SlurmRefused("Invalid node name specified")

    # ------------------------------------------------------------ what the controller knows

    def _remembered(self) -> tuple[JobRecord, ...]:
        forgotten = self._at - timedelta(seconds=self.min_job_age_s)
        return tuple(
            self._as_shown(job)
            for job in self._jobs.values()
            if job.record.end_at is None or job.completing or job.record.end_at > forgotten
        )

    def _as_shown(self, job: _Job) -> JobRecord:
        """As squeue shows it: COMPLETING in place of the state, and why a job waits."""
        if job.completing:
            flags = frozenset({JobFlag.COMPLETING})
            nodes = tuple(name for name in job.record.nodes if name in job.completing)
            return replace(job.record, state=None, raw_state="COMPLETING", flags=flags, nodes=nodes)
        if job.record.state is JobState.PENDING:
            return replace(job.record, reason=self._why_waiting(job))
        return job.record

    def _why_waiting(self, job: _Job) -> str:
        if (job.request.nodes or 1) > len(self._nodes):
            return "PartitionNodeLimit"
        return "Dependency" if self._is_held_by_dependency(job) else "Resources"

    def _find(self, job_id: int) -> _Job:
        job = self._jobs.get(job_id)
        if job is None or job.record.job_id not in {record.job_id for record in self._remembered()}:
            raise SlurmRefused("Invalid job id specified")
        return job

    def _describe(self, job: _Job) -> JobDescription:
        record, request = job.record, job.request
        output = str(request.output or Path(request.chdir or "/") / f"slurm-{record.job_id}.out")
        return JobDescription(
            job_id=record.job_id,
            name=record.name,
            user=record.user,
            uid=job.uid,
            state=record.state,
            raw_state=record.raw_state,
            partition=record.partition,
            account=request.account or "",
            qos=request.qos or "",
            time_limit=request.time_limit or "UNLIMITED",
            nodes=request.nodes or 1,
            node_list=",".join(record.nodes),
            batch_host=record.nodes[0] if record.nodes else "",
            exclude=",".join(request.exclude),
            gpus_per_node=request.gpus_per_node,
            work_dir=str(request.chdir or request.submit_dir or "/"),
            command=" ".join([str(request.script), *request.arguments]),
            stdout=output,
            stderr=output,
            comment=record.comment,
            is_requeue=job.is_requeue,
        )

    def _accounted(self, since: datetime) -> tuple[JobRecord, ...]:
        return tuple(
            job.record
            for job in self._jobs.values()
            if job.record.submit_at is not None and job.record.submit_at >= since.replace(microsecond=0)
        )

    def _node_record(self, node: _Node) -> NodeRecord:
        flags = {
            "DRAIN": node.is_drained,
            "NOT_RESPONDING": node.is_noticed,
            "COMPLETING": any(node.name in job.completing for job in self._active),
        }
        shown = [flag for flag, is_set in flags.items() if is_set]
        base = NodeBase.IDLE
        if any(not job.is_over and node.name in job.allocated for job in self._active):
            base = NodeBase.MIXED
        if node.is_down:
            base = NodeBase.DOWN
        return NodeRecord(
            name=node.name,
            base=base,
            flags=frozenset(shown),
            raw_state="+".join([base.value, *shown]),
            address="127.0.0.1",
            host_name=node.name,
            port=6818,
            partitions=self.partitions,
            reason=node.reason,
            reason_user=node.reason_user,
            reason_at=node.reason_at.strftime("%Y-%m-%dT%H:%M:%S") if node.reason_at else "",
            cpus=8,
            memory_mb=8000,
            version=self.version,
        )

    # ------------------------------------------------------------ what happens

    def _accept(self, request: SubmitRequest) -> int:
        for node in request.exclude:
            self._require(node)
        if request.partition is not None and request.partition not in self.partitions:
            raise SlurmRefused("Invalid partition name specified")
        job_id = self.next_job_id
        self.next_job_id += 1
        record = JobRecord(
            job_id=job_id,
            state=JobState.PENDING,
            raw_state="PENDING",
            name=request.job_name,
            user=self.user,
            partition=request.partition or self.partitions[0],
            comment=request.token,
            submit_at=self._at.replace(microsecond=0),
        )
        job = _Job(record, request, eligible_at=self._at + self.start_delay)
        self._jobs[job_id] = job
        self._active.append(job)
        # Larger than the cluster: accepted, and never started. What only the exclusion makes impossible is refused,
        # and yet there is a record of it (seen on 22.05).
        if len(self._nodes) >= (request.nodes or 1) > len(self._nodes.keys() - set(request.exclude)):
            self._end(job, JobState.FAILED, 0, 1)
            raise SlurmRefused("Requested node configuration is not available")
        return job_id

    def _settle(self) -> None:
        """Everything that is due by now, in the order of its time."""
        now = self.clock.now()
        while True:
            due_at, happen = min(self._events(), key=lambda event: event[0], default=(_FOREVER, None))
            if happen is None or due_at > now:
                break
            self._at = max(self._at, due_at)
            happen()
        self._at = max(self._at, now)

    def _events(self) -> Iterable[tuple[datetime, Callable[[], None]]]:
        for late in self._late:
            yield late[0], partial(self._accept_late, late)
        for node in self._nodes.values():
            if node.silent_at is not None and not node.is_down:
                yield self._silent_event(node, node.silent_at)
            elif node.pinged_at is not None:
                yield node.pinged_at, partial(self._ping, node)
        free = set(self._free_nodes())
        for job in self._active:
            if job.completing:
                yield from self._completing_event(job)
            elif not job.is_over and job.record.start_at is None:
                chosen = [name for name in self._nodes if name in free - set(job.request.exclude)]
                if len(chosen) >= (job.request.nodes or 1) and not self._is_held_by_dependency(job):
                    names = tuple(chosen[: job.request.nodes or 1])
                    yield max(self._at, job.eligible_at), partial(self._start, job, names)

    def _silent_event(self, node: _Node, silent_at: datetime) -> tuple[datetime, Callable[[], None]]:
        noticed_at = silent_at + timedelta(seconds=self.slurmd_timeout_s / 2)
        if not node.is_noticed:
            return noticed_at, partial(self._notice, node)
        return silent_at + timedelta(seconds=self.slurmd_timeout_s), partial(self._turn_down, node)

    def _completing_event(self, job: _Job) -> Iterable[tuple[datetime, Callable[[], None]]]:
        assert job.record.end_at is not None
        clean_at = job.record.end_at + self.completing_time
        answering = {name for name in job.completing if self._nodes[name].silent_at is None}
        if answering:
            yield max(self._at, clean_at), partial(self._clean, job, answering)

    def _free_nodes(self) -> list[str]:
        busy = {name for job in self._active for name in (*job.completing, *(() if job.is_over else job.allocated))}
        return [
            node.name
            for node in self._nodes.values()
            if not (node.is_down or node.is_drained or node.is_noticed or node.name in busy)
        ]

    def _is_held_by_dependency(self, job: _Job) -> bool:
        after = [int(number) for number in re.findall(r"afterany:(\d+)", job.request.dependency)]
        waits = any(number in self._jobs and not self._jobs[number].is_over for number in after)
        return waits or self._is_held_by_singleton(job)

    def _is_held_by_singleton(self, job: _Job) -> bool:
        if "singleton" not in job.request.dependency:
            return False
        # A job that is COMPLETING holds nobody back, though its processes may live on a node that is cut off.
        return any(
            other.record.job_id < job.record.job_id
            and not other.is_over
            and (other.record.name, other.record.user) == (job.record.name, job.record.user)
            for other in self._active
        )

    def _accept_late(self, late: tuple[datetime, SubmitRequest]) -> None:
        self._late.remove(late)
        with suppress(SlurmRefused):
            self._accept(late[1])

    def _start(self, job: _Job, names: tuple[str, ...]) -> None:
        job.allocated = names
        limit_s = parse_duration_s(job.request.time_limit or "")
        job.record = replace(
            job.record,
            state=JobState.RUNNING,
            raw_state="RUNNING",
            nodes=names,
            start_at=self._at.replace(microsecond=0),
            limit_at=self._at.replace(microsecond=0) + timedelta(seconds=limit_s or _NO_LIMIT_S),
        )
        if self.on_start is not None:
            self.on_start(job.record)

    def _end(self, job: _Job, state: JobState, exit_code: int, exit_signal: int) -> None:
        end_at = self._at.replace(microsecond=0)
        job.record = replace(
            job.record,
            state=state,
            raw_state=state.value,
            end_at=end_at,
            limit_at=None,
            exit_code=exit_code,
            exit_signal=exit_signal,
        )
        job.completing = {name for name in job.allocated if not self._nodes[name].is_down}
        if not job.completing:
            self._active.remove(job)

    def _clean(self, job: _Job, names: Iterable[str]) -> None:
        job.completing -= set(names)
        if not job.completing:
            self._active.remove(job)

    def _notice(self, node: _Node) -> None:
        node.is_noticed = True

    def _ping(self, node: _Node) -> None:
        node.pinged_at = None
        node.is_noticed = node.silent_at is not None

    def _turn_down(self, node: _Node) -> None:
        node.is_down = True
        if not node.reason:
            node.reason, node.reason_user, node.reason_at = "Not responding", "slurm", self._at
        for job in list(self._active):
            if not job.is_over and node.name in job.allocated:
                self._lose(job, node)
            elif node.name in job.completing:
                self._clean(job, [node.name])

    def _lose(self, job: _Job, node: _Node) -> None:
        """A node of a running job went DOWN. With --no-kill, which our script asks for, the job goes on without it.

        It does so even when the batch script ran there: the job is RUNNING with nothing in it, until someone cancels
        it (seen on 22.05). Only the last node takes the job with it.
        """
        left = tuple(name for name in job.allocated if name != node.name)
        if not left:
            self._end(job, JobState.NODE_FAIL, 0, 0)
        else:
            job.allocated = left
            job.record = replace(job.record, nodes=left)

    def _drain(self, node: str, reason: str, user: str) -> None:
        state = self._nodes[node]
        state.is_drained = True
        state.reason, state.reason_user, state.reason_at = reason, user, self._at
