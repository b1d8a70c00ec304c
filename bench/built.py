"""A large cluster as built values: what a daemon of 2,048 nodes and 20 runs would read and remember."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from slurm.parse import parse_nodes
from slurm.types import JobRecord, JobState, NodeRecord
from supervisor.model import (
    Attempt,
    AttemptState,
    Checkpoint,
    CheckpointState,
    CheckpointView,
    Fact,
    Fresh,
    NodeMemory,
    NodesSpec,
    Plan,
    Run,
    RunSpec,
    RunView,
    Seen,
    Snapshot,
)
from supervisor.store import Store
from trainer.contract import LaunchReport, NodeBeat, Progress

NOW = datetime(2026, 1, 1, tzinfo=UTC)
NODES = 2048
RUNS = 20
NODES_PER_RUN = 100
CHECKPOINTS_PER_RUN = 5
OLD_ATTEMPTS_PER_RUN = 20

# One line as Slurm 22.05 prints it.
_NODE_LINE = (
    "NodeName={name} Arch=x86_64 CoresPerSocket=64  CPUAlloc={alloc} CPUEfctv=128 CPUTot=128 CPULoad=1.37 "
    "AvailableFeatures=(null) ActiveFeatures=(null) Gres=gpu:8 NodeAddr=10.0.{high}.{low} NodeHostName={name} "
    "Port=6818 Version=22.05.8 OS=Linux 6.1.0-18-amd64 #1 SMP PREEMPT_DYNAMIC @0  RealMemory=2000000 AllocMem=0 "
    "FreeMem=1915600 Sockets=2 Boards=1 State={state} ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A "
    "Partitions=main,other  BootTime=2025-12-01T03:28:48 SlurmdStartTime=2025-12-01T03:57:22 "
    "LastBusyTime=2025-12-31T23:57:50 CfgTRES=cpu=128,mem=2000000M,billing=128,gres/gpu=8 AllocTRES= CapWatts=n/a "
    "CurrentWatts=0 AveWatts=0 ExtSensorsJoules=n/s ExtSensorsWatts=0 ExtSensorsTemp=n/s"
)


def node_name(number: int) -> str:
    return f"n{number:04d}"


def render_nodes(count: int = NODES) -> str:
    """What `scontrol -o show node` would print; some nodes are drained, with a reason."""
    return "".join(_render_node(number) for number in range(count))


def _render_node(number: int) -> str:
    is_used = number < RUNS * NODES_PER_RUN
    is_drained = number % 97 == 96 and not is_used
    state = "ALLOCATED" if is_used else "IDLE+DRAIN" if is_drained else "IDLE"
    line = _NODE_LINE.format(
        name=node_name(number), alloc=128 if is_used else 0, state=state, high=number // 250, low=number % 250 + 1
    )
    reason = " Reason=gpu 3: uncorrectable memory error [root@2025-12-30T11:22:33]" if is_drained else ""
    return f"{line}{reason}\n"


def build_nodes() -> dict[str, NodeRecord]:
    return {record.name: record for record in parse_nodes(render_nodes()).nodes}


def fill_ledger(store: Store) -> None:
    """Twenty runs in their twenty-first attempt, their checkpoints, and what is remembered of every node."""
    facts: list[Fact] = []
    for number in range(RUNS):
        run = store.add_run(_build_run(number), NOW - timedelta(days=30)).name
        facts += [Fact(record=_build_attempt(run, number, n), reason="built") for n in range(1, _attempts() + 1)]
        facts += [Fact(record=_build_checkpoint(run, n), reason="built") for n in range(CHECKPOINTS_PER_RUN)]
    facts += [
        Fact(record=NodeMemory(node=node_name(n), checked_at=NOW - timedelta(minutes=3)), reason="built")
        for n in range(NODES)
    ]
    store.commit(Plan(facts=tuple(facts)), NOW)


def build_snapshot(nodes: dict[str, NodeRecord]) -> Snapshot:
    """Everything is well: every job runs, every launcher beats, every run steps."""
    jobs = {number: _build_job(number) for number in range(RUNS)}
    return Snapshot(
        jobs=Fresh(value={job.job_id: job for job in jobs.values()}, asked_at=NOW),
        nodes=Fresh(value=nodes, asked_at=NOW),
        runs={_name(number): Fresh(value=_build_view(number), asked_at=NOW) for number in range(RUNS)},
    )


# ---------------------------------------------------------------- parts


def _name(number: int) -> str:
    return f"run{number:02d}"


def _attempts() -> int:
    return OLD_ATTEMPTS_PER_RUN + 1


def _job_id(number: int, attempt: int) -> int:
    return 1000 * (number + 1) + attempt


def _nodes_of(number: int) -> tuple[str, ...]:
    return tuple(node_name(n) for n in range(number * NODES_PER_RUN, (number + 1) * NODES_PER_RUN))


def _build_run(number: int) -> Run:
    nodes = NodesSpec(min=NODES_PER_RUN // 2, max=NODES_PER_RUN)
    return Run(spec=RunSpec(name=_name(number), command=("train.py",), root=Path("/shared/runs"), nodes=nodes))


def _build_attempt(run: str, number: int, attempt: int) -> Attempt:
    began = NOW - timedelta(days=_attempts() - attempt + 1)
    is_over = attempt < _attempts()
    return Attempt(
        run=run,
        number=attempt,
        token=f"sup:{run}:{attempt}",
        state=AttemptState.OVER if is_over else AttemptState.RUNNING,
        nodes_wanted=NODES_PER_RUN,
        job_id=_job_id(number, attempt),
        nodes=_nodes_of(number),
        planned_at=began,
        submitted_at=began,
        started_at=began,
        stepped_at=began,
        over_at=began + timedelta(hours=23) if is_over else None,
        is_job_gone=is_over,
        last_step=attempt * 1000,
        phase="step",
        progress_at=NOW,
    )


def _build_checkpoint(run: str, age: int) -> Checkpoint:
    step = _attempts() * 1000 - age * 100
    return Checkpoint(
        run=run,
        step=step,
        attempt=_attempts(),
        state=CheckpointState.VERIFIED,
        path=f"/shared/runs/{run}/checkpoints/step-{step}.a{_attempts()}",
        size_bytes=10**12,
        files=NODES_PER_RUN * 8,
        samples=step * 4096,
        first_seen_at=NOW - timedelta(hours=age + 1),
        verified_at=NOW - timedelta(hours=age + 1),
        verified_by="nodes",
    )


def _build_job(number: int) -> JobRecord:
    run = _name(number)
    return JobRecord(
        job_id=_job_id(number, _attempts()),
        state=JobState.RUNNING,
        raw_state="RUNNING",
        name=run,
        comment=f"sup:{run}:{_attempts()}",
        nodes=_nodes_of(number),
        submit_at=NOW - timedelta(days=1),
    )


def _build_view(number: int) -> RunView:
    run, attempt = _name(number), _attempts()
    beats = {node: NodeBeat(state="running", age_s=0.3) for node in _nodes_of(number)}
    known = [_build_checkpoint(run, age) for age in range(CHECKPOINTS_PER_RUN)]
    return RunView(
        attempt=attempt,
        progress=Seen(
            value=Progress(attempt=attempt, step=attempt * 1000, phase="step", time=0.0, limit_s=60.0), unchanged_s=0.4
        ),
        launch=Seen(
            value=LaunchReport(
                attempt=attempt,
                job_id=_job_id(number, attempt),
                seq=1,
                time=0.0,
                host=_nodes_of(number)[0],
                phase="running",
                nodes=beats,
            ),
            unchanged_s=0.4,
        ),
        checkpoints=tuple(
            CheckpointView(
                step=c.step,
                attempt=c.attempt,
                path=c.path,
                size_bytes=c.size_bytes,
                files=c.files,
                samples=c.samples,
                is_complete=True,
                is_verified_by_nodes=True,
            )
            for c in known
        ),
    )
