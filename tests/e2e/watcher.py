"""Looks at a cluster all the time: a run never has two live jobs, nor two attempts that train at once."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slurm.client import CliClient
from slurm.errors import SlurmError
from tests.e2e.stage import Stage

_EVERY_S = 0.25


@contextmanager
def watched(stage: Stage, name: str = "r") -> Iterator[Watcher]:
    """Watch one run; at the end nothing of it may have run twice."""
    watcher = Watcher(stage, name)
    watcher.start()
    try:
        yield watcher
    finally:
        watcher.stop()
    assert watcher.looks > 0
    assert not watcher.broken, watcher.broken


class Watcher:
    """A thread that polls squeue and the process table."""

    def __init__(self, stage: Stage, name: str) -> None:
        self._client = CliClient(timeout_s=2, parent={**os.environ, **stage.sandbox.env})
        self._name = name
        self._run_dir = str(stage.directory / "runs" / name)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self.looks = 0
        self.broken: list[str] = []

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join(10)

    def _work(self) -> None:
        while not self._over.wait(_EVERY_S):
            self.looks += 1
            attempts = self.training()
            if len(attempts) > 1:
                self.broken.append(f"attempts {sorted(attempts)} train at once")
            try:
                jobs = [j for j in self._client.fetch_jobs().jobs if j.name == self._name and j.is_live]
            except SlurmError:
                continue
            if len(jobs) > 1:
                self.broken.append(f"live at once: {[(j.job_id, j.raw_state, j.comment) for j in jobs]}")

    def training(self) -> frozenset[str]:
        """The attempts whose training processes are alive, on whatever node."""
        found = (_environ(path) for path in Path("/proc").iterdir() if path.name.isdigit())
        return frozenset(
            env["SUPERVISOR_ATTEMPT"]
            for env in found
            if env.get("SUPERVISOR_RUN_DIR") == self._run_dir and "RANK" in env and "SUPERVISOR_ATTEMPT" in env
        )


def _environ(process: Path) -> dict[str, str]:
    try:
        raw = (process / "environ").read_bytes()
    except OSError:
        return {}
    return dict(word.split("=", 1) for word in raw.decode(errors="replace").split("\0") if "=" in word)
