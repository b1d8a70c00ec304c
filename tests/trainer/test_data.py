"""The order of samples: each once an epoch, the same for every number of ranks, a function of the position only."""

from __future__ import annotations

import time
from itertools import islice, pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.contract import SampleRange
from trainer.data import (
    ByteWindows,
    SampleOrder,
    merge_ranges,
    next_ranges,
    parse_skip_samples,
    permute,
    read_text,
)

SIZES = st.integers(min_value=1, max_value=300)


@given(size=SIZES, key=st.text(max_size=10))
def test_a_permutation_hits_every_index_once(size: int, key: str) -> None:
    assert sorted(permute(index, size, key) for index in range(size)) == list(range(size))


@given(size=SIZES, seed=st.integers(), epoch=st.integers(min_value=0, max_value=1000))
def test_every_epoch_takes_every_sample_once(size: int, seed: int, epoch: int) -> None:
    order = SampleOrder(size=size, seed=seed)
    taken = [order.sample_at(position) for position in range(epoch * size, (epoch + 1) * size)]
    assert sorted(taken) == list(range(size))


@given(
    size=SIZES,
    position=st.integers(min_value=0, max_value=10**12),
    world=st.integers(min_value=1, max_value=8),
    global_batch=st.integers(min_value=1, max_value=40),
)
def test_the_parts_of_any_number_of_ranks_are_the_same_batch(
    size: int, position: int, world: int, global_batch: int
) -> None:
    order = SampleOrder(size=size, seed=7)
    parts = [order.part(position, global_batch, rank, world) for rank in range(world)]
    assert [index for part in parts for index in part] == order.batch(position, global_batch)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize(("size", "first"), [(3, 5), (1000, 990), (1_000_003, 10**9), (2**33 + 1, 2**34)])
def test_samples_are_the_same_one_by_one_and_a_batch_at_a_time(size: int, first: int) -> None:
    order = SampleOrder(size=size, seed=11)
    assert order.batch(first, 4096) == [order.sample_at(position) for position in range(first, first + 4096)]


def test_a_batch_of_4096_indices_takes_less_than_10_ms() -> None:
    order = SampleOrder(size=10**9, seed=1)
    order.batch(0, 4096)  # imports numpy
    assert min(_timed(order, position) for position in range(0, 10**8, 10**7)) < 0.010


def _timed(order: SampleOrder, position: int) -> float:
    began = time.perf_counter()
    order.batch(position, 4096)
    return time.perf_counter() - began


def test_epochs_and_seeds_give_different_orders() -> None:
    order, other = SampleOrder(size=1000, seed=1), SampleOrder(size=1000, seed=2)
    assert order.batch(0, 1000) != order.batch(1000, 1000)
    assert order.batch(0, 1000) != other.batch(0, 1000)


def test_the_order_is_the_same_in_every_release() -> None:
    # Changing it would repeat and skip samples of every run that is resumed after an upgrade.
    assert SampleOrder(size=1000, seed=1).batch(998, 6) == [502, 390, 45, 63, 649, 406]


def test_neighbours_are_spread_over_the_whole_text() -> None:
    batch = SampleOrder(size=32_768, seed=1).batch(0, 1000)
    assert 0.4 < sum(index < 16_384 for index in batch) / 1000 < 0.6


@given(world=st.integers(min_value=1, max_value=8), losses=st.lists(st.integers(-100, 100), min_size=1, max_size=20))
def test_weighted_means_of_uneven_parts_are_the_mean_of_the_batch(world: int, losses: list[int]) -> None:
    order = SampleOrder(size=len(losses), seed=1)
    shares = [order.share(0, len(losses), rank, world) for rank in range(world)]
    means = [share.weight * sum(losses[i] for i in share.inputs) / len(share.inputs) for share in shares]
    assert sum(means) / world == pytest.approx(sum(losses) / len(losses))
    assert sorted(index for share in shares for index in share.samples) == list(range(len(losses)))


def test_equal_parts_leave_the_loss_as_it_is() -> None:
    shares = [SampleOrder(size=100, seed=1).share(0, 12, rank, 3) for rank in range(3)]
    assert [share.weight for share in shares] == [1.0, 1.0, 1.0]


