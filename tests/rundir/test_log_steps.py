"""Steps out of a log, by a person's pattern: the newest one, and never at the cost of the daemon."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from supervisor.layouts.registry import pattern_of
from supervisor.logsteps import MAX_BYTES, find_step, search

TITAN = "[titan] root - INFO - \x1b[31mstep: 12  \x1b[32mloss:  7.85  \x1b[33mgrad_norm:  1.2\x1b[39m\n"
MEGATRON = " [2026-11-30 03:00:00] iteration      340/  500000 | consumed samples:  87040 | elapsed time 1.2\n"
DEEPSPEED = "[INFO] [logging.py:96:log_dist] [Rank 0] step=70, skipped=0, lr=[0.001], mom=[(0.9, 0.95)]\n"


@pytest.mark.parametrize(
    ("layout", "line", "step"), [("torchtitan", TITAN, 12), ("megatron", MEGATRON, 340), ("deepspeed", DEEPSPEED, 70)]
)
def test_each_frameworks_own_line_is_understood(layout: str, line: str, step: int) -> None:
    assert search(line * 3, pattern_of(layout)) == step


def test_the_newest_step_counts_also_within_a_progress_bar() -> None:
    assert search("step 1\nstep 2\rstep 3\rstep 4\nother\n", r"step (\d+)") == 4


@pytest.mark.parametrize("text", ["", "no step", "step x", "step 99999999999999999999", "step ٣"])
def test_a_line_without_a_usable_number_gives_none(text: str) -> None:
    assert search(text, r"step (\S+)") is None


def test_only_what_came_after_the_offset_is_read(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("step 100\n")
    first = find_step(log, r"step (\d+)", since=9)
    assert (first.step, first.offset) == (None, 9)
    log.write_text("step 100\nstep 5\nstep 6")
    second = find_step(log, r"step (\d+)", since=9)
    assert (second.step, second.offset) == (5, 16)  # the last line is still being written


def test_a_log_that_was_begun_again_is_read_from_its_start(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("step 3\n")
    assert find_step(log, r"step (\d+)", since=10_000).step == 3


def test_of_a_large_log_the_newest_part_is_read(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("step 1\n" + "x" * 100 * 1024 * 10 + "\nstep 2\n")
    assert log.stat().st_size > MAX_BYTES
    assert find_step(log, r"step (\d+)", since=0).step == 2


def test_a_pattern_that_takes_for_ever_is_given_up_and_said(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("a" * 60 + "\n")
    started = time.monotonic()
    found = find_step(log, r"(a+)+b(\d)", since=0)
    assert "takes too long" in found.fault
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("kind", ["absent", "fifo", "link", "folder"])
def test_what_is_no_log_gives_no_step_and_does_not_wait(kind: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    if kind == "fifo":
        os.mkfifo(log)
    elif kind == "link":
        log.symlink_to(tmp_path / "x")
    elif kind == "folder":
        log.mkdir()
    assert find_step(log, r"step (\d+)", since=0).step is None
