"""What is held of a node: sweeps over time, silence of a running attempt's nodes, drains that others lifted. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime

from slurm.types import JobFlag, JobRecord, NodeAvailability, NodeBase, NodeRecord
from supervisor.core.attempts import since_suspension_s
from supervisor.core.launches import NOT_TRAINING, REPORT_EVERY_S, needed_nodes
from supervisor.core.sight import Sight, Silence
from supervisor.model import (
    EPOCH,
    Attempt,
    AttemptState,
    DrainPolicy,
    Fresh,
    LivenessSpec,
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
        healed = replace(before, failing=(), failed_sweeps=0, checked_at=checks.at)
        if before.is_drained_by_us:
            return healed  # a person returns it to service
        was_livenessy = before.verdict is Verdict.HEALTHY and before.since_at > EPOCH
        since_at = before.since_at if was_livenessy else checks.at
        return replace(healed, verdict=Verdict.HEALTHY, reason="", since_at=since_at)
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
    failing: dict[str, set[str]] = {}
    for checks in sweeps:
        for result in checks.results:
            if result.ok is False:
                failing.setdefault(result.check, set()).add(checks.node)
    return any(len(nodes) > limit for nodes in failing.values())


def condemn(before: NodeMemory, reason: str, now: datetime) -> NodeMemory:
    """The node's memory once hard evidence names it."""
    if before.verdict is Verdict.BROKEN:
        return before
    return replace(before, verdict=Verdict.BROKEN, reason=reason, since_at=now)


def suspect(before: NodeMemory, reason: str, now: datetime) -> NodeMemory:
    """The node's memory once soft evidence names it; a broken one stays broken."""
    if before.verdict is Verdict.BROKEN:
        return before
    return replace(before, verdict=Verdict.SUSPECT, reason=reason, since_at=now)


# ---------------------------------------------------------------- silence


def suspects(sight: Sight, nodes: Mapping[str, NodeRecord] | None) -> frozenset[str]:
    """Nodes of an attempt whose slurmd port deserves a close look now.

    While the launcher has not reported, or is silent itself, these are all of the job's nodes.
    """
    attempt = sight.attempt
    if attempt.state not in (AttemptState.SUBMITTED, AttemptState.RUNNING) or not attempt.nodes:
        return frozenset()
    if sight.run.script is not None:
        return frozenset(attempt.nodes) if quiet_s(sight) >= sight.run.spec.liveness.timeout_s / 2 else frozenset()
    early_s = sight.run.spec.liveness.suspect_after_s / 2
    launch = sight.view.launch if sight.view is not None else None
    if launch is None or launch.unchanged_s > early_s + REPORT_EVERY_S / 2:
        return frozenset(attempt.nodes)
    by_slurm = {n for n in attempt.nodes if nodes and n in nodes and not nodes[n].is_responding}
    quiet = {n for n, beat in launch.value.nodes.items() if beat.state not in NOT_TRAINING and beat.age_s > early_s}
    return frozenset((quiet | by_slurm) & {*needed_nodes(attempt, launch.value)})


def quiet_s(sight: Sight) -> float:
    """For how long a job without our launcher has shown no sign of life; 0 while none of its files is known."""
    view = sight.view
    ages = [seen.unchanged_s for seen in (view.progress, view.log) if seen is not None] if view is not None else []
    return min(ages, default=0.0)


def choose_controls(
    watched: frozenset[str], attempt: Attempt, nodes: Mapping[str, NodeRecord] | None
) -> frozenset[str]:
    """Nodes to compare with: a port that is silent says something only while another one answers."""
    if not watched or nodes is None:
        return frozenset()
    others = [n for n in attempt.nodes if n not in watched]
    others += sorted(n for n, r in nodes.items() if r.is_responding and n not in watched and n not in others)
    return frozenset(others[:_CONTROLS])


def silent_ports(ports: Mapping[str, PortProbe]) -> frozenset[str]:
    """Watched nodes whose port does not answer now, while some other one does (else nobody is suspected)."""
    if not any(p.failures == 0 for p in ports.values()):
        return frozenset()
    return frozenset(n for n, p in ports.items() if p.failures > 0)


