"""The order of samples: each once an epoch, the same for every number of ranks, a function of the position only."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.data import BatchNotDivisible, ByteWindows, SampleOrder, permute, read_text

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
    consumed=st.integers(min_value=0, max_value=10**12),
    world=st.integers(min_value=1, max_value=8),
    share=st.integers(min_value=1, max_value=8),
)
def test_the_parts_of_any_number_of_ranks_are_the_same_batch(size: int, consumed: int, world: int, share: int) -> None:
    order = SampleOrder(size=size, seed=7)
    parts = [order.part(consumed, world * share, rank, world) for rank in range(world)]
    assert [index for part in parts for index in part] == order.batch(consumed, world * share)


@given(worlds=st.lists(st.sampled_from([1, 2, 3, 4, 6, 12]), min_size=1, max_size=12))
def test_no_sample_is_repeated_or_skipped_when_the_number_of_ranks_changes(worlds: list[int]) -> None:
    order = SampleOrder(size=50, seed=3)
    taken: list[int] = []
    for step, world in enumerate(worlds):
        for rank in range(world):
            taken += order.part(step * 12, 12, rank, world)
    assert taken == order.batch(0, 12 * len(worlds))


def test_epochs_and_seeds_give_different_orders() -> None:
    order, other = SampleOrder(size=1000, seed=1), SampleOrder(size=1000, seed=2)
    assert order.batch(0, 1000) != order.batch(1000, 1000)
    assert order.batch(0, 1000) != other.batch(0, 1000)


def test_the_order_is_the_same_in_every_release() -> None:
    # Changing it would repeat and skip samples of every run that is resumed after an upgrade.
    assert SampleOrder(size=1000, seed=1).batch(998, 6) == [669, 997, 684, 570, 409, 72]


def test_neighbours_are_spread_over_the_whole_text() -> None:
    batch = SampleOrder(size=32_768, seed=1).batch(0, 1000)
    assert 0.4 < sum(index < 16_384 for index in batch) / 1000 < 0.6


def test_an_uneven_split_is_refused() -> None:
    with pytest.raises(BatchNotDivisible, match="12 does not split evenly over 5 ranks"):
        SampleOrder(size=100, seed=1).part(0, 12, 0, 5)


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
