"""Which bytes the rank copies itself and which are copied behind it: together every byte, once."""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Sequence
from pathlib import Path

import pytest

pytestmark = pytest.mark.torch

torch = pytest.importorskip("torch")

from tests.trainer.saving.crew import plan_by_hand, raw  # noqa: E402
from trainer.saving.image import Image  # noqa: E402
from trainer.saving.mappings import OwnMemory  # noqa: E402
from trainer.saving.memory import StagingMemory  # noqa: E402
from trainer.saving.protect import PAGE  # noqa: E402
from trainer.saving.staging import SMALL_BYTES, Binding, bind, copy_all, copy_now, locate  # noqa: E402

LARGE = SMALL_BYTES // 4 + 1


def _image(sources: Sequence[object]) -> Image:
    return plan_by_hand(0, sources).image  # type: ignore[arg-type]


def _covered(binding: Binding) -> list[tuple[int, int]]:
    """(begin, end) in the file of everything that will be filled, in order."""
    parts = [(part.offset, part.size) for part in binding.copies]
    parts += [(part.offset, part.size) for part in binding.ranges]
    parts += [(part.offset, part.size) for part in binding.twins]
    return sorted((offset, offset + size) for offset, size in parts)


def test_every_byte_of_every_tensor_is_filled_once() -> None:
    sources = [torch.zeros(LARGE * 3), torch.zeros(5), torch.zeros(LARGE), torch.zeros(())]
    image = _image(sources)
    binding = bind(image, sources, is_protecting=True)
    assert binding.ranges
    covered = _covered(binding)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(covered))
    assert sum(end - begin for begin, end in covered) == sum(slot.size for slot in image.slots)


def test_only_whole_pages_inside_a_tensor_are_protected() -> None:
    source = torch.zeros(LARGE * 2)[3:]
    image = _image([source])
    for part in bind(image, [source], is_protecting=True).ranges:
        assert part.address % PAGE == part.size % PAGE == 0
        assert source.data_ptr() <= part.address
        assert part.address + part.size <= source.data_ptr() + source.numel() * 4


def test_without_protection_nothing_is_left_to_copy_behind() -> None:
    sources = [torch.zeros(LARGE), torch.zeros(LARGE)]
    binding = bind(_image(sources), sources, is_protecting=False)
    assert not binding.ranges
    assert not binding.twins


def test_tied_weights_are_copied_behind_once_and_then_doubled() -> None:
    tied = torch.zeros(LARGE * 2)
    binding = bind(_image([tied, tied]), [tied, tied], is_protecting=True)
    assert len(binding.ranges) == 1
    (twin,) = binding.twins
    assert twin.source == binding.ranges[0].offset
    assert twin.size == binding.ranges[0].size


def test_a_view_into_another_tensor_is_copied_at_once() -> None:
    whole = torch.zeros(LARGE * 4)
    part = whole[LARGE:]
    binding = bind(_image([whole, part]), [whole, part], is_protecting=True)
    assert len(binding.ranges) == 1
    assert part.data_ptr() in {copy.address for copy in binding.copies}


def test_memory_that_other_processes_write_to_is_copied_at_once() -> None:
    shared = torch.zeros(LARGE).share_memory_()
    assert not bind(_image([shared]), [shared], is_protecting=True).ranges


@pytest.mark.parametrize("flags", [mmap.MAP_SHARED, mmap.MAP_PRIVATE], ids=["shared", "private"])
def test_memory_of_a_file_is_copied_at_once(flags: int, tmp_path: Path) -> None:
    """Another process that has mapped it writes past the protection, which the kernel may refuse for files."""
    file = tmp_path / "weights"
    file.write_bytes(bytes(LARGE * 4))
    with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 0, flags=flags) as mapped:
        source = torch.frombuffer(mapped, dtype=torch.float32)
        binding = bind(_image([source]), [source], is_protecting=True)
        del source
        assert not binding.ranges
        assert sum(copy.size for copy in binding.copies) == LARGE * 4


def test_only_private_memory_without_a_file_is_a_process_own() -> None:
    own = OwnMemory(
        [
            "1000-3000 rw-p 00000000 00:00 0 [heap]",
            "3000-5000 rw-p 00000000 00:00 0",
            "5000-6000 rw-s 00000000 00:01 77 /dev/shm/weights",
            "7000-8000 rw-p 00000000 08:01 78 /a file with spaces",
        ]
    )
    assert own.holds(0x1800, 0x3800)
    assert not own.holds(0x4800, 0x1000)
    assert not own.holds(0x5000, 0x10)
    assert not own.holds(0x7000, 0x10)
    assert not own.holds(0x800, 0x10)


def test_copying_at_once_puts_every_byte_where_it_belongs() -> None:
    sources = [torch.arange(LARGE, dtype=torch.float32), b"opaque", torch.tensor(3.0), torch.arange(7)]
    image = _image(sources)
    memory = StagingMemory.allocate(image.size)
    copy_all(image, sources, memory)
    for slot, source in zip(image.slots, sources, strict=True):
        assert bytes(memory.view[slot.offset : slot.offset + slot.size]) == raw(source)
    memory.close()


def test_what_is_protected_is_not_copied_at_once() -> None:
    source = torch.ones(LARGE * 4)
    image = _image([source])
    binding = bind(image, [source], is_protecting=True)
    memory = StagingMemory.allocate(image.size)
    copy_now(image, [source], binding, memory)
    (part,) = binding.ranges
    assert bytes(memory.view[part.offset : part.offset + part.size]) == bytes(part.size)
    memory.close()


def test_a_tensor_that_moved_needs_a_new_binding() -> None:
    sources = [torch.zeros(LARGE)]
    key = bind(_image(sources), sources, is_protecting=True).key
    assert key == locate(sources)
    assert key != locate([torch.zeros(LARGE)])


@pytest.mark.parametrize("sources", [[], [torch.zeros(3)], [torch.zeros(2, 2).T]], ids=["none", "size", "stride"])
def test_sources_that_are_not_the_planned_ones_are_refused(sources: list[object]) -> None:
    image = _image([torch.zeros(4)])
    with pytest.raises(ValueError, match=r"slot|contiguous"):
        bind(image, sources, is_protecting=True)  # type: ignore[arg-type]


def test_a_tensor_without_its_memory_is_refused() -> None:
    """What offloads a tensor may give its memory back and leave the tensor there, to get it anew later."""
    source = torch.zeros(LARGE)
    image = _image([source])
    source.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="given back"):
        bind(image, [source], is_protecting=True)
