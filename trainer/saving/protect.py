"""Write protection of another process's memory by userfaultfd, and the copy that is made behind it. Linux only.

The rank makes the descriptor, hands it to its writer and closes its own: when the writer dies, the kernel lifts all
protection. A write to a page that is still protected waits in the kernel until the page's chunk was copied and
released; reads never wait. Only a descriptor of full mode will do, because also the kernel itself writes for the
training (a recv() into a tensor); where the site does not allow one, states are copied at once instead.
"""

from __future__ import annotations

import bisect
import ctypes
import errno
import fcntl
import os
import platform
import select
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trainer.saving.mappings import OwnMemory

PAGE = 4096
CHUNK_BYTES = 2 * 1024 * 1024  # a huge page, so that none is split; it is copied in half a millisecond

_SYSCALLS = {"x86_64": 323, "aarch64": 282}
_DEVICE = Path("/dev/userfaultfd")
_DEVICE_NEW = 0xAA00
_API, _API_IOCTL = 0xAA, 0xC018AA3F
_REGISTER, _MODE_WP = 0xC020AA00, 2
_WRITEPROTECT = 0xC018AA06
_WAKE = 0x8010AA02
_FEATURE_WP = 1
_FEATURE_WP_UNPOPULATED = 1 << 13
_MESSAGE = struct.Struct("<B7xQQ8x")
_EVENT_PAGEFAULT = 0x12
_MESSAGES_AT_ONCE = 64
_PR_SET_PTRACER = 0x59616D61

_GAP_BYTES = 16 * PAGE
_HEAD_START_S = 0.004  # of the other ranks of this node, whose trainings wait to be protected just now

_libc = ctypes.CDLL(None, use_errno=True)


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


_libc.process_vm_readv.argtypes = (
    ctypes.c_int,
    ctypes.POINTER(_Vector),
    ctypes.c_ulong,
    ctypes.POINTER(_Vector),
    ctypes.c_ulong,
    ctypes.c_ulong,
)
_libc.process_vm_readv.restype = ctypes.c_ssize_t
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


@dataclass(frozen=True, slots=True)
class Range:
    """Whole pages of the rank's memory, and where their bytes go in the staging memory."""

    address: int
    size: int
    offset: int


@dataclass(frozen=True, slots=True)
class Region:
    """What is protected in one go: ranges that are neighbours, and the pages between them."""

    address: int
    size: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """What is copied and released in one go: a part of a region, and the ranges or parts of ranges in it."""

    address: int
    size: int
    parts: tuple[Range, ...]


def merge(ranges: Sequence[Range], holds: Callable[[int, int], bool] | None = None) -> list[Region]:
    """Regions around ranges that do not overlap. `holds(address, size)`: what lies between can be protected, too.

    Between neighbours lie the pages that hold the end of one tensor and the begin of the next, and small ones: a bias,
    say, and its moments. Protected with them, huge pages stay whole, and then protecting costs next to nothing.
    """
    regions: list[Region] = []
    for part in sorted(ranges, key=lambda part: part.address):
        last = regions[-1] if regions else None
        end = last.address + last.size if last is not None else 0
        gap = part.address - end
        if last is not None and gap <= _GAP_BYTES and (gap == 0 or holds is None or holds(end, gap)):
            regions[-1] = Region(last.address, part.address + part.size - last.address)
        else:
            regions.append(Region(part.address, part.size))
    return regions


def leave_out(regions: Sequence[Region], ranges: Sequence[Range], addresses: Iterable[int]) -> list[Region]:
    """The regions without the gaps between ranges that these addresses are in; an address in a range changes nothing.

    What else lies in a gap may be written to all the time, and who does would wait in each save.
    """
    parts = sorted(ranges, key=lambda part: part.address)
    begins = [part.address for part in parts]
    left = list(regions)
    for address in addresses:
        at = bisect.bisect_right(begins, address)
        if not 0 < at < len(parts):
            continue
        begin, end = parts[at - 1].address + parts[at - 1].size, parts[at].address
        if begin <= address < end:
            left = [piece for region in left for piece in _without(region, begin, end)]
    return left


def _without(region: Region, begin: int, end: int) -> list[Region]:
    stop = region.address + region.size
    if not (region.address <= begin and end <= stop):
        return [region]
    pieces = Region(region.address, begin - region.address), Region(end, stop - end)
    return [piece for piece in pieces if piece.size]


