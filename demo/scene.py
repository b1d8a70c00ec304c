"""The stage of the demo: a sandbox cluster, a daemon, one run; all of it under one folder, all of it taken down."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

from slurm.sandbox import Sandbox
from supervisor.model import Attempt, AttemptState, Checkpoint, CheckpointState, Interruption, Run
from supervisor.store import Store

T = TypeVar("T")
_SAY_EVERY_S = 8.0
Mode = Literal["auto", "isolated", "loopback"]


class DemoFailed(Exception):
    """The demo did not show what it must show; the message says what was not so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What is trained in the demo, and how often it is saved."""

    steps: int = 240
    step_sleep_s: float = 0.2
    save_every_s: float = 4.0
    seed: int = 7

    @property
    def command(self) -> list[str]:
        """Program and arguments of the reference training."""
        return ["-m", "trainer.example.train", "--steps", str(self.steps), "--seed", str(self.seed)]


class Scene:
    """A running cluster and daemon. A context manager: leaving it ends everything that it started."""

    def __init__(
        self,
        directory: Path,
        training: Training,
        *,
        name: str = "gpt",
        mode: Mode = "auto",
        say: Callable[[str], None] = print,
    ) -> None:
        self.directory = directory
        self.training = training
        self.name = name
        self._mode = mode
        self._say = say
        self.sandbox: Sandbox | None = None
        self.cold_start_s = 0.0
        self._daemon: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        try:
            self._set_up()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._daemon is not None:
            self._daemon.send_signal(signal.SIGTERM)
            try:
                self._daemon.wait(15)
            except subprocess.TimeoutExpired:
                self._daemon.kill()
                self._daemon.wait()
        if self.sandbox is not None:
            self.sandbox.stop()

    # ---- setting up

    def _set_up(self) -> None:
        if self.directory.exists():
            shutil.rmtree(self.directory)
        (self.directory / "runs").mkdir(parents=True)
        self.sandbox = Sandbox.start(nodes=4, mode=self._mode, directory=self.directory / "sandbox")
        self.cold_start_s = self.sandbox.cold_start_s
        (self.directory / "supervisor.toml").write_text(self._settings())
        (self.directory / "gpt.toml").write_text(self._run_file())
        with (self.directory / "daemon.log").open("wb") as log:
            self._daemon = subprocess.Popen(
                [*_SUPERVISOR, "daemon", "--config", str(self.config)],
                env=self.env,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C reaches the demo alone, which then ends it in order
            )
        self.wait_for("the daemon", self._answers, 30)

    def _settings(self) -> str:
        assert self.sandbox is not None
        scratch = json.dumps([str(self.sandbox.scratch)]) if self.sandbox.mode == "isolated" else "[]"
        return f"""# written by the demo
[ledger]
path = "{self.directory}/ledger.db"
[control]
socket = "{self.directory}/control.sock"
[slurm]
conf = "{self.sandbox.env["SLURM_CONF"]}"
poll_interval_s = 3
[loop]
cycle_interval_s = 0.5
idle_interval_s = 3
[drain]
max_fraction = 0.5  # of four nodes: the demo breaks two
[sweep]
interval_s = 30
[sweep.limits]
disk_paths = {scratch}
disk_min_free_bytes = 1048576
"""

    def _run_file(self) -> str:
        command = json.dumps([*self.training.command, "--step-sleep", str(self.training.step_sleep_s)])
        return f"""# written by the demo
name = "{self.name}"
command = {command}
root = "{self.directory}/runs"
[nodes]
min = 2
max = 3
spares = 1
[checkpoint]
every_s = {self.training.save_every_s}
keep_last = 4
"""

    # ---- paths and processes

    @property
    def env(self) -> dict[str, str]:
        """The environment of every command of the demo."""
        assert self.sandbox is not None
        return {**os.environ, **self.sandbox.env, "SUPERVISOR_CONFIG": str(self.config)}

    @property
    def config(self) -> Path:
        return self.directory / "supervisor.toml"

    @property
    def run_dir(self) -> Path:
        return self.directory / "runs" / self.name

    def supervisor(self, *arguments: str, timeout_s: float = 60) -> str:
        """Standard output of a `supervisor` command; DemoFailed with its message when it fails."""
        ended = subprocess.run(
            [*_SUPERVISOR, *arguments], env=self.env, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        if ended.returncode != 0:
            raise DemoFailed(f"supervisor {' '.join(arguments)}: exit {ended.returncode}: {ended.stderr.strip()}")
        return ended.stdout

    def _answers(self) -> bool:
        if self._daemon is not None and self._daemon.poll() is not None:
            raise DemoFailed(f"the daemon ended: {self.tail('daemon.log')}")
        if not (self.directory / "ledger.db").exists():
            return False
        status: dict[str, Any] = json.loads(self.supervisor("status", "--json"))
        return bool(status["daemon"]["running"])

    def tail(self, name: str, lines: int = 5) -> str:
        """The last lines of a log of the demo."""
        path = self.directory / name
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) if path.exists() else "(no log)"

    # ---- looking

    def wait_for(self, what: str, condition: Callable[[], T | None], limit_s: float) -> T:
        """The first true value of `condition`; DemoFailed when it does not come in time, or the run is held."""
        until = time.monotonic() + limit_s
        says_at = time.monotonic() + _SAY_EVERY_S
        while True:
            value = condition()
            if time.monotonic() > says_at:
                says_at += _SAY_EVERY_S
                self._say(f"  ... {self._where()}; waiting for {what}")
            if value:
                return value
            if time.monotonic() > until:
                raise DemoFailed(
                    f"{what} did not come within {limit_s:.0f} s; the log ends:\n{self.tail('daemon.log')}"
                )
            run = self.run()
            if run is not None and run.state == "held":
                raise DemoFailed(f"while waiting for {what} the run was held: {run.reason}")
            time.sleep(0.1)

    def _where(self) -> str:
        last = self.attempts()[-1:]
        if not last:
            return "no attempt yet"
        step = last[0].last_step
        return f"attempt {last[0].number} {last[0].state}" + (f", step {step} of {self.training.steps}" if step else "")

    def _ledger(self) -> Store | None:
        path = self.directory / "ledger.db"
        return Store.open_readonly(path) if path.exists() else None

    def run(self) -> Run | None:
        store = self._ledger()
        if store is None:
            return None
        with store:
            return store.load_run(self.name)

    def attempts(self) -> tuple[Attempt, ...]:
        store = self._ledger()
        if store is None:
            return ()
        with store:
            return store.load_attempts(self.name)

    def checkpoints(self) -> tuple[Checkpoint, ...]:
        store = self._ledger()
        if store is None:
            return ()
        with store:
            return store.load_checkpoints(self.name)

    def verified(self, attempt: int | None = None) -> tuple[Checkpoint, ...]:
        """Verified checkpoints, oldest first; of one attempt when given."""
        return tuple(
            c for c in self.checkpoints() if c.state is CheckpointState.VERIFIED and attempt in (None, c.attempt)
        )

    def interruptions(self) -> tuple[Interruption, ...]:
        store = self._ledger()
        if store is None:
            return ()
        with store:
            return store.load_interruptions(self.name)

    def stepping(self, number: int) -> Attempt | None:
        """Attempt `number` once it has done a new step."""
        return next(
            (a for a in self.attempts() if a.number == number and a.stepped_at and a.state is AttemptState.RUNNING),
            None,
        )


_SUPERVISOR = (sys.executable, "-m", "supervisor")
