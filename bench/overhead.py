"""`make bench-overhead`: what agents and launcher cost a training, and what 256 agents cost one launcher.

Two ranks on two nodes train in a real Slurm sandbox, and agents and launcher are stopped (SIGSTOP) and go on again in
turns of three seconds, which is no silence yet to any of them: the same processes, with and without what is around
them. A pair of turns gives one ratio of mean step times; the median of the pairs counts, and how sure it is stands
beside it. `whole_percent` is the same training started bare by srun beside it, the two suspended in turns: what the
ranks themselves do for their agent is in it too, and where each process lies in memory, which is a matter of a percent.
Ends with 1 when a target is missed, and says which.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from bench.fleet import measure_fleet
from bench.gap import read_step_logs
from bench.overhead_training import NO_SAVES_S
from bench.peers import submit_bare
from bench.recovery_result import TARGETS, judge
from bench.report import describe_machine, finish, say
from bench.stage import BenchFailed, Service, Stage, open_stage, wait_for
from slurm.sandbox import SandboxUnavailable
from trainer.history import StepRecord

PAIRS = 48  # of turns with and without agents and launcher
WHOLE_PAIRS = 10  # of turns of ours and of bare ranks
RANKS = 2
AGENTS = 256

_TURN_S = 2.7
_SETTLE_S = 0.3  # after agents and launcher were stopped or went on
_WHOLE_TURN_S = 4.0
_WHOLE_SETTLE_S = 1.5  # after a suspension: what was missed meanwhile is caught up with
_AFTER_START_S = 6.0  # what is done once, such as preparing the next start, is over
_STEPS_AT_LEAST = 10  # of a turn that counts
_START_LIMIT_S = 120.0
_TRAINING = (str(Path(__file__).parent / "overhead_training.py"),)
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
    parser.add_argument("--pairs", type=int, default=PAIRS, help="turns with and without agents and launcher")
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


# ---------------------------------------------------------------- trainings and their turns

Windows = dict[str, list[tuple[float, float]]]  # (from, to) of each turn


def _measure_steps(stage: Stage, service: Service, pairs: int) -> dict[str, Any]:
    bare_dir, root = stage.directory / "bare", stage.directory / "overhead"
    root.mkdir()
    run_file = stage.directory / "overhead.toml"
    command = ", ".join(f'"{word}"' for word in _TRAINING)
    run_file.write_text(_RUN_FILE.format(command=command, root=root, ranks=RANKS, every_s=NO_SAVES_S))
    run_dir = root / "overhead"
    service.command("submit", str(run_file))
    bare: int | None = None
    try:
        wait_for("the first step", partial(_has_stepped, run_dir), _START_LIMIT_S)
        time.sleep(_AFTER_START_S)
        ours = service.attempts("overhead")[-1].job_id or 0
        alone = _stop_and_go(_find_around(stage, service.attempts("overhead")[-1].nodes), pairs)
        stage.slurm("scontrol", "suspend", str(ours))
        bare = submit_bare(stage, bare_dir, _TRAINING, nodes=RANKS)
        wait_for("the first step, bare", partial(_has_stepped, bare_dir), _START_LIMIT_S)
        stage.slurm("scontrol", "suspend", str(bare))
        whole = _take_turns(stage, {"bare": bare, "ours": ours})
        if len(service.attempts("overhead")) > 1 or any(run_dir.glob("attempts/*/interruptions/*.json")):
            raise BenchFailed("the training was interrupted while its overhead was measured")
    finally:
        service.command("stop", "overhead")
        if bare is not None:
            stage.sandbox.run("scancel", str(bare))
    bare_log, our_log = _records(bare_dir), _records(run_dir)
    around = rate_steps(_steps(our_log, alone["without"]), _steps(our_log, alone["with"]))
    beside = rate_steps(_steps(bare_log, whole["bare"]), _steps(our_log, whole["ours"]))
    for what, found in (("with agents and launcher", around), ("of the whole run", beside)):
        say(f"steps {what}: {found['percent']:+.2f} % (standard error {found['error_percent']:.2f})")
    return {
        "overhead_percent": around["percent"],
        "overhead": around,
        "whole_percent": beside["percent"],
        "whole": beside,
    }


def _find_around(stage: Stage, nodes: Sequence[str]) -> list[int]:
    """The processes of a training's nodes that are its launcher, its agents, or what Slurm starts these with."""
    found = [(_kind(pid), pid) for node in nodes for pid in stage.sandbox.node_pids(node)]
    kinds = Counter(kind for kind, _ in found)
    if not kinds["trainer.launch"] or kinds["trainer.node"] < len(nodes):
        raise BenchFailed(f"no launcher and {len(nodes)} agents among the processes of {', '.join(nodes)}")
    return [pid for kind, pid in found if kind]


