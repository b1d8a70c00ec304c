"""From measured recoveries to ratios, targets and tables. Pure."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.gap import IN_JOB, NEW_JOB, Gap
from bench.report import Target, median, render_table, say, show

WAYS = {
    "spare": "supervisor, a spare takes its place",
    "spare_warm": "the same, workers prepared",
    "shrink": "supervisor, no spare: 3 nodes to 2",
    "batch_host": "supervisor, batch host cut, idle nodes outside the job",
    "batch_host_alone": "the same, no other nodes: 3 to 2",
    "worker": "supervisor, one of 3 workers killed",
    "worker_warm": "the same, workers prepared",
    "hang": "supervisor, one rank stopped (SIGSTOP)",
    "requeue": "sbatch --requeue, torchrun",
    "requeue_batch_host": "the same, its batch host cut",
    "submitit": "submitit, checkpoint and requeue",
    "nvrx": "ft_launcher (nvidia-resiliency-ext), 3 nodes to 2",
    "nvrx_spare": "the same, a spare takes its place",
    "torchrun_worker": "torchrun --max-restarts, one of 3 workers killed",
}
NEW_JOB_WAYS = ("batch_host", "batch_host_alone")
OURS = ("spare", "spare_warm", "shrink", "batch_host", "batch_host_alone", "worker", "worker_warm", "hang")

DEFINITIONS = {
    "gap_s": "median, from the last step before the fault to the first step after it, from the training's step log",
    "start_s": "median, from the start of a bare `srun torchrun` of the same training to its first step",
    "spare_vs_start": "gap with a spare in the allocation, node power cut / start_s",
    "spare_warm_vs_start": "the same with worker_start = warm / start_s",
    "requeue_vs_spare": "gap under `sbatch --requeue`, node power cut / ours with a spare",
    "nvrx_vs_spare": "gap under ft_launcher, node power cut, 3 nodes to 2 / ours with a spare",
    "nvrx_spare_vs_spare": "gap under ft_launcher, node power cut, with a spare / ours with a spare",
    "requeue_vs_shrink": "gap under `sbatch --requeue`, node power cut / ours from 3 nodes to 2",
    "worker_vs_torchrun": "ours, one of 3 workers of one node killed / torchrun --max-restarts",
    "worker_warm_vs_torchrun": "the same with worker_start = warm / torchrun --max-restarts",
    "hang_s": "median, from SIGSTOP of one rank until the launcher acts upon it; step time 0.2 s",
    "requeue_vs_batch_host": "gap under `sbatch --requeue`, batch host cut / ours, no other node there (3 to 2)",
    "overhead_percent": "step time with agents and launcher over that of the same ranks while those are stopped, minus "
    "one, percent; `overhead` has its standard error",
    "whole_percent": "step time of a whole run of ours over that of the same training started bare, minus one, percent",
    "fleet_percent": "CPU of one launcher with 256 agents that beat, percent of a core",
}


TARGETS = (
    Target(key="spare_vs_start", at_most=1.5, what="node cut, spare / cold start by srun torchrun"),
    Target(key="spare_warm_vs_start", at_most=1.0, what="the same with warm workers / cold start"),
    Target(key="requeue_vs_spare", at_least=25, what="sbatch --requeue / node cut, spare"),
    Target(key="nvrx_vs_spare", at_least=8, what="ft_launcher / node cut, spare"),
    Target(key="requeue_vs_shrink", at_least=20, what="sbatch --requeue / node cut, fewer nodes"),
    Target(key="worker_vs_torchrun", at_most=1.1, what="one worker killed / torchrun's own restart"),
    Target(key="worker_warm_vs_torchrun", at_most=0.7, what="the same with warm workers / torchrun's"),
    Target(key="hang_s", at_most=10, what="hang of one rank: seconds until acted upon"),
    Target(key="requeue_vs_batch_host", at_least=8, what="sbatch --requeue / batch host cut"),
    Target(key="overhead_percent", at_most=0.5, what="step time with agents and launcher, percent more"),
    Target(key="fleet_percent", at_most=5, what="256 agents on one launcher, percent of a core"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """One fault and what followed. `parts_s`: as our launcher told them; `acted_s`: from a stop until acted upon."""

    way: str
    node: str
    gap: Gap
    stages: Mapping[str, float] = field(default_factory=dict)
    parts_s: Mapping[str, float] = field(default_factory=dict)
    acted_s: float | None = None

    def plain(self) -> dict[str, Any]:
        return {
            "way": self.way,
            "node": self.node,
            "gap_s": round(self.gap.seconds, 2),
            "redone_steps": self.gap.redone_steps,
            "stages_s": {label: round(seconds, 2) for label, seconds in self.stages.items()},
            "parts_s": dict(self.parts_s),
            **({} if self.acted_s is None else {"acted_s": round(self.acted_s, 2)}),
        }


class Findings:
    """Everything measured so far, from several threads; what could not be measured is said, not hidden."""

    def __init__(self) -> None:
        self.recoveries: list[Recovery] = []
        self.failures: list[str] = []
        self.starts_s: list[float] = []
        self._lock = threading.Lock()

    def add(self, recovery: Recovery) -> None:
        with self._lock:
            self.recoveries.append(recovery)
        acted = "" if recovery.acted_s is None else f", acted upon after {recovery.acted_s:.1f} s"
        gap = recovery.gap
        say(f"{recovery.way}: {gap.seconds:.2f} s from step {gap.last_step} to step {gap.first_step}{acted}")

    def fail(self, text: str) -> None:
        with self._lock:
            self.failures.append(text)
        say(f"NOT measured: {text}")

    def of(self, way: str) -> list[Recovery]:
        return [r for r in self.recoveries if r.way == way]

    def gap_s(self, way: str) -> float | None:
        return median([r.gap.seconds for r in self.of(way)])


# ---------------------------------------------------------------- from seconds to ratios


def rate(findings: Findings, overhead: Mapping[str, Any]) -> dict[str, Any]:
    """The result; a number whose parts were not measured is None."""
    gap_s = {way: findings.gap_s(way) for way in WAYS}
    start_s = median(findings.starts_s)
    result: dict[str, Any] = {
        "spare_vs_start": _ratio(gap_s["spare"], start_s),
        "spare_warm_vs_start": _ratio(gap_s["spare_warm"], start_s),
        "requeue_vs_spare": _ratio(gap_s["requeue"], gap_s["spare"]),
        "nvrx_vs_spare": _ratio(gap_s["nvrx"], gap_s["spare"]),
        "nvrx_spare_vs_spare": _ratio(gap_s["nvrx_spare"], gap_s["spare"]),
        "requeue_vs_shrink": _ratio(gap_s["requeue"], gap_s["shrink"]),
        "worker_vs_torchrun": _ratio(gap_s["worker"], gap_s["torchrun_worker"]),
        "worker_warm_vs_torchrun": _ratio(gap_s["worker_warm"], gap_s["torchrun_worker"]),
        "hang_s": median([r.acted_s for r in findings.of("hang") if r.acted_s is not None]),
        "requeue_vs_batch_host": _ratio(gap_s["requeue_batch_host"], gap_s["batch_host_alone"]),
        "overhead_percent": overhead.get("overhead_percent"),
        "whole_percent": overhead.get("whole_percent"),
        "fleet_percent": overhead.get("fleet_percent"),
        "gap_s": gap_s,
        "start_s": start_s,
        "starts_s": [round(seconds, 2) for seconds in findings.starts_s],
        "stages_s": {way: median_parts([r.stages for r in findings.of(way)]) for way in OURS},
        "parts_s": {way: median_parts([r.parts_s for r in findings.of(way)]) for way in OURS},
        "recoveries": [recovery.plain() for recovery in findings.recoveries],
        "overhead": dict(overhead),
        "definitions": DEFINITIONS,
        "failures": findings.failures,
    }
    return {**result, "missed": judge(result)}


def _ratio(over: float | None, under: float | None) -> float | None:
    return None if over is None or not under else round(over / under, 3)


def judge(result: Mapping[str, Any], targets: Sequence[Target] = TARGETS) -> list[str]:
    """The targets that were missed, or not measured, a sentence each."""
    missed = []
    for target in targets:
        value = result.get(target.key)
        if value is None:
            missed.append(f"{target.key} was not measured")
        elif not target.is_met(value):
            missed.append(f"{target.key} is {value:g}, the target {target.bound} ({target.what})")
    return missed


def median_parts(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of each part its median over those that have it, in the order in which they came."""
    names = dict.fromkeys(name for each in parts for name in each)
    return {name: value for name in names if (value := median([p[name] for p in parts if name in p])) is not None}