def split(ranges: Sequence[Range], regions: Sequence[Region] | None = None) -> list[Chunk]:
    """The regions around the ranges in chunks that end at multiples of CHUNK_BYTES, by address."""
    parts = sorted(ranges, key=lambda part: part.address)
    begins = [part.address for part in parts]
    chunks = []
    for region in merge(parts) if regions is None else regions:
        begin, end = region.address, region.address + region.size
        while begin < end:
            stop = min(end, (begin // CHUNK_BYTES + 1) * CHUNK_BYTES)
            first = max(bisect.bisect_right(begins, begin) - 1, 0)
            inside = [_cut(part, begin, stop) for part in parts[first : bisect.bisect_left(begins, stop)]]
            chunks.append(Chunk(begin, stop - begin, tuple(part for part in inside if part.size > 0)))
            begin = stop
    return chunks


def _cut(part: Range, begin: int, end: int) -> Range:
    begin, end = max(part.address, begin), min(part.address + part.size, end)
    return Range(begin, end - begin, part.offset + begin - part.address)


# ---------------------------------------------------------------- the rank's side


@dataclass(frozen=True, slots=True)
class Descriptor:
    """A userfaultfd of this process. `needs_pages`: pages that were never touched escape it and must be touched."""

    fd: int
    needs_pages: bool


def open_descriptor() -> Descriptor:
    """A new userfaultfd of full mode; raises OSError where the kernel or the site does not give one."""
    for features in (_FEATURE_WP | _FEATURE_WP_UNPOPULATED, _FEATURE_WP):
        fd = _create()
        try:
            fcntl.ioctl(fd, _API_IOCTL, struct.pack("<QQQ", _API, features, 0))
        except OSError as error:
            os.close(fd)
            if error.errno != errno.EINVAL or features == _FEATURE_WP:
                raise
        else:
            return Descriptor(fd, needs_pages=not features & _FEATURE_WP_UNPOPULATED)
    raise OSError(errno.ENOSYS, "no write protection by userfaultfd")


def _create() -> int:
    number = _SYSCALLS.get(platform.machine())
    if number is not None:
        fd = int(_libc.syscall(number, os.O_CLOEXEC | os.O_NONBLOCK))
        if fd >= 0:
            return fd
    device = os.open(_DEVICE, os.O_RDWR | os.O_CLOEXEC)  # who may is the owner of this file's business
    try:
        return fcntl.ioctl(device, _DEVICE_NEW, os.O_CLOEXEC | os.O_NONBLOCK)
    finally:
        os.close(device)


def allow_reading_by(pid: int) -> None:
    """Let our writer read our memory where only debuggers of their own children may."""
    _libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(pid), 0, 0, 0)  # fails where nothing restricts it


def advise(address: int, size: int, advice: int) -> bool:
    """madvise() for whole pages; False when the kernel declines."""
    return bool(_libc.madvise(address, size, advice) == 0)


# ---------------------------------------------------------------- the writer's side


class Protector:
    """Protects pages of the memory of the process that made `fd`, which is `pid`. Its calls raise OSError but one."""

    def __init__(self, fd: int, pid: int) -> None:
        self._fd = fd
        self._pid = pid
        self._registered: set[Region] = set()
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)

    def register(self, regions: Sequence[Region]) -> None:
        """Get ready to protect these; `protect` does it otherwise. EBUSY: someone else protects there."""
        for region in regions:
            fcntl.ioctl(self._fd, _REGISTER, struct.pack("<QQQQ", region.address, region.size, _MODE_WP, 0))
            self._registered.add(region)

    def protect(self, regions: Sequence[Region], beat: Callable[[], None] = lambda: None) -> dict[Region, str]:
        """Writes to these regions wait from now on; returns those where none does, each with what the kernel says.

        `beat` is called after each of them.
        """
        declined = {}
        for region in regions:
            try:
                self._protect(region)
            except OSError as error:
                declined[region] = str(error)
            beat()
        return declined

    def _protect(self, region: Region) -> None:
        if region not in self._registered:
            self.register([region])  # not released when this fails: it may be protected by someone else
        try:
            try:
                self._set(region.address, region.size, is_protected=True)
            except FileNotFoundError:  # a part of it was freed and mapped anew, which forgets the registration
                self._register_again(region)
                self._set(region.address, region.size, is_protected=True)
        except OSError:
            self.release_all([region])  # the part before what declines
            raise

    def leave_out(self, regions: Sequence[Region]) -> None:
        """From now on these stand for the registered ones that they are parts of."""
        whole = [(region.address, region.address + region.size) for region in self._registered]
        self._registered.update(
            region
            for region in regions
            if any(a <= region.address and region.address + region.size <= b for a, b in whole)
        )

    def _register_again(self, region: Region) -> None:
        self._registered.discard(region)
        with Path(f"/proc/{self._pid}/maps").open() as lines:
            if not OwnMemory(lines).holds(region.address, region.size):
                raise OSError(errno.EINVAL, "it is no memory of the process's own any more")
        self.register([region])

    def release(self, address: int, size: int) -> None:
        """Writes to these pages go on, also those that wait.

        What was mapped anew among them, between tensors, is not protected any more, and the kernel stops there.
        """
        try:
            self._set(address, size, is_protected=False)
        except FileNotFoundError:
            if size > PAGE:
                half = size // 2 // PAGE * PAGE
                self.release(address, half)
                self.release(address + half, size - half)
            else:  # whoever waited for what was there before
                fcntl.ioctl(self._fd, _WAKE, struct.pack("<QQ", address, size))

    def release_all(self, regions: Sequence[Region]) -> None:
        """As `release`, for all that can be released."""
        for region in regions:
            with suppress(OSError):  # never registered, or gone
                self.release(region.address, region.size)

    def _set(self, address: int, size: int, *, is_protected: bool) -> None:
        fcntl.ioctl(self._fd, _WRITEPROTECT, struct.pack("<QQQ", address, size, int(is_protected)))

    def waiting(self, within_s: float = 0.0) -> list[int]:
        """Addresses that someone waits to write to."""
        if not self._poll.poll(within_s * 1000):
            return []
        try:
            data = os.read(self._fd, _MESSAGE.size * _MESSAGES_AT_ONCE)
        except BlockingIOError:
            return []
        return [address for event, _, address in _MESSAGE.iter_unpack(data) if event == _EVENT_PAGEFAULT]

    def read(self, parts: Sequence[Range], memory: int) -> None:
        """Copy parts of the rank's memory to their offsets from the address `memory` of ours."""
        local, remote = (_Vector * len(parts))(), (_Vector * len(parts))()
        for at, part in enumerate(parts):
            local[at] = _Vector(memory + part.offset, part.size)
            remote[at] = _Vector(part.address, part.size)
        done = int(_libc.process_vm_readv(self._pid, local, len(parts), remote, len(parts), 0))
        if done < sum(part.size for part in parts):  # parts never cross from one mapping that may go to another
            number = ctypes.get_errno() if done < 0 else errno.EFAULT
            raise OSError(number, f"the rank's memory: {os.strerror(number)}")


