"""Resharding: any box of any chunk, in any order of dimensions, gets to its place in any tensor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainer.contract import ManifestFile
from trainer.format.metadata import Chunk, Entry
from trainer.saving import filereads, regions
from trainer.saving.filereads import Scratch, open_file
from trainer.saving.pickles import dense_stride, pickle_tensor
from trainer.saving.regions import Box, Target, intersect
from trainer.saving.zipimage import Piece, fill_checksums, lay_out
from trainer.storage.stored import checksum_bytes

pytestmark = pytest.mark.torch


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Chunk, tuple[int, ...], tuple[int, ...], tuple[int, ...], bool]:
    """(a saved chunk, its order of dimensions, where a target begins, its shape, is it plain in memory)."""
    dims = draw(st.integers(0, 4))
    numbers = st.tuples(*[st.integers(0, 4)] * dims)
    sizes = st.tuples(*[st.integers(1, 7)] * dims)
    order = tuple(draw(st.permutations(range(dims))))
    return Chunk(offsets=draw(numbers), sizes=draw(sizes)), order, draw(numbers), draw(sizes), draw(st.booleans())


def write(folder: Path, chunk: Chunk, order: tuple[int, ...], saved: torch.Tensor) -> tuple[Path, Entry, ManifestFile]:
    """A file with one item: the chunk, its dimensions in memory in this order."""
    pickled = pickle_tensor("int32", chunk.sizes, dense_stride(chunk.sizes, order))
    image, (extent,) = lay_out("file", [Piece(pickle=pickled, size=saved.numel() * 4)])
    data = memoryview(bytearray(image.size))
    for at, part in image.frame:
        data[at : at + len(part)] = part
    (slot,) = image.slots
    data[slot.offset : slot.offset + slot.size] = saved.permute(order).contiguous().numpy().tobytes()
    fill_checksums(data, image)
    path = folder / "file"
    path.write_bytes(data)
    entry = Entry(
        key="w", offsets=chunk.offsets, path="file", offset=extent.offset, length=extent.length, is_plain=True
    )
    return path, entry, ManifestFile(path="file", size_bytes=image.size, xxh3_128=checksum_bytes(bytes(data)))


def number(shape: tuple[int, ...], offsets: tuple[int, ...]) -> torch.Tensor:
    """A tensor of which each element tells its place in the whole."""
    made = torch.zeros(shape, dtype=torch.int32)
    for dim, (size, first) in enumerate(zip(shape, offsets, strict=True)):
        line = torch.arange(first + 1, first + size + 1, dtype=torch.int32) * 16**dim
        made += line.reshape([-1 if dim == other else 1 for other in range(len(shape))])
    return made


@pytest.mark.parametrize("is_small_item", [True, False])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(layout=layouts(), long_row=st.sampled_from([8, 64, 65536]), block=st.sampled_from([64, 128, 4096]))
def test_a_box_gets_to_its_place(
    is_small_item: bool,
    layout: tuple[Chunk, tuple[int, ...], tuple[int, ...], tuple[int, ...], bool],
    long_row: int,
    block: int,
    tmp_path: Path,
) -> None:
    chunk, order, begin, shape, is_plain = layout
    path, entry, file = write(tmp_path, chunk, order, number(chunk.sizes, chunk.offsets))
    local = torch.zeros(shape, dtype=torch.int32) if is_plain else torch.zeros((*shape, 2), dtype=torch.int32)[..., 0]
    box = intersect(chunk, entry, "int32", Target(key="w", offsets=begin, local=local))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(regions, "LONG_ROW_BYTES", min(long_row, block))
        patch.setattr(filereads, "BLOCK_BYTES", block)
        patch.setattr(filereads, "SMALL_BYTES", 10**6 if is_small_item else 0)
        with open_file(path, file, lambda _count: None) as opened:
            opened.read_boxes([box] if box is not None else [], Scratch(), is_checked=True)
    expected = number(shape, begin)
    inside = torch.ones(shape, dtype=torch.bool)
    for dim, (at, size, first) in enumerate(zip(chunk.offsets, chunk.sizes, begin, strict=True)):
        line = torch.arange(first, first + shape[dim])
        here = (line >= at) & (line < at + size)
        inside &= here.reshape([-1 if dim == other else 1 for other in range(len(shape))])
    assert torch.equal(local, torch.where(inside, expected, 0))
    assert (box is not None) == bool(inside.any())


def test_a_large_item_that_holds_another_tensor_than_described_is_refused(tmp_path: Path) -> None:
    chunk = Chunk(offsets=(0, 0), sizes=(4, 6))
    path, entry, file = write(tmp_path, chunk, (0, 1), number((4, 6), (0, 0)))
    for dtype, sizes, into in (
        ("float32", (4, 6), torch.zeros(4, 6)),
        ("int32", (6, 4), torch.zeros(6, 4, dtype=torch.int32)),
        ("int32", (4, 7), torch.zeros(4, 7, dtype=torch.int32)),
    ):
        box = Box(entry=entry, dtype=dtype, sizes=sizes, begin=(0, 0), into=into)
        with (
            pytest.raises(filereads.Damaged, match="can't be read"),
            open_file(path, file, lambda _count: None) as opened,
        ):
            opened.read_boxes([box], Scratch(), is_checked=False)