def judge_silence(sight: Sight, ports: Mapping[str, PortProbe]) -> tuple[Silence, ...]:
    """Nodes of an attempt that are gone: no heartbeat, and slurmd's port silent too.

    One sign alone is no proof: a slow file system delays the launcher's report, a restart of slurmd closes the port.
    A silent port counts only while some other node's port answers: else our own network, or the port, is suspected.
    Heartbeats that stay away much longer while the port answers mean a frozen node, if only a minority is affected.
    """
    attempt, liveness = sight.attempt, sight.run.spec.liveness
    launch = sight.view.launch if sight.view is not None else None
    if sight.is_suspended or not any(p.failures == 0 for p in ports.values()):
        return ()
    if sight.run.script is not None:
        return _judge_script(sight, ports)
    if launch is None:
        return _judge_without_launcher(sight, ports)
    if attempt.state is not AttemptState.RUNNING:
        return ()
    # a job that was suspended until just now is silent for as long as it was
    report_age_s = max(0.0, min(launch.unchanged_s, since_suspension_s(attempt, sight.now)) - REPORT_EVERY_S)
    found = []
    for node in needed_nodes(attempt, launch.value):
        age_s = _beat_age(node, launch.value, report_age_s)
        is_blind = report_age_s > liveness.suspect_after_s and node != launch.value.host
        found.append(_judge_node(node, age_s, ports.get(node), liveness, is_blind=is_blind))
    gone = tuple(s for s in found if s is not None)
    if gone or not _is_said_to_run(sight, report_age_s):
        return gone
    return _judge_frozen(attempt, launch.value, report_age_s, ports, liveness)


_CONTROLS = 3


def _judge_without_launcher(sight: Sight, ports: Mapping[str, PortProbe]) -> tuple[Silence, ...]:
    """The job has its nodes and no launcher has spoken yet: a node that is dead already would be waited for long."""
    job, liveness = sight.job, sight.run.spec.liveness
    if job is None or job.is_pending or job.is_ended or JobFlag.CONFIGURING in job.flags:
        return ()  # while it is configured, its nodes may still be booting
    dead = [p for n in sight.attempt.nodes if (p := ports.get(n)) is not None and p.silent_s >= 2 * liveness.confirm_s]
    return tuple(
        Silence(
            node=p.node,
            evidence=f"{p.node}: allocated, no launcher yet, slurmd at {p.address} silent for {p.silent_s:.1f} s",
        )
        for p in dead
        if p.failures >= _PORT_FAILURES
    )


_PORT_FAILURES = 2


def _judge_script(sight: Sight, ports: Mapping[str, PortProbe]) -> tuple[Silence, ...]:
    """A person's own script has no heartbeats: its silent log and progress are the first sign, the port the second."""
    liveness, silent_s = sight.run.spec.liveness, quiet_s(sight)
    if sight.attempt.state is not AttemptState.RUNNING or silent_s < liveness.timeout_s:
        return ()
    dead = [p for n in sight.attempt.nodes if (p := ports.get(n)) is not None and p.failures >= _PORT_FAILURES]
    return tuple(
        Silence(
            node=p.node,
            evidence=(
                f"{p.node}: slurmd at {p.address} silent for {p.silent_s:.1f} s, and nothing new in the job's log for "
                f"{silent_s:.0f} s"
            ),
        )
        for p in dead
        if p.silent_s >= 2 * liveness.confirm_s
    )


def _is_said_to_run(sight: Sight, report_age_s: float) -> bool:
    """Slurm has said since the launcher fell silent that the job runs: one that has ended is silent too."""
    if sight.job is None or not sight.job.is_live or sight.jobs_asked_at is None:
        return False
    return report_age_s <= 0 or (sight.now - sight.jobs_asked_at).total_seconds() < report_age_s


def _judge_frozen(
    attempt: Attempt, launch: LaunchReport, report_age_s: float, ports: Mapping[str, PortProbe], liveness: LivenessSpec
) -> tuple[Silence, ...]:
    limit_s = liveness.timeout_s
    if report_age_s > 0:  # the launcher is silent: only its own host can be told
        quiet = {launch.host: report_age_s} if launch.host in attempt.nodes else {}
        limit_s *= 2  # and the whole attempt ends with it
    else:
        quiet = {n: _beat_age(n, launch, 0.0) for n in needed_nodes(attempt, launch)}
    frozen = tuple(
        Silence(node=n, evidence=f"{n}: no heartbeat for {age:.1f} s though its slurmd port accepts connections")
        for n, age in quiet.items()
        if age > limit_s and n in ports and ports[n].failures == 0
    )
    return frozen if len(frozen) * 2 <= max(2, len(attempt.nodes)) else ()


def _beat_age(node: str, launch: LaunchReport, report_age_s: float) -> float:
    beat = launch.nodes.get(node)
    is_idle = beat is None or beat.state in NOT_TRAINING
    if node == launch.host:  # the job ends with it, whatever its ranks do: between two starts they have all ended
        return max(0.0 if beat is None or is_idle else beat.age_s, report_age_s)
    return 0.0 if beat is None or is_idle else beat.age_s + report_age_s


