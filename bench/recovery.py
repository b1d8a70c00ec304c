"""`make bench-recovery`: from a node's power cut to the next step, three ways, in one sandbox and one run.

The same training (3 ranks on gloo, one per node) loses the same kind of node: under plain `sbatch --requeue`, under
submitit, and under the supervisor. The gap is read from the training's own step log for all three.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.gap import STAGES, Gap, find_gap, parse_worker_marks, read_launch_marks, split_gap
from bench.peers import NODES, submit_plain, submit_submitit
from bench.report import describe_machine, finish, median, render_table, say, show
from bench.stage import BenchFailed, Service, Stage, open_stage, wait_for
from slurm.sandbox import SandboxUnavailable
from supervisor.model import Attempt
from trainer.contract import RunPaths
from trainer.history import loss_path, read_step_log
from trainer.storage.stored import find_checkpoints

SAVE_EVERY_S = 4.0
TRAINING = ("-m", "trainer.example.train", "--steps", "100000", "--seed", "7", "--step-sleep", "0.2")
RUN = "bench"

_START_LIMIT_S = 120.0
_PEER_LIMIT_S = 420.0  # Slurm's requeue alone waits two minutes
_SUPERVISOR_LIMIT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """One power cut and what followed."""

    way: str
    node: str
    gap: Gap
    stages: dict[str, float] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        return {
            "way": self.way,
            "node": self.node,
            "gap_s": round(self.gap.seconds, 2),
            "redone_steps": self.gap.redone_steps,
            "stages_s": {label: round(seconds, 2) for label, seconds in self.stages.items()},
        }


@dataclass(slots=True)
class Findings:
    """Everything measured so far; what could not be measured is said, not hidden."""

    recoveries: list[Recovery] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    cold_start_s: float | None = None

    def add(self, recovery: Recovery) -> None:
        self.recoveries.append(recovery)
        say(
            f"{recovery.way}: {recovery.gap.seconds:.1f} s from step {recovery.gap.last_step} to "
            f"step {recovery.gap.first_step}"
        )

    def of(self, way: str) -> list[Recovery]:
        return [r for r in self.recoveries if r.way == way]

    def gap_s(self, way: str) -> float | None:
        return median([r.gap.seconds for r in self.of(way)])


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # cluster and daemon are taken down on the way out
    machine = describe_machine()
    findings = Findings()
    try:
        with open_stage() as stage:
            say(f"a real Slurm with 4 {stage.sandbox.mode} nodes is up; SlurmdTimeout is 10 s (Slurm's default: 300 s)")
            _measure_supervisor(stage, findings, options.repeats, options.batch_host_repeats)
            for way, submit in (("requeue", submit_plain), ("submitit", submit_submitit)):
                for number in range(options.peer_repeats):
                    _measure_peer(stage, findings, way, stage.directory / f"{way}-{number}", submit)
    except SandboxUnavailable as error:
        print(f"bench-recovery: {error}", file=sys.stderr)
        return 1
    except BenchFailed as error:
        findings.failures.append(str(error))
    _tell(findings)
    finish("recovery", _result(findings), machine)
    return 1 if findings.failures else 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.recovery", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="power cuts under the supervisor")
    parser.add_argument("--batch-host-repeats", type=int, default=2, help="of those that hit the batch host")
    parser.add_argument("--peer-repeats", type=int, default=1, help="power cuts under each of the others")
    return parser.parse_args(argv)


# ---------------------------------------------------------------- the others


def _measure_peer(
    stage: Stage,
    findings: Findings,
    way: str,
    run_dir: Path,
    submit: Callable[[Stage, Path, Sequence[str]], int],
) -> None:
    try:
        findings.add(_recover_peer(stage, way, run_dir, submit))
    except BenchFailed as error:
        findings.failures.append(f"{way}: {error}; its log ends: {_read_end(run_dir)}")
        say(findings.failures[-1])


def _recover_peer(
    stage: Stage, way: str, run_dir: Path, submit: Callable[[Stage, Path, Sequence[str]], int]
) -> Recovery:
    job_id = submit(stage, run_dir, [*TRAINING, "--save-every-s", f"{SAVE_EVERY_S:g}"])
    say(f"{way}: job {job_id} submitted")
    wait_for("two checkpoints", lambda: _count_verified(run_dir, 1) >= 2, _START_LIMIT_S)
    node = stage.job_nodes(job_id)[1]
    _cut(stage, node)
    gap = wait_for("a step after the cut", lambda: find_gap(run_dir, 2), _PEER_LIMIT_S)
    stage.slurm("scancel", str(job_id))
    stage.mend(node)
    wait_for("every node", lambda: set(stage.node_states().values()) == {"IDLE"}, 120, every_s=0.5)
    return Recovery(way=way, node=node, gap=gap)


def _count_verified(run_dir: Path, attempt: int) -> int:
    found = find_checkpoints(RunPaths(run_dir).checkpoints())
    return sum(f.attempt == attempt and f.is_verified for f in found)


def _read_end(run_dir: Path) -> str:
    logs = [run_dir / "job.log", *sorted((run_dir / "submitit").glob("*.err"))]
    return " / ".join(log.read_text(errors="replace")[-600:] for log in logs if log.exists())


def _cut(stage: Stage, node: str) -> None:
    stage.sandbox.power_cut(node)
    say(f"power of {node} cut")


# ---------------------------------------------------------------- the supervisor


def _measure_supervisor(stage: Stage, findings: Findings, repeats: int, batch_host_repeats: int) -> None:
    run_dir = stage.directory / "runs" / RUN
    run_dir.parent.mkdir(exist_ok=True)
    (stage.directory / "run.toml").write_text(_render_run_file(stage.directory))
    with stage.daemon() as service:
        began = time.time()
        service.command("submit", str(stage.directory / "run.toml"))
        first = wait_for("the first step", lambda: read_step_log(loss_path(run_dir, 1)), _START_LIMIT_S)
        findings.cold_start_s = round((first[0].time or began) - began, 2)
        say(f"supervisor: first step {findings.cold_start_s:.1f} s after `supervisor submit`")
        for number in range(repeats + batch_host_repeats):
            findings.add(_recover(stage, service, run_dir, is_batch_host=number >= repeats))
        last = service.attempts(RUN)[-1]
        service.command("stop", RUN)
        wait_for("the end of the job", lambda: not stage.job_nodes(last.job_id or 0), 60)
        for node in stage.node_states():
            stage.mend(node)


def _render_run_file(directory: Path) -> str:
    command = ", ".join(f'"{word}"' for word in TRAINING)
    return f"""name = "{RUN}"
