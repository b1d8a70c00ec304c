"""Which rank takes the checksum of what: every copy that is read, once, by a rank that sees it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trainer.saving.copies import OWN, Copy, Sight, assign

FILES = {"a": 1000, "b": 800, "c": 10, "d": 0}


@st.composite
def seen(draw: st.DrawFn) -> list[list[Sight]]:
    """What ranks of two nodes see: each file once, on their node's disk or at the checkpoint's own place."""
    places = {(node, name): draw(st.sampled_from([OWN, f"node{node}"])) for node in (0, 1) for name in FILES}
    needs = st.integers(0, 1000)
    return [
        [
            Sight(Copy(name, places[rank % 2, name]), min(draw(needs), size))
            for name, size in FILES.items()
            if draw(st.booleans())
        ]
        for rank in range(draw(st.integers(1, 5)))
    ]


@given(seen())
def test_every_copy_that_is_read_is_checked_once_by_a_rank_that_sees_it(sights: list[list[Sight]]) -> None:
    duties = assign(sights, FILES)
    read = {sight.copy for ours in sights for sight in ours if sight.needed_bytes}
    checked = [copy for duty in duties for copy in duty]
    assert len(checked) == len(set(checked))
    assert read <= set(checked)
    for ours, duty in zip(sights, duties, strict=True):
        assert duty <= {sight.copy for sight in ours}


@given(seen())
def test_of_every_file_that_anybody_sees_a_copy_is_checked(sights: list[list[Sight]]) -> None:
    checked = {copy.file for duty in assign(sights, FILES) for copy in duty}
    assert checked == {sight.copy.file for ours in sights for sight in ours}


def test_a_file_is_checked_by_the_rank_that_reads_all_of_it() -> None:
    sights = [[Sight(Copy("a"), 100), Sight(Copy("b"), 800)], [Sight(Copy("a"), 1000), Sight(Copy("b"), 100)]]
    assert assign(sights, FILES) == [{Copy("b")}, {Copy("a")}]


def test_files_that_all_read_in_parts_are_spread_evenly() -> None:
    sizes = {f"file{n}": 1000 for n in range(8)}
    sights = [[Sight(Copy(name), 250) for name in sizes] for _ in range(4)]
    assert [len(duty) for duty in assign(sights, sizes)] == [2, 2, 2, 2]
