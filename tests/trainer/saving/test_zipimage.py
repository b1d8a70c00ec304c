"""The layout of a rank's file: every item a zip that anything can read, data where direct I/O and pages want it."""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.saving.image import ALIGNMENT, Image
from trainer.saving.itemhead import HEAD_BYTES, NotAnItem, parse_head
from trainer.saving.zipimage import (
    LARGE_BYTES,
    NotBytes,
    Piece,
    choose_capacity,
    fill_checksums,
    fits,
    lay_out,
    parse_bytes,
    patch_checksum,
    render_bytes,
)


def fill(image: Image) -> bytearray:
    """The file of an image whose slots hold nonsense."""
    buffer = bytearray(image.size)
    for at, data in image.frame:
        buffer[at : at + len(data)] = data
    for slot in image.slots:
        buffer[slot.offset : slot.offset + slot.size] = bytes(byte % 251 for byte in range(slot.size))
    return buffer


PIECES = st.lists(
    st.builds(
        Piece,
        pickle=st.one_of(st.none(), st.binary(min_size=1, max_size=300)),
        size=st.one_of(st.integers(1, 500), st.integers(LARGE_BYTES - 2, LARGE_BYTES + 2)),
    ),
    max_size=5,
)


@given(PIECES)
def test_items_are_zips_one_after_the_other_with_right_checksums(pieces: list[Piece]) -> None:
    image, extents = lay_out("file", pieces)
    data = fill(image)
    fill_checksums(memoryview(data), image)
    end = 0
    for piece, extent in zip(pieces, extents, strict=True):
        assert extent.offset == end
        end += extent.length
        item = bytes(data[extent.offset : end])
        with zipfile.ZipFile(io.BytesIO(item)) as opened:
            assert opened.testzip() is None
            names = {name for name in opened.namelist() if name.startswith("archive/data")}
            assert names == {"archive/data.pkl", *(() if piece.pickle is None else ("archive/data/0",))}
        head = parse_head(item[:HEAD_BYTES], extent.length)
        assert extent.slot is not None
        assert (head.pickle, head.size) == (piece.pickle, piece.size)
        assert head.data_at + extent.offset == extent.slot.offset
    assert end == image.size


@given(PIECES)
def test_slots_lie_at_multiples_that_memory_and_direct_io_work_in(pieces: list[Piece]) -> None:
    image, _ = lay_out("file", pieces)
    for slot in image.slots:
        assert slot.offset % (ALIGNMENT if slot.size >= LARGE_BYTES else 64) == 0


@given(PIECES)
def test_slots_and_frame_together_are_the_whole_file(pieces: list[Piece]) -> None:
    image, _ = lay_out("file", pieces)
    ranges = [(at, len(data)) for at, data in image.frame] + [(slot.offset, slot.size) for slot in image.slots]
    end = 0
    for at, size in sorted(ranges):
        assert at == end
        end += size
    assert end == image.size


def test_a_checksum_stands_before_the_slot_and_after_it() -> None:
    image, _ = lay_out("file", [Piece(pickle=b"p", size=100)])
    (slot,) = image.slots
    buffer = bytearray(image.size)
    patch_checksum(memoryview(buffer), slot, 0x01020304)
    before, after = slot.crc_at
    assert before < slot.offset < slot.offset + slot.size <= after
    assert buffer[before : before + 4] == buffer[after : after + 4] == b"\x04\x03\x02\x01"


def test_an_item_beyond_four_gibibytes_has_a_directory_that_names_its_size(tmp_path: Path) -> None:
    size = 5 * 2**30 + 7
    image, _ = lay_out("file", [Piece(pickle=b"p", size=size)])
    path = tmp_path / "file"
    with path.open("wb") as stream:
        stream.truncate(image.size)
        for at, data in image.frame:
            stream.seek(at)
            stream.write(data)
    with zipfile.ZipFile(path) as opened:
        assert opened.getinfo("archive/data/0").file_size == size
    with path.open("rb") as stream:
        assert parse_head(stream.read(HEAD_BYTES), image.size).size == size


def test_nothing_to_write_is_an_image_without_bytes() -> None:
    image, extents = lay_out("file", [])
    assert (image.size, image.frame, image.slots, extents) == (0, (), (), ())


def test_an_empty_tensor_has_an_item_and_no_slot() -> None:
    image, (extent,) = lay_out("file", [Piece(pickle=b"p", size=0)])
    assert extent.slot is None
    with zipfile.ZipFile(io.BytesIO(fill(image))) as opened:
        assert opened.testzip() is None
        assert opened.read("archive/data/0") == b""


def test_only_equal_layouts_have_equal_signatures() -> None:
    pieces = [Piece(pickle=b"p", size=100), Piece(pickle=b"p", size=101), Piece(pickle=b"q", size=100)]
    signatures = [lay_out("file", [piece])[0].signature for piece in pieces]
    assert len(set(signatures)) == len(pieces)
    assert lay_out("file", pieces[:1])[0].signature == signatures[0]
    assert lay_out("other", pieces[:1])[0].signature != signatures[0]


@given(st.binary(max_size=3000), st.integers(0, 5000))
def test_bytes_come_back_from_a_slot_of_any_capacity_that_they_fit_into(data: bytes, spare: int) -> None:
    slot = render_bytes(data, len(data) + 12 + spare)
    assert len(slot) == len(data) + 12 + spare
    assert parse_bytes(slot) == pickle.loads(slot) == data


@given(st.integers(0, 100_000))
def test_the_chosen_capacity_leaves_room_to_grow_by_half(size: int) -> None:
    assert fits(b"x" * (size * 3 // 2), choose_capacity(size))


def test_bytes_without_room_are_refused() -> None:
    assert not fits(b"x" * 100, 111)
    with pytest.raises(ValueError, match="do not fit"):
        render_bytes(b"x" * 100, 111)


@pytest.mark.parametrize(
    "pickled", [pickle.dumps(b"x"), pickle.dumps(print), b"", render_bytes(b"abc", 30)[:10], b"\0" * 30]
)
def test_only_the_one_form_of_a_pickle_is_read(pickled: bytes) -> None:
    with pytest.raises(NotBytes):
        parse_bytes(pickled)


@given(st.binary(max_size=200), st.integers(0, 2**40))
def test_the_head_of_something_else_is_refused(data: bytes, length: int) -> None:
    with pytest.raises(NotAnItem):
        parse_head(data, length)


@given(st.data())
def test_a_damaged_head_is_refused_or_read_within_its_item(data: st.DataObject) -> None:
    image, _ = lay_out("file", [Piece(pickle=b"some pickle", size=700)])
    head = bytearray(fill(image)[:HEAD_BYTES])
    at = data.draw(st.integers(0, len(head) - 1))
    head[at] ^= data.draw(st.integers(1, 255))
    try:
        found = parse_head(bytes(head), image.size)
    except NotAnItem:
        return
    assert found.data_at + found.size <= image.size
