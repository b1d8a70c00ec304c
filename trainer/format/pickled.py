"""Reads a pickle that somebody else wrote, without running anything of it.

A machine of its own for the few opcodes that plain records need: it knows no module and no class, and calls nothing
but the makers in the caller's table of names. What is not in the table, every other opcode (persistent ids, extension
codes, protocols 0 and 1) and every value that could cost more than the bytes that spell it ends the reading.

Where a file holds millions of records alike, a `SeriesReader` of the caller's takes many in one step. It is a shortcut
only: what it leaves, and all of a file that refers back to what it passed over, is read opcode by opcode.

Standard library only: the service reads files with it that any user of the cluster may have written.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias

MAX_OPCODES = 30_000_000  # read one by one, each makes at most one small value: some 2.5 GB, some 20 s
MAX_KEY_PARTS = 64
MAX_INTEGER_BYTES = 9

Maker: TypeAlias = Callable[[tuple[Any, ...]], Any]
Names: TypeAlias = Mapping[
    tuple[str, str], "Maker | str"
]  # a text stands for itself, a maker for what it is called with


class PickleRefused(ValueError):
    """It is no pickle of plain records; the message says what stands in it."""


class PickleTooLong(PickleRefused):
    """It may well be one, and has more to read than the caller allows."""


class Table(dict[Any, Any]):
    """A dictionary of the pickle. `pairs`: what a series reader has made of items that belong into it."""

    __slots__ = ("pairs",)

    def __init__(self) -> None:
        self.pairs: Any = None


class Record:
    """Stands in for an object of a class: what it was made with, and the state that it was given."""

    __slots__ = ("arguments", "state")

    def __init__(self, arguments: tuple[Any, ...]) -> None:
        self.arguments = arguments
        self.state: Any = None

    def field(self, name: str) -> Any:
        """A field of an object that keeps its fields by name; None when there is none of that name."""
        return self.state.get(name) if isinstance(self.state, dict) else None


class Global:
    """A name of the table, on the stack: it can be called with arguments, and nothing else."""

    __slots__ = ("make", "module", "name", "series")

    def __init__(self, module: str, name: str, make: Maker, series: SeriesReader | None) -> None:
        self.module, self.name = module, name
        self.make = make
        self.series = series


class Skipped:
    """Stands in the memo for what a series reader has passed over without making it."""


SKIPPED = Skipped()


class SeriesReader(Protocol):
    """Reads a series of records alike, spelled as Python's own pickler spells them, for one class of the table."""

    def __call__(self, data: bytes, at: int, stack: list[Any], below: Any, memo: list[Any]) -> int:
        """Where the opcodes go on that follow the series; `at` itself when there is none.

        `at`: after the EMPTY_TUPLE that follows the class, which is the last thing on `stack`; `below`: what lies
        under the open mark, None where there is none. In place of the class the records go on the stack (or to the
        `pairs` of a `Table` below), and to the memo all that its opcodes store there, or SKIPPED for it.
        """


def read_pickle(
    data: bytes,
    names: Names,
    *,
    series: Callable[[], Mapping[tuple[str, str], SeriesReader]] = dict,
    max_opcodes: int | None = None,
) -> Any:
    """The value that a pickle spells, of plain values, lists, dictionaries, tuples and what the table's makers give.

    `series` makes readers of series of records, by the name of their class. `max_opcodes`: so many are read, not
    counting those in a series; by default `MAX_OPCODES`. Raises `PickleTooLong` where there are more.

    Raises `PickleRefused` for everything else. The value may refer to itself: walk it only where its shape is known.
    """
    limit = MAX_OPCODES if max_opcodes is None else max_opcodes
    try:
        try:
            return _run(data, names, series(), limit)
        except _Refetched:
            return _run(data, names, {}, limit)
    except PickleRefused:
        raise
    except (IndexError, struct.error):
        raise PickleRefused("it is cut") from None
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        raise PickleRefused(f"it can't be read: {type(error).__name__}: {str(error)[:100]}") from None


class _Refetched(Exception):
    """Something is fetched from the memo that a series reader has passed over."""