def _judge_node(
    node: str, age_s: float, port: PortProbe | None, liveness: LivenessSpec, *, is_blind: bool
) -> Silence | None:
    """`is_blind`: the launcher is silent, so that all ages grow; then the port must be silent for twice as long."""
    if port is None or age_s < liveness.suspect_after_s or port.failures < _PORT_FAILURES:
        return None
    if port.silent_s < liveness.confirm_s * (2 if is_blind else 1):
        return None
    return Silence(
        node=node,
        evidence=f"{node}: no heartbeat for {age_s:.1f} s, slurmd at {port.address} silent for {port.silent_s:.1f} s",
    )


def _is_spare(node: str, launch: LaunchReport) -> bool:
    beat = launch.nodes.get(node)
    return beat is not None and beat.state == "spare"


def judge_slurm_failure(sight: Sight, snapshot: Snapshot) -> tuple[Silence, ...]:
    """Nodes of a running attempt that Slurm has turned DOWN since it started, other than for a planned reboot."""
    attempt = sight.attempt
    if not isinstance(snapshot.nodes, Fresh) or attempt.state is not AttemptState.RUNNING or attempt.started_at is None:
        return ()
    if snapshot.nodes.asked_at < attempt.started_at:
        return ()
    launch = sight.view.launch.value if sight.view is not None and sight.view.launch is not None else None
    nodes = attempt.nodes if launch is None else needed_nodes(attempt, launch)
    needed = [n for n in nodes if launch is None or n == launch.host or not _is_spare(n, launch)]
    records = (snapshot.nodes.value.get(n) for n in needed)
    down = [r for r in records if r is not None and r.base is NodeBase.DOWN and "REBOOT_ISSUED" not in r.flags]
    return tuple(Silence(node=r.name, evidence=f"{r.name}: Slurm says {r.raw_state} ({r.reason})") for r in down)


# ---------------------------------------------------------------- use

STUCK_AFTER_S = 300.0  # Slurm gives processes a minute (UnkillableStepTimeout), epilogs and a slow answer some more


def is_stuck(job: JobRecord, now: datetime) -> bool:
    """True for a job that has ended long ago and still completes: something on its nodes can't be ended."""
    return job.is_completing and job.end_at is not None and (now - job.end_at).total_seconds() > STUCK_AFTER_S


def find_stuck(snapshot: Snapshot, now: datetime) -> frozenset[str]:
    """Nodes that a job, anybody's, does not let go of: nothing starts there, whatever Slurm calls them."""
    if not isinstance(snapshot.jobs, Fresh):
        return frozenset()
    return frozenset(n for job in snapshot.jobs.value.values() if is_stuck(job, now) for n in job.nodes)


def is_fit(record: NodeRecord, memory: NodeMemory | None) -> bool:
    """True when a job of ours may run on the node, now or once others leave it."""
    if memory is not None and memory.verdict is Verdict.BROKEN:
        return False
    if record.is_drain_set or not record.is_responding:
        return False
    is_only_completing = record.flags <= {"COMPLETING"} and record.base in _ALIVE
    return record.availability is NodeAvailability.USABLE or is_only_completing


_ALIVE = frozenset({NodeBase.IDLE, NodeBase.ALLOCATED, NodeBase.MIXED})


def judge_probation(memory: NodeMemory, record: NodeRecord, asked_at: datetime, window_s: float) -> NodeMemory | None:
    """The memory of a node with something against it that nobody drained, once Slurm has called it usable for a window.

    A sweep that it passes heals it sooner; without sweeps it would be left out for ever.
    """
    if memory.verdict is Verdict.HEALTHY or memory.drained_at is not None or memory.failing:
        return None
    is_usable = record.availability is NodeAvailability.USABLE and not record.is_withdrawn
    if not is_usable or (asked_at - memory.since_at).total_seconds() < window_s:
        return None
    return NodeMemory(node=memory.node, since_at=asked_at, checked_at=memory.checked_at)


def judge_drift(memory: NodeMemory, record: NodeRecord, asked_at: datetime) -> NodeMemory | None:
    """The memory after someone else touched the drain of a broken node; None while it stands as it is known.

    Whose drain it was does not matter once it is lifted: a person has returned the node, so that the old evidence is
    spent and the next sweep decides.
    """
    if memory.drained_at is None:
        is_new = memory.verdict is Verdict.BROKEN and record.is_withdrawn
        return replace(memory, drain_reason=record.reason, drained_at=asked_at) if is_new else None
    if asked_at <= memory.drained_at:
        return None
    if not record.is_withdrawn:
        return NodeMemory(node=memory.node, since_at=asked_at, checked_at=memory.checked_at)
    if record.reason != memory.drain_reason:
        return replace(memory, is_drained_by_us=False, drain_reason=record.reason, drained_at=asked_at)
    return None
