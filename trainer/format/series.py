"""Reads the long series of records in a `.metadata` file, each record by one match of a pattern.

Of a job of a thousand ranks there are millions: the boxes of the tensors, and where each of them lies. The first of a
series is matched by a pattern that takes any reference to a name; what it refers to is looked up and compared. The
following ones must have the very same bytes in these places. So nothing is taken that reading opcode by opcode would
not take, and all else is left to that: other spellings, a frame that ends within a record.

Equal boxes, texts and numbers become one object: there are few of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from trainer.format.entries import Chunk, Entries
from trainer.format.pickled import SKIPPED, Global, SeriesReader, Table

MAX_DIMENSIONS = 64
_DCP = "torch.distributed.checkpoint."
_MAX_REMEMBERED = 1 << 17  # values that are kept to become one object with equal ones
_MAX_PATTERNS = 16  # each is made after a search in the memo
_MAX_SEARCHED = 1_000_000

T = TypeVar("T")
Numbers = tuple[int, ...]
Match = re.Match[bytes]


def make_readers() -> Mapping[tuple[str, str], SeriesReader]:
    """Readers for one file, by the class whose records they read."""
    places = _Places()
    return {
        (_DCP + "metadata", "ChunkStorageMetadata"): _Chunks(places).read,
        (_DCP + "metadata", "MetadataIndex"): _Lies(places).read,
    }


# ---------------------------------------------------------------- how Python's own pickler spells them

_REF = rb"(h.|j.{4})"  # BINGET, LONG_BINGET
_INT = rb"(?:K.|M..|J.{4}|\x8a(?:\x01.|\x02..|\x03.{3}|\x04.{4}|\x05.{5}|\x06.{6}|\x07.{7}|\x08.{8}))"
_TEXT = rb"(h.|j.{4}|\x8c.[\x20-\x7e]{0,255}\x94)"  # known already, or here for the first time
_NUMBERS = rb"(\)|%b\x85\x94|%b\x86\x94|%b\x87\x94|\((?:%b){4,64}t\x94)" % (_INT, _INT * 2, _INT * 3, _INT)
_MADE = rb"\x85\x94R\x94"  # called with one value
_NEVER = rb"(?!)"
_BEGIN, _END = rb"\x81\x94\}\x94\(", rb"ub"


def _spell_chunk(refs: tuple[bytes, ...]) -> bytes:
    offsets, size, sizes, other_size = refs
    return _BEGIN + offsets + size + _NUMBERS + _MADE + sizes + other_size + _NUMBERS + _MADE + _END


def _spell_entry(refs: tuple[bytes, ...]) -> bytes:
    """`place` matches no size when it was one of the file's before, or there is none."""
    fqn, index, offset, size, info, path, at, length = refs
    place = rb"(?:%b%b%b|%b|(N))" % (size, _NUMBERS, _MADE, _REF)
    described = _BEGIN + fqn + _TEXT + index + rb"(?:%b|N)" % _INT + offset + place + _END
    return described + info + rb"\)" + _BEGIN + path + _TEXT + at + rb"(%b)" % _INT + length + rb"(%b)" % _INT + _END


_ANY_CHUNK = re.compile(_spell_chunk((_REF,) * 4), re.DOTALL)
_ANY_ENTRY = re.compile(_spell_entry((_REF,) * 8), re.DOTALL)


class _Patterns:
    """Patterns of records that refer to names by the same bytes as one that was matched."""

    def __init__(self, spell: Callable[[tuple[bytes, ...]], bytes]) -> None:
        self._spell = spell
        self._made: dict[tuple[int, tuple[bytes | None, ...]], re.Pattern[bytes] | None] = {}

    def find(self, made_of: Global, refs: tuple[bytes | None, ...], memo: list[Any]) -> re.Pattern[bytes] | None:
        """None: the class is not in the memo, or there were too many."""
        key = id(made_of), refs
        if key not in self._made and len(self._made) < _MAX_PATTERNS:
            newest = range(len(memo) - 1, max(0, len(memo) - _MAX_SEARCHED) - 1, -1)
            number = next((n for n in newest if memo[n] is made_of), None)
            self._made[key] = None if number is None else self._make(number, refs)
        return self._made.get(key)

    def _make(self, number: int, refs: tuple[bytes | None, ...]) -> re.Pattern[bytes]:
        again = b"h%c" % number if number < 256 else b"j" + number.to_bytes(4, "little")
        spelled = self._spell(tuple(_NEVER if ref is None else re.escape(ref) for ref in refs))
        return re.compile(re.escape(again) + rb"\)" + spelled, re.DOTALL)


