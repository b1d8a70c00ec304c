"""Finds a few plain numbers in a pickle without executing it: only its opcodes are read."""

from __future__ import annotations

import io
import pickletools
from collections.abc import Collection

from supervisor.layouts.torchzip import data_start, is_zip, list_entries
from supervisor.layouts.tree import Broken, Tree, read_at

MAX_PICKLE_BYTES = 8 * 1024 * 1024
MAX_OPCODES = 1_000_000

_MEMO = frozenset({"MEMOIZE", "BINPUT", "LONG_BINPUT", "PUT"})
_INTEGERS = frozenset({"BININT", "BININT1", "BININT2", "INT", "LONG", "LONG1", "LONG4"})


def find_numbers(data: bytes, names: Collection[str]) -> dict[str, int]:
    """Whole numbers that directly follow one of `names` in a pickle (as dictionaries store them); the first of each.

    A text that was used before is only referred to: such names are followed as well. Garbage gives what was found
    before it.
    """
    found: dict[str, int] = {}
    memo: dict[int, str] = {}
    last: str | None = None
    memoized = 0
    try:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(io.BytesIO(data))):
            if count > MAX_OPCODES or len(found) == len(names):
                break
            if opcode.name in _MEMO:
                place = memoized if opcode.name == "MEMOIZE" else int(argument or 0)
                memoized += 1
                if last is not None:
                    memo[place] = last
                continue
            if opcode.name in _INTEGERS and last in names and isinstance(argument, int):
                found.setdefault(str(last), argument)
            last = _text(opcode.name, argument, memo, names)
    except Exception:  # noqa: BLE001 - garbage may raise anything
        return found
    return found


def _text(opcode: str, argument: object, memo: dict[int, str], names: Collection[str]) -> str | None:
    if opcode in ("BINGET", "LONG_BINGET", "GET") and isinstance(argument, int | str):
        return memo.get(int(argument))
    return argument if isinstance(argument, str) and argument in names else None


def find_numbers_in_file(tree: Tree, path: str, names: Collection[str]) -> dict[str, int]:
    """The same for the `data.pkl` of a file that torch.save wrote; empty for one of the old format."""
    return tree.once(f"numbers {sorted(names)}", path, lambda: _find_in_file(tree, path, names))


def _find_in_file(tree: Tree, path: str, names: Collection[str]) -> dict[str, int]:
    with tree.open(path) as fd:
        size = tree.file(path).size
        if not is_zip(fd):
            return {}
        entry = next((e for e in list_entries(fd, 0, size) if e.name.endswith("/data.pkl")), None)
        if entry is None:
            raise Broken(f"{path} holds no data.pkl")
        return find_numbers(read_at(fd, data_start(fd, 0, entry), min(entry.size, MAX_PICKLE_BYTES)), names)
