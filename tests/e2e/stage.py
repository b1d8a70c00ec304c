"""A sandbox cluster, a daemon on it, and the words that the tests need to act and to look."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from slurm.client import CliClient
from slurm.sandbox import Sandbox
from slurm.sandbox.processes import die_with_parent
from slurm.types import JobRecord, NodeRecord
from supervisor.model import Attempt, AttemptState, Checkpoint, CheckpointState, Intent, IntentState, Interruption, Run
from supervisor.store import Store

T = TypeVar("T")

RIG = Path(__file__).with_name("rig")
TRAINING = RIG / "training.py"
SUPERVISOR = (sys.executable, "-m", "supervisor")

# The launcher's interpreter is a setting: here it starts the launcher with an agent that needs no torch.
_PYTHON = """#!/bin/sh
if [ "$2 $3" = "-m trainer.launch" ]; then shift 3; exec {python} {rig}/launch.py "$@"; fi
exec {python} "$@"
"""

_SETTINGS = """
[ledger]
path = "{directory}/ledger.db"
[control]
socket = "{directory}/control.sock"
[slurm]
conf = "{conf}"
poll_interval_s = 1
submit_lookup_wait_s = 1
command_timeout_s = 3
[loop]
cycle_interval_s = 0.3
idle_interval_s = 0.5
[drain]
max_fraction = 0.6
{sweep}
[launcher]
python = "{python}"
"""

_RUN_FILE = """
name = "{name}"
command = {command}
root = "{root}"
[nodes]
min = {min}
max = {max}
spares = {spares}
start_checks = false
[restart]
backoff_s = 0
max_without_progress = {max_without_progress}
queue_ahead_s = {queue_ahead_s}
in_job = {in_job}
[progress]
step_min_s = 0.5
step_max_s = {step_max_s}
{more}
"""

NO_SWEEP = "[sweep]\ninterval_s = 0"


class Stage:
    """One cluster and one ledger; `daemon_log` is what all its daemons said, one after the other."""

    def __init__(self, directory: Path, sandbox: Sandbox, *, sweep: str = NO_SWEEP, has_torch: bool = False) -> None:
        self.directory = directory
        self.sandbox = sandbox
        self.daemon: subprocess.Popen[bytes] | None = None
        self.daemon_log = directory / "daemon.log"
        self.slurm = CliClient(timeout_s=10, parent={**os.environ, **sandbox.env})
        (directory / "runs").mkdir(parents=True, exist_ok=True)
        python = directory / "python"
        python.write_text(_PYTHON.format(python=sys.executable, rig=RIG))
        python.chmod(0o755)
        self.config = directory / "supervisor.toml"
        self.config.write_text(
            _SETTINGS.format(
                directory=directory,
                conf=sandbox.env["SLURM_CONF"],
                python=sys.executable if has_torch else python,
                sweep=sweep,
            )
        )

    @property
    def env(self) -> dict[str, str]:
        return {**os.environ, **self.sandbox.env, "SUPERVISOR_CONFIG": str(self.config)}

    # ---- the daemon

    def start_daemon(self, *, kill_at: str = "", path_first: Path | None = None, await_it: bool = True) -> None:
        """Start a daemon. `kill_at`: one that dies at this point (see rig/mortal_daemon.py)."""
        env = self.env
        if path_first is not None:
            env["PATH"] = f"{path_first}:{env['PATH']}"
        argv: tuple[str, ...] = (*SUPERVISOR, "daemon")
        if kill_at:
            argv, env["E2E_KILL_AT"] = (sys.executable, str(RIG / "mortal_daemon.py"), str(self.config)), kill_at
        with self.daemon_log.open("ab") as log:
            self.daemon = subprocess.Popen(
                argv,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent,  # noqa: PLW1509  (tests that are killed leave no daemon behind)
            )
        if await_it and not kill_at:
            self.wait("the daemon's socket", (self.directory / "control.sock").exists)

    def end_daemon(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Its exit code after this signal."""
        assert self.daemon is not None
        self.daemon.send_signal(number)
        code, self.daemon = self.daemon.wait(20), None
        return code

    def await_death(self, point: str, limit_s: float = 30) -> None:
        """Wait until the daemon has killed itself at its point."""
        daemon = self.daemon
        assert daemon is not None
        self.wait(f"death at {point}", lambda: daemon.poll() is not None, limit_s)
        assert daemon.returncode == -signal.SIGKILL, self.log_tail()
        self.daemon = None

    def close(self) -> None:
        if self.daemon is not None and self.daemon.poll() is None:
            self.daemon.kill()
            self.daemon.wait()

    # ---- commands

    def supervisor(self, *arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """A `supervisor` command; the caller reads its exit code."""
        return subprocess.run(
            [*SUPERVISOR, *arguments], env=env or self.env, capture_output=True, text=True, timeout=60, check=False
        )

    def do(self, *arguments: str) -> str:
        """Standard output of a `supervisor` command that succeeds."""
        ended = self.supervisor(*arguments)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    def status(self) -> dict[str, Any]:
        report: dict[str, Any] = json.loads(self.do("status", "--json"))
        return report

    def write_run(
        self,
        name: str = "r",
        *training: str,
        script: Path = TRAINING,
        minimum: int = 1,
        maximum: int = 1,
        spares: int = 0,
        max_without_progress: int = 3,
        step_max_s: float = 60,
        queue_ahead_s: float = 0,
        in_job: bool = False,
        root: Path | None = None,
        more: str = "",
    ) -> Path:
        """A run file; `training`: arguments of the stand-in (see rig/training.py).

        Without `in_job` every failure ends the attempt: most tests here are about what the service does then.
        """
        path = self.directory / f"{name}.toml"
        path.write_text(
            _RUN_FILE.format(
                name=name,
                command=json.dumps([str(script), *training]),
                root=root or self.directory / "runs",
                min=minimum,
                max=maximum,
                spares=spares,
                max_without_progress=max_without_progress,
                step_max_s=step_max_s,
                queue_ahead_s=queue_ahead_s,
                in_job=str(in_job).lower(),
                more=more,
            )
        )
        return path

    def submit(self, name: str = "r", *training: str, **more: Any) -> None:
        self.do("submit", "--no-visibility-check", str(self.write_run(name, *training, **more)))

    # ---- looking

    def run(self, name: str = "r") -> Run:
        with Store.open_readonly(self.directory / "ledger.db") as store:
            run = store.load_run(name)
        assert run is not None
        return run

    def attempts(self, name: str = "r") -> tuple[Attempt, ...]:
        with Store.open_readonly(self.directory / "ledger.db") as store:
            return store.load_attempts(name)

    def attempt(self, number: int, name: str = "r") -> Attempt:
        return next(a for a in self.attempts(name) if a.number == number)

    def checkpoints(self, name: str = "r") -> tuple[Checkpoint, ...]:
        with Store.open_readonly(self.directory / "ledger.db") as store:
            return store.load_checkpoints(name)

    def open_intents(self) -> tuple[Intent, ...]:
        with Store.open_readonly(self.directory / "ledger.db") as store:
            return store.load_intents(IntentState.OPEN)

    def interruptions(self, name: str = "r") -> tuple[Interruption, ...]:
        with Store.open_readonly(self.directory / "ledger.db") as store:
            return store.load_interruptions(name)

    def jobs(self) -> tuple[JobRecord, ...]:
        """All jobs that the controller remembers, ended ones too, by number: squeue's order is another in 25.11."""
        return tuple(sorted(self.slurm.fetch_jobs().jobs, key=lambda job: job.job_id))

    def node(self, name: str) -> NodeRecord:
        return next(n for n in self.slurm.fetch_nodes().nodes if n.name == name)

    def drained(self) -> dict[str, str]:
        """Reason by drained node."""
        return {n.name: n.reason for n in self.slurm.fetch_nodes().nodes if n.is_drain_set}

    def log_tail(self, lines: int = 25) -> str:
        if not self.daemon_log.exists():
            return "(no log)"
        return "\n".join(self.daemon_log.read_text(errors="replace").splitlines()[-lines:])

    # ---- waiting

    def wait(self, what: str, condition: Callable[[], T | None], limit_s: float = 30) -> T:
        """The first true value of `condition`."""
        until = time.monotonic() + limit_s
        while True:
            value = condition()
            if value:
                return value
            assert time.monotonic() < until, f"{what} did not come within {limit_s:g} s:\n{self.log_tail()}"
            time.sleep(0.05)

    def await_step(self, number: int, name: str = "r", limit_s: float = 30) -> Attempt:
        """Attempt `number`, once it has done a new step."""

        def stepping() -> Attempt | None:
            found = [a for a in self.attempts(name) if a.number == number]
            return found[0] if found and found[0].stepped_at is not None else None

        return self.wait(f"a step of attempt {number} of {name}", stepping, limit_s)

    def await_state(self, state: str, name: str = "r", limit_s: float = 30) -> Run:
        return self.wait(f"{name} {state}", lambda: run if (run := self.run(name)).state == state else None, limit_s)

    def await_verified(self, attempt: int, name: str = "r", limit_s: float = 30) -> Checkpoint:
        """A verified checkpoint of this attempt."""

        def newest() -> Checkpoint | None:
            found = [c for c in self.checkpoints(name) if c.attempt == attempt and c.state is CheckpointState.VERIFIED]
            return found[-1] if found else None

        return self.wait(f"a verified checkpoint of attempt {attempt}", newest, limit_s)

    # ---- what must always be so

    def assert_one_job_per_attempt(self) -> None:
        """The controller still remembers every job of a test."""
        tokens = Counter(job.comment for job in self.jobs() if job.comment.startswith("sup:"))
        assert all(count == 1 for count in tokens.values()), tokens

    def live_attempts(self, name: str = "r") -> list[int]:
        return [a.number for a in self.attempts(name) if a.state is not AttemptState.OVER]
