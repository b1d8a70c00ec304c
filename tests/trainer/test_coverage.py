"""Whether the files cover what the metadata describes."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer.pickles import Place, chunk, metadata, record, size, small, tensor
from trainer.format.coverage import NotCovered, check_coverage, check_tiling
from trainer.format.metadata import Chunk, Entries, Entry, Metadata, MetadataRefused, Tensor, read_metadata

DATA = Path(__file__).parents[1] / "data" / "checkpoints"
FILE = "__0_0.distcp"


def boxes(*pairs: tuple[tuple[int, ...], tuple[int, ...]]) -> tuple[Chunk, ...]:
    return tuple(Chunk(offsets=offsets, sizes=sizes) for offsets, sizes in pairs)


def tensor_of(size: tuple[int, ...], *pairs: tuple[tuple[int, ...], tuple[int, ...]]) -> Tensor:
    return Tensor(dtype="float32", size=size, chunks=boxes(*pairs))


# ---------------------------------------------------------------- reading


@pytest.mark.parametrize("file", sorted(DATA.rglob(".metadata")), ids=lambda file: str(file.relative_to(DATA).parent))
def test_what_torch_and_the_frameworks_wrote_is_read_and_covered(file: Path) -> None:
    found = read_metadata(file.read_bytes())
    assert found.tensors
    assert all(tensor.chunks for tensor in found.tensors.values())
    check_coverage(found, {entry.path: (file.parent / entry.path).stat().st_size for entry in found.entries})


def test_tensors_come_with_type_size_and_parts() -> None:
    found = read_metadata(small())
    assert found.tensors == {"w": tensor_of((4,), ((0,), (4,)))}
    assert tuple(found.entries) == (Entry(key="w", offsets=(0,), path=FILE, offset=0, length=100, is_plain=True),)
    assert found.byte_keys == frozenset()


def test_what_is_no_tensor_is_listed_apart() -> None:
    data = metadata({"step": record("BytesStorageMetadata")}, [Place("step", None, FILE, 0, 9)])
    found = read_metadata(data)
    assert (found.byte_keys, found.keys) == (frozenset({"step"}), ("step",))
    check_coverage(found, {FILE: 9})


@pytest.mark.parametrize(
    "data",
    [
        metadata({"w": tensor([4], [chunk([0], [4])], dtype="Tensor")}, []),
        metadata({"w": tensor([-4], [])}, []),
        metadata({"w": tensor([2**70], [])}, []),
        metadata({"w": tensor([1] * 65, [])}, []),
        metadata({"w": "text"}, []),
        metadata({7: record("BytesStorageMetadata")}, []),  # type: ignore[dict-item]
        metadata({"w": record("TensorStorageMetadata", size=size(4))}, []),
        metadata({}, [Place("w", (0,), FILE, -1, 100)]),
        metadata({}, [Place("w", (0,), FILE, 0, 2**64)]),
        metadata({}, [Place("w", (-1,), FILE, 0, 100)]),
        metadata({}, [Place("w", (0,), 7, 0, 100)]),  # type: ignore[arg-type]
        b"",
        b"\x80\x04}.",
        small()[:-10],
    ],
)
def test_metadata_that_describes_nothing_sensible_is_refused(data: bytes) -> None:
    with pytest.raises(MetadataRefused):
        read_metadata(data)


# ---------------------------------------------------------------- files


def entry(key: str, place: tuple[int, ...] | None, at: int, length: int, path: str = FILE) -> Entry:
    return Entry(key=key, offsets=place, path=path, offset=at, length=length, is_plain=True)


HALVES = tensor_of((4, 2), ((0, 0), (2, 2)), ((2, 0), (2, 2)))
WHOLE = Metadata(
    tensors={"w": HALVES},
    byte_keys=frozenset({"step"}),
    entries=Entries([entry("w", (0, 0), 0, 20), entry("w", (2, 0), 0, 20, "__1_0.distcp"), entry("step", None, 20, 5)]),
)
SIZES = {FILE: 25, "__1_0.distcp": 20}


def test_a_whole_one_is_covered_and_may_have_more_bytes_than_it_needs() -> None:
    check_coverage(WHOLE, SIZES)
    check_coverage(WHOLE, {name: count + 100 for name, count in SIZES.items()})


@pytest.mark.parametrize(
    ("entries", "sizes", "word"),
    [
        (WHOLE.entries[1:], SIZES, r"w: its part at \[0, 0\] lies in no file"),
        (WHOLE.entries[:2], SIZES, "step has 0 entries"),
        ((*WHOLE.entries, entry("step", None, 40, 5)), {**SIZES, FILE: 99}, "step has 2 entries"),
        ((*WHOLE.entries, entry("w", (0, 0), 40, 20)), {**SIZES, FILE: 99}, "two entries"),
        (WHOLE.entries, {FILE: 25}, "__1_0.distcp is missing"),
        (WHOLE.entries, {**SIZES, FILE: 24}, "has 24 bytes, 25 are needed"),
        ((replace(WHOLE.entries[0], length=15), *WHOLE.entries[1:]), SIZES, "has 15 bytes of 16"),
        ((*WHOLE.entries[:2], replace(WHOLE.entries[2], offset=19)), SIZES, "step lies over another item"),
    ],
)
def test_whatever_is_missing_or_in_the_way_is_named(
    entries: tuple[Entry, ...], sizes: dict[str, int], word: str
) -> None:
    with pytest.raises(NotCovered, match=word):
        check_coverage(replace(WHOLE, entries=Entries(entries)), sizes)


def test_the_length_of_what_was_compressed_says_nothing() -> None:
    packed = replace(WHOLE.entries[0], length=3, is_plain=False)
    check_coverage(replace(WHOLE, entries=Entries([packed, *WHOLE.entries[1:]])), SIZES)


# ---------------------------------------------------------------- boxes

TILED = {
    "a number": tensor_of((), ((), ())),
    "nothing": tensor_of((0, 4)),
    "nothing, in a part": tensor_of((0, 4), ((0, 0), (0, 4))),
    "rows, the last rank without any": tensor_of((3, 2), ((0, 0), (2, 2)), ((2, 0), (1, 2)), ((3, 0), (0, 2))),
    "a grid": tensor_of((4, 4), *((((r, c), (2, 2))) for r, c in product((0, 2), repeat=2))),
    "bricks": tensor_of((2, 6), ((0, 0), (1, 4)), ((0, 4), (1, 2)), ((1, 0), (1, 2)), ((1, 2), (1, 4))),
    "a wheel": tensor_of(
        (3, 3), ((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))
    ),
}
NOT_TILED = {
    "no part": tensor_of((4,)),
    "a hole": tensor_of((4,), ((0,), (1,)), ((2,), (2,))),
    "twice the same": tensor_of((4,), ((0,), (4,)), ((0,), (4,))),
    "a number twice": tensor_of((), ((), ()), ((), ())),
    "an overlap that makes up for a hole": tensor_of((4, 2), ((0, 0), (2, 2)), ((1, 0), (2, 2))),
    "outside": tensor_of((4,), ((0,), (5,))),
    "outside, of no size": tensor_of((4,), ((0,), (4,)), ((9,), (0,))),
    "of other dimensions": tensor_of((4,), ((0, 0), (4, 1))),
    "two corners of a square, twice": tensor_of(
        (2, 2), ((0, 0), (1, 1)), ((0, 0), (1, 1)), ((1, 1), (1, 1)), ((1, 1), (1, 1))
    ),
}


@pytest.mark.parametrize("name", TILED)
def test_parts_that_fill_a_tensor_are_accepted_in_any_pattern(name: str) -> None:
    check_tiling("w", TILED[name])


@pytest.mark.parametrize("name", NOT_TILED)
def test_a_hole_an_overlap_and_a_part_outside_are_refused(name: str) -> None:
    with pytest.raises(NotCovered):
        check_tiling("w", NOT_TILED[name])


@st.composite
def cut_boxes(draw: st.DrawFn) -> Tensor:
    """A tensor, cut in two again and again at drawn places."""
    whole = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    parts = [((0,) * len(whole), whole)]
    for _ in range(draw(st.integers(0, 8))):
        at, sizes = parts.pop(draw(st.integers(0, len(parts) - 1)))
        axis = draw(st.integers(0, len(whole) - 1))
        left = draw(st.integers(0, sizes[axis]))
        for begin, count in ((0, left), (left, sizes[axis] - left)):
            parts.append(
                (
                    tuple(a + begin * (n == axis) for n, a in enumerate(at)),
                    tuple(count if n == axis else s for n, s in enumerate(sizes)),
                )
            )
    return tensor_of(whole, *parts)


@settings(max_examples=200, deadline=None)
@given(cut_boxes())
def test_any_tensor_that_is_cut_up_is_filled_by_its_parts(tensor: Tensor) -> None:
    check_tiling("w", tensor)


@settings(max_examples=200, deadline=None)
@given(tensor=cut_boxes(), change=st.data())
def test_a_part_that_is_lost_doubled_moved_or_grown_is_noticed(tensor: Tensor, change: st.DataObject) -> None:
    place = change.draw(st.integers(0, len(tensor.chunks) - 1))
    part = tensor.chunks[place]
    if 0 in part.sizes:
        return
    others = tensor.chunks[:place] + tensor.chunks[place + 1 :]
    axis = change.draw(st.integers(0, len(tensor.size) - 1))
    by = tuple(int(n == axis) for n in range(len(tensor.size)))
    moved = replace(part, offsets=tuple(a + b for a, b in zip(part.offsets, by, strict=True)))
    grown = replace(part, sizes=tuple(a + b for a, b in zip(part.sizes, by, strict=True)))
    changed = change.draw(st.sampled_from([(), (part, part), (moved,), (grown,)]))
    with pytest.raises(NotCovered):
        check_tiling("w", replace(tensor, chunks=(*others, *changed)))


def test_a_hundred_thousand_parts_take_seconds_and_not_their_square() -> None:
    grid = tensor_of((1000, 1000), *(((r * 10, c), (10, 1)) for r in range(100) for c in range(1000)))
    began = time.process_time()
    check_tiling("w", grid)
    assert time.process_time() - began < 10


def test_a_shape_that_would_take_for_ever_is_refused() -> None:
    size = (2,) * 40
    with pytest.raises(NotCovered, match="too many ways"):
        check_tiling("w", tensor_of(size, ((0,) * 40, (1,) * 40)))
