"""Which files of a folder are Flight Recorder dumps, of which rank, and which of them are read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.trainer.flight.nccl_dumps import dump, entry
from trainer.flight.files import DumpFile, find_dumps, name_file, parse_name, read_dumps

ONE = dump([entry(1)], groups={"0": "[0, 1]"})
TWO = dump([entry(2, state="scheduled")], groups={"0": "[0, 1]"})


@pytest.mark.parametrize(
    ("name", "rank", "host"),
    [
        ("nccl_trace_rank_0", 0, ""),
        ("nccl_trace_rank_node02_5", 5, "node02"),
        ("nccl_trace_rank_node07_40", 40, "node07"),
        ("nccl_trace_rank_gpu-a1.example.org_3", 3, "gpu-a1.example.org"),
        ("fr_trace_rank_17", 17, ""),
        ("comm_lib_trace_rank_2", 2, ""),
        ("fr_trace_rank_2.json", 2, ""),
        ("rank12.flight", 12, ""),
        ("rank12.nccl.flight", 12, ""),
    ],
)
def test_the_rank_is_the_last_number_of_the_name_and_a_host_is_kept(name: str, rank: int, host: str) -> None:
    """FR-02, and either generation of names (FR-01)."""
    found = parse_name(Path(name))
    assert found is not None
    assert (found.rank, found.host) == (rank, host)


@pytest.mark.parametrize(
    "name", ["nccl_trace_rank_0.tmp", ".nccl_trace_rank_0", "rank0.stacks.txt", "nccl.gpu1.77.log", "job.log", "rank_x"]
)
def test_other_files_and_unfinished_ones_are_passed_over(name: str) -> None:
    """FR-02"""
    assert parse_name(Path(name)) is None


def test_dumps_of_a_folder_are_found_among_other_files_and_links_are_not_followed(tmp_path: Path) -> None:
    for name in ("nccl_trace_rank_node07_40", "fr_trace_rank_1", "rank0.stacks.txt", "fr_trace_rank_3.tmp"):
        (tmp_path / name).write_bytes(ONE)
    (tmp_path / "fr_trace_rank_9").symlink_to(tmp_path / "fr_trace_rank_1")
    os.mkfifo(tmp_path / "fr_trace_rank_8")
    assert [file.rank for file in find_dumps(tmp_path)] == [1, 40]
    linked = read_dumps([DumpFile(path=tmp_path / "fr_trace_rank_9", rank=9)])
    piped = read_dumps([DumpFile(path=tmp_path / "fr_trace_rank_8", rank=8)])
    assert (linked.dumps, len(linked.unreadable), piped.dumps, len(piped.unreadable)) == ({}, 1, {}, 1)


def test_a_file_that_somebody_names_may_be_called_anything_that_ends_in_a_rank(tmp_path: Path) -> None:
    named = name_file(tmp_path / "dump-of-7")
    assert named is not None
    assert named.rank == 7
    assert name_file(tmp_path / "dump") is None


def test_the_newest_of_a_rank_s_dumps_counts(tmp_path: Path) -> None:
    older, newer = tmp_path / "fr_trace_rank_0", tmp_path / "rank0.flight"
    older.write_bytes(ONE)
    newer.write_bytes(TWO)
    os.utime(older, (1, 1))
    assert [e.seq for e in read_dumps(find_dumps(tmp_path)).dumps[0].entries] == [2]


def test_the_two_recorders_of_a_rank_are_read_together(tmp_path: Path) -> None:
    (tmp_path / "rank0.flight").write_bytes(ONE)
    (tmp_path / "rank0.nccl.flight").write_bytes(TWO)
    assert [e.seq for e in read_dumps(find_dumps(tmp_path)).dumps[0].entries] == [1, 2]


def test_what_can_t_be_read_is_told_and_the_rest_is_read(tmp_path: Path) -> None:
    (tmp_path / "fr_trace_rank_0").write_bytes(b"nothing")
    (tmp_path / "fr_trace_rank_1").write_bytes(ONE)
    found = read_dumps([*find_dumps(tmp_path), *filter(None, [name_file(tmp_path / "gone_2")])])
    assert list(found.dumps) == [1]
    assert [line.partition(":")[0] for line in found.unreadable] == ["fr_trace_rank_0", "gone_2"]


def test_reading_ends_when_time_or_bytes_run_out(tmp_path: Path) -> None:
    for rank in range(3):
        (tmp_path / f"fr_trace_rank_{rank}").write_bytes(ONE)
    for limits in ({"limit_s": -1.0}, {"max_total_bytes": 1}):
        found = read_dumps(find_dumps(tmp_path), **limits)
        assert found.unread
        assert set(found.dumps) | found.unread == {0, 1, 2}
