import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from supervisor.runlock import AlreadyRunning, acquire, lock_path
from tests.store.records import NOW

ROOT = Path(__file__).parents[2]

_HOLD = """
import subprocess, sys
from datetime import datetime, UTC
from pathlib import Path
from supervisor.runlock import acquire
lock = acquire(Path(sys.argv[1]), datetime(2026, 11, 30, 3, tzinfo=UTC))
child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=sys.stdin, close_fds=False)
print(child.pid, flush=True)
child.wait()
"""

_FORK = """
import os, sys
from datetime import datetime, UTC
from pathlib import Path
from supervisor.runlock import acquire
lock = acquire(Path(sys.argv[1]), datetime(2026, 11, 30, 3, tzinfo=UTC))
child = os.fork()
if child == 0:
    sys.stdin.read()
    os._exit(0)
print(child, flush=True)
os.waitpid(child, 0)
"""


def test_a_second_daemon_is_refused_with_the_first_ones_pid_and_start(path: Path) -> None:
    with acquire(path, NOW), pytest.raises(AlreadyRunning, match=rf"pid {os.getpid()} on .*2026-11-30T03:00:00"):
        acquire(path, NOW)


def test_the_lock_is_free_again_after_its_release(path: Path) -> None:
    acquire(path, NOW).release()
    acquire(path, NOW).release()


def test_a_ledger_reached_by_a_link_has_the_same_lock(path: Path) -> None:
    link = path.with_name("link.db")
    path.touch()
    link.symlink_to(path)
    assert lock_path(link) == lock_path(path)


def test_the_lock_file_names_its_holder(path: Path) -> None:
    with acquire(path, NOW) as lock:
        assert json.loads(lock.path.read_text())["pid"] == os.getpid()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b'{"pid": 1}'])
def test_a_lock_file_of_any_content_is_taken_over_when_nobody_holds_it(path: Path, content: bytes) -> None:
    lock_path(path).write_bytes(content)
    acquire(path, NOW).release()


def test_a_holder_that_cannot_be_read_is_refused_all_the_same(path: Path) -> None:
    with acquire(path, NOW) as lock:
        lock.path.write_bytes(b"{")
        with pytest.raises(AlreadyRunning, match="has not written"):
            acquire(path, NOW)


@pytest.mark.parametrize("program", [_HOLD, _FORK])
def test_the_lock_dies_with_its_holder_though_a_child_lives_on(path: Path, program: str) -> None:
    command = [sys.executable, "-c", program, str(path)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        child = int(holder.stdout.readline())
        with pytest.raises(AlreadyRunning, match=f"pid {holder.pid} "):
            acquire(path, NOW)
        holder.send_signal(signal.SIGKILL)
        holder.wait(10)
        os.kill(child, 0)
        acquire_by(time.monotonic() + 5, path)


def acquire_by(deadline: float, path: Path) -> None:
    """The kernel frees the lock in its own time after the holder's death is seen."""
    while True:
        try:
            acquire(path, NOW).release()
        except AlreadyRunning:
            if time.monotonic() > deadline:
                raise
        else:
            return


def test_a_lock_file_replaced_between_its_opening_and_its_locking_is_not_the_one_that_is_held(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock = fcntl.flock

    def replace_first(fd: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        lock_path(path).unlink()
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", replace_first)
    with acquire(path, NOW), pytest.raises(AlreadyRunning):
        acquire(path, NOW)
