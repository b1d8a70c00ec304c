"""Write protection by userfaultfd: who writes waits for the copy, and the copy holds what was there before."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.saving.waiting import await_that
from trainer.saving.protect import (
    CHUNK_BYTES,
    PAGE,
    Chunk,
    Protector,
    Range,
    Region,
    copy_behind,
    leave_out,
    merge,
    open_descriptor,
    split,
)

SIZE = 3 * CHUNK_BYTES
_MAP_FIXED = 0x10

_libc = ctypes.CDLL(None)


def _why_not() -> str:
    try:
        os.close(open_descriptor().fd)
    except OSError as error:
        return f"no userfaultfd of full mode here: {error}"
    return ""


pytestmark = pytest.mark.skipif(bool(_why_not()), reason=_why_not())


@dataclass(frozen=True)
class Memory:
    mapping: mmap.mmap

    @property
    def address(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self.mapping))

    def write(self, offset: int, data: bytes) -> None:
        ctypes.memmove(self.address + offset, data, len(data))

    def write_aside(self, offset: int, data: bytes) -> threading.Thread:
        thread = threading.Thread(target=self.write, args=(offset, data), daemon=True)
        thread.start()
        return thread


def _memory(fill: bytes) -> Memory:
    memory = Memory(mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    if fill:
        memory.mapping[:] = fill * SIZE
    return memory


@pytest.fixture
def protector() -> Iterator[Protector]:
    descriptor = open_descriptor()
    yield Protector(descriptor.fd, os.getpid())
    os.close(descriptor.fd)


def _map_fixed(address: int, size: int, flags: int, file: int = -1) -> int:
    _libc.mmap.restype = ctypes.c_void_p
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    pointer, length = ctypes.c_void_p(address), ctypes.c_size_t(size)
    return int(_libc.mmap(pointer, length, protection, flags | _MAP_FIXED, file, 0))


def _whole(memory: Memory) -> Region:
    return Region(memory.address, SIZE)


def _part(memory: Memory) -> Range:
    return Range(memory.address, SIZE, 0)


def test_a_write_waits_for_the_copy_and_does_not_leak_into_it(protector: Protector) -> None:
    source, copy = _memory(b"a"), _memory(b"")
    protector.protect([_whole(source)])
    writes = [source.write_aside(at * CHUNK_BYTES + 5, b"new") for at in (2, 0)]
    copy_behind(protector, split([_part(source)]), copy.address)
    for write in writes:
        write.join(10)
    assert copy.mapping[:] == b"a" * SIZE
    assert [source.mapping[at * CHUNK_BYTES + 5 :][:3] for at in (0, 2)] == [b"new", b"new"]


def _record_reads(protector: Protector) -> list[int]:
    """Grows by the offset of each chunk that is copied."""
    order: list[int] = []
    reading = protector.read

    def read(parts: Sequence[Range], memory: int) -> None:
        order.append(parts[0].offset)
        reading(parts, memory)

    protector.read = read  # type: ignore[method-assign]
    return order


def test_what_someone_waits_for_is_copied_first(protector: Protector) -> None:
    source, copy = _memory(b"a"), _memory(b"")
    protector.protect([_whole(source)])
    write = source.write_aside(2 * CHUNK_BYTES, b"new")
    await_that(protector.waiting)
    order = _record_reads(protector)
    other = source.write_aside(CHUNK_BYTES, b"new")
    awaited = protector.waiting

    def wait(within_s: float = 0.0) -> list[int]:
        return awaited(5.0 if not order else 0.0)

    protector.waiting = wait  # type: ignore[method-assign]
    copy_behind(protector, split([_part(source)]), copy.address)
    write.join(10)
    other.join(10)
    assert 0 < order[0] <= CHUNK_BYTES < order[0] + CHUNK_BYTES


def test_memory_that_was_never_touched_is_protected_too(protector: Protector) -> None:
    source, copy = _memory(b""), _memory(b"x")
    protector.protect([_whole(source)])
    write = source.write_aside(CHUNK_BYTES, b"new")
    copy_behind(protector, split([_part(source)]), copy.address)
    write.join(10)
    assert copy.mapping[:] == bytes(SIZE)


def test_each_chunk_that_is_copied_is_told_of(protector: Protector) -> None:
    source, copy = _memory(b"a"), _memory(b"")
    told: list[int] = []
    protector.protect([_whole(source)])
    chunks = split([_part(source)])
    copy_behind(protector, chunks, copy.address, beat=lambda: told.append(1))
    assert len(told) == len(chunks)


def _apart(memory: Memory) -> list[Range]:
    """All of it but two pages in the middle of the second chunk."""
    middle = CHUNK_BYTES + CHUNK_BYTES // 2
    return [
        Range(memory.address, middle, 0),
        Range(memory.address + middle + 2 * PAGE, SIZE - middle - 2 * PAGE, middle + 2 * PAGE),
    ]


def _await_the_first(protector: Protector) -> None:
    """Have the copy begin when somebody waits."""
    waiting = protector.waiting
    has_waited: list[int] = []

    def wait(within_s: float = 0.0) -> list[int]:
        found = waiting(within_s if has_waited else 5.0)
        has_waited.extend(found)
        return found

    protector.waiting = wait  # type: ignore[method-assign]


def test_who_writes_between_ranges_waits_for_no_copy_while_the_training_stands(protector: Protector) -> None:
    source, copy = _memory(b"a"), _memory(b"")
    protector.protect([_whole(source)])
    between = CHUNK_BYTES + CHUNK_BYTES // 2 + PAGE
    write = source.write_aside(between, b"new")
    reading = protector.read

    def read(parts: Sequence[Range], memory: int) -> None:
        write.join(10)
        assert not write.is_alive()
        reading(parts, memory)

    protector.read = read  # type: ignore[method-assign]
    _await_the_first(protector)
    chunks = split(_apart(source), [_whole(source)])
    hindered = copy_behind(protector, chunks, copy.address, is_standing=lambda: True)
    assert hindered == [source.address + between]
    gap = (between - PAGE, between)
    assert all(copy.mapping[at] == ord("a") for at in range(0, SIZE, PAGE) if at not in gap)
    assert [copy.mapping[at] for at in gap] == [0, 0]
    source.write(0, b"new")


def test_who_writes_between_ranges_later_waits_for_the_copy_of_what_is_around(protector: Protector) -> None:
    source, copy = _memory(b"a"), _memory(b"")
    protector.protect([_whole(source)])
    between = CHUNK_BYTES + CHUNK_BYTES // 2
    write = source.write_aside(between, b"new")
    order = _record_reads(protector)
    _await_the_first(protector)
    chunks = split(_apart(source), [_whole(source)])
    assert copy_behind(protector, chunks, copy.address) == []
    write.join(10)
    assert not write.is_alive()
    around = next(c for c in chunks if c.address <= source.address + between < c.address + c.size)
    assert order[0] == around.parts[0].offset


def test_reading_does_not_wait(protector: Protector) -> None:
    source = _memory(b"a")
    protector.protect([_whole(source)])
    assert source.mapping[SIZE // 2] == ord("a")
    protector.release_all([_whole(source)])


def test_a_failure_in_the_middle_leaves_nothing_protected(protector: Protector) -> None:
    source, copy = _memory(b"a"), _memory(b"")

    def fail(parts: Sequence[Range], memory: int) -> None:
        raise OSError("no")

    protector.read = fail  # type: ignore[method-assign]
    protector.protect([_whole(source)])
    with pytest.raises(OSError, match="no"):
        copy_behind(protector, split([_part(source)]), copy.address)
    write = source.write_aside(0, b"new")
    write.join(10)
    assert not write.is_alive()


def test_a_cancelled_copy_leaves_nothing_protected(protector: Protector) -> None:
    source, copy = _memory(b"a"), _memory(b"")
    protector.protect([_whole(source)])
    copy_behind(protector, split([_part(source)]), copy.address, is_cancelled=lambda: True)
    source.write(0, b"new")
    assert source.mapping[:3] == b"new"


def test_when_the_last_descriptor_goes_so_does_the_protection() -> None:
    source = _memory(b"a")
    descriptor = open_descriptor()
    Protector(descriptor.fd, os.getpid()).protect([_whole(source)])
    write = source.write_aside(0, b"new")
    os.close(descriptor.fd)
    write.join(10)
    assert source.mapping[:3] == b"new"


def test_memory_that_can_not_be_protected_is_named_and_the_rest_is_protected(protector: Protector) -> None:
    source, copy, other = _memory(b"a"), _memory(b""), _memory(b"a")
    nowhere = Region(0x1000, PAGE)
    assert list(protector.protect([nowhere, _whole(source)])) == [nowhere]
    write = source.write_aside(0, b"new")
    copy_behind(protector, split([_part(source)]), copy.address)
    write.join(10)
    assert copy.mapping[:3] == b"aaa"
    other.write(0, b"new")


def test_nothing_waits_in_a_region_of_which_a_part_can_not_be_protected(protector: Protector) -> None:
    source = _memory(b"a")
    protector.register([_whole(source)])
    part = source.address + 2 * CHUNK_BYTES
    assert _map_fixed(part, PAGE, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS) == part
    assert list(protector.protect([_whole(source)])) == [_whole(source)]
    write = source.write_aside(0, b"new")
    write.join(10)
    assert not write.is_alive()


@pytest.mark.parametrize("flags", [mmap.MAP_SHARED, mmap.MAP_PRIVATE], ids=["shared", "of a file"])
def test_memory_that_came_to_be_another_s_is_not_protected(protector: Protector, flags: int) -> None:
    source = _memory(b"a")
    protector.register([_whole(source)])
    file = os.memfd_create("weights")
    os.ftruncate(file, SIZE)
    assert _map_fixed(source.address, SIZE, flags, file) == source.address
    os.close(file)
    (why,) = protector.protect([_whole(source)]).values()
    assert "own" in why
    source.write(0, b"new")


def test_what_another_one_protects_stays_protected(protector: Protector) -> None:
    source, copy = _memory(b"a"), _memory(b"")
    protector.protect([_whole(source)])
    descriptor = open_descriptor()
    (why,) = Protector(descriptor.fd, os.getpid()).protect([_whole(source)]).values()
    assert "busy" in why
    os.close(descriptor.fd)
    write = source.write_aside(0, b"new")
    copy_behind(protector, split([_part(source)]), copy.address)
    write.join(10)
    assert copy.mapping[:3] == b"aaa"


def test_memory_that_was_mapped_anew_is_protected_all_the_same(protector: Protector) -> None:
    source = _memory(b"a")
    address = source.address
    protector.protect([_whole(source)])
    protector.release_all([_whole(source)])
    _libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(SIZE))
    assert _map_fixed(address, SIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) == address
    copy = _memory(b"x")
    protector.protect([_whole(source)])
    write = source.write_aside(0, b"new")
    copy_behind(protector, split([_part(source)]), copy.address)
    write.join(10)
    assert copy.mapping[:3] == bytes(3)


@pytest.mark.parametrize("is_all", [True, False])
def test_what_is_mapped_anew_between_tensors_keeps_nothing_around_it_protected(
    protector: Protector, is_all: bool
) -> None:
    source, copy = _memory(b"a"), _memory(b"")
    gap = source.address + CHUNK_BYTES + CHUNK_BYTES // 2
    protector.protect([_whole(source)])
    assert _map_fixed(gap, PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) == gap
    writes = [source.write_aside(at, b"new") for at in (0, gap - source.address + PAGE, SIZE - PAGE)]
    if is_all:
        protector.release_all([_whole(source)])
    else:
        copy_behind(protector, split(_apart(source), [_whole(source)]), copy.address)
    for write in writes:
        write.join(10)
        assert not write.is_alive()


# ---------------------------------------------------------------- regions and chunks


def test_neighbours_are_protected_together_and_others_apart() -> None:
    near = [Range(10 * PAGE, 3 * PAGE, 0), Range(15 * PAGE, PAGE, 900)]
    far = Range(40 * PAGE, PAGE, 5)
    assert merge([far, *near]) == [Region(10 * PAGE, 6 * PAGE), Region(40 * PAGE, PAGE)]


def test_neighbours_with_memory_between_them_that_can_not_be_protected_are_apart() -> None:
    parts = [Range(10 * PAGE, 3 * PAGE, 0), Range(14 * PAGE, PAGE, 900), Range(15 * PAGE, PAGE, 950)]
    regions = merge(parts, lambda address, size: False)
    assert regions == [Region(10 * PAGE, 3 * PAGE), Region(14 * PAGE, 2 * PAGE)]
    assert [(chunk.address, chunk.size) for chunk in split(parts, regions)] == [
        (10 * PAGE, 3 * PAGE),
        (14 * PAGE, 2 * PAGE),
    ]


def test_small_tensors_between_two_large_ones_do_not_keep_them_apart() -> None:
    parts = [Range(0, 600 * PAGE, 0), Range(606 * PAGE, 300 * PAGE, 0)]
    assert merge(parts, lambda address, size: (address, size) == (600 * PAGE, 6 * PAGE)) == [Region(0, 906 * PAGE)]


def test_what_hinders_is_left_out_of_the_regions_and_a_range_never_is() -> None:
    parts = [Range(0, 6 * PAGE, 0), Range(8 * PAGE, 2 * PAGE, 0), Range(20 * PAGE, PAGE, 0)]
    regions = [Region(0, 10 * PAGE), Region(20 * PAGE, PAGE)]
    assert leave_out(regions, parts, [7 * PAGE + 5]) == [
        Region(0, 6 * PAGE),
        Region(8 * PAGE, 2 * PAGE),
        Region(20 * PAGE, PAGE),
    ]
    for address in (0, 5 * PAGE, 8 * PAGE, 12 * PAGE, 20 * PAGE, 30 * PAGE):  # ranges, or protected by no region
        assert leave_out(regions, parts, [address]) == regions


def test_chunks_end_at_multiples_of_their_size_and_parts_keep_their_offsets() -> None:
    (first, second, third) = split([Range(CHUNK_BYTES - PAGE, 2 * CHUNK_BYTES, 100)])
    assert first == Chunk(CHUNK_BYTES - PAGE, PAGE, (Range(CHUNK_BYTES - PAGE, PAGE, 100),))
    assert second.parts == (Range(CHUNK_BYTES, CHUNK_BYTES, 100 + PAGE),)
    assert third.size == CHUNK_BYTES - PAGE
    assert third.parts[0].offset == 100 + PAGE + CHUNK_BYTES


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3000)), min_size=1, max_size=8))
def test_every_page_of_every_range_is_in_one_chunk_and_goes_to_its_offset(layout: list[tuple[int, int]]) -> None:
    ranges, at, offset = [], 1000 * PAGE, 0
    for gap, pages in layout:
        at += gap * PAGE
        ranges.append(Range(at, pages * PAGE, offset))
        at, offset = at + pages * PAGE, offset + pages * PAGE + 7
    chunks = split(ranges)
    wanted = {part.address + page: part.offset + page for part in ranges for page in range(0, part.size, PAGE)}
    found = [
        (part.address + page, part.offset + page)
        for chunk in chunks
        for part in chunk.parts
        for page in range(0, part.size, PAGE)
    ]
    assert len(found) == len(wanted)
    assert dict(found) == wanted
    regions = merge(ranges)
    assert sum(chunk.size for chunk in chunks) == sum(region.size for region in regions)
    assert all(
        chunk.address <= part.address and part.address + part.size <= chunk.address + chunk.size
        for chunk in chunks
        for part in chunk.parts
    )
