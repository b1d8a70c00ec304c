"""The guard ends a process that holds memory and gets on no more, and only such a one."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

_HOLDS = """
import sys, time
from trainer.saving.guard import Guard
guard = Guard()
guard.arm(0.6)
for _ in range(int(sys.argv[1])):
    time.sleep(0.02)
    guard.beat()
print("on", flush=True)
if len(sys.argv) > 2:
    guard.disarm()
    time.sleep(0.9)
    guard.beat()
    time.sleep(0.9)
    print("free", flush=True)
    sys.exit()
time.sleep(60)
"""


def _start(*arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", _HOLDS, *arguments], stdout=subprocess.PIPE)


def test_who_gets_on_may_hold_memory_for_longer_than_the_limit_and_who_stops_is_ended() -> None:
    child = _start("70")
    assert child.stdout is not None
    assert child.stdout.readline() == b"on\n"
    began = time.monotonic()
    assert child.wait(30) == -signal.SIGKILL
    assert time.monotonic() - began < 5
    child.stdout.close()


def test_who_has_released_everything_is_left_alone() -> None:
    child = _start("1", "disarm")
    output, _ = child.communicate(timeout=30)
    assert (child.returncode, output) == (0, b"on\nfree\n")
