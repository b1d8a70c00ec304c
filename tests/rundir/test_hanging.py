"""What happens when a run directory hangs: a process that is stopped stands in for one that the kernel holds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from supervisor.rundir import RunDirReader, RunDirUnreadable
from trainer import contract
from trainer.contract import Progress, RunPaths


def wait_until(condition: Callable[[], bool], deadline_s: float = 10.0) -> None:
    until = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def child_pids(reader: RunDirReader) -> list[int]:
    return [member.child.pid for member in reader._pool._members]


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_a_hanging_run_directory_costs_one_deadline_then_nothing_and_others_are_read(
    paths: RunPaths, reader: RunDirReader, tmp_path: Path
) -> None:
    other = RunPaths(tmp_path / "other")
    other.checkpoints().mkdir(parents=True)
    reader.read("run", paths.run_dir, 1, is_final=False, deadline_s=10.0)
    (hung,) = child_pids(reader)
    os.kill(hung, signal.SIGSTOP)

    started = time.monotonic()
    with pytest.raises(RunDirUnreadable):
        reader.read("run", paths.run_dir, 1, is_final=False, deadline_s=0.3)
    assert time.monotonic() - started < 2.0
    with pytest.raises(RunDirUnreadable):  # at once, although the deadline is far
        reader.read("run", paths.run_dir, 1, is_final=False, deadline_s=60.0)
    assert time.monotonic() - started < 2.0
    reader.read("other", other.run_dir, 1, is_final=False, deadline_s=10.0)

    os.kill(hung, signal.SIGCONT)
    contract.write_json(paths.progress(1), Progress(attempt=1, step=4, time=1.0))
    wait_until(reader._pool._members[0].child.is_free)
    assert reader.read("run", paths.run_dir, 1, is_final=False, deadline_s=10.0).progress is not None


def test_only_so_many_processes_may_hang(paths: RunPaths, tmp_path: Path) -> None:
    reader = RunDirReader(max_children=1)
    try:
        reader.read("run", paths.run_dir, 1, is_final=False, deadline_s=10.0)
        os.kill(child_pids(reader)[0], signal.SIGSTOP)
        for run in ("one", "two"):
            with pytest.raises(RunDirUnreadable):
                reader.read(run, tmp_path / run, 1, is_final=False, deadline_s=0.2)
        assert len(child_pids(reader)) == 1
    finally:
        reader.close()


def test_a_reader_that_was_killed_is_replaced_and_ages_go_on(paths: RunPaths, reader: RunDirReader) -> None:
    contract.write_json(paths.progress(1), Progress(attempt=1, step=4, time=1.0))
    reader.read("run", paths.run_dir, 1, is_final=False, deadline_s=10.0)
    (pid,) = child_pids(reader)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not reader._pool._members[0].child.is_alive())
    progress = reader.read("run", paths.run_dir, 1, is_final=False, deadline_s=10.0).progress
    assert progress
    assert progress.unchanged_s > 0


def test_readers_end_with_the_process_that_started_them() -> None:
    code = (
        "import os, time\n"
        "from supervisor.rundir import RunDirReader\n"
        "reader = RunDirReader()\n"
        "print(reader._pool._members[0].child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.communicate(timeout=10)
    wait_until(lambda: is_gone(pid) or Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_as_root_files_are_touched_as_the_run_s_owner(tmp_path: Path) -> None:
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    home = tmp_path / "home"
    home.mkdir()
    os.chown(home, 4242, 4343)
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    reader = RunDirReader(4242, 4343)
    try:
        reader.write_attempt(home / "run", 1, {"batch.sh": b""})
        written = RunPaths(home / "run").attempt_dir(1) / "batch.sh"
        assert (written.stat().st_uid, written.stat().st_gid) == (4242, 4343)
        with pytest.raises(RunDirUnreadable):
            reader.read("run", private, 1, is_final=False, deadline_s=10.0)
    finally:
        reader.close()
