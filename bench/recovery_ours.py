"""The recoveries of the supervisor: each kind of fault, the way back read from steps, launcher and ledger."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.gap import IN_JOB, NEW_JOB, Gap, find_gap, parse_worker_marks, read_launch_marks, read_step_logs, split_gap
from bench.peers import NODES
from bench.recovery_peers import SAVE_EVERY_S, TRAINING, await_idle, has_newer, kill_worker
from bench.recovery_result import Findings, Recovery
from bench.report import say
from bench.stage import LIVENESS_S, BenchFailed, Service, Stage, wait_for
from bench.victims import signal_rank
from supervisor.model import Attempt, AttemptState
from trainer import contract
from trainer.contract import InterruptionRecord, LaunchReport, RunPaths

_START_LIMIT_S = 120.0
_NEXT_LOOK_S = 16.0  # the service asks Slurm of nodes that are idle every 15 s
_LIMIT_S = 120.0
_PREPARED_S = 4.0  # until every node has its prepared interpreter, after the first step

# Heartbeats are as short as those that the other launcher gets; everything else has its default.
_RUN_FILE = """name = "{name}"
command = [{command}]
root = "{root}"
[nodes]
min = {nodes_min}
max = {nodes_max}
spares = {spares}
procs_per_node = {procs}
[checkpoint]
every_s = {every_s:g}
[restart]
worker_start = "{worker_start}"
[liveness]
timeout_s = {timeout_s:g}
suspect_after_s = {timeout_s:g}
beat_interval_s = {beat_s:g}
confirm_s = {confirm_s:g}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a run asks for."""

    nodes_min: int = NODES
    nodes_max: int = NODES
    spares: int = 0
    procs: int = 1
    worker_start: str = "direct"


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A run that trains."""

    service: Service
    name: str
    run_dir: Path

    @property
    def attempt(self) -> Attempt:
        """The newest one."""
        return self.service.attempts(self.name)[-1]

    @property
    def paths(self) -> RunPaths:
        return RunPaths(self.run_dir)

    def launch_report(self) -> LaunchReport:
        """What the launcher says now. Raises BenchFailed when it says nothing."""
        try:
            return contract.parse(LaunchReport, self.paths.launch_report(self.attempt.number).read_bytes())
        except (OSError, contract.ContractError) as error:
            raise BenchFailed(f"{self.name}: launch.json: {error}") from error

    def node_of_rank(self, rank: int) -> str:
        """The node that a rank runs on, where each node has one."""
        return self.launch_report().training[rank]

    def await_checkpoints(self, after_step: int = -1) -> None:
        """Two verified ones beyond a step."""
        wait_for("two verified checkpoints", partial(has_newer, self.run_dir, after_step), _START_LIMIT_S)

    def record_after(self, since: float) -> InterruptionRecord | None:
        """The launcher's record of the first interruption after `since`, once the training steps again."""
        folder = self.paths.attempt_dir(self.attempt.number) / "interruptions"
        for path in sorted(folder.glob("*.json"), key=lambda path: int(path.stem)):
            record = contract.parse(InterruptionRecord, path.read_bytes())
            if record.detected_at > since and record.resumed_at is not None:
                return record
        return None


# ---------------------------------------------------------------- one run


@contextmanager
def train(stage: Stage, service: Service, way: str, shape: Shape) -> Iterator[Training]:
    """A run that has saved twice; it is stopped at the end, and its nodes are free again."""
    name = f"{way}-{int(time.time())}".replace("_", "-")
    root = stage.directory / "runs"
    root.mkdir(exist_ok=True)
    run_file = stage.directory / f"{name}.toml"
    run_file.write_text(
        _RUN_FILE.format(
            name=name,
            command=", ".join(f'"{word}"' for word in TRAINING),
            root=root,
            nodes_min=shape.nodes_min,
            nodes_max=shape.nodes_max,
            spares=shape.spares,
            procs=shape.procs,
            every_s=SAVE_EVERY_S,
            worker_start=shape.worker_start,
            timeout_s=LIVENESS_S,
            beat_s=LIVENESS_S / 4,
            confirm_s=LIVENESS_S / 2,
        )
    )
    began = time.time()
    service.command("submit", str(run_file))
    training = Training(service=service, name=name, run_dir=root / name)
    try:
        first = wait_for("the first step", lambda: _first_step_at(training.run_dir), _START_LIMIT_S)
        say(f"{way}: first step {first - began:.1f} s after `supervisor submit`")
        training.await_checkpoints()
        if shape.worker_start == "warm":
            time.sleep(max(0.0, first + _PREPARED_S - time.time()))
        yield training
    finally:
        job_id = training.attempt.job_id or 0
        service.command("stop", name)
        wait_for("the end of the job", lambda: not stage.job_nodes(job_id), 60)


def _first_step_at(run_dir: Path) -> float | None:
    return next((log[0].time for log in read_step_logs(run_dir) if log), None)


# ---------------------------------------------------------------- faults


