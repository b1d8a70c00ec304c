"""The rank's part of a save: which bytes it copies into the staging memory at once, and which are copied behind it.

Large tensors in this process's memory are protected by pages and copied by the writer (trainer.saving.protect); the
parts of pages at their ends, small tensors and byte items are copied here. Tensors on a GPU are copied by its own copy
engine, behind which the training's stream waits. What can't be protected is copied at once.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from trainer.saving.image import Image, Slot
from trainer.saving.mappings import OwnMemory
from trainer.saving.memory import StagingMemory
from trainer.saving.protect import PAGE, Range, Region, advise, merge

SMALL_BYTES = 256 * 1024  # below it a copy costs less than the system calls that protect

_MADV_HUGEPAGE, _MADV_POPULATE_READ, _MADV_COLLAPSE = 14, 22, 25
_HUGE = 2 * 1024 * 1024
_COLLAPSE_BYTES = 16 * _HUGE

Source = torch.Tensor | bytes


@dataclass(frozen=True, slots=True)
class Copy:
    """Bytes of this process's memory that belong at `offset` of the staging memory."""

    offset: int
    address: int
    size: int


@dataclass(frozen=True, slots=True)
class Twin:
    """Bytes that belong at `offset`, too, and are at `source` of the staging memory."""

    offset: int
    source: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """How the slots of an image are filled from tensors that lie where they lie now.

    `key` is equal as long as they lie there. No reference is held: addresses are valid while the caller has the
    tensors.
    """

    key: tuple[int, ...]
    copies: tuple[Copy, ...]
    ranges: tuple[Range, ...] = ()
    regions: tuple[Region, ...] = ()  # around them
    twins: tuple[Twin, ...] = ()


@dataclass(slots=True)
class _Parts:
    copies: list[Copy] = field(default_factory=list)
    ranges: list[Range] = field(default_factory=list)
    twins: list[Twin] = field(default_factory=list)


def locate(sources: Sequence[Source]) -> tuple[int, ...]:
    """Where the tensors lie now: the key of their binding; 0 for what is not in this process's memory."""
    return tuple([0 if isinstance(s, bytes) or not s.is_cpu else s.data_ptr() for s in sources])


def is_on_device(source: Source) -> bool:
    """True for tensors that are not in this process's memory."""
    return not isinstance(source, bytes) and not source.is_cpu


def bind(image: Image, sources: Sequence[Source], *, is_protecting: bool) -> Binding:
    """Decide for each slot how it is filled. Raises ValueError when sources and slots do not fit together."""
    if len(sources) != len(image.slots):
        raise ValueError(f"{len(sources)} sources for {len(image.slots)} slots")
    parts = _Parts()
    own = OwnMemory() if is_protecting else None
    large: list[tuple[int, Slot]] = []
    for slot, source in zip(image.slots, sources, strict=True):
        _check_size(slot, source)
        if isinstance(source, bytes) or is_on_device(source):
            continue  # anew for each save
        if own is not None and slot.size >= SMALL_BYTES and _can_be_protected(source, own):
            large.append((source.data_ptr(), slot))
        else:
            parts.copies.append(Copy(slot.offset, source.data_ptr(), slot.size))
    _split_large(sorted(large, key=lambda item: (item[0], item[1].offset)), parts)
    return Binding(
        key=locate(sources),
        copies=tuple(parts.copies),
        ranges=tuple(sorted(parts.ranges, key=lambda part: part.offset)),
        regions=tuple(merge(parts.ranges, own.holds)) if own is not None else (),
        twins=tuple(parts.twins),
    )


def _check_size(slot: Slot, source: Source) -> None:
    size = len(source) if isinstance(source, bytes) else source.numel() * source.element_size()
    if size != slot.size:
        raise ValueError(f"{size} bytes for a slot of {slot.size}")
    if isinstance(source, bytes):
        return
    if not source.is_contiguous():
        raise ValueError("a tensor that is not contiguous")
    if source.storage_offset() * source.element_size() + size > source.untyped_storage().nbytes():
        raise ValueError("a tensor whose memory was given back")


def _can_be_protected(source: torch.Tensor, own: OwnMemory) -> bool:
    # Other processes, and a GPU that copies into pinned memory, write past the protection.
    size = source.numel() * source.element_size()
    return own.holds(source.data_ptr(), size) and not source.is_pinned()