def _kind(pid: int) -> str:
    with suppress(OSError):
        words = (Path("/proc") / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
        return next((kind for kind in ("trainer.launch", "trainer.node", "srun") if kind in words), "")
    return ""


def _stop_and_go(around: Sequence[int], pairs: int) -> Windows:
    windows: Windows = {"with": [], "without": []}
    try:
        for number in range(pairs):
            for name in ("with", "without") if number % 2 else ("without", "with"):  # a drift hits both
                _signal(around, signal.SIGCONT if name == "with" else signal.SIGSTOP)
                windows[name].append(_window(_SETTLE_S, _TURN_S))
                _signal(around, signal.SIGCONT)
    finally:
        _signal(around, signal.SIGCONT)
    return windows


def _signal(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):  # that the training was interrupted shows in its records
            os.kill(pid, number)


def _window(settle_s: float, turn_s: float) -> tuple[float, float]:
    time.sleep(settle_s)
    began = time.time()
    time.sleep(turn_s)
    return began, time.time()


def _has_stepped(run_dir: Path) -> bool:
    return any(read_step_logs(run_dir))


def _take_turns(stage: Stage, jobs: dict[str, int]) -> Windows:
    """Turns of jobs that are both suspended; ours goes on at the end: it is stopped by asking it."""
    windows: Windows = {name: [] for name in jobs}
    for number in range(WHOLE_PAIRS):
        for name in ("bare", "ours") if number % 2 else ("ours", "bare"):
            stage.slurm("scontrol", "resume", str(jobs[name]))
            windows[name].append(_window(_WHOLE_SETTLE_S, _WHOLE_TURN_S))
            stage.slurm("scontrol", "suspend", str(jobs[name]))
    stage.slurm("scontrol", "resume", str(jobs["ours"]))
    return windows


def _records(run_dir: Path) -> list[StepRecord]:
    return [record for log in read_step_logs(run_dir) for record in log]


# ---------------------------------------------------------------- from steps to a percentage


def _steps(log: Sequence[StepRecord], windows: Sequence[tuple[float, float]]) -> list[float | None]:
    return [step_s(log, *window) for window in windows]


def step_s(log: Sequence[StepRecord], began: float, ended: float) -> float | None:
    """Seconds of a step between two instants, the mean; None when there were too few."""
    times = [record.time for record in log if record.time is not None and began <= record.time <= ended]
    steps = len(times) - 1
    return (times[-1] - times[0]) / steps if steps >= _STEPS_AT_LEAST else None


def rate_steps(before: Sequence[float | None], after: Sequence[float | None]) -> dict[str, Any]:
    """`percent`: by how much the steps of the second list take longer, the median of the pairs of turns.

    `error_percent` is the standard error of that median: 1.2533 times that of a mean, with 1.4826 times the median
    distance from the middle as standard deviation. Both factors are those of a normal distribution.
    """
    pairs = [(one, other) for one, other in zip(before, after, strict=True) if one and other]
    if not pairs:
        raise BenchFailed("no pair of turns had enough steps")
    percents = [(other / one - 1) * 100 for one, other in pairs]
    middle = statistics.median(percents)
    spread = 1.4826 * statistics.median(abs(percent - middle) for percent in percents)
    return {
        "percent": round(middle, 3),
        "error_percent": round(1.2533 * spread / math.sqrt(len(pairs)), 3),
        "percent_of_pairs": [round(percent, 2) for percent in percents],
        "step_ms": [round(statistics.median(side) * 1000, 2) for side in zip(*pairs, strict=True)],
    }


if __name__ == "__main__":
    sys.exit(main())