def copy_behind(
    protector: Protector,
    chunks: Sequence[Chunk],
    memory: int,
    is_cancelled: Callable[[], bool] = lambda: False,
    beat: Callable[[], None] = lambda: None,
    is_standing: Callable[[], bool] = lambda: False,
) -> list[int]:
    """Copy protected chunks to the staging memory that begins at `memory`, and release each after its copy.

    Chunks that someone waits for come first; `beat` is called after each. Whatever happens, nothing is protected
    afterwards, as long as the kernel lets it be released. Returns the addresses between ranges that were waited for
    while the training was `is_standing`: those gaps were released at once.
    """
    begins = [chunk.address for chunk in chunks]
    is_copied = bytearray(len(chunks))
    urgent: deque[int] = deque()
    hindered: list[int] = []
    next_at = 0
    head_start_until = time.monotonic() + _HEAD_START_S
    try:
        while next_at < len(chunks) and not is_cancelled():
            wait_s = 0.0 if urgent else max(0.0, head_start_until - time.monotonic())
            waiting = protector.waiting(wait_s)
            for address in waiting:
                at = bisect.bisect_right(begins, address) - 1
                gap = _find_gap(chunks[at], address) if is_standing() else None
                if gap is None:
                    urgent.append(at)
                else:
                    hindered.append(address)
                    protector.release(gap.address, gap.size)
            if not urgent and time.monotonic() < head_start_until:
                continue
            at = urgent.popleft() if urgent else next_at
            chunk = chunks[at]
            if not is_copied[at]:
                if chunk.parts:
                    protector.read(chunk.parts, memory)
                is_copied[at] = True
                protector.release(chunk.address, chunk.size)
                beat()
            while next_at < len(chunks) and is_copied[next_at]:
                next_at += 1
    finally:
        if next_at < len(chunks):
            protector.release_all([Region(chunk.address, chunk.size) for chunk in chunks])
    return hindered


def _find_gap(chunk: Chunk, address: int) -> Region | None:
    """What lies around an address between the ranges in a chunk; None when a range does."""
    begin, end = chunk.address, chunk.address + chunk.size
    for part in chunk.parts:
        if part.address + part.size <= address:
            begin = max(begin, part.address + part.size)
        elif part.address > address:
            end = min(end, part.address)
        else:
            return None
    return Region(begin, end - begin) if begin <= address < end else None  # a waiter of what was declined
