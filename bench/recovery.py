"""`make bench-recovery`: from a failure to the next training step, ours and the others', in one sandbox and one run.

The same training loses the same node, worker or rank each way; the gap is read from the training's own step log. Ends
with 1 when a target is missed, and says which.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from bench.overhead import measure_overhead
from bench.recovery_ours import Shape, cut_batch_host, cut_node, kill_workers, stop_rank
from bench.recovery_peers import PROCS, TRAINING, measure_cuts, measure_start, measure_torchrun_worker
from bench.recovery_result import Findings, rate, tell
from bench.report import describe_machine, finish, say
from bench.stage import FAILURES, BenchFailed, Service, Stage, open_stage
from slurm.sandbox import SandboxUnavailable

__all__ = ["RUN", "TRAINING"]

RUN = "bench"
CLUSTER_NODES = 24  # four are used by ours; the others' jobs wait side by side, and each has broken one
FEW = 2  # repeats of what no number of the result is made of

_WITH_SPARE = Shape(spares=1)
_FEWER = Shape(nodes_min=2)
_ONE_NODE = Shape(nodes_min=1, nodes_max=1, procs=PROCS)


class Stopped(BaseException):
    """SIGTERM: what was measured until then is told."""


Measure = Callable[[Stage, Service, Findings, int], None]


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(argv)
    signal.signal(signal.SIGTERM, _stop)  # cluster and daemon are taken down on the way out
    machine = describe_machine()
    findings = Findings()
    chosen = options.only or tuple(_MEASURES)
    overhead: dict[str, Any] = {}
    try:
        with open_stage(CLUSTER_NODES) as stage, stage.daemon() as service:
            mode = stage.sandbox.mode
            say(f"a real Slurm with {CLUSTER_NODES} {mode} nodes is up; SlurmdTimeout is 10 s (Slurm's default: 300 s)")
            for way in chosen:
                overhead |= _measure(way, stage, service, findings, options.repeats)
    except SandboxUnavailable as error:
        print(f"bench-recovery: {error}", file=sys.stderr)
        return 1
    except Stopped:
        findings.fail("ended by SIGTERM: what was to come")
    result = rate(findings, overhead)
    tell(findings, result)
    finish("recovery", result, machine)
    for sentence in result["missed"]:
        print(f"bench-recovery: {sentence}", file=sys.stderr)
    return 1 if result["missed"] or findings.failures else 0


def _stop(*_: object) -> None:
    raise Stopped


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.recovery", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="faults of each way")
    parser.add_argument("--only", choices=_MEASURES, action="append", help="measure this alone: misses the others")
    return parser.parse_args(argv)


def _measure(way: str, stage: Stage, service: Service, findings: Findings, repeats: int) -> dict[str, Any]:
    try:
        if way == "overhead":
            return measure_overhead(stage, service)
        _MEASURES[way](stage, service, findings, repeats)
    except (BenchFailed, *FAILURES) as error:
        findings.fail(f"{way}: {error}")
        stage.clear()  # what comes next finds everything as it should be
    return {}


# ---------------------------------------------------------------- what is measured, in this order


def _each(measure: Callable[[Stage, Service, Findings], None], *, at_most: int = 1000) -> Measure:
    """The same again and again, a run for each."""

    def repeat(stage: Stage, service: Service, findings: Findings, repeats: int) -> None:
        for _ in range(min(repeats, at_most)):
            measure(stage, service, findings)

    return repeat


def _measure_starts(stage: Stage, _: Service, findings: Findings, repeats: int) -> None:
    for number in range(-1, repeats):  # the first one reads the programs from the disk
        measure_start(stage, findings if number >= 0 else Findings(), number)


def _measure_requeues(stage: Stage, _: Service, findings: Findings, repeats: int) -> None:
    measure_cuts(stage, findings, [*["requeue", "requeue_batch_host"] * repeats, "submitit"])


def _measure_nvrx(stage: Stage, _: Service, findings: Findings, repeats: int) -> None:
    measure_cuts(stage, findings, ["nvrx"] * repeats + ["nvrx_spare"] * min(repeats, FEW))


def _measure_torchrun(stage: Stage, _: Service, findings: Findings, repeats: int) -> None:
    measure_torchrun_worker(stage, findings, repeats)


_MEASURES: Mapping[str, Measure] = {
    "start": _measure_starts,
    "spare": _each(partial(cut_node, way="spare", shape=_WITH_SPARE)),
    "spare_warm": _each(partial(cut_node, way="spare_warm", shape=Shape(spares=1, worker_start="warm"))),
    "shrink": _each(partial(cut_node, way="shrink", shape=_FEWER)),
    "worker": partial(kill_workers, way="worker", shape=_ONE_NODE),
    "worker_warm": partial(
        kill_workers, way="worker_warm", shape=Shape(nodes_min=1, nodes_max=1, procs=PROCS, worker_start="warm")
    ),
    "torchrun": _measure_torchrun,
    "hang": _each(partial(stop_rank, way="hang", shape=Shape())),
    "batch_host_alone": _each(partial(cut_batch_host, way="batch_host_alone", shape=_FEWER, is_alone=True)),
    "batch_host": _each(partial(cut_batch_host, way="batch_host", shape=_FEWER, is_alone=False), at_most=FEW),
    "nvrx": _measure_nvrx,
    "requeue": _measure_requeues,
    "overhead": _each(lambda *_: None),
}


if __name__ == "__main__":
    sys.exit(main())
