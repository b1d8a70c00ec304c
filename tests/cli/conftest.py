"""A ledger, a control socket that is served as the daemon's loop does, and the command line against them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from supervisor.cli.main import main
from supervisor.control import ControlServer
from supervisor.model import Fact, NodesSpec, Plan, Record, Run, RunSpec
from supervisor.requests import handle
from supervisor.store import Store
from supervisor.submissions import Submissions
from supervisor.verbs import Rights

NOW = datetime(2026, 1, 2, 12, tzinfo=UTC)
RUN_FILE = """\
name = "llama"
command = ["train.py"]
root = "runs"

[nodes]
min = 1
max = 2
"""


def now() -> datetime:
    return datetime.now(UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """Where a service lives, and the commands of a user of it."""

    folder: Path

    @property
    def ledger(self) -> Path:
        return self.folder / "state/ledger.db"

    @property
    def socket(self) -> Path:
        return self.folder / "state/control.sock"

    @property
    def runs(self) -> Path:
        """The root of the run files."""
        return self.folder / "runs"

    def call(self, *words: str) -> Result:
        """One command; its output without colours or wrapping."""
        env = {"SUPERVISOR_LEDGER": str(self.ledger), "SUPERVISOR_SOCKET": str(self.socket), "SUPERVISOR_CONFIG": ""}
        return CliRunner().invoke(main, list(words), env=env)

    def keep(self, *records: Record) -> None:
        """Put records into the ledger."""
        self.ledger.parent.mkdir(exist_ok=True)
        with Store.open(self.ledger, now=NOW) as store:
            store.commit(Plan(facts=tuple(Fact(record=record, reason="test") for record in records)), NOW)

    def load_run(self, name: str = "llama") -> Run | None:
        with Store.open_readonly(self.ledger) as store:
            return store.load_run(name)

    @contextmanager
    def running(self) -> Iterator[None]:
        """A daemon that answers requests and does nothing else."""
        self.keep()
        is_ready, is_over = threading.Event(), threading.Event()

        def serve() -> None:
            kept = Submissions(self.ledger)
            with Store.open(self.ledger, now=now()) as store, ControlServer(self.socket) as server:
                store.heartbeat(now(), cycle=7, summary="1 runs", pid=os.getpid())
                is_ready.set()
                while not is_over.is_set():
                    server.serve(0.02, lambda request: handle(request, store, now(), Rights(), kept))
                store.end(now())

        thread = threading.Thread(target=serve)
        thread.start()
        assert is_ready.wait(10)
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    def write_run_file(self, change: Callable[[str], str] = str) -> str:
        """A run file beside its script and its root; its path."""
        self.runs.mkdir(exist_ok=True)
        (self.folder / "train.py").touch()
        path = self.folder / "run.toml"
        path.write_text(change(RUN_FILE))
        return str(path)


@pytest.fixture
def service(tmp_path: Path) -> Service:
    return Service(folder=tmp_path)


def run(name: str = "llama", **changes: object) -> Run:
    spec = RunSpec(name=name, command=("train.py",), root=Path("/shared"), nodes=NodesSpec(min=1, max=2))
    return Run(spec=spec, created_at=NOW, changed_at=NOW, **changes)  # type: ignore[arg-type]
