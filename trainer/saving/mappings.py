"""Which memory of this process is its own alone: no file's, and no other process can write to it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from pathlib import Path

_MAPS = Path("/proc/self/maps")


class OwnMemory:
    """The private, anonymous mappings as they are now; neighbouring ones are one."""

    def __init__(self, lines: Iterable[str] | None = None) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []
        for line in _MAPS.read_text().splitlines() if lines is None else lines:
            span, access, _, _, inode = line.split(maxsplit=5)[:5]
            if not access.endswith("p") or inode != "0":
                continue
            begin, end = (int(edge, 16) for edge in span.split("-"))
            if self._ends and self._ends[-1] == begin:
                self._ends[-1] = end
            else:
                self._begins.append(begin)
                self._ends.append(end)

    def holds(self, address: int, size: int) -> bool:
        """True when all of these bytes lie in it."""
        at = bisect_right(self._begins, address) - 1
        return at >= 0 and address + size <= self._ends[at]
