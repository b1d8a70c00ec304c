"""What is held of a node: sweeps over time, silence of a running attempt's nodes, drains that others lifted. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime

from slurm.types import NodeAvailability, NodeBase, NodeRecord
from supervisor.core.attempts import Sight, Silence
from supervisor.model import (
    AttemptState,
    DrainPolicy,
    Fresh,
    HealthSpec,
    NodeChecks,
    NodeMemory,
    PortProbe,
    Snapshot,
    Verdict,
)
from trainer.contract import LaunchReport

# ---------------------------------------------------------------- sweeps


def fold_checks(before: NodeMemory, checks: NodeChecks, policy: DrainPolicy, *, is_mass: bool) -> NodeMemory:
    """A node's memory after one sweep.

    A sweep that the node did not answer is unknown and changes nothing. A node is BROKEN after `sweeps_to_drain`
    failed sweeps in a row; while many nodes fail at once (`is_mass`) the check itself is suspected and nobody is.
    """
    if not checks.is_complete:
        return before
    failing = tuple(sorted(r.check for r in checks.results if r.ok is False))
    if not failing:
        if before.verdict is Verdict.HEALTHY and not before.failing and before.failed_sweeps == 0:
            return before
        healed = replace(before, failing=(), failed_sweeps=0, checked_at=checks.at)
        if before.is_drained_by_us:
            return healed  # a person returns it to service
        return replace(healed, verdict=Verdict.HEALTHY, reason="", since_at=checks.at)
    failed = before.failed_sweeps + 1
    is_broken = before.verdict is Verdict.BROKEN or (failed >= policy.sweeps_to_drain and not is_mass)
    verdict = Verdict.BROKEN if is_broken else Verdict.SUSPECT
    return replace(
        before,
        verdict=verdict,
        reason=before.reason if before.verdict is Verdict.BROKEN else render_failing(checks),
        since_at=before.since_at if before.verdict is verdict else checks.at,
        failing=failing,
        failed_sweeps=failed,
        checked_at=checks.at,
    )


def render_failing(checks: NodeChecks) -> str:
    """The failed checks of one sweep in one line: `disk: 1 % free of /scratch (limit 5 %)`."""
    return "; ".join(f"{r.check}: {r.detail}" for r in checks.results if r.ok is False)


def is_mass_failure(sweeps: Sequence[NodeChecks], limit: int) -> bool:
    """True when one and the same check fails on more nodes at once than may be drained: suspect the check."""
    counts: dict[str, int] = {}
    for checks in sweeps:
        for name in {r.check for r in checks.results if r.ok is False}:
            counts[name] = counts.get(name, 0) + 1
    return any(count > limit for count in counts.values())


def condemn(before: NodeMemory, reason: str, now: datetime) -> NodeMemory:
    """The node's memory once hard evidence names it."""
    if before.verdict is Verdict.BROKEN:
        return before
    return replace(before, verdict=Verdict.BROKEN, reason=reason, since_at=now)


# ---------------------------------------------------------------- silence


def suspects(sight: Sight, nodes: Mapping[str, NodeRecord] | None) -> frozenset[str]:
    """Nodes of a running attempt whose slurmd port deserves a close look now."""
    attempt = sight.attempt
    if attempt.state is not AttemptState.RUNNING or not attempt.nodes:
        return frozenset()
    early_s = sight.run.spec.health.silent_after_s / 2
    by_slurm = {n for n in attempt.nodes if nodes and n in nodes and not nodes[n].is_responding}
    launch = sight.view.launch if sight.view is not None else None
    if launch is None:
        return frozenset(by_slurm)
    if launch.unchanged_s > early_s + 1:  # the launcher itself is silent: look at all of its nodes
        return frozenset(attempt.nodes)
    quiet = {n for n, beat in launch.value.nodes.items() if beat.state not in _NOT_TRAINING and beat.age_s > early_s}
    return frozenset(quiet | by_slurm)


