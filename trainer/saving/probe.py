"""Tries write protection once, with this writer on this kernel, before any state depends on it."""

from __future__ import annotations

import ctypes
import mmap
import threading

from trainer.saving.link import Link, LinkLost
from trainer.saving.protect import Descriptor

_LIMIT_S = 10.0
_OLD, _NEW = b"old ", b"new "


def probe_protection(link: Link, descriptor: Descriptor) -> str:
    """What is wrong with write protection here; empty when a write waits and does not leak into the copy.

    Raises `LinkLost` when the writer does not answer.
    """
    # One page that holds something, and one that was never touched, which some kernels can't protect.
    for is_touched in (True,) if descriptor.needs_pages else (True, False):
        problem = _probe_page(link, is_touched=is_touched)
        if problem:
            return problem
    return ""


def _probe_page(link: Link, *, is_touched: bool) -> str:
    page = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    if is_touched:
        page[: len(_OLD)] = _OLD
    expected = (_OLD if is_touched else b"").ljust(mmap.PAGESIZE, b"\0")
    link.send({"kind": "probe", "address": address, "size": mmap.PAGESIZE})
    answer = link.receive(_LIMIT_S)
    if answer is not None and answer["kind"] == "protected":
        # memmove holds no lock of Python's while it waits.
        write = threading.Thread(target=ctypes.memmove, args=(address, _NEW, len(_NEW)), daemon=True)
        write.start()
        answer = link.receive(_LIMIT_S)
        write.join(_LIMIT_S)
    if answer is None:
        raise LinkLost("no answer to the probe of write protection")
    if answer["error"]:
        return str(answer["error"])
    if bytes.fromhex(answer["held"]) != expected:
        return "a write to a protected page leaked into the copy"
    return "" if page[: len(_NEW)] == _NEW else "a write to a protected page was lost"