def _split_large(large: Sequence[tuple[int, Slot]], parts: _Parts) -> None:
    first_of: dict[tuple[int, int], Range] = {}
    end_of_last = 0
    for address, slot in large:
        begin, end = -(-address // PAGE) * PAGE, (address + slot.size) // PAGE * PAGE
        inner = Range(begin, end - begin, slot.offset + begin - address)
        if (first := first_of.get((begin, end))) is not None:
            parts.twins.append(Twin(inner.offset, first.offset, inner.size))  # tied weights
        elif begin < end_of_last:
            parts.copies.append(Copy(slot.offset, address, slot.size))  # a view into another one: rare
            continue
        else:
            first_of[begin, end] = inner
            parts.ranges.append(inner)
            end_of_last = end
        if begin > address:
            parts.copies.append(Copy(slot.offset, address, begin - address))
        if (tail := address + slot.size - end) > 0:
            parts.copies.append(Copy(slot.offset + slot.size - tail, end, tail))


def use_huge_pages(binding: Binding) -> threading.Thread:
    """Get huge pages under what is going to be protected, in a thread: protecting costs next to nothing with them.

    Until it is done, and where the kernel has none, a save blocks somewhat longer; nothing else depends on it.
    """
    thread = threading.Thread(target=_use_huge_pages, args=(binding.regions,), name="pages", daemon=True)
    thread.start()
    return thread


def _use_huge_pages(regions: Sequence[Region]) -> None:
    for region in regions:
        begin, end = -(-region.address // _HUGE) * _HUGE, (region.address + region.size) // _HUGE * _HUGE
        if begin < end and advise(begin, end - begin, _MADV_HUGEPAGE):
            for at in range(begin, end, _COLLAPSE_BYTES):  # what is no longer there by now is declined
                advise(at, min(_COLLAPSE_BYTES, end - at), _MADV_COLLAPSE)


def touch_pages(binding: Binding) -> None:
    """Make all pages of the ranges exist, for kernels where protection misses others."""
    for part in binding.ranges:
        if not advise(part.address, part.size, _MADV_POPULATE_READ):
            raise OSError("pages of the state can't be touched")


def copy_now(image: Image, sources: Sequence[Source], binding: Binding, memory: StagingMemory) -> None:
    """Copy everything that is not copied behind. When it returns, all but the ranges and twins is in place."""
    base = memory.address
    for part in binding.copies:
        ctypes.memmove(base + part.offset, part.address, part.size)
    for slot, source in zip(image.slots, sources, strict=True):
        if isinstance(source, bytes):
            memory.view[slot.offset : slot.offset + slot.size] = source


def copy_regions(binding: Binding, regions: Sequence[Region], memory: StagingMemory) -> None:
    """Copy at once what was to be copied behind, in these of the binding's regions."""
    for region in regions:
        for part in binding.ranges:
            if region.address <= part.address < region.address + region.size:
                ctypes.memmove(memory.address + part.offset, part.address, part.size)


def copy_all(image: Image, sources: Sequence[Source], memory: StagingMemory) -> None:
    """Copy everything at once."""
    copy_now(image, sources, bind(image, sources, is_protecting=False), memory)


# ---------------------------------------------------------------- tensors on a GPU


class DeviceCopies:
    """Copies from a GPU into the staging memory, in a stream of their own.

    The training's stream waits for them on the GPU, so that no kernel changes a tensor before it was copied; the
    training's process waits for nothing.
    """

    def __init__(self, memory: StagingMemory) -> None:
        # Registered with the driver, the memory is pinned: only then do copies run beside kernels.
        result = _runtime().cudaHostRegister(memory.address, memory.capacity, 0)
        if int(result) != 0:
            raise RuntimeError(f"the staging memory can't be pinned: {result}")
        self._memory = memory
        self._stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def begin(self, image: Image, sources: Sequence[Source]) -> Callable[[], Any]:
        """Begin the copies; what is returned waits until they are done."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for slot, source in zip(image.slots, sources, strict=True):
                if not isinstance(source, bytes) and is_on_device(source):
                    self._slot(slot, source).copy_(source, non_blocking=True)
                    source.record_stream(self._stream)  # freed memory is not used again before it was copied
            copied = self._stream.record_event()
        current.wait_event(copied)
        wait: Callable[[], Any] = copied.synchronize
        return wait

    def _slot(self, slot: Slot, source: torch.Tensor) -> torch.Tensor:
        count = source.numel()
        flat = torch.frombuffer(self._memory.view, dtype=source.dtype, count=count, offset=slot.offset)
        return flat.view(source.shape)

    def close(self) -> None:
        """Unpin the memory."""
        _runtime().cudaHostUnregister(self._memory.address)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
