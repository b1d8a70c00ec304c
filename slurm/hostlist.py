"""Slurm's host lists (`gpu[01-04,7]`) to names and back. Pure, bounded, no look at the host's files.

Expanding keeps the order as written and refuses ranges over a cap; folding uses ClusterShell with node groups switched
off, so a name is never taken for a group of the head node's configuration.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator

MAX_NODES = 65_536  # Slurm's own limit is 64k nodes per cluster; more is a typing error

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_LITERAL = re.compile(r"[A-Za-z0-9._-]+")
_NUMBERED = re.compile(r"([A-Za-z_.-]*[A-Za-z_][.-]?)([0-9]{1,9})", re.ASCII)
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_PIECE = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
_MAX_NAME_CHARS = 255
_NOBODY = frozenset({"", "(null)", "N/A", "n/a", "None", "None assigned"})


class HostlistUnreadable(ValueError):
    """A host list that is malformed, or larger than `MAX_NODES`."""


def is_node_name(text: str) -> bool:
    """True for one plain node name: letters, digits, dot, dash and underscore; no list, range or path."""
    return len(text) <= _MAX_NAME_CHARS and _NAME.fullmatch(text) is not None


def expand_nodes(text: str) -> tuple[str, ...]:
    """Node names of a host list, in the order written; Slurm's words for "none" give an empty tuple.

    Raises:
        HostlistUnreadable: brackets that don't match, an empty or reversed range, or more than `MAX_NODES` names.
    """
    text = text.strip()
    if text in _NOBODY:
        return ()
    if is_node_name(text):
        return (text,)
    names: list[str] = []
    for part in _split_outside_brackets(text):
        names.extend(_expand_part(part, MAX_NODES - len(names)))
    return tuple(names)


def fold_nodes(names: Iterable[str]) -> str:
    """A short host list that Slurm reads as exactly these names (sorted, without duplicates)."""
    unique = sorted(set(names))
    plain = _fold_plain(unique)
    if plain is not None:
        return plain
    from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet

    folded = NodeSet.fromlist(unique, resolver=RESOLVER_NOGROUP)  # type: ignore[no-untyped-call]
    return str(folded)


def _fold_plain(names: list[str]) -> str | None:
    """The commonest list as ClusterShell would fold it, which takes longer to import than `supervisor status` to run.

    Sorted names of one stem with numbers of one width (gpu001, gpu002); None for any other list.
    """
    found = [_NUMBERED.fullmatch(name) for name in names]
    parts = [(match[1], match[2]) for match in found if match is not None]
    if len(parts) != len(names) or len(parts) < 2 or len({(stem, len(number)) for stem, number in parts}) != 1:
        return None
    pieces: list[list[str]] = []
    for _, number in parts:
        if pieces and int(pieces[-1][-1]) + 1 == int(number):
            pieces[-1] = [pieces[-1][0], number]
        else:
            pieces.append([number])
    return f"{parts[0][0]}[{','.join('-'.join(piece) for piece in pieces)}]"


def _split_outside_brackets(text: str) -> Iterator[str]:
    start = depth = 0
    for position, character in enumerate(text):
        if character == "[":
            depth += 1
        elif character == "]":
            depth -= 1
        elif character == "," and depth == 0:
            yield text[start:position]
            start = position + 1
        if depth not in (0, 1):
            raise HostlistUnreadable(f"brackets do not match in {text[:80]!r}")
    if depth:
        raise HostlistUnreadable(f"brackets do not match in {text[:80]!r}")
    yield text[start:]


def _expand_part(part: str, room: int) -> list[str]:
    choices: list[list[str]] = []
    total = 1
    for ranges, literal in _PIECE.findall(part):
        choice = [literal] if literal else _expand_ranges(ranges, part)
        total *= len(choice)
        if total > room:
            raise HostlistUnreadable(f"more than {MAX_NODES} nodes in {part[:80]!r}")
        choices.append(choice)
    if not _are_names(choices):
        raise HostlistUnreadable(f"not a host list: {part[:80]!r}")
    return ["".join(pieces) for pieces in itertools.product(*choices)]


def _are_names(choices: list[list[str]]) -> bool:
    """True when every combination is a node name: of each piece the first choice tells, since numbers always fit."""
    if not choices or choices[0][0].startswith((".", "-")):
        return False
    longest = sum(max(map(len, choice)) for choice in choices)
    return longest <= _MAX_NAME_CHARS and all(_LITERAL.fullmatch(choice[0]) for choice in choices)


def _expand_ranges(ranges: str, part: str) -> list[str]:
    numbers: list[str] = []
    for item in ranges.split(","):
        found = _RANGE.fullmatch(item)
        if found is None:
            raise HostlistUnreadable(f"not a range: {item[:40]!r} in {part[:80]!r}")
        first, last = int(found[1]), int(found[2] or found[1])
        if last < first or last - first + len(numbers) >= MAX_NODES:
            raise HostlistUnreadable(f"range {item[:40]!r} is reversed or has more than {MAX_NODES} nodes")
        width = len(found[1])
        numbers += [str(number).zfill(width) for number in range(first, last + 1)]
    return numbers
