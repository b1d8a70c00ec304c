"""`make bench-overhead`: what agents and launcher cost a training, and what 256 agents cost one launcher.

The same two ranks on the same two nodes, once under agents and launcher, once started bare by srun: both trainings run
in the same sandbox, and Slurm suspends one of them in turns, so that both meet the same machine. A pair of turns gives
one ratio of median step times; the median of the pairs counts. Ends with 1 when a target is missed, and says which.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench.fleet import measure_fleet
from bench.gap import read_step_logs
from bench.peers import submit_bare
from bench.recovery_result import TARGETS, judge
from bench.report import describe_machine, finish, say
from bench.stage import BenchFailed, Service, Stage, open_stage, wait_for
from slurm.sandbox import SandboxUnavailable
from trainer.history import StepRecord

PAIRS = 12
RANKS = 2
AGENTS = 256

_TURN_S = 4.0
_SETTLE_S = 1.5  # after a suspension: what was missed meanwhile is caught up with
_BLOCK = 5  # steps that are taken together: the log tells milliseconds
_BLOCKS_AT_LEAST = 3  # of a turn that counts
_START_LIMIT_S = 120.0

# No pauses and no saves: every millisecond that is taken away shows.
_TRAINING = ("-m", "trainer.example.train", "--steps", "10000000", "--seed", "7")
_NO_SAVES_S = 36000
_RUN_FILE = """name = "overhead"
command = [{command}]
root = "{root}"
[nodes]
min = {ranks}
max = {ranks}
[checkpoint]
every_s = {every_s}
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.overhead", description=__doc__)
    parser.add_argument("--pairs", type=int, default=PAIRS, help="turns of each of the two trainings")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # cluster and daemon are taken down on the way out
    machine = describe_machine()
    try:
        with open_stage() as stage, stage.daemon() as service:
            result = measure_overhead(stage, service, options.pairs)
    except (SandboxUnavailable, BenchFailed) as error:
        print(f"bench-overhead: {error}", file=sys.stderr)
        return 1
    missed = judge(result, [target for target in TARGETS if target.key in result])
    finish("overhead", {**result, "missed": missed}, machine)
    for sentence in missed:
        print(f"bench-overhead: {sentence}", file=sys.stderr)
    return 1 if missed else 0


def measure_overhead(stage: Stage, service: Service, pairs: int = PAIRS) -> dict[str, Any]:
    """Percent of a step, percent of a core, and what they are made of. Raises BenchFailed."""
    steps = _measure_steps(stage, service, pairs)
    fleet = measure_fleet(AGENTS)
    say(f"{AGENTS} agents on one launcher: {fleet['fleet_percent']:.2f} % of a core")
    return {**steps, **fleet}


# ---------------------------------------------------------------- two trainings in turns


def _measure_steps(stage: Stage, service: Service, pairs: int) -> dict[str, Any]:
    bare_dir, root = stage.directory / "bare", stage.directory / "overhead"
    root.mkdir()
    run_file = stage.directory / "overhead.toml"
    command = ", ".join(f'"{word}"' for word in _TRAINING)
    run_file.write_text(_RUN_FILE.format(command=command, root=root, ranks=RANKS, every_s=_NO_SAVES_S))
    bare = submit_bare(stage, bare_dir, _TRAINING, nodes=RANKS)
    service.command("submit", str(run_file))
    try:
        for what, folder in (("bare", bare_dir), ("ours", root / "overhead")):
            wait_for(f"the first step, {what}", partial(_has_stepped, folder), _START_LIMIT_S)
        ours = service.attempts("overhead")[-1].job_id or 0
        windows = _take_turns(stage, {"bare": bare, "ours": ours}, pairs)
        if len(service.attempts("overhead")) > 1:
            raise BenchFailed("the training was interrupted while its overhead was measured")
    finally:
        service.command("stop", "overhead")
        stage.sandbox.run("scancel", str(bare))
    say("steps are measured")
    logs = {"bare": _records(bare_dir), "ours": _records(root / "overhead")}
    return rate_steps({name: [step_s(logs[name], *w) for w in windows[name]] for name in windows})


def _has_stepped(run_dir: Path) -> bool:
    return any(read_step_logs(run_dir))


def _take_turns(stage: Stage, jobs: dict[str, int], pairs: int) -> dict[str, list[tuple[float, float]]]:
    """(from, to) of each turn of each training, by name."""
    windows: dict[str, list[tuple[float, float]]] = {name: [] for name in jobs}
    stage.slurm("scontrol", "suspend", str(jobs["ours"]))
    stage.slurm("scontrol", "suspend", str(jobs["bare"]))
    for number in range(pairs):
        order = ("bare", "ours") if number % 2 else ("ours", "bare")  # a drift of the machine hits both
        for name in order:
            stage.slurm("scontrol", "resume", str(jobs[name]))
            time.sleep(_SETTLE_S)
            began = time.time()
            time.sleep(_TURN_S)
            windows[name].append((began, time.time()))
            stage.slurm("scontrol", "suspend", str(jobs[name]))
    stage.slurm("scontrol", "resume", str(jobs["ours"]))  # it is stopped by asking it
    return windows


def _records(run_dir: Path) -> list[StepRecord]:
    return [record for log in read_step_logs(run_dir) for record in log]


# ---------------------------------------------------------------- from steps to a percentage


def step_s(log: Sequence[StepRecord], began: float, ended: float) -> float | None:
    """Seconds of a step between two instants, the median of blocks of steps; None when there were too few."""
    times = [record.time for record in log if record.time is not None and began <= record.time <= ended]
    blocks = [(times[n + _BLOCK] - times[n]) / _BLOCK for n in range(0, len(times) - _BLOCK, _BLOCK)]
    return statistics.median(blocks) if len(blocks) >= _BLOCKS_AT_LEAST else None


def rate_steps(steps: dict[str, list[float | None]]) -> dict[str, Any]:
    """The percentage by which steps take longer: of each pair of turns, then the median of the pairs."""
    pairs = [(b, o) for b, o in zip(steps["bare"], steps["ours"], strict=True) if b and o]
    if not pairs:
        raise BenchFailed("no pair of turns had enough steps")
    percents = [(ours / bare - 1) * 100 for bare, ours in pairs]
    return {
        "overhead_percent": round(statistics.median(percents), 3),
        "overhead_percent_of_pairs": [round(percent, 2) for percent in percents],
        "step_ms": {
            "bare": round(statistics.median(bare for bare, _ in pairs) * 1000, 2),
            "ours": round(statistics.median(ours for _, ours in pairs) * 1000, 2),
        },
    }


if __name__ == "__main__":
    sys.exit(main())
