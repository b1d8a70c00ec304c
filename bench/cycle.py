"""`make bench-cycle`: what a cycle of the daemon costs when nothing changes, on a real Slurm and at 2,048 nodes."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.built import NODES, NOW, RUNS, build_nodes, build_snapshot, fill_ledger, render_nodes
from bench.recovery import RUN, TRAINING
from bench.report import describe_machine, finish, median, render_table, say, show
from bench.stage import Stage, open_stage, wait_for
from slurm.client import CliClient
from slurm.parse import parse_nodes
from slurm.run_tool import Completed, run_tool
from slurm.sandbox import SandboxUnavailable
from supervisor.clock import SystemClock
from supervisor.config import load_settings
from supervisor.core.reconcile import reconcile
from supervisor.daemon import Daemon
from supervisor.logs import configure_logs
from supervisor.model import Policy
from supervisor.store import Store

MAX_COMMANDS = 3


@dataclass(slots=True)
class CountedTools:
    """Runs Slurm's commands and counts them, by name."""

    path: str
    counts: Counter[str] = field(default_factory=Counter)

    def __call__(self, argv: tuple[str, ...], timeout_s: float, env: Mapping[str, str]) -> Completed:
        self.counts[Path(argv[0]).name] += 1
        return run_tool(argv, timeout_s, env, path=self.path)


class OwnTime:
    """CPU time of this process, its threads and its children, without those that were there before."""

    def __init__(self) -> None:
        self._others = find_children(os.getpid())  # the sandbox

    def read_s(self) -> float:
        """Seconds so far, user and system; Slurm's commands count once they have ended."""
        own = find_children(os.getpid()) - self._others
        return _cpu_s(os.getpid()) + sum(_tree_cpu_s(pid) for pid in own)


def _tree_cpu_s(pid: int) -> float:
    return _cpu_s(pid) + sum(_tree_cpu_s(child) for child in find_children(pid))


def _cpu_s(pid: int) -> float:
    """User and system time of a process and of its children that have ended; 0 when it has ended itself."""
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return sum(int(field) for field in fields[11:15]) / os.sysconf("SC_CLK_TCK")
    return 0.0


