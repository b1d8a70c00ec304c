"""What bench-checkpoint makes of its numbers: ratios of the right times, and targets that can be missed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.checkpoint import (
    OF_EACH_SIZE,
    OF_THE_WHOLE,
    REPEATS,
    judge,
    rate_restores,
    rate_size,
    rate_steps,
    rate_verify,
)
from bench.checkpoint_verify import find_files, forget, read_plainly
from bench.report import Target


def bound(target: Target) -> float:
    return target.at_most if target.at_most is not None else target.at_least or 0.0


def past(target: Target) -> float:
    return bound(target) * (1.1 if target.at_most is not None else 0.9)


def within() -> dict[str, Any]:
    sizes = [{"state_gb": gb, **{target.key: bound(target) for target in OF_EACH_SIZE}} for gb in REPEATS]
    return {"sizes": sizes, **{target.key: bound(target) for target in OF_THE_WHOLE}}


def times(block_s: float, total_s: float) -> dict[str, list[float]]:
    return {"block_s": [0.0, block_s, 99.0], "total_s": [0.0, total_s, 99.0]}


def test_numbers_at_their_targets_miss_none() -> None:
    assert judge(within()) == []


@pytest.mark.parametrize("target", OF_THE_WHOLE, ids=lambda target: target.key)
def test_each_number_past_its_target_is_named(target: Target) -> None:
    (missed,) = judge({**within(), target.key: past(target)})
    assert missed.startswith(target.key)


@pytest.mark.parametrize("target", OF_EACH_SIZE, ids=lambda target: target.key)
def test_one_size_past_its_target_is_named_with_the_size(target: Target) -> None:
    result = within()
    result["sizes"][-1][target.key] = past(target)
    (missed,) = judge(result)
    assert missed.startswith(f"4 GB: {target.key}")


def test_what_was_not_measured_is_no_success() -> None:
    result = within()
    del result["sizes"][0]
    assert judge({**result, "verify_vs_read": None}) == ["0.25 GB were not measured", "verify_vs_read was not measured"]


def test_each_ratio_of_a_size_is_made_of_the_times_it_is_named_for() -> None:
    ours = times(0.01, 0.5)
    measured = {
        "bytes": 1,
        "groups": [
            {"sync": times(0.6, 0.625), "memcpy": times(0.02, 0.02), "ours": ours},
            {"thread": times(0.04, 1.0), "ours": ours},
            {"process": times(0.05, 1.0), "ours": ours},
            {"sync": times(0.6, 0.625), "memcpy": times(0.02, 0.02), "copy": times(0.03, 1.25)},
        ],
    }
    rated = rate_size(1.0, measured)
    assert (
        rated.items()
        >= {
            "state_gb": 1.0,
            "block_vs_sync": 60.0,
            "block_vs_thread": 0.25,
            "block_vs_process": 0.2,
            "block_vs_memcpy": 0.5,
            "durable_vs_sync": 0.8,
            "copy_block_vs_memcpy": 1.5,
            "copy_durable_vs_sync": 2.0,
        }.items()
    )


def test_the_worse_resharding_counts() -> None:
    measured = {"4 to 2": {"ours": [1.0], "dcp": [2.0]}, "2 to 4": {"ours": [3.0], "dcp": [2.0]}}
    assert rate_restores(measured)["restore_vs_dcp"] == 1.5


def test_the_slowdown_is_that_of_the_default_staging() -> None:
    measured = {
        way: {"slowdown": [ratio], "worst": [2 * ratio], "steps": [3], "quiet_step_s": 0.1}
        for way, ratio in (("ours", 1.05), ("copy", 1.2), ("thread", 1.5))
    }
    rated = rate_steps(measured)
    assert (rated["step_slowdown"], rated["copy_step_slowdown"], rated["worst_step"]) == (1.05, 1.2, 2.1)


def test_a_verification_at_half_the_bandwidth_is_a_half() -> None:
    assert rate_verify({"read_gb_s": [4.0], "verify_gb_s": [2.0]})["verify_vs_read"] == 0.5


def test_every_file_is_read_and_still_there_afterwards(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    for name, size in (("a", 3), ("inner/b", 5_000_000)):
        (tmp_path / name).write_bytes(b"x" * size)
    forget(tmp_path)
    assert read_plainly(tmp_path) == 5_000_003
    assert len(find_files(tmp_path)) == 2
