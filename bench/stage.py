"""The stage of the benchmarks: a sandbox cluster and, where one is wanted, a daemon with its default intervals."""

from __future__ import annotations

import getpass
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from slurm.parse import parse_nodes
from slurm.sandbox import Sandbox, SandboxError
from supervisor.model import Attempt, AttemptState, CheckpointState, Interruption, Verdict
from supervisor.store import Store

T = TypeVar("T")

FAILURES = (OSError, SandboxError, subprocess.SubprocessError)  # of a sandbox or a command, besides BenchFailed

LIVENESS_S = 1.0  # without a heartbeat for so long a node or a rank is given up, here and under the other launcher

_SUPERVISOR = (sys.executable, "-m", "supervisor")


class BenchFailed(Exception):
    """What was to be measured did not happen; the message says what."""


def wait_for(what: str, condition: Callable[[], T | None], limit_s: float, *, every_s: float = 0.1) -> T:
    """The first true value of `condition`. Raises BenchFailed when it does not come in time."""
    until = time.monotonic() + limit_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > until:
            raise BenchFailed(f"{what} did not come within {limit_s:.0f} s")
        time.sleep(every_s)


@contextmanager
def open_stage(nodes: int = 4) -> Iterator[Stage]:
    """A sandbox in a temporary folder; both are gone afterwards."""
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as folder,
        Sandbox.start(nodes=nodes, mode="auto", directory=Path(folder) / "sandbox") as sandbox,
    ):
        yield Stage(directory=Path(folder).resolve(), sandbox=sandbox)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A running sandbox and a folder that its nodes share."""

    directory: Path
    sandbox: Sandbox

    @property
    def env(self) -> dict[str, str]:
        """The environment of every command."""
        return {**os.environ, **self.sandbox.env, "SUPERVISOR_CONFIG": str(self.config)}

    @property
    def config(self) -> Path:
        return self.directory / "supervisor.toml"

    def slurm(self, *argv: str) -> str:
        """Standard output of a Slurm command. Raises BenchFailed when it fails."""
        ended = self.sandbox.run(*argv)
        if ended.returncode != 0:
            raise BenchFailed(f"{' '.join(argv)}: exit {ended.returncode}: {ended.stderr.strip()}")
        return ended.stdout

    def node_states(self) -> dict[str, str]:
        """State of each node with its flags, such as IDLE+DRAIN."""
        records = self.slurm("scontrol", "-o", "show", "node").splitlines()
        fields = [dict(word.split("=", 1) for word in line.split() if "=" in word) for line in records if line]
        return {record["NodeName"]: record["State"] for record in fields}

    def job_nodes(self, job_id: int) -> tuple[str, ...]:
        """The nodes that a job runs on, the batch host first; empty while it runs on none."""
        shown = self.sandbox.run("squeue", "-h", "-t", "running", "-j", str(job_id), "-o", "%N %B").stdout.split()
        if len(shown) != 2:
            return ()
        names = self.slurm("scontrol", "show", "hostnames", shown[0]).split()
        return (shown[1], *(name for name in names if name != shown[1]))

    def mend(self, node: str) -> None:
        """Give a node its power back, lift its drain, and wait until Slurm may use it."""
        self.sandbox.revive(node)
        record = next(r for r in parse_nodes(self.slurm("scontrol", "-o", "show", "node", node)).nodes)
        # Down and up again: Slurm would otherwise ask the node only after a minute what has become of its old job.
        # With the reason that it has, or the supervisor would see a stranger's drain.
        reason = record.reason or "bench"
        self.sandbox.run("scontrol", "update", f"nodename={node}", "state=down", f"reason={reason}")

        def is_back() -> bool:
            state = self.node_states()[node]
            if "DRAIN" in state or "DOWN" in state:
                self.sandbox.run("scontrol", "update", f"nodename={node}", "state=resume")
            return state == "IDLE"

        wait_for(f"node {node}", is_back, 120, every_s=0.5)

    def clear(self) -> None:
        """No job is left, and every node is idle. Raises BenchFailed."""
        self.sandbox.run("scancel", f"--user={getpass.getuser()}")
        for node, state in self.node_states().items():
            if state != "IDLE":
                self.mend(node)

    @contextmanager
    def daemon(self) -> Iterator[Service]:
        """A daemon with default intervals. Its drain budget is wide: the benchmarks break one node after the other."""
        paths = json.dumps([str(self.sandbox.scratch)]) if self.sandbox.mode == "isolated" else "[]"
        self.config.write_text(f"""[ledger]
path = "{self.directory}/ledger.db"
[control]
socket = "{self.directory}/control.sock"
[slurm]
conf = "{self.sandbox.env["SLURM_CONF"]}"
[drain]
max_fraction = 1.0
max_nodes = 1000
window_s = 30
[sweep.limits]
disk_paths = {paths}
disk_min_free_bytes = 1048576
[launcher]
pythonpath = "{Path(__file__).parents[1]}"
""")
        log_path = self.directory / "daemon.log"
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                [*_SUPERVISOR, "daemon", "--config", str(self.config)],
                env=self.env,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        service = Service(stage=self, process=process)
        try:
            wait_for("the daemon", service.is_up, 30)
            yield service
        except BenchFailed:
            print("\n".join(log_path.read_text(errors="replace").splitlines()[-20:]), file=sys.stderr)
            raise
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A running daemon, and its ledger."""

    stage: Stage
    process: subprocess.Popen[bytes]

    @property
    def ledger(self) -> Path:
        return self.stage.directory / "ledger.db"

    def is_up(self) -> bool:
        """True once it answers on its socket. Raises BenchFailed when it has ended."""
        if self.process.poll() is not None:
            raise BenchFailed(f"the daemon ended with {self.process.returncode}")
        return (self.stage.directory / "control.sock").exists() and self.ledger.exists()

    def command(self, *arguments: str) -> str:
        """Standard output of a `supervisor` command. Raises BenchFailed when it fails."""
        ended = subprocess.run(
            [*_SUPERVISOR, *arguments], env=self.stage.env, capture_output=True, text=True, timeout=90, check=False
        )
        if ended.returncode != 0:
            raise BenchFailed(f"supervisor {' '.join(arguments)}: exit {ended.returncode}: {ended.stderr.strip()}")
        return ended.stdout

    def attempts(self, run: str) -> tuple[Attempt, ...]:
        """The attempts of a run. Raises BenchFailed when the run is held: nothing more would come."""
        with Store.open_readonly(self.ledger) as store:
            found = store.load_run(run)
            if found is not None and found.state == "held":
                raise BenchFailed(f"the run is held: {found.reason}")
            return store.load_attempts(run)

    def interruptions(self, run: str) -> tuple[Interruption, ...]:
        with Store.open_readonly(self.ledger) as store:
            return store.load_interruptions(run)

    def verified(self, run: str, attempt: int) -> int:
        """How many verified checkpoints of an attempt the ledger knows."""
        with Store.open_readonly(self.ledger) as store:
            found = store.load_checkpoints(run)
        return sum(c.attempt == attempt and c.state is CheckpointState.VERIFIED for c in found)

    def stepping(self, run: str, number: int) -> Attempt | None:
        """Attempt `number` once it has done a new step."""
        found = (a for a in self.attempts(run) if a.number == number)
        return next((a for a in found if a.state is AttemptState.RUNNING and a.stepped_at), None)

    def is_forgiven(self, node: str) -> bool:
        """True when a node that was drained counts as healthy again."""
        with Store.open_readonly(self.ledger) as store:
            memory = next((m for m in store.load_nodes() if m.node == node), None)
        return memory is None or memory.verdict is Verdict.HEALTHY