def judge_silence(sight: Sight, ports: Mapping[str, PortProbe]) -> tuple[Silence, ...]:
    """Nodes of a running attempt that are gone: no heartbeat, and slurmd's port silent too.

    One sign alone is no proof: a slow file system delays the launcher's report, a restart of slurmd closes the port.
    Heartbeats that stay away much longer while the port answers mean a frozen node, if only a minority is affected.
    """
    attempt, health = sight.attempt, sight.run.spec.health
    launch = sight.view.launch if sight.view is not None else None
    if attempt.state is not AttemptState.RUNNING or launch is None:
        return ()
    ages = {n: _beat_age(n, launch.value, launch.unchanged_s) for n in attempt.nodes}
    found = [_judge_node(n, age, ports.get(n), health) for n, age in ages.items()]
    gone = tuple(s for s in found if s is not None)
    if gone:
        return gone
    frozen = tuple(
        Silence(node=n, evidence=f"{n}: no heartbeat for {age:.1f} s though its slurmd port accepts connections")
        for n, age in ages.items()
        if age > health.frozen_after_s and n in ports and ports[n].silent_s == 0
    )
    launcher_is_silent = launch.unchanged_s > health.frozen_after_s
    if launcher_is_silent:  # then every age grows; only the batch host can be told
        frozen = tuple(s for s in frozen if s.node == launch.value.host)
    return frozen if len(frozen) * 2 < max(2, len(attempt.nodes) + 1) else ()


_NOT_TRAINING = frozenset({"ended", "spare"})  # their loss does not end the training


def _beat_age(node: str, launch: LaunchReport, unchanged_s: float) -> float:
    beat = launch.nodes.get(node)
    if beat is None or beat.state in _NOT_TRAINING:
        return 0.0
    stale_s = max(0.0, unchanged_s - 1.5)  # the report is rewritten once a second
    return (beat.age_s + stale_s) if node != launch.host else max(beat.age_s, stale_s)


def _judge_node(node: str, age_s: float, port: PortProbe | None, health: HealthSpec) -> Silence | None:
    if port is None or age_s < health.silent_after_s or port.failures < 2 or port.silent_s < health.confirm_s:
        return None
    return Silence(
        node=node,
        evidence=f"{node}: no heartbeat for {age_s:.1f} s, slurmd at {port.address} silent for {port.silent_s:.1f} s",
    )


def judge_slurm_failure(sight: Sight, snapshot: Snapshot) -> tuple[Silence, ...]:
    """Nodes of a running attempt that Slurm has turned DOWN since it started."""
    attempt = sight.attempt
    if not isinstance(snapshot.nodes, Fresh) or attempt.state is not AttemptState.RUNNING or attempt.started_at is None:
        return ()
    if snapshot.nodes.asked_at < attempt.started_at:
        return ()
    down = [r for n in attempt.nodes if (r := snapshot.nodes.value.get(n)) is not None and r.base is NodeBase.DOWN]
    return tuple(Silence(node=r.name, evidence=f"{r.name}: Slurm says {r.raw_state} ({r.reason})") for r in down)


# ---------------------------------------------------------------- use


def is_fit(record: NodeRecord, memory: NodeMemory | None) -> bool:
    """True when a job of ours may run on the node, now or once others leave it."""
    if memory is not None and memory.verdict is Verdict.BROKEN:
        return False
    if record.is_drain_set or not record.is_responding:
        return False
    is_only_completing = record.flags <= {"COMPLETING"} and record.base in _ALIVE
    return record.availability is NodeAvailability.USABLE or is_only_completing


_ALIVE = frozenset({NodeBase.IDLE, NodeBase.ALLOCATED, NodeBase.MIXED})


def judge_drift(memory: NodeMemory, record: NodeRecord, asked_at: datetime) -> NodeMemory | None:
    """The memory after someone else touched our drain; None while it stands as we set it."""
    if not memory.is_drained_by_us or memory.drained_at is None or asked_at <= memory.drained_at:
        return None
    if not record.is_drain_set:
        return NodeMemory(node=memory.node, since_at=asked_at, checked_at=memory.checked_at)
    if record.reason != memory.drain_reason:
        return replace(memory, is_drained_by_us=False)
    return None
