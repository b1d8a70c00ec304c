"""What reaches the service manager's socket."""

import os
import socket
from pathlib import Path

import pytest

from supervisor.notify import notify, watchdog_interval_s


@pytest.mark.parametrize("abstract", [False, True])
def test_a_state_arrives_as_one_datagram(tmp_path: Path, *, abstract: bool) -> None:
    name = f"{tmp_path}/notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0" + name if abstract else name)
        manager.settimeout(5)
        told = notify("READY=1\nSTATUS=watching", {"NOTIFY_SOCKET": "@" + name if abstract else name})
        assert told
        assert manager.recv(1024) == b"READY=1\nSTATUS=watching"


def test_without_a_service_manager_nothing_happens() -> None:
    assert not notify("READY=1", {})


def test_a_service_manager_that_is_gone_is_no_error(tmp_path: Path) -> None:
    assert not notify("READY=1", {"NOTIFY_SOCKET": str(tmp_path / "gone")})


def test_a_service_manager_that_does_not_read_does_not_block(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        told = [notify("WATCHDOG=1", {"NOTIFY_SOCKET": str(tmp_path / "notify")}) for _ in range(1_000)]
    assert told[0]
    assert not told[-1]


def test_the_watchdog_interval_is_in_seconds_and_meant_for_this_process() -> None:
    assert watchdog_interval_s({"WATCHDOG_USEC": "1500000", "WATCHDOG_PID": str(os.getpid())}) == 1.5
    assert watchdog_interval_s({"WATCHDOG_USEC": "1500000"}) == 1.5
    assert watchdog_interval_s({"WATCHDOG_USEC": "1500000", "WATCHDOG_PID": "1"}) is None


@pytest.mark.parametrize("usec", ["", "0", "soon", "-5"])
def test_no_usable_interval_means_that_nobody_watches(usec: str) -> None:
    assert watchdog_interval_s({"WATCHDOG_USEC": usec}) is None