# ---------------------------------------------------------------- tables


def tell(findings: Findings, result: Mapping[str, Any]) -> None:
    """Print the tables."""
    print("\nFrom the last step before the fault to the first step after it, seconds")
    print(render_table(("way", "faults", "median", "range", "steps done again"), _gap_rows(findings)))
    print(f"\nbare `srun torchrun`, from its start to the first step: {show(result['start_s'], 2)} s (median)")
    for ways, stages, what in (
        ([way for way in OURS if way not in NEW_JOB_WAYS], IN_JOB, "inside the allocation"),
        (list(NEW_JOB_WAYS), NEW_JOB, "by a new job"),
    ):
        measured = [way for way in ways if findings.of(way)]
        if measured:
            print(f"\nWhere our seconds go {what} (median of each stage)")
            rows = [(label, *(show(result["stages_s"][w].get(label), 2) for w in measured)) for label, _ in stages]
            print(render_table(("stage", *measured), rows))
    print()
    targets = [(t.what, t.key, _plain(result.get(t.key)), t.bound) for t in TARGETS]
    print(render_table(("what", "in the result", "measured", "target"), targets))
    for failure in findings.failures:
        print(f"NOT measured: {failure}")


def _gap_rows(findings: Findings) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for way, name in WAYS.items():
        found = findings.of(way)
        if found:
            gaps = [r.gap.seconds for r in found]
            redone = [float(r.gap.redone_steps) for r in found]
            spread = f"{min(gaps):.2f} to {max(gaps):.2f}"
            rows.append((name, str(len(gaps)), show(median(gaps), 2), spread, show(median(redone), 0)))
    return rows


def _plain(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"