def cut_node(stage: Stage, service: Service, findings: Findings, *, way: str, shape: Shape) -> None:
    """The power of a training node that is not the batch host is cut."""
    with train(stage, service, way, shape) as training:
        node = training.node_of_rank(1)
        since = time.time()
        stage.sandbox.power_cut(node)
        try:
            findings.add(_in_job_recovery(training, way, node, since))
        finally:
            stage.sandbox.revive(node)
    _bring_back(stage, service, node)


def kill_workers(stage: Stage, service: Service, findings: Findings, repeats: int, *, way: str, shape: Shape) -> None:
    """One of the workers of the only node is killed, again and again."""
    with train(stage, service, way, shape) as training:
        node = training.attempt.nodes[0]
        for _ in range(repeats):
            since = time.time()
            gap = kill_worker(stage, training.run_dir, node)
            findings.add(_describe(training, way, node, since, gap))
            training.await_checkpoints(gap.first_step)


def stop_rank(stage: Stage, service: Service, findings: Findings, *, way: str, shape: Shape) -> None:
    """One rank is stopped (SIGSTOP): it neither steps nor dies. Once a run: a second time would blame its node."""
    with train(stage, service, way, shape) as training:
        node = training.node_of_rank(1)
        since = time.time()
        signal_rank(stage, node, 0, signal.SIGSTOP)
        findings.add(_in_job_recovery(training, way, node, since, is_timed=True))


def cut_batch_host(
    stage: Stage, service: Service, findings: Findings, *, way: str, shape: Shape, is_alone: bool
) -> None:
    """The power of the node with the launcher is cut. `is_alone`: no node outside the job can be used."""
    with train(stage, service, way, shape) as training:
        before = training.attempt
        others = [name for name in stage.node_states() if name not in before.nodes] if is_alone else []
        for name in others:
            stage.slurm("scontrol", "update", f"nodename={name}", "state=drain", "reason=bench: not to be used")
        node = before.nodes[0]
        since = time.time()
        stage.sandbox.power_cut(node)
        try:
            gap = wait_for("a step after the cut", lambda: find_gap(training.run_dir, since), _LIMIT_S)
            after = wait_for("the ledger", lambda: _stepping(training, before.number), 30)
            marks = _new_job_marks(training, after, gap)
            findings.add(Recovery(way=way, node=node, gap=gap, stages=split_gap(gap, marks, NEW_JOB)))
        finally:
            stage.sandbox.revive(node)
            for name in others:
                stage.slurm("scontrol", "update", f"nodename={name}", "state=resume")
    _bring_back(stage, service, node)
    if is_alone:
        time.sleep(_NEXT_LOOK_S)  # the next run would else begin without them, and could not lose one


def _bring_back(stage: Stage, service: Service, node: str) -> None:
    stage.mend(node)
    await_idle(stage)
    wait_for(f"node {node} to count as healthy", lambda: service.is_forgiven(node), 60, every_s=0.5)


def _stepping(training: Training, before: int) -> Attempt | None:
    after = training.attempt
    return after if after.number > before and after.state is AttemptState.RUNNING and after.stepped_at else None


# ---------------------------------------------------------------- from traces to a recovery


def _in_job_recovery(training: Training, way: str, node: str, since: float, *, is_timed: bool = False) -> Recovery:
    number = training.attempt.number
    gap = wait_for("a step after the fault", lambda: find_gap(training.run_dir, since), _LIMIT_S)
    if (now := training.attempt.number) != number:
        raise BenchFailed(f"{way}: the training was not started again inside its job, but as attempt {now}")
    return _describe(training, way, node, since, gap, is_timed=is_timed)


def _describe(training: Training, way: str, node: str, since: float, gap: Gap, *, is_timed: bool = False) -> Recovery:
    record = wait_for("the launcher's record", lambda: training.record_after(since), 10)
    marks = _in_job_marks(training, gap)
    return Recovery(
        way=way,
        node=node,
        gap=gap,
        stages=split_gap(gap, marks, IN_JOB),
        parts_s=record.parts_s,
        acted_s=record.detected_at - since if is_timed else None,
    )


def _in_job_marks(training: Training, gap: Gap) -> Mapping[str, float]:
    number = training.attempt.number
    return {
        **read_launch_marks(training.run_dir, number, gap.last_at),
        **parse_worker_marks(_read_log(training, number), gap.last_at),
    }


def _new_job_marks(training: Training, after: Attempt, gap: Gap) -> Mapping[str, float]:
    interruptions = training.service.interruptions(training.name)
    interruption = next(i for i in interruptions if i.attempt == after.number - 1)
    marks = {
        "detected": interruption.detected_at.timestamp(),
        "planned": after.planned_at.timestamp(),
        **read_launch_marks(training.run_dir, after.number, gap.last_at),
        **parse_worker_marks(_read_log(training, after.number), gap.last_at),
    }
    return marks if after.submitted_at is None else {**marks, "submitted": after.submitted_at.timestamp()}


def _read_log(training: Training, number: int) -> str:
    return (training.paths.attempt_dir(number) / "job.log").read_text(errors="replace")