command = [{command}]
root = "{directory}/runs"
[nodes]
min = 2
max = {NODES}
[checkpoint]
every_s = {SAVE_EVERY_S:g}
"""


def _recover(stage: Stage, service: Service, run_dir: Path, *, is_batch_host: bool) -> Recovery:
    before = service.attempts(RUN)[-1]
    wait_for("two verified checkpoints", lambda: service.verified(RUN, before.number) >= 2, _START_LIMIT_S)
    before = service.attempts(RUN)[-1]
    # The launcher's host is the batch host; the first of the job's nodes, as Slurm sorts them.
    node = before.nodes[0] if is_batch_host else before.nodes[1]
    _cut(stage, node)
    number = before.number + 1
    gap = wait_for("a step after the cut", lambda: find_gap(run_dir, number), _SUPERVISOR_LIMIT_S)
    after = wait_for("the ledger", lambda: service.stepping(RUN, number), 30)
    way = "supervisor_batch_host" if is_batch_host else "supervisor"
    recovery = Recovery(way=way, node=node, gap=gap, stages=split_gap(gap, _read_marks(service, run_dir, after)))
    stage.mend(node)
    wait_for(f"node {node} to count as healthy", lambda: service.is_forgiven(node), 60, every_s=0.5)
    return recovery


def _read_marks(service: Service, run_dir: Path, after: Attempt) -> dict[str, float]:
    log = RunPaths(run_dir).attempt_dir(after.number) / "job.log"
    interruption = next(i for i in service.interruptions(RUN) if i.attempt == after.number - 1)
    marks = {
        "detected": interruption.detected_at.timestamp(),
        "planned": after.planned_at.timestamp(),
        **read_launch_marks(run_dir, after.number),
        **parse_worker_marks(log.read_text(errors="replace")),
    }
    return marks if after.submitted_at is None else {**marks, "submitted": after.submitted_at.timestamp()}


# ---------------------------------------------------------------- the result


def _result(findings: Findings) -> dict[str, Any]:
    ways = ("requeue", "submitit", "supervisor", "supervisor_batch_host")
    gap_s = {way: findings.gap_s(way) for way in ways}
    plain, ours = gap_s["requeue"], gap_s["supervisor"]
    return {
        "gap_s": gap_s,
        "cold_start_s": findings.cold_start_s,
        "requeue_over_supervisor": round(plain / ours, 1) if plain and ours else None,
        "stages_s": {way: _median_stages(findings, way) for way in ways[2:]},
        "recoveries": [recovery.plain() for recovery in findings.recoveries],
        "failures": findings.failures,
    }


def _median_stages(findings: Findings, way: str) -> dict[str, float | None]:
    stages = [r.stages for r in findings.of(way)]
    return {label: median([s[label] for s in stages if label in s]) for label, _ in STAGES}


def _tell(findings: Findings) -> None:
    names = {
        "requeue": "sbatch --requeue, torchrun",
        "submitit": "submitit, checkpoint and requeue",
        "supervisor": "supervisor",
        "supervisor_batch_host": "supervisor, batch host cut",
    }
    rows = []
    for way, name in names.items():
        gaps = [r.gap.seconds for r in findings.of(way)]
        redone = [float(r.gap.redone_steps) for r in findings.of(way)]
        spread = f"{min(gaps):.1f} to {max(gaps):.1f}" if gaps else "-"
        rows.append((name, len(gaps), show(median(gaps)), spread, show(median(redone), 0)))
    print("\nFrom the last step before the power cut to the first step after it, seconds")
    print(render_table(("way", "cuts", "median", "range", "steps done again"), rows))
    stages = [_median_stages(findings, way) for way in ("supervisor", "supervisor_batch_host")]
    print("\nWhere the supervisor's seconds go (median of each stage)")
    print(
        render_table(
            ("stage", "another node cut", "batch host cut"),
            [(label, *(show(s[label], 2) for s in stages)) for label, _ in STAGES],
        )
    )
    print(f"\ncold start, from `supervisor submit` to the first step: {show(findings.cold_start_s)} s")
    for failure in findings.failures:
        print(f"NOT measured: {failure}")


if __name__ == "__main__":
    sys.exit(main())