def find_children(pid: int) -> set[int]:
    """Processes that this one has started and that still run."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found |= {int(child) for child in task.read_text().split()}
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.cycle", description=__doc__)
    parser.add_argument("--cycles", type=int, default=60, help="measured on the sandbox, each way")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # cluster and daemon are taken down on the way out
    machine = describe_machine()
    result: dict[str, Any] = {"scale": _measure_scale()}
    say(f"{NODES} nodes and {RUNS} runs are measured")
    try:
        with open_stage() as stage:
            result["sandbox"] = _measure_sandbox(stage, options.cycles)
    except SandboxUnavailable as error:
        print(f"bench-cycle: {error}", file=sys.stderr)
        return 1
    is_within = result["sandbox"]["asking"]["slurm_commands_max"] <= MAX_COMMANDS
    result["is_within_limit"] = is_within
    _tell(result)
    finish("cycle", result, machine)
    return 0 if is_within else 1


# ---------------------------------------------------------------- four nodes, one run, a real Slurm


def _measure_sandbox(stage: Stage, cycles: int) -> dict[str, Any]:
    _start_training(stage)
    settings = load_settings(stage.config, {})
    configure_logs(level="error", stream=sys.stderr)
    tools = CountedTools(path=stage.env["PATH"])
    client = CliClient(run=tools, timeout_s=settings.slurm.command_timeout_s, parent={**os.environ, **stage.env})
    clock = SystemClock()
    own = OwnTime()
    with Store.open(settings.ledger.path, now=clock.now()) as store:
        store.claim(clock.now(), pid=os.getpid(), host="bench")
        daemon = Daemon(settings, store, client, clock)
        try:
            _settle(daemon)
            asking = _run_cycles(daemon, tools, own, cycles, is_asking=True)
            say("cycles that ask Slurm are measured")
            pacing = _run_cycles(daemon, tools, own, cycles, is_asking=False)
            say("cycles at the daemon's own pace are measured")
        finally:
            daemon.close()
            store.end(clock.now())
    return {"asking": asking, "own_pace": pacing}


def _start_training(stage: Stage) -> None:
    """A run that trains without saving; the daemon that submitted it has gone, and its job goes on."""
    words = ", ".join(f'"{word}"' for word in TRAINING)
    (stage.directory / "runs").mkdir(exist_ok=True)
    run_file = stage.directory / "run.toml"
    run_file.write_text(
        f'name = "{RUN}"\ncommand = [{words}]\nroot = "{stage.directory}/runs"\n'
        "[nodes]\nmin = 2\nmax = 3\n[checkpoint]\nevery_s = 36000\n"
    )
    with stage.daemon() as service:
        service.command("submit", str(run_file))
        wait_for("the first step", lambda: service.stepping(RUN, 1), 120)
    say("one run trains on three of four nodes")


def _settle(daemon: Daemon) -> None:
    """Turn until nothing changes any more: the run is adopted."""
    quiet = 0
    until = time.monotonic() + 60
    while quiet < 5 and time.monotonic() < until:
        daemon.observer.slurm.ask()
        daemon.observer.slurm.wait(20)
        cycle = daemon.cycle()
        quiet = 0 if cycle.plan.facts or cycle.plan.intents else quiet + 1


def _run_cycles(daemon: Daemon, tools: CountedTools, own: OwnTime, cycles: int, *, is_asking: bool) -> dict[str, Any]:
    """`is_asking`: each cycle gets a new answer from Slurm; otherwise the daemon decides when it asks, and waits."""
    loop_ms, commands, changed = [], [], 0
    tools.counts.clear()
    began_s, began_cpu_s = time.monotonic(), own.read_s()
    for _ in range(cycles):
        before = tools.counts.total()
        if is_asking:
            daemon.observer.slurm.ask()
            daemon.observer.slurm.wait(20)
        cycle = daemon.cycle()
        if not is_asking:
            daemon._wait(cycle.plan.wake_after_s)
        loop_ms.append(cycle.spent_ms)
        commands.append(tools.counts.total() - before)
        changed += bool(cycle.plan.facts or cycle.plan.intents)
    spent_s, cpu_s = time.monotonic() - began_s, own.read_s() - began_cpu_s
    return {
        "cycles": cycles,
        "cycles_that_changed_something": changed,
        "loop_cpu_ms": median(loop_ms),
        "all_cpu_ms": round(cpu_s / cycles * 1000, 1),
        "cpu_percent_of_a_core": round(cpu_s / spent_s * 100, 2),
        "slurm_commands_max": max(commands),
        "slurm_commands_per_cycle": round(sum(commands) / cycles, 2),
        "slurm_commands_per_minute": round(sum(commands) / spent_s * 60, 1),
        "slurm_commands": dict(tools.counts),
    }


# ---------------------------------------------------------------- 2,048 nodes, 20 runs, built values


def _measure_scale() -> dict[str, Any]:
    text = render_nodes()
    parse_ms = _time_ms(lambda: parse_nodes(text), 10)
    nodes = build_nodes()
    snapshot = build_snapshot(nodes)
    with (
        tempfile.TemporaryDirectory() as folder,
        Store.open(Path(folder) / "ledger.db", now=NOW) as store,
    ):
        fill_ledger(store)
        load_ms = _time_ms(lambda: store.load_world(NOW), 10)
        world = store.load_world(NOW)
        first = reconcile(world, snapshot, Policy(), NOW)
        store.commit(first, NOW)  # what there was to learn is learnt: the measured cycles change nothing
        world = store.load_world(NOW)
        reconcile_ms = _time_ms(lambda: reconcile(world, snapshot, Policy(), NOW), 10)
        plan = reconcile(world, snapshot, Policy(), NOW)
    return {
        "nodes": NODES,
        "runs": RUNS,
        "scontrol_bytes": len(text),
        "parse_nodes_ms": parse_ms,
        "load_world_ms": load_ms,
        "reconcile_ms": reconcile_ms,
        "facts": len(plan.facts),
        "intents": len(plan.intents),
    }


def _time_ms(work: Callable[[], object], times: int) -> float:
    """CPU milliseconds of one call, the median of several."""
    spent = []
    for _ in range(times):
        began = time.thread_time()
        work()
        spent.append((time.thread_time() - began) * 1000)
    return median(spent) or 0.0


def _tell(result: dict[str, Any]) -> None:
    asking, pacing, scale = result["sandbox"]["asking"], result["sandbox"]["own_pace"], result["scale"]
    rows = [
        ("CPU of the loop, ms", asking["loop_cpu_ms"], pacing["loop_cpu_ms"]),
        ("CPU of the daemon, its reader and Slurm's commands, ms", asking["all_cpu_ms"], pacing["all_cpu_ms"]),
        ("Slurm commands in one cycle, at most", asking["slurm_commands_max"], pacing["slurm_commands_max"]),
        ("Slurm commands a minute", asking["slurm_commands_per_minute"], pacing["slurm_commands_per_minute"]),
        ("share of one core, percent", asking["cpu_percent_of_a_core"], pacing["cpu_percent_of_a_core"]),
    ]
    print(f"\nOne cycle when nothing changes: 4 nodes, 1 run, {asking['cycles']} cycles each")
    print(render_table(("", "asking Slurm each time", "at its own pace"), rows))
    print(f"\nAt {NODES} nodes and {RUNS} runs, built values: CPU milliseconds (median)")
    print(
        render_table(
            ("", "ms"),
            [
                (
                    f"parse scontrol -o show node ({scale['scontrol_bytes'] / 1e6:.1f} MB)",
                    show(scale["parse_nodes_ms"]),
                ),
                ("load the world from the ledger", show(scale["load_world_ms"])),
                ("reconcile: decide", show(scale["reconcile_ms"])),
            ],
        )
    )


if __name__ == "__main__":
    sys.exit(main())