def _run(data: bytes, names: Names, series: Mapping[tuple[str, str], SeriesReader], limit: int) -> Any:  # noqa: PLR0915
    """One long function: a call for each of millions of opcodes would take most of the time."""
    stack: list[Any] = []
    outer: list[list[Any]] = []  # stacks below the open marks
    memo: list[Any] = []
    size, at = len(data), 0
    for _ in range(min(limit, size)):
        code = data[at]
        at += 1
        if code == 0x94:  # MEMOIZE
            memo.append(stack[-1])
        elif code == 0x68:  # BINGET
            value = memo[data[at]]
            if value is SKIPPED:
                raise _Refetched
            stack.append(value)
            at += 1
        elif code == 0x8C:  # SHORT_BINUNICODE
            end = at + 1 + data[at]
            stack.append(_text(data, at + 1, end, size))
            at = end
        elif code == 0x6A:  # LONG_BINGET
            (place,) = _UINT.unpack_from(data, at)
            value = memo[place]
            if value is SKIPPED:
                raise _Refetched
            stack.append(value)
            at += 4
        elif code == 0x4B:  # BININT1
            stack.append(data[at])
            at += 1
        elif code == 0x28:  # MARK
            outer.append(stack)
            stack = []
        elif code == 0x29:  # EMPTY_TUPLE
            if series and stack and type(stack[-1]) is Global and stack[-1].series is not None:
                after = stack[-1].series(data, at, stack, outer[-1][-1] if outer and outer[-1] else None, memo)
                if after > at:
                    at = after
                    continue
            stack.append(())
        elif code == 0x7D:  # EMPTY_DICT
            stack.append(Table())
        elif code in (0x81, 0x52):  # NEWOBJ, REDUCE
            arguments = stack.pop()
            stack[-1] = _make(stack[-1], arguments)
        elif code == 0x62:  # BUILD
            state = stack.pop()
            _build(stack[-1], state)
        elif code == 0x75:  # SETITEMS
            items, stack = stack, outer.pop()
            _set_items(stack[-1], items)
        elif code == 0x85:  # TUPLE1
            stack[-1] = (stack[-1],)
        elif code == 0x86:  # TUPLE2
            stack[-2:] = [(stack[-2], stack[-1])]
        elif code == 0x87:  # TUPLE3
            stack[-3:] = [(stack[-3], stack[-2], stack[-1])]
        elif code == 0x74:  # TUPLE
            items, stack = stack, outer.pop()
            stack.append(tuple(items))
        elif code == 0x4D:  # BININT2
            stack.append(data[at] | data[at + 1] << 8)
            at += 2
        elif code == 0x4A:  # BININT
            stack.append(_INT.unpack_from(data, at)[0])
            at += 4
        elif code == 0x4E:  # NONE
            stack.append(None)
        elif code == 0x88:  # NEWTRUE
            stack.append(True)
        elif code == 0x89:  # NEWFALSE
            stack.append(False)
        elif code == 0x5D:  # EMPTY_LIST
            stack.append([])
        elif code == 0x61:  # APPEND
            value = stack.pop()
            _extend(stack[-1], [value])
        elif code == 0x65:  # APPENDS
            items, stack = stack, outer.pop()
            _extend(stack[-1], items)
        elif code == 0x73:  # SETITEM
            items = stack[-2:]
            del stack[-2:]
            _set_items(stack[-1], items)
        elif code == 0x71:  # BINPUT
            series = {}  # they rely on a memo in which nothing is replaced
            _put(memo, data[at], stack[-1])
            at += 1
        elif code == 0x72:  # LONG_BINPUT
            series = {}
            _put(memo, _UINT.unpack_from(data, at)[0], stack[-1])
            at += 4
        elif code in (0x58, 0x42):  # BINUNICODE, BINBYTES
            end = at + 4 + _UINT.unpack_from(data, at)[0]
            stack.append(_text(data, at + 4, end, size) if code == 0x58 else _bytes(data, at + 4, end, size))
            at = end
        elif code == 0x43:  # SHORT_BINBYTES
            end = at + 1 + data[at]
            stack.append(_bytes(data, at + 1, end, size))
            at = end
        elif code == 0x8D:  # BINUNICODE8
            end = at + 8 + _UINT64.unpack_from(data, at)[0]
            stack.append(_text(data, at + 8, end, size))
            at = end
        elif code == 0x8A:  # LONG1
            end = at + 1 + data[at]
            if data[at] > MAX_INTEGER_BYTES:
                raise PickleRefused("it holds a whole number of too many digits")
            stack.append(int.from_bytes(_bytes(data, at + 1, end, size), "little", signed=True))
            at = end
        elif code == 0x47:  # BINFLOAT
            stack.append(_FLOAT.unpack_from(data, at)[0])
            at += 8
        elif code == 0x93:  # STACK_GLOBAL
            name = stack.pop()
            stack[-1] = _find(names, series, stack[-1], name)
        elif code == 0x63:  # GLOBAL
            module, name, at = _read_global(data, at)
            stack.append(_find(names, series, module, name))
        elif code == 0x95:  # FRAME: all of it is in memory, its length says nothing new
            at += 8
        elif code == 0x80:  # PROTO
            if not 2 <= data[at] <= 5:
                raise PickleRefused(f"it has protocol {data[at]}")
            at += 1
        elif code == 0x2E:  # STOP
            if len(stack) != 1 or outer:
                raise PickleRefused("it is not one value")
            return stack[0]
        else:
            raise PickleRefused(f"it uses opcode 0x{code:02x}, which no plain record needs")
    if limit >= size:
        raise PickleRefused("it is cut")
    raise PickleTooLong(f"it is too long: more than {limit:,} opcodes")


