"""`make bench-scale`: what one look at a cluster of 2,048 nodes costs, and how long `supervisor status` takes to start.

Ends with 1 when a target is missed, and says which. CPU times, medians: a busy machine moves them little.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

from bench.built import NODES, render_nodes
from bench.cycle import OwnTime, find_children
from bench.large import JOBS, MARK, LargeCluster, MeasuredTools, open_large_cluster
from bench.report import describe_machine, finish, median, render_table, say, show
from bench.stage import BenchFailed, wait_for
from bench.starts import as_installed
from slurm.client import SlurmClient
from slurm.commands import FIELD_SEPARATOR, SQUEUE_FIELDS, row_end
from slurm.parse import parse_nodes, parse_squeue
from slurm.pyslurm_client import PyslurmClient, choose_client
from slurm.sandbox import SandboxUnavailable
from supervisor.clock import SystemClock
from supervisor.config import Settings, parse_settings
from supervisor.daemon import Daemon
from supervisor.logs import configure_logs
from supervisor.model import Attempt, AttemptState, Fact, NodesSpec, Plan, Run, RunSpec
from supervisor.store import Store

SMALL = 64
PARSED_JOBS = 10_000
_POLL_S = 1.0
_CYCLES = 6  # of each kind
_ABSENT_JOB_ID = 900_000
RUNS = 3  # in the ledger that `supervisor status` reads


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """An upper bound of one number of the result."""

    key: str
    at_most: float
    what: str


TARGETS = (
    Target(key="commands_per_cycle", at_most=3, what="Slurm commands in one cycle"),
    Target(key="parse_cpu_s", at_most=0.15, what=f"CPU to parse {NODES} nodes and {PARSED_JOBS} jobs, s"),
    Target(key="growth_64_to_2048", at_most=1.0, what=f"CPU per node at {NODES} nodes, over that at {SMALL}"),
    Target(key="status_cold_ratio", at_most=10.0, what="start of `supervisor status`, over a bare Python's"),
)


def judge(result: Mapping[str, Any]) -> list[str]:
    """The targets that were missed, or not measured, a sentence each."""
    missed = []
    for target in TARGETS:
        value = result.get(target.key)
        if value is None:
            missed.append(f"{target.key} was not measured")
        elif value > target.at_most:
            missed.append(f"{target.key} is {value:g}, the target at most {target.at_most:g} ({target.what})")
    return missed


def growth(small: Mapping[str, Any], large: Mapping[str, Any]) -> float:
    """CPU per node of one look at the large cluster over that at the small one: at most 1 is not worse than linear."""
    small_ms, large_ms = (float(look["cpu_ms"]) / int(look["nodes"]) for look in (small, large))
    return round(large_ms / small_ms, 3)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.scale", description=__doc__)
    parser.add_argument("--looks", type=int, default=15, help="at each cluster, each way")
    parser.add_argument("--starts", type=int, default=25, help="of each command, in turns")
    parser.add_argument("--json", action="store_true", dest="as_json", help="print the result as JSON, not as tables")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # cluster and daemon are taken down on the way out
    machine = describe_machine()
    with contextlib.redirect_stdout(sys.stderr) if options.as_json else contextlib.nullcontext():
        try:
            result = _measure(options.looks, options.starts)
        except (SandboxUnavailable, BenchFailed) as error:
            print(f"bench-scale: {error}", file=sys.stderr)
            return 1
        _tell(result)
        written = finish("scale", result, machine)
    if options.as_json:
        print(json.dumps(written, indent=2))
    for sentence in result["missed"]:
        print(f"bench-scale: {sentence}", file=sys.stderr)
    return 1 if result["missed"] else 0


def _measure(looks: int, starts: int) -> dict[str, Any]:
    with open_large_cluster(SMALL) as cluster:
        small = _measure_looks(cluster, looks)
    say(f"{SMALL} nodes are measured")
    with open_large_cluster(NODES, accounting=True) as cluster:
        large = _measure_looks(cluster, looks)
        say(f"{NODES} nodes are measured")
        cycles = _measure_cycles(cluster)
        say("cycles of the daemon are measured")
        parse = _measure_parse(cluster)
        say("parsing is measured")
        cold = _measure_starts(cluster, starts)
        say("starts are measured")
    result = {
        "commands_per_cycle": cycles["commands_per_cycle"],
        "parse_cpu_s": parse["cpu_s"],
        "growth_64_to_2048": growth(small["cli"], large["cli"]),
        "status_cold_ratio": cold["ratio_to_python"],
        "definitions": {
            "growth_64_to_2048": "CPU (own and commands) per node of one look by the command line at 2,048 nodes, "
            "divided by the same at 64 nodes; 1 is linear growth, less is better",
            "status_cold_ratio": "median CPU (user and system) from start to end of `supervisor status` with "
            f"{RUNS} runs and no daemon, divided by that of `python -c pass`, in turns",
            "commands_per_cycle": "most Slurm commands in one cycle of the daemon once it knows the cluster; cycles "
            "with an absent job ask accounting too",
            "parse_cpu_s": "CPU of this process to parse both listings; of two node listings the dearer one counts",
        },
        "looks": {str(SMALL): small, str(NODES): large},
        "cycles": cycles,
        "parse": parse,
        "starts": cold,
    }
    return {**result, "missed": judge(result)}


# ---------------------------------------------------------------- one look


def _measure_looks(cluster: LargeCluster, looks: int) -> dict[str, Any]:
    tools = cluster.tools
    cli = cluster.client(tools)
    _look(cli, cluster.nodes)  # the first one pays for imports
    tools.names.clear()
    tools.bytes = 0
    spent = [_time(lambda: _look(cli, cluster.nodes)) for _ in range(looks)]
    by_cli = {
        "nodes": cluster.nodes,
        "jobs": JOBS,
        "wall_ms": median([s.wall_ms for s in spent]),
        "cpu_ms": median([s.own_ms + s.children_ms for s in spent]),
        "own_cpu_ms": median([s.own_ms for s in spent]),
        "commands_cpu_ms": median([s.children_ms for s in spent]),
        "bytes": tools.bytes // looks,
        "commands": len(tools.names) / looks,
    }
    return {"cli": by_cli, "pyslurm": _measure_pyslurm(cluster, cli, looks)}


def _look(client: SlurmClient, nodes: int) -> None:
    """One observation: all jobs and all nodes. Raises BenchFailed when something is missing in it."""
    jobs, found = client.fetch_jobs(), client.fetch_nodes()
    if len(jobs.jobs) != JOBS or len(found.nodes) != nodes or jobs.unreadable or found.unreadable:
        raise BenchFailed(f"{len(jobs.jobs)} jobs and {len(found.nodes)} nodes were read, not {JOBS} and {nodes}")


def _measure_pyslurm(cluster: LargeCluster, cli: SlurmClient, looks: int) -> dict[str, Any]:
    """The same through pyslurm; where it does not fit, why."""
    before, own = find_children(os.getpid()), OwnTime()
    choice = choose_client("auto", cli=cli, parent=cluster.env, timeout_s=30)
    if not isinstance(choice.client, PyslurmClient):
        return {"is_measured": False, "why": choice.reason}
    client = choice.client
    try:
        _look(client, cluster.nodes)
        child = next(iter(find_children(os.getpid()) - before), None)
        wrote, began_s = _bytes_written(child), own.read_s()
        spent = [_time(lambda: _look(client, cluster.nodes)) for _ in range(looks)]
        cpu_s = own.read_s() - began_s
        return {
            "is_measured": True,
            "nodes": cluster.nodes,
            "jobs": JOBS,
            "wall_ms": median([s.wall_ms for s in spent]),
            "cpu_ms": round(cpu_s / looks * 1000, 1),  # a mean: the child's time is told in hundredths of a second
            "own_cpu_ms": median([s.own_ms for s in spent]),
            "bytes": (_bytes_written(child) - wrote) // looks,
            "commands": 0,
        }
    finally:
        client.close()


def _bytes_written(pid: int | None) -> int:
    if pid is None:
        return 0
    for line in Path(f"/proc/{pid}/io").read_text().splitlines():
        if line.startswith("wchar:"):
            return int(line.split()[1])
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """What one piece of work took, milliseconds."""

    wall_ms: float
    own_ms: float  # CPU of this process
    children_ms: float  # CPU of the children that ended meanwhile


def _time(work: Callable[[], object]) -> Spent:
    wall, own, children = time.monotonic(), time.process_time(), _ended_children_s()
    work()
    return Spent(
        wall_ms=(time.monotonic() - wall) * 1000,
        own_ms=(time.process_time() - own) * 1000,
        children_ms=(_ended_children_s() - children) * 1000,
    )


def _ended_children_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


# ---------------------------------------------------------------- cycles of the daemon


def _measure_cycles(cluster: LargeCluster) -> dict[str, Any]:
    """Cycles of a daemon that only observes, a new question to Slurm in each: its job is listed, then it is absent."""
    configure_logs(level="error", stream=sys.stderr)
    settings = _observing(cluster)
    tools = cluster.tools
    client, clock = cluster.client(tools), SystemClock()
    with Store.open(settings.ledger.path, now=clock.now()) as store:
        store.claim(clock.now(), pid=os.getpid(), host="bench")
        daemon = Daemon(settings, store, client, clock)
        try:
            first = _run_cycle(daemon, tools)
            _add_run(store, cluster, "run000", _find_job_id(client, "run000"), clock.now())
            listed = [_run_cycle(daemon, tools) for _ in range(_CYCLES)]
            _add_run(store, cluster, "absent", _ABSENT_JOB_ID, clock.now())
            absent = [_run_cycle(daemon, tools) for _ in range(_CYCLES)]
        finally:
            daemon.close()
            store.end(clock.now())
    most = max((cycle.commands for cycle in (*listed, *absent)), key=len)
    if cluster.has_accounting and "sacct" not in most:
        raise BenchFailed("accounting was not asked for a job that is absent")
    return {
        "commands_per_cycle": len(most),
        "commands": most,
        "commands_while_all_is_listed": max((cycle.commands for cycle in listed), key=len),
        "commands_of_the_first_cycle": first.commands,
        "cycles": len(listed) + len(absent),
        "loop_cpu_ms": median([cycle.loop_cpu_ms for cycle in listed]),
        "all_cpu_ms": median([cycle.all_cpu_ms for cycle in listed]),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedCycle:
    """One turn of the loop with the answers that it asked for."""

    commands: list[str]
    loop_cpu_ms: float  # in the loop's own thread
    all_cpu_ms: float  # the daemon's threads and Slurm's commands


def _run_cycle(daemon: Daemon, tools: MeasuredTools) -> ObservedCycle:
    slurm = daemon.observer.slurm
    wait_for("the time for a question", lambda: slurm.age_s >= _POLL_S, 30, every_s=0.05)
    before, loop_ms = len(tools.names), 0.0

    def turn() -> None:
        nonlocal loop_ms
        loop_ms = daemon.cycle().spent_ms  # the observer asks, because it is time
        if not slurm.wait(60):
            raise BenchFailed("Slurm did not answer within a minute")

    spent = _time(turn)
    return ObservedCycle(
        commands=tools.names[before:], loop_cpu_ms=loop_ms, all_cpu_ms=spent.own_ms + spent.children_ms
    )


def _observing(cluster: LargeCluster) -> Settings:
    text = (
        f'observe_only = true\n[ledger]\npath = "{cluster.directory}/ledger.db"\n'
        f'[control]\nsocket = "{cluster.directory}/control.sock"\n'
        f'[slurm]\nconf = "{cluster.env["SLURM_CONF"]}"\npoll_interval_s = {_POLL_S}\n'
    )
    return parse_settings(text, path=cluster.directory / "supervisor.toml")


def _find_job_id(client: SlurmClient, name: str) -> int:
    return next(job.job_id for job in client.fetch_jobs().jobs if job.name == name)


def _add_run(store: Store, cluster: LargeCluster, name: str, job_id: int, now: datetime) -> None:
    """A run whose first attempt was submitted an hour ago."""
    began = now - timedelta(hours=1)
    run = store.add_run(_build_run(name, cluster.directory / "runs"), began).name
    attempt = Attempt(
        run=run,
        number=1,
        token=f"sup:{name}:1",
        state=AttemptState.SUBMITTED,
        nodes_wanted=1,
        job_id=job_id,
        planned_at=began,
        submitted_at=began,
    )
    store.commit(Plan(facts=(Fact(record=attempt, reason="built"),)), now)


def _build_run(name: str, root: Path) -> Run:
    return Run(spec=RunSpec(name=name, command=("train.py",), root=root, nodes=NodesSpec(min=1, max=1)))


# ---------------------------------------------------------------- parsing


def _measure_parse(cluster: LargeCluster) -> dict[str, Any]:
    """Both listings as Slurm prints them; its 200 rows of jobs stand for 10,000, each with a number of its own."""
    jobs_text = repeat_jobs(cluster.read_jobs(), PARSED_JOBS)
    listings = {"printed": cluster.read_nodes(), "built": render_nodes()}
    jobs_s = _parse_s(lambda: len(parse_squeue(jobs_text, mark=MARK).jobs), PARSED_JOBS)
    nodes_s = {name: _parse_s(partial(_count_nodes, text), NODES) for name, text in listings.items()}
    return {
        "cpu_s": round(jobs_s + max(nodes_s.values()), 4),
        "jobs_cpu_s": round(jobs_s, 4),
        "jobs_bytes": len(jobs_text),
        "nodes_cpu_s": {name: round(value, 4) for name, value in nodes_s.items()},
        "nodes_bytes": {name: len(text) for name, text in listings.items()},
    }


def _count_nodes(text: str) -> int:
    return len(parse_nodes(text).nodes)


def repeat_jobs(text: str, count: int) -> str:
    """`count` rows of squeue made of the given ones: the same rows again and again, numbered from 1.

    Each 500th runs on a hundred nodes of its own, as the jobs that fill a cluster do; the given ones hold none or one.
    """
    given = [row.lstrip("\n").split(FIELD_SEPARATOR) for row in text.split(row_end(MARK)) if row.strip()]
    return "".join(_render_row(given[n % len(given)], n + 1) for n in range(count))


def _render_row(values: list[str], number: int) -> str:
    changed = {"JobID": str(number)}
    if number % 500 == 0:
        first = number // 5 - 99
        changed |= {"State": "RUNNING", "NodeList": f"c[{first:04d}-{first + 99:04d}]"}
    named = zip(SQUEUE_FIELDS, values, strict=True)
    return FIELD_SEPARATOR.join(changed.get(name, value) for name, value in named) + row_end(MARK) + "\n"


def _parse_s(parse: Callable[[], int], wanted: int) -> float:
    """CPU seconds, median of several; `parse` returns how many records it has read."""
    spent = []
    for _ in range(9):
        began = time.process_time()
        found = parse()
        spent.append(time.process_time() - began)
        if found != wanted:
            raise BenchFailed(f"{found} records were read, not {wanted}")
    return statistics.median(spent)


# ---------------------------------------------------------------- starts


def _measure_starts(cluster: LargeCluster, starts: int) -> dict[str, Any]:
    """From start to end: a bare Python, `supervisor status` on a small ledger, and squeue, in turns."""
    env = as_installed({**cluster.env, **_small_ledger(cluster.directory / "small")}, cluster.directory / "bytecode")
    commands = {
        "python": (sys.executable, "-c", "pass"),
        "status": (sys.executable, "-m", "supervisor", "status"),
        "squeue": ("squeue",),
    }
    spent: dict[str, list[Spent]] = {name: [] for name in commands}
    for _ in range(starts + 1):
        for name, argv in commands.items():
            spent[name].append(_time_start(argv, env))
    cpu = {name: median([s.children_ms for s in each[1:]]) or 0.0 for name, each in spent.items()}
    wall = {name: median([s.wall_ms for s in each[1:]]) or 0.0 for name, each in spent.items()}
    return {
        "ratio_to_python": round(cpu["status"] / cpu["python"], 2),
        "ratio_to_squeue": round(cpu["status"] / cpu["squeue"], 2),
        "wall_ratio_to_python": round(wall["status"] / wall["python"], 2),
        "wall_ratio_to_squeue": round(wall["status"] / wall["squeue"], 2),
        "cpu_ms": cpu,
        "wall_ms": wall,
        "starts": starts,
        "runs": RUNS,
    }


def _time_start(argv: Sequence[str], env: Mapping[str, str]) -> Spent:
    def start() -> None:
        subprocess.run(argv, env=env, check=True, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL, timeout=60)

    return _time(start)


def _small_ledger(folder: Path) -> dict[str, str]:
    """A ledger of a few runs, a few attempts each, and the variables that point to it."""
    folder.mkdir()
    ledger, now = folder / "ledger.db", SystemClock().now()
    with Store.open(ledger, now=now) as store:
        for number in range(RUNS):
            run = store.add_run(_build_run(f"run{number:03d}", folder), now - timedelta(days=3)).name
            attempts = [_build_attempt(run, number * 10 + n, n, now) for n in range(1, 4)]
            store.commit(Plan(facts=tuple(Fact(record=a, reason="built") for a in attempts)), now)
    return {"SUPERVISOR_LEDGER": str(ledger), "SUPERVISOR_SOCKET": str(folder / "control.sock")}


def _build_attempt(run: str, job_id: int, number: int, now: datetime) -> Attempt:
    began, is_over = now - timedelta(days=4 - number), number < 3
    return Attempt(
        run=run,
        number=number,
        token=f"sup:{run}:{number}",
        state=AttemptState.OVER if is_over else AttemptState.RUNNING,
        nodes_wanted=16,
        nodes=tuple(f"c{n:04d}" for n in range(1, 17)),
        job_id=job_id,
        planned_at=began,
        submitted_at=began,
        started_at=began,
        stepped_at=began,
        over_at=began + timedelta(hours=20) if is_over else None,
        is_job_gone=is_over,
        last_step=number * 1000,
        phase="step",
        progress_at=now,
    )


# ---------------------------------------------------------------- the result


def _tell(result: Mapping[str, Any]) -> None:
    print(f"\nOne look at all jobs ({JOBS}) and all nodes, milliseconds (median)")
    looks = [(int(nodes), way, each) for nodes, ways in result["looks"].items() for way, each in ways.items()]
    header = ("nodes", "by", "wall", "CPU", "of it own", "kB", "commands")
    print(render_table(header, [_look_row(*look) for look in looks]))
    cycles, starts = result["cycles"], result["starts"]
    print(
        f"\nA cycle: {', '.join(cycles['commands_while_all_is_listed'])}; with an absent job: "
        f"{', '.join(cycles['commands'])}; first of all: {', '.join(cycles['commands_of_the_first_cycle'])}"
    )
    print(
        f"CPU of a cycle at {NODES} nodes, ms: {show(cycles['all_cpu_ms'])}, of it in the loop "
        f"{show(cycles['loop_cpu_ms'], 2)}"
    )
    print(f"\nFrom start to end, milliseconds (median of {starts['starts']}, in turns)")
    rows = [(name, show(starts["cpu_ms"][name]), show(starts["wall_ms"][name])) for name in starts["cpu_ms"]]
    print(render_table(("command", "CPU", "wall"), rows))
    print()
    bounds = [(t.what, t.key, f"{result[t.key]:g}", f"{t.at_most:g}") for t in TARGETS]
    print(render_table(("what", "in the result", "measured", "at most"), bounds))


def _look_row(nodes: int, way: str, look: Mapping[str, Any]) -> tuple[str, ...]:
    if not look.get("is_measured", True):
        return (str(nodes), way, look["why"], "-", "-", "-", "-")
    return (
        str(nodes),
        way,
        show(look["wall_ms"]),
        show(look["cpu_ms"]),
        show(look["own_cpu_ms"]),
        show(look["bytes"] / 1000, 0),
        f"{look['commands']:g}",
    )


if __name__ == "__main__":
    sys.exit(main())
