"""What a test leaves behind when it is killed: no daemon and no cluster."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from slurm.sandbox.processes import await_true, is_alive, read_stat
from supervisor.store import Store

pytestmark = pytest.mark.slurm

TEST = """
import sys, time
from pathlib import Path
from slurm.sandbox import Sandbox
from tests.e2e.stage import Stage
sandbox = Sandbox.start(nodes=1, directory=Path(sys.argv[1], "sandbox"))
stage = Stage(Path(sys.argv[1], "stage"), sandbox)
stage.start_daemon()
print(stage.daemon.pid, flush=True)
time.sleep(600)
"""


def test_a_test_that_is_killed_leaves_no_daemon_and_a_ledger_that_opens(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", TEST, str(tmp_path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as killed:
        try:
            assert killed.stdout is not None
            daemon = read_stat(int(killed.stdout.readline()))
            assert daemon is not None
        finally:
            killed.kill()
    assert await_true(lambda: not is_alive(daemon.pid, daemon.started), deadline_s=10)
    with Store.open_readonly(tmp_path / "stage" / "ledger.db") as store:
        assert store.load_runs() == ()
