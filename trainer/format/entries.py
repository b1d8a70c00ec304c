"""Where the parts of a checkpoint's tensors lie: one record for each item, millions of them in a large job."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A box of a tensor that is stored as one item."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Where one item lies. `offsets`: of its chunk; None: it belongs to no tensor.

    `is_plain` False: it went through a transform (compressed, for example).
    """

    key: str
    offsets: tuple[int, ...] | None
    path: str
    offset: int
    length: int
    is_plain: bool


class Entries(Sequence[Entry]):
    """Entries as columns, some 40 bytes for each: an `Entry` is made when it is asked for."""

    __slots__ = ("_by_key", "keys", "lengths", "offsets", "packed", "paths", "places")

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self.keys: list[str] = []
        self.places: list[tuple[int, ...] | None] = []  # `Entry.offsets`
        self.paths: list[str] = []
        self.offsets = array("q")
        self.lengths = array("q")
        self.packed: set[int] = set()  # the numbers of those that are not plain
        self._by_key: dict[str, array[int]] | None = None
        self.extend(entries)

    def extend(self, entries: Iterable[Entry]) -> None:
        """Add some at the end."""
        for entry in entries:
            if not entry.is_plain:
                self.packed.add(len(self.keys))
            self.keys.append(entry.key)
            self.places.append(entry.offsets)
            self.paths.append(entry.path)
            self.offsets.append(entry.offset)
            self.lengths.append(entry.length)

    def __reduce__(self) -> tuple[Any, ...]:
        columns = self.keys, self.places, self.paths, self.offsets, self.lengths, self.packed
        return _restore, columns

    def numbers_of(self, key: str) -> Sequence[int]:
        """The numbers of a key's entries. The first question sorts all of them; add none after it."""
        if self._by_key is None:
            self._by_key = group(self.keys)
        return self._by_key.get(key, ())

    def __len__(self) -> int:
        return len(self.keys)

    @overload
    def __getitem__(self, at: int) -> Entry: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Entry]: ...
    def __getitem__(self, at: int | slice) -> Entry | Sequence[Entry]:
        if isinstance(at, slice):
            return tuple(self[number] for number in range(*at.indices(len(self))))
        return Entry(
            key=self.keys[at],
            offsets=self.places[at],
            path=self.paths[at],
            offset=self.offsets[at],
            length=self.lengths[at],
            is_plain=at % len(self) not in self.packed,
        )

    def __iter__(self) -> Iterator[Entry]:
        return (self[number] for number in range(len(self)))


def _restore(*columns: Any) -> Entries:
    entries = Entries()
    entries.keys, entries.places, entries.paths, entries.offsets, entries.lengths, entries.packed = columns
    return entries


def group(names: Iterable[str]) -> dict[str, array[int]]:
    """The places of each name in a list, ascending."""
    found: dict[str, array[int]] = {}
    for number, name in enumerate(names):
        try:
            found[name].append(number)
        except KeyError:
            found[name] = array("q", (number,))
    return found
