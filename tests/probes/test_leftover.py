"""Processes of jobs that are over and still hold GPU memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from supervisor.probes.leftover import Holder, Reading, describe, find_jobs, judge

LOADER = Holder(gpu=0, pid=88123, memory_bytes=39 * 2**30, name="pt_data_worker", job="71")


def test_a_data_loader_that_outlived_its_job_makes_the_node_not_ready_and_its_pid_is_told() -> None:
    """TE-09"""
    told = judge(Reading(holders=(LOADER,), jobs=frozenset()))
    assert (told.check, told.ok) == ("leftover_process", False)
    assert "pid 88123 (pt_data_worker) of job 71 on GPU 0 with 39.0 GiB" in told.detail


@pytest.mark.parametrize(
    "reading",
    [
        Reading(holders=(LOADER,), jobs=frozenset({"71"})),  # its job is on the node
        Reading(holders=(Holder(gpu=0, pid=7, name="nv-hostengine"),)),  # a daemon of the node
        Reading(),
    ],
)
def test_who_belongs_there_may_hold_memory(reading: Reading) -> None:
    assert judge(reading).ok is True


def test_without_an_answer_nothing_is_known() -> None:
    assert judge(Reading(error="no NVML binding")).ok is None


def test_many_are_told_by_their_number() -> None:
    """TE-09: 126 processes."""
    holders = tuple(Holder(gpu=pid % 7, pid=pid, job="71") for pid in range(1, 127))
    told = judge(Reading(holders=holders))
    assert told.value == 126
    assert "and 118 more" in told.detail


def test_jobs_of_the_node_and_of_a_process_are_read_from_proc(tmp_path: Path) -> None:
    def make(pid: int, *, cmdline: bytes = b"", environ: bytes = b"", comm: str = "x") -> None:
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "cmdline").write_bytes(cmdline)
        (tmp_path / str(pid) / "environ").write_bytes(environ)
        (tmp_path / str(pid) / "comm").write_text(comm + "\n")

    make(10, cmdline=b"slurmstepd: [72.batch]\0")
    make(11, cmdline=b"slurmstepd: [73.0]\0")
    make(12, cmdline=b"python\0train.py\0slurmstepd: [74.0]\0")
    make(13, environ=b"A=1\0SLURM_JOB_ID=71\0B=2\0", comm="pt_data_worker")
    assert find_jobs(tmp_path) == {"72", "73"}
    assert describe(tmp_path, 3, 13, None) == Holder(gpu=3, pid=13, name="pt_data_worker", job="71")
    assert describe(tmp_path, 3, 99, None) == Holder(gpu=3, pid=99)