def test_a_rank_without_a_sample_computes_on_one_that_counts_for_nothing() -> None:
    order = SampleOrder(size=100, seed=1)
    share = order.share(30, 3, 7, 8)
    assert (share.samples, share.inputs, share.weight) == ([], order.batch(30, 1), 0.0)


def test_a_batch_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        SampleOrder(size=100, seed=1).share(0, 0, 0, 1)


def test_skipped_positions_are_written_as_ranges() -> None:
    assert parse_skip_samples("") == ()
    assert parse_skip_samples("0-12,12-24,100-101") == (
        SampleRange(first=0, end=12),
        SampleRange(first=12, end=24),
        SampleRange(first=100, end=101),
    )


ODD = ("5-\u0667", "5-7\n", "1e3-2000", "0x1-20", "5-" + "9" * 30)


@pytest.mark.parametrize(
    "text",
    [
        "5",
        "5-5",
        "7-5",
        "-5-7",
        "5-7,",
        ",5-7",
        "5-7,6-9",
        "10-12,5-7",
        " 5-7",
        "5 -7",
        "05-7",
        "5-7;9-11",
        "1_0-20",
        *ODD,
    ],
)
def test_skipped_positions_that_are_no_ranges_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="skipped samples"):
        parse_skip_samples(text)


RANGES = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), max_size=5).map(
    lambda pairs: [SampleRange(first=first, end=first + length) for first, length in pairs]
)


@given(groups=st.lists(RANGES, max_size=3))
def test_merged_ranges_hold_the_same_positions_in_order(groups: list[list[SampleRange]]) -> None:
    merged = merge_ranges(*groups)
    positions = [p for part in merged for p in range(part.first, part.end)]
    assert positions == sorted({p for group in groups for part in group for p in range(part.first, part.end)})
    assert all(one.end < other.first for one, other in pairwise(merged))


@given(ranges=RANGES, position=st.integers(0, 80), count=st.integers(0, 50))
def test_a_batch_is_the_next_positions_that_are_not_skipped(
    ranges: list[SampleRange], position: int, count: int
) -> None:
    skip = merge_ranges(ranges)
    taken = [p for run in next_ranges(position, count, skip) for p in range(run.first, run.end)]
    allowed = (p for p in range(position, 1000) if not any(part.first <= p < part.end for part in skip))
    assert taken == list(islice(allowed, count))


def test_an_empty_range_is_no_range() -> None:
    with pytest.raises(ValueError, match="5-5 are no range"):
        merge_ranges([SampleRange(first=5, end=5)])


def test_an_order_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="shorter than one window"):
        SampleOrder(size=len(ByteWindows(text=b"short", length=64)), seed=1)


@given(text=st.binary(min_size=1, max_size=200), length=st.integers(min_value=1, max_value=20))
def test_windows_cover_the_text_and_overlap_by_the_successor_only(text: bytes, length: int) -> None:
    windows = ByteWindows(text=text, length=length)
    cut = [windows[index] for index in range(len(windows))]
    assert all(len(window) == length + 1 for window in cut)
    assert b"".join(window[:-1] for window in cut) == text[: len(cut) * length]
    with pytest.raises(IndexError):
        windows[len(windows)]


def test_other_text_or_another_cut_has_another_fingerprint() -> None:
    windows = [ByteWindows(text=t, length=n) for t, n in ((b"abcd", 1), (b"abce", 1), (b"abcd", 2))]
    assert len({window.fingerprint for window in windows}) == 3


def test_the_default_text_is_python_source_and_bounded() -> None:
    text = read_text(max_bytes=100_000)
    assert len(text) == 100_000
    assert b"import " in text
    assert text == read_text(max_bytes=100_000)


def test_a_folder_of_text_is_read_in_sorted_order(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "2.txt").write_bytes(b"second")
    (tmp_path / "a.txt").write_bytes(b"first ")
    (tmp_path / ".hidden").write_bytes(b"x")
    assert read_text(tmp_path) == b"first second"
    assert read_text(tmp_path, max_bytes=8) == b"first se"


def test_a_folder_without_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    with pytest.raises(ValueError, match="no text in"):
        read_text(tmp_path)