# ---------------------------------------------------------------- the values in them


class _Places:
    """Tuples of whole numbers, as sizes and offsets are; equal ones are one object while they are remembered."""

    def __init__(self) -> None:
        self._known: dict[bytes, tuple[Numbers, tuple[Any, ...]] | None] = {}
        self._checked: dict[int, Any] = {}

    def read(self, spelled: bytes) -> tuple[Numbers, tuple[Any, ...]] | None:
        """(the tuple, what the opcodes store in the memo); None when it is no size."""
        if spelled in self._known:
            return self._known[spelled]
        numbers = _split(spelled)
        found = None
        if len(numbers) <= MAX_DIMENSIONS and all(0 <= number < 2**63 for number in numbers):
            found = numbers, ((numbers,) if numbers else ()) + ((numbers,), numbers)
        return _remember(self._known, spelled, found)

    def check(self, value: Any) -> bool:
        """True when a value of the memo is such a tuple, or None."""
        if id(value) in self._checked:
            return True
        is_fine = type(value) is tuple and len(value) <= MAX_DIMENSIONS
        if value is not None and not (is_fine and all(type(n) is int and 0 <= n < 2**63 for n in value)):
            return False
        _remember(self._checked, id(value), value)
        return True


def _split(spelled: bytes) -> Numbers:
    found: list[int] = []
    at = int(spelled[0] == 0x28)
    while True:
        width = _WIDTHS.get(spelled[at])
        if width is None:
            if spelled[at] != 0x8A:
                return tuple(found)
            width = 2 + spelled[at + 1]
        found.append(_whole(spelled[at : at + width]))
        at += width


_WIDTHS = {0x4B: 2, 0x4D: 3, 0x4A: 5}


def _whole(spelled: bytes) -> int:
    if spelled[0] == 0x8A:
        return int.from_bytes(spelled[2:], "little", signed=True)
    return int.from_bytes(spelled[1:], "little", signed=spelled[0] == 0x4A)


def _fetch(memo: list[Any], ref: bytes) -> Any:
    number = int.from_bytes(ref[1:], "little")
    return memo[number] if number < len(memo) else SKIPPED


def _is_name(memo: list[Any], ref: bytes, name: str) -> bool:
    found = _fetch(memo, ref)
    return type(found) is str and found == name


def _is_class(memo: list[Any], ref: bytes, module: str, name: str) -> bool:
    found = _fetch(memo, ref)
    return type(found) is Global and (found.module, found.name) == (module, name)


def _remember(known: dict[Any, T], key: Any, value: T) -> T:
    if len(known) >= _MAX_REMEMBERED:
        known.clear()
    known[key] = value
    return value


# ---------------------------------------------------------------- boxes


class _Chunks:
    """A list's boxes, which go on the stack."""

    def __init__(self, places: _Places) -> None:
        self._places = places
        self._patterns = _Patterns(_spell_chunk)
        self._known: dict[tuple[bytes, bytes], tuple[Chunk, tuple[Any, ...]] | None] = {}

    def read(self, data: bytes, at: int, stack: list[Any], below: Any, memo: list[Any]) -> int:  # noqa: ARG002
        first = _ANY_CHUNK.match(data, at)
        if first is None or not self._is_chunk(first, memo):
            return at
        found = self._make((first[3], first[6]))
        if found is None:
            return at
        pattern = self._patterns.find(stack.pop(), first.group(1, 2, 4, 5), memo)
        known, last = self._known, first
        while found is not None:
            stack.append(found[0])
            memo += found[1]
            at = last.end()
            match = pattern.match(data, at) if pattern is not None else None
            if match is None:
                break
            last = match
            numbers = last.groups()
            found = known.get(numbers) or self._make(numbers)  # type: ignore[arg-type]
        return at

    @staticmethod
    def _is_chunk(first: Match, memo: list[Any]) -> bool:
        offsets, size, _, sizes, other_size, _ = first.groups()
        return (
            _is_name(memo, offsets, "offsets")
            and _is_name(memo, sizes, "sizes")
            and _is_class(memo, size, "torch", "Size")
            and _is_class(memo, other_size, "torch", "Size")
        )

    def _make(self, numbers: tuple[bytes, bytes]) -> tuple[Chunk, tuple[Any, ...]] | None:
        offsets, sizes = self._places.read(numbers[0]), self._places.read(numbers[1])
        if offsets is None or sizes is None:
            return None
        chunk = Chunk(offsets=offsets[0], sizes=sizes[0])
        return _remember(self._known, numbers, (chunk, (chunk, SKIPPED, *offsets[1], *sizes[1])))


