"""Small builders of built values for the tests of the core: one run `gpt` on nodes n1 to n4, at one instant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from slurm.types import JobRecord, JobState, NodeBase, NodeRecord
from supervisor.core.attempts import fold_attempt
from supervisor.core.reconcile import reconcile
from supervisor.core.sight import Sight, find_sight
from supervisor.model import (
    Attempt,
    AttemptEnd,
    AttemptState,
    Checkpoint,
    CheckpointState,
    CheckpointView,
    Fact,
    Fresh,
    Intent,
    IntentKind,
    IntentState,
    NodeChecks,
    NodeMemory,
    NodesSpec,
    Plan,
    Policy,
    PortProbe,
    Run,
    RunSpec,
    RunState,
    RunView,
    Seen,
    Snapshot,
    Stale,
    Verdict,
    World,
)
from trainer.contract import CheckResult, ExitRecord, LaunchReport, NodeBeat, Progress

NOW = datetime(2026, 11, 30, 3, 0, tzinfo=UTC)
LATER = NOW + timedelta(hours=1)
STALE = Stale(why="no answer", since_at=NOW)
SPEC = RunSpec(name="gpt", command=("train.py",), root=Path("/shared/runs"), nodes=NodesSpec(min=2, max=3))
RUN = Run(spec=SPEC, created_at=NOW - timedelta(days=1))


def ago(seconds: float) -> datetime:
    return NOW - timedelta(seconds=seconds)


def spec(**parts: Any) -> RunSpec:
    """The run file, with some of its tables changed: `spec(nodes={"max": 5})`."""
    changed = {
        key: replace(getattr(SPEC, key), **value) if isinstance(value, dict) else value for key, value in parts.items()
    }
    return replace(SPEC, **changed)


def run(**changes: Any) -> Run:
    return replace(RUN, **changes)


def attempt(number: int = 1, state: AttemptState = AttemptState.RUNNING, **changes: Any) -> Attempt:
    """An attempt in its usual shape for `state`: job 100 + number on n1 and n2, submitted ten minutes ago."""
    one = Attempt(run="gpt", number=number, token=f"sup:gpt:{number}", state=state, nodes_wanted=2, planned_at=ago(610))
    if state is not AttemptState.PLANNED:
        one = replace(one, job_id=100 + number, submitted_at=ago(600))
    if state in (AttemptState.RUNNING, AttemptState.OVER):
        one = replace(one, started_at=ago(590), nodes=("n1", "n2"))
    if state is AttemptState.OVER:
        one = replace(one, over_at=ago(60), end=AttemptEnd.CRASHED, end_detail="exit 1", is_job_gone=True)
    one = replace(one, **changes)
    is_seen = one.job_id is not None and "slurm_submit_at" not in changes
    return replace(one, slurm_submit_at=one.submitted_at, slurm_user="ann") if is_seen else one


def over(number: int = 1, end: AttemptEnd = AttemptEnd.CRASHED, **changes: Any) -> Attempt:
    return attempt(number, AttemptState.OVER, end=end, **changes)


def job(number: int = 1, state: JobState | None = JobState.RUNNING, **changes: Any) -> JobRecord:
    """The job of attempt `number`."""
    one = JobRecord(
        job_id=100 + number,
        state=state,
        raw_state=state.value if state else "",
        name="gpt",
        comment=f"sup:gpt:{number}",
        nodes=("n1", "n2"),
        submit_at=ago(600),
    )
    return replace(one, **changes)


def node(name: str, base: NodeBase = NodeBase.IDLE, *flags: str, **changes: Any) -> NodeRecord:
    return replace(
        NodeRecord(name=name, base=base, flags=frozenset(flags), raw_state="+".join([base.value, *flags])), **changes
    )


def cluster(count: int = 4, *changed: NodeRecord) -> dict[str, NodeRecord]:
    """Nodes n1 to n<count>, all idle, some replaced or added."""
    nodes = {f"n{i}": node(f"n{i}") for i in range(1, count + 1)}
    return nodes | {n.name: n for n in changed}


def broken(name: str, **changes: Any) -> NodeMemory:
    one = NodeMemory(node=name, verdict=Verdict.BROKEN, reason=f"{name}: disk full", since_at=ago(30))
    return replace(one, **changes)


# ---------------------------------------------------------------- run directory


def progress(step: int = 10, phase: str = "step", *, unchanged_s: float = 1.0, **changes: Any) -> Seen[Progress]:
    value = Progress(attempt=1, step=step, phase=phase, time=0.0)
    return Seen(value=replace(value, **changes), unchanged_s=unchanged_s)


def launch(
    ages: Mapping[str, float] | None = None,
    *,
    unchanged_s: float = 0.5,
    host: str = "n1",
    states: Mapping[str, str] | None = None,
    number: int = 1,
    **changes: Any,
) -> Seen[LaunchReport]:
    """The launcher's report with the age of each node's last heartbeat."""
    ages = {"n1": 0.2, "n2": 0.2} if ages is None else ages
    beats = {n: NodeBeat(state=(states or {}).get(n, "running"), age_s=age) for n, age in ages.items()}
    report = LaunchReport(attempt=number, job_id=100 + number, seq=1, time=0.0, host=host, phase="running", nodes=beats)
    return Seen(value=replace(report, **changes), unchanged_s=unchanged_s)


def exit_record(
    code: int, *, number: int = 1, reason: str = "ended", node: str | None = None, **changes: Any
) -> ExitRecord:
    record = ExitRecord(attempt=number, job_id=100 + number, exit_code=code, reason=reason, node=node, time=0.0)
    return replace(record, **changes)


def view(number: int = 1, **parts: Any) -> RunView:
    return RunView(attempt=number, **parts)


def checkpoint_view(step: int, number: int = 1, **changes: Any) -> CheckpointView:
    path = str(SPEC.paths.checkpoint(step, number))
    return replace(CheckpointView(step=step, attempt=number, path=path, size_bytes=10, is_complete=True), **changes)


def checkpoint(
    step: int, number: int = 1, state: CheckpointState = CheckpointState.VERIFIED, **changes: Any
) -> Checkpoint:
    one = Checkpoint(
        run="gpt",
        step=step,
        attempt=number,
        state=state,
        path=str(SPEC.paths.checkpoint(step, number)),
        size_bytes=10,
        first_seen_at=ago(300),
    )
    if state is CheckpointState.VERIFIED:
        one = replace(one, verified_at=NOW, verified_by="head")
    return replace(one, **changes)


# ---------------------------------------------------------------- ports and checks


def port(name: str, *, silent_s: float = 0.0, failures: int | None = None) -> PortProbe:
    failures = (3 if silent_s else 0) if failures is None else failures
    return PortProbe(node=name, address=f"{name}:6818", silent_s=silent_s, failures=failures)


def ports(**silent_s: float) -> dict[str, PortProbe]:
    return {name: port(name, silent_s=s) for name, s in silent_s.items()}


def failed_check(name: str, check: str = "disk", *, at: datetime = NOW) -> NodeChecks:
    return NodeChecks(node=name, at=at, results=(CheckResult(check=check, ok=False, detail="1 % free"),))


def passed_check(name: str, check: str = "disk", *, at: datetime = NOW) -> NodeChecks:
    return NodeChecks(node=name, at=at, results=(CheckResult(check=check, ok=True),))


# ---------------------------------------------------------------- intents


def drain_intent(name: str, state: IntentState, at: datetime = NOW, **changes: Any) -> Intent:
    one = Intent(kind=IntentKind.DRAIN, key=f"drain:{name}", reason="broken", node=name, state=state, settled_at=at)
    return replace(one, **changes)


def submit_intent(number: int = 1, **changes: Any) -> Intent:
    one = Intent(kind=IntentKind.SUBMIT, key=f"submit:gpt:{number}", reason="go", run="gpt", attempt=number)
    return replace(one, **changes)


# ---------------------------------------------------------------- world, snapshot, plan


def world(
    *attempts: Attempt,
    of: Run = RUN,
    checkpoints: Sequence[Checkpoint] = (),
    nodes: Sequence[NodeMemory] = (),
    **parts: Any,
) -> World:
    return World(
        runs=(of,),
        attempts={of.name: attempts},
        checkpoints={of.name: tuple(checkpoints)},
        nodes={m.node: m for m in nodes},
        **parts,
    )


def snapshot(
    *jobs: JobRecord,
    nodes: Mapping[str, NodeRecord] | None = None,
    view: RunView | None = None,
    asked_at: datetime = NOW,
    **parts: Any,
) -> Snapshot:
    """Fresh answers; `view` is what the run directory says."""
    view = RunView(attempt=0) if view is None else view
    whole: dict[str, Any] = {
        "jobs": Fresh(value={j.job_id: j for j in jobs}, asked_at=asked_at),
        "nodes": Fresh(value=cluster() if nodes is None else nodes, asked_at=asked_at),
        "runs": {"gpt": Fresh(value=view, asked_at=asked_at)},
    }
    return Snapshot(**(whole | parts))


def sight(one: Attempt | None = None, *jobs: JobRecord, of: Run = RUN, **parts: Any) -> Sight:
    """What one cycle knows of an attempt; silent nodes are given by `silent` and `failed_by_slurm`."""
    one = one or attempt()
    extra = {key: parts.pop(key) for key in ("silent", "failed_by_slurm") if key in parts}
    found = find_sight(of, one, snapshot(*jobs, **parts), NOW)
    return replace(found, attempt=fold_attempt(found), **extra)


def plan_for(known: World, seen: Snapshot, policy: Policy | None = None, now: datetime = NOW) -> Plan:
    return reconcile(known, seen, policy or Policy(), now)


def intents_of(plan: Plan, kind: IntentKind) -> tuple[Intent, ...]:
    return tuple(i for i in plan.intents if i.kind is kind)


def attempts_in(plan: Plan) -> dict[int, Attempt]:
    """Attempts as the plan writes them, by number."""
    return {f.record.number: f.record for f in plan.facts if isinstance(f.record, Attempt)}


def attempt_in(plan: Plan, number: int = 1) -> Attempt:
    return attempts_in(plan)[number]


def run_in(plan: Plan) -> Run | None:
    return next((f.record for f in plan.facts if isinstance(f.record, Run)), None)


def node_in(plan: Plan, name: str) -> NodeMemory | None:
    return next((f.record for f in plan.facts if isinstance(f.record, NodeMemory) and f.record.node == name), None)


def checkpoints_in(plan: Plan) -> dict[tuple[int, int], Checkpoint]:
    return {f.record.key: f.record for f in plan.facts if isinstance(f.record, Checkpoint)}


def records(facts: Sequence[Fact], kind: type) -> list[Any]:
    return [f.record for f in facts if isinstance(f.record, kind)]


def run_state(plan: Plan) -> RunState | None:
    changed = run_in(plan)
    return changed.state if changed else None
