from __future__ import annotations

import errno
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.probes import clock, disk, gpu, kernel_log, memory, shared_path, shm
from supervisor.probes.clock import ClockReading
from supervisor.probes.disk import Disk
from supervisor.probes.gpu import Gpu, GpuReading
from supervisor.probes.memory import Memory
from supervisor.probes.shared_path import Trial
from supervisor.probes.shm import SharedMemory
from trainer.contract import CheckResult

GIB = 1024**3


def judge_disk(**parts: int | bool) -> CheckResult:
    values = {"total_bytes": 100 * GIB, "free_bytes": 50 * GIB, "inodes": 1000, "free_inodes": 500, **parts}
    found = Disk(path="/scratch", **values)  # type: ignore[arg-type]
    return disk.judge(found, min_free_fraction=0.05, min_free_bytes=GIB)


@pytest.mark.parametrize(
    ("parts", "ok"),
    [
        ({}, True),
        ({"free_bytes": 4 * GIB}, False),  # less than the fraction
        ({"total_bytes": 10 * GIB, "free_bytes": GIB - 1}, False),  # less than the bytes
        ({"total_bytes": GIB // 2, "free_bytes": GIB // 4}, True),  # smaller than the limit: only the fraction counts
        ({"free_bytes": 0}, False),
        ({"free_inodes": 10}, False),
        ({"inodes": 0, "free_inodes": 0}, True),  # a file system that counts none
        ({"is_read_only": True}, False),
        ({"total_bytes": 0}, False),
    ],
)
def test_a_disk_needs_space_inodes_and_write_permission(parts: dict[str, int | bool], ok: bool) -> None:
    assert judge_disk(**parts).ok is ok


def test_a_full_disk_is_named_with_what_is_left() -> None:
    result = judge_disk(free_bytes=0)
    assert result.check == "disk:/scratch"
    assert "/scratch" in result.detail


def test_a_path_that_is_not_there_is_measured_as_such(tmp_path: Path) -> None:
    assert disk.measure(str(tmp_path / "none")).total_bytes == 0
    assert disk.measure(str(tmp_path)).total_bytes > 0


def test_memory_is_measured_in_bytes() -> None:
    found = memory.measure()
    assert 0 < found.available_bytes <= found.total_bytes


@pytest.mark.parametrize(("available", "ok"), [(500, True), (100, True), (99, False), (0, False)])
def test_memory_below_the_fraction_fails(available: int, ok: bool) -> None:
    found = Memory(total_bytes=1000, available_bytes=available)
    assert memory.judge(found, min_available_fraction=0.1).ok is ok


@pytest.mark.parametrize(("total", "free", "ok"), [(1000, 900, True), (1000, 100, False), (10, 10, False)])
def test_shared_memory_must_be_large_and_free_enough(total: int, free: int, ok: bool) -> None:
    found = SharedMemory(total_bytes=total, free_bytes=free)
    assert shm.judge(found, min_free_fraction=0.2, min_total_bytes=100).ok is ok


# ---------------------------------------------------------------- shared paths


def test_a_shared_path_that_works_passes_and_nothing_is_left(tmp_path: Path) -> None:
    assert shared_path.judge(shared_path.measure(str(tmp_path))).ok is True
    assert list(tmp_path.iterdir()) == []


def test_a_shared_path_that_is_not_there_fails(tmp_path: Path) -> None:
    assert shared_path.judge(shared_path.measure(str(tmp_path / "unmounted"))).ok is False


@pytest.mark.parametrize(
    ("error", "is_root", "ok"),
    [
        (errno.ESTALE, False, False),
        (errno.EROFS, False, False),
        (errno.EIO, True, False),
        (errno.ENOSPC, False, None),  # full for every node alike
        (errno.EDQUOT, False, None),
        (errno.EACCES, False, False),
        (errno.EACCES, True, True),  # root has no rights on many network file systems
    ],
)
def test_errors_of_a_shared_path_are_told_apart(error: int, is_root: bool, ok: bool | None) -> None:
    trial = Trial(path="/shared", is_there=True, error=error, error_step="write", is_root=is_root)
    assert shared_path.judge(trial).ok is ok


# ---------------------------------------------------------------- clock


@given(
    skew=st.floats(-100, 100),
    travel=st.floats(0, 5),
    probing=st.floats(0, 10),
    back=st.floats(0, 5),
    at=st.floats(0, 2e9),
)
def test_a_clock_within_the_limit_never_fails_however_slow_the_question(
    skew: float, travel: float, probing: float, back: float, at: float
) -> None:
    reading = ClockReading(
        asked_at=at,
        node_started_at=at + travel + skew,
        node_ended_at=at + travel + probing + skew,
        answered_at=at + travel + probing + back,
    )
    result = clock.judge(reading, max_skew_s=2.0)
    if abs(skew) <= 1.999:
        assert result.ok
    if abs(skew) > 2.001 + travel + back:
        assert not result.ok


def test_a_limit_of_zero_turns_the_clock_check_off() -> None:
    reading = ClockReading(asked_at=1e9, node_started_at=0.0, node_ended_at=1.0, answered_at=1e9 + 1)
    assert clock.judge(reading, max_skew_s=0.0).ok


# ---------------------------------------------------------------- GPUs


def failed(results: tuple[CheckResult, ...]) -> dict[str, bool | None]:
    return {result.check: result.ok for result in results if result.ok is not True}


@pytest.mark.parametrize(
    ("reading", "expected"),
    [
        (GpuReading(gpus=(Gpu(index=0), Gpu(index=1))), {}),
        (GpuReading(gpus=(Gpu(index=0),)), {"gpu": False}),
        (GpuReading(gpus=(Gpu(index=0), Gpu(index=1, error_code=15))), {"gpu:1": False}),
        (GpuReading(gpus=(Gpu(index=0), Gpu(index=1, error_code=10))), {"gpu:1": None}),  # NVML's time-out
        (GpuReading(gpus=(Gpu(index=0), Gpu(index=1, recovery_action=2))), {"gpu:1": False}),
        (GpuReading(gpus=(Gpu(index=0), Gpu(index=1, has_remap_failure=True))), {"gpu:1": False}),
        (GpuReading(gpus=(Gpu(index=0), Gpu(index=1, has_pending_remap=True, uncorrected_errors=3))), {}),
        (GpuReading(error_code=18, error="mismatch"), {"gpu": False}),
        (GpuReading(error_code=999, error="unknown"), {"gpu": None}),
        (GpuReading(error="no NVML binding"), {"gpu": None}),
    ],
)
def test_gpus_are_judged_by_what_they_say_of_themselves(reading: GpuReading, expected: dict[str, bool | None]) -> None:
    assert failed(gpu.judge(reading, expected_count=2)) == expected


# ---------------------------------------------------------------- kernel log


@pytest.mark.parametrize(
    ("text", "is_fault"),
    [
        ("NVRM: Xid (PCI:0000:c6:00): 79, pid=1234, name=python, GPU has fallen off the bus.", True),
        ("NVRM: Xid (0000:c6:00): 48, pid='<unknown>', name=<unknown>, DBE", True),
        (
            "NVRM: Xid (PCI:0000:c6:00): 154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)",
            True,
        ),
        (
            "NVRM: Xid (PCI:0000:c6:00): 154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)",
            False,
        ),
        ("NVRM: GPU 0000:c6:00.0: GPU has fallen off the bus.", True),
        ("NVRM: Xid (PCI:0000:c6:00): 31, pid=12, name=python, MMU Fault", False),
        ("NVRM: Xid (PCI:0000:c6:00): 43, pid=12, name=python, Ch 1", False),
        ("NVRM: Xid (PCI:0000:c6:00): 63, row remapper event", False),
        ("NVRM: Xid (PCI:0000:c6:00): 94, contained", False),
        ("EXT4-fs (nvme0n1): Remounting filesystem read-only", True),
        ("usb 1-1: new device", False),
    ],
)
def test_only_faults_that_call_for_more_than_a_restart_condemn(text: str, is_fault: bool) -> None:
    assert bool(kernel_log.find_fault(text)) is is_fault


def test_old_records_and_records_of_another_shape_are_left_out() -> None:
    xid = b"NVRM: Xid (PCI:0000:c6:00): 79, pid=1"
    records = [b"3,1,1000000,-;" + xid + b"\n KEY=1\n", b"no record", b"6,3,99000000,-;usb\n"]
    recent = kernel_log.parse_records(records, uptime_s=100.0, window_s=10.0)
    assert [line.text for line in recent.lines] == ["usb"]
    everything = kernel_log.parse_records(records, uptime_s=100.0, window_s=1000.0)
    assert kernel_log.judge(everything).ok is False
    assert kernel_log.judge(recent).ok is True
