"""Which rank takes the checksum of which file, and what all found together means. Pure.

Ranks may read different copies of a file: the checkpoint's own, or one on the disk of their node. Each copy that is
read is checked by one rank that sees it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

OWN = ""  # the place of the checkpoint's own files


@dataclass(frozen=True, slots=True)
class Copy:
    """One copy of a file of the manifest; two are the same when file and place are."""

    file: str
    place: str = OWN


@dataclass(frozen=True, slots=True)
class Sight:
    """A rank sees a copy, and needs so many bytes of it for itself."""

    copy: Copy
    needed_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A copy that a rank could not read as recorded. `errno` 0: it is damaged; else it could not be read now."""

    copy: Copy
    reason: str
    errno: int = 0

    def __str__(self) -> str:
        return f"{self.copy.file} {self.reason}"


def assign(sights: Sequence[Iterable[Sight]], sizes: Mapping[str, int]) -> list[frozenset[Copy]]:
    """The copies that each rank checks, given what each sees: all that are read, and of each file at least one.

    The largest first, each to the rank that has the least to read then; what a rank reads for itself costs it nothing.
    """
    seen: dict[Copy, dict[int, int]] = defaultdict(dict)
    loads = [0] * len(sights)
    for rank, ours in enumerate(sights):
        for sight in ours:
            seen[sight.copy][rank] = sight.needed_bytes
            loads[rank] += sight.needed_bytes
    duties: list[set[Copy]] = [set() for _ in sights]
    for copy in sorted(_worth_checking(seen), key=lambda copy: (-sizes[copy.file], copy.file, copy.place)):
        rank = min(seen[copy], key=lambda rank: (loads[rank] - seen[copy][rank], rank))
        loads[rank] += sizes[copy.file] - seen[copy][rank]
        duties[rank].add(copy)
    return [frozenset(duty) for duty in duties]


def _worth_checking(seen: Mapping[Copy, Mapping[int, int]]) -> Iterable[Copy]:
    read = {copy for copy, needs in seen.items() if any(needs.values())}
    yield from read
    idle = {copy.file: copy for copy in sorted(seen, key=lambda copy: copy.place, reverse=True)}
    known = {copy.file for copy in read}
    yield from (copy for file, copy in idle.items() if file not in known)