_INT, _UINT, _UINT64, _FLOAT = struct.Struct("<i"), struct.Struct("<I"), struct.Struct("<Q"), struct.Struct(">d")


def _text(data: bytes, start: int, end: int, size: int) -> str:
    if end > size:
        raise PickleRefused("it is cut")
    return data[start:end].decode("utf-8", "surrogatepass")


def _bytes(data: bytes, start: int, end: int, size: int) -> bytes:
    if end > size:
        raise PickleRefused("it is cut")
    return data[start:end]


def _put(memo: list[Any], place: int, value: Any) -> None:
    # Numbers follow each other in what a pickler writes. A far one would be a table of gigabytes elsewhere.
    if place > len(memo):
        raise PickleRefused("it numbers its values out of order")
    if place == len(memo):
        memo.append(value)
    else:
        memo[place] = value


def _make(called: Any, arguments: Any) -> Any:
    if type(called) is not Global or type(arguments) is not tuple:
        raise PickleRefused("it makes an object of something that is no class")
    return called.make(arguments)


def _build(made: Any, state: Any) -> None:
    if type(made) is not Record or made.state is not None:
        raise PickleRefused("it gives a state to something that has none")
    if type(state) is tuple and len(state) == 2 and state[0] is None and type(state[1]) is Table:
        state = state[1]  # of a class with slots
    made.state = state


def _set_items(target: Any, items: list[Any]) -> None:
    if type(target) is not Table or len(items) % 2:
        raise PickleRefused("it stores a key in something that is no dictionary")
    keys = items[::2]
    for key in keys:
        if type(key) not in _KEYS and not (type(key) is tuple and _is_flat(key)):
            # the hash of a tuple of tuples may take for ever, or the whole of the machine's stack
            raise PickleRefused("it uses a nested or a long value as a key")
    target.update(zip(keys, items[1::2], strict=True))


def _is_flat(key: tuple[Any, ...]) -> bool:
    return len(key) <= MAX_KEY_PARTS and all(type(part) in _KEYS for part in key)


_KEYS = frozenset({str, int, bool, type(None), bytes, float, Record})  # a record is told by its identity


def _extend(target: Any, items: list[Any]) -> None:
    if type(target) is not list:
        raise PickleRefused("it adds a value to something that is no list")
    target.extend(items)


def _find(names: Names, series: Mapping[tuple[str, str], SeriesReader], module: Any, name: Any) -> Any:
    if type(module) is not str or type(name) is not str:
        raise PickleRefused("it names something by no text")
    try:
        found = names[module, name]
    except KeyError:
        shown = f"{module[:80]}.{name[:80]}"
        raise PickleRefused(f"it names {shown}, which is none of its own types") from None
    return found if isinstance(found, str) else Global(module, name, found, series.get((module, name)))


def _read_global(data: bytes, at: int) -> tuple[str, str, int]:
    middle = data.index(b"\n", at, at + 1000)
    end = data.index(b"\n", middle + 1, middle + 1000)
    return data[at:middle].decode(), data[middle + 1 : end].decode(), end + 1