# ---------------------------------------------------------------- where they lie


class _Lies:
    """A dictionary's items, which become its `pairs`: an item's index, and where it lies."""

    def __init__(self, places: _Places) -> None:
        self._places = places
        self._patterns = _Patterns(_spell_entry)
        self._texts: dict[bytes, tuple[str, tuple[str, ...]]] = {}
        self._same: dict[str, str] = {}
        self._numbers: dict[bytes, int] = {}

    def read(self, data: bytes, at: int, stack: list[Any], below: Any, memo: list[Any]) -> int:
        if type(below) is not Table or len(stack) % 2 == 0:  # it is no key of a dictionary
            return at
        first = _ANY_ENTRY.match(data, at)
        if first is None or not self._is_entry(first, memo):
            return at
        if below.pairs is None:
            below.pairs = Entries()
        pattern = self._patterns.find(stack[-1], first.group(1, 3, 4, 5, 9, 10, 12, 14), memo)
        values, end, begin = first.group(2, 6, 7, 8, 11, 13, 15), first.end(), at
        while self._take(values, below.pairs, memo):
            at = end
            match = pattern.match(data, at) if pattern is not None else None
            if match is None:
                break
            values, end = match.groups(), match.end()
        if at > begin:
            stack.pop()
        return at

    @staticmethod
    def _is_entry(first: Match, memo: list[Any]) -> bool:
        names = zip(first.group(1, 3, 4, 10, 12, 14), _NAMES, strict=True)
        return (
            all(_is_name(memo, ref, name) for ref, name in names)
            and _is_class(memo, first.group(9), _DCP + "filesystem", "_StorageInfo")
            and (first.group(5) is None or _is_class(memo, first.group(5), "torch", "Size"))
        )

    def _take(self, values: tuple[Any, ...], entries: Entries, memo: list[Any]) -> bool:
        spelled_key, numbers, ref, _, spelled_path, spelled_offset, spelled_length = values
        key = self._texts.get(spelled_key) or self._text(spelled_key, memo)
        path = self._texts.get(spelled_path) or self._text(spelled_path, memo)
        offset, length = self._number(spelled_offset), self._number(spelled_length)
        place: tuple[Numbers | None, tuple[Any, ...]] | None
        place = self._places.read(numbers) if numbers is not None else self._fetch(ref, memo)
        if key is None or path is None or place is None or offset < 0 or length < 0:
            return False
        entries.keys.append(key[0])
        entries.places.append(place[0])
        entries.paths.append(path[0])
        entries.offsets.append(offset)
        entries.lengths.append(length)
        memo += (SKIPPED, SKIPPED, *key[1], *place[1], SKIPPED, SKIPPED, *path[1])
        return True

    def _fetch(self, ref: bytes | None, memo: list[Any]) -> tuple[Numbers | None, tuple[Any, ...]] | None:
        value = None if ref is None else _fetch(memo, ref)
        return (value, ()) if self._places.check(value) else None

    def _text(self, spelled: bytes, memo: list[Any]) -> tuple[str, tuple[str, ...]] | None:
        """(the text, what the opcodes store in the memo); None when it is none."""
        if spelled[0] == 0x8C:
            if spelled[1] != len(spelled) - 3:
                return None
            text = self._one(spelled[2:-1].decode("ascii"))
            return _remember(self._texts, spelled, (text, (text,)))
        found = _fetch(memo, spelled)
        return _remember(self._texts, spelled, (self._one(found), ())) if type(found) is str else None

    def _one(self, text: str) -> str:
        return self._same.get(text) or _remember(self._same, text, text)

    def _number(self, spelled: bytes) -> int:
        found = self._numbers.get(spelled)
        return _remember(self._numbers, spelled, _whole(spelled)) if found is None else found


_NAMES = ("fqn", "index", "offset", "relative_path", "offset", "length")
