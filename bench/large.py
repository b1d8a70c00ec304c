"""A large cluster: a real slurmctld with many configured nodes, one of them with a slurmd, and 200 jobs."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bench.stage import BenchFailed, wait_for
from slurm import commands
from slurm.client import CliClient
from slurm.run_tool import Completed, run_tool
from slurm.sandbox import Sandbox, SandboxUnavailable
from slurm.sandbox.installed import require_accounting

JOBS = 200
ENDED_JOBS = 10
MARK = "scale"  # ends each row of the squeue that the jobs' text is taken from

_NODE = "CPUs=128 Boards=1 SocketsPerBoard=2 CoresPerSocket=64 ThreadsPerCore=1 RealMemory=2000000 Gres=gpu:8"


@dataclass(slots=True)
class MeasuredTools:
    """Runs Slurm's commands; notes their names and how much they print."""

    path: str
    names: list[str] = field(default_factory=list)
    bytes: int = 0

    def __call__(self, argv: tuple[str, ...], timeout_s: float, env: Mapping[str, str]) -> Completed:
        self.names.append(Path(argv[0]).name)
        done = run_tool(argv, timeout_s, env, path=self.path)
        self.bytes += len(done.stdout.encode()) + len(done.stderr.encode())
        return done


@dataclass(frozen=True, slots=True, kw_only=True)
class LargeCluster:
    """A running controller that knows `nodes` nodes, and a folder beside it."""

    directory: Path
    sandbox: Sandbox
    nodes: int
    has_accounting: bool

    @property
    def env(self) -> dict[str, str]:
        """The environment of every command."""
        return {**os.environ, **self.sandbox.env}

    @property
    def tools(self) -> MeasuredTools:
        """A new one: it has counted nothing."""
        return MeasuredTools(path=self.sandbox.env["PATH"])

    def client(self, tools: MeasuredTools) -> CliClient:
        return CliClient(run=tools, parent=self.env)

    def read(self, argv: tuple[str, ...]) -> str:
        """What a reading command prints, with the environment that the client gives it. Raises BenchFailed."""
        done = run_tool(argv, 30, commands.reading_environment(self.env), path=self.sandbox.env["PATH"])
        if done.returncode != 0:
            raise BenchFailed(f"{' '.join(argv)}: exit {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    def read_nodes(self) -> str:
        return self.read(commands.show_nodes_argv())

    def read_jobs(self) -> str:
        return self.read(commands.squeue_argv(MARK))


@contextmanager
def open_large_cluster(nodes: int, *, accounting: bool = False) -> Iterator[LargeCluster]:
    """A controller with `nodes` nodes and 200 jobs: 190 held ones of many sizes and 10 that have ended.

    Accounting, where it is wanted, is left out on a machine without slurmdbd and MariaDB. No other node than the
    first has a slurmd; the controller does not ask for theirs (SlurmdTimeout=0).
    """
    accounting = accounting and _has_accounting()
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as folder,
        Sandbox.start(
            nodes=1,
            gpus_per_node=1,
            accounting=accounting,
            slurmd_timeout_s=0,
            extra_conf=_render_nodes(nodes - 1),
            directory=Path(folder) / "sandbox",
        ) as sandbox,
    ):
        cluster = LargeCluster(
            directory=Path(folder).resolve(), sandbox=sandbox, nodes=nodes, has_accounting=accounting
        )
        _submit_jobs(cluster)
        yield cluster


def _has_accounting() -> bool:
    try:
        require_accounting()
    except SandboxUnavailable:
        return False
    return True


def _render_nodes(count: int) -> str:
    names = f"c[0001-{count:04d}]"
    return (
        f"NodeName={names} NodeAddr=127.0.0.1 {_NODE} State=UNKNOWN\n"
        f"PartitionName=large Nodes={names} MaxTime=INFINITE State=UP"
    )


def _submit_jobs(cluster: LargeCluster) -> None:
    for number in range(JOBS - ENDED_JOBS):
        size = 1 + number % min(cluster.nodes - 1, 100)
        _submit(cluster, number, "--hold", "--partition=large", f"--nodes={size}", "--ntasks-per-node=8")
    for number in range(JOBS - ENDED_JOBS, JOBS):
        _submit(cluster, number, "--partition=main", "--nodes=1")

    def have_ended() -> bool:
        return cluster.read(("squeue", "-h", "-t", "completed", "-o", "%i")).count("\n") == ENDED_JOBS

    wait_for("the end of the short jobs", have_ended, 120, every_s=0.5)


def _submit(cluster: LargeCluster, number: int, *options: str) -> None:
    comment = f"--comment=sup:run{number:03d}:1"
    argv = ("sbatch", "--parsable", "--output=/dev/null", f"--job-name=run{number:03d}", comment, *options)
    done = cluster.sandbox.run(*argv, "--wrap", "true")
    if done.returncode != 0:
        raise BenchFailed(f"{' '.join(argv)}: exit {done.returncode}: {done.stderr.strip()}")
