"""Who writes what several ranks hold: each piece once, and on each rank about as many bytes. Pure."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from trainer.format.coverage import NotCovered, check_tiling
from trainer.format.metadata import Chunk, Tensor
from trainer.saving.pickles import dense_stride
from trainer.saving.structure import Held, Part

_MAX_PROBLEMS = 3
_MIN_CUT_BYTES = 4 * 1024 * 1024  # smaller ones are not cut
_CUTS_PER_RANK = 4  # a piece that several hold is cut where it is more than this part of a rank's share

Identity = tuple[str, tuple[int, ...] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one rank writes. `signature`: of the shares of all. `problem`: why there is none, the same on all ranks."""

    mine: tuple[Part, ...] = ()
    signature: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class _Piece:
    """One thing to write; `holders`: the ranks that could, and the part of which of their leaves it is.

    `is_alike`: it lies in memory in the same way on all of them.
    """

    held: Held
    holders: tuple[tuple[int, Part], ...]
    is_alike: bool = True


def share_out(gathered: Sequence[tuple[Sequence[Held | None], str]]) -> list[Share]:
    """One share for each rank, given what each holds, or why it can't say so.

    The largest pieces are dealt first, each to the holder that has the least so far.
    """
    problems = [problem for _, problem in gathered if problem] or list(_find_differences(gathered))
    if problems:
        return [Share(problem="; ".join(problems[:_MAX_PROBLEMS]))] * len(gathered)
    limit = _limit(gathered)
    pieces = [part for piece in _collect(gathered) for part in _cut(piece, limit)]
    loads = [0] * len(gathered)
    mine: list[list[Part]] = [[] for _ in gathered]
    for piece in sorted(pieces, key=lambda piece: -piece.held.size):
        rank, part = min(piece.holders, key=lambda holder: (loads[holder[0]], holder[0]))
        loads[rank] += piece.held.size
        mine[rank].append(part)
    shares = [Share(mine=tuple(sorted(parts))) for parts in mine]
    signature = _sign(gathered, shares)
    return [replace(share, signature=signature) for share in shares]


def _sign(gathered: Sequence[tuple[Sequence[Held | None], str]], shares: Sequence[Share]) -> str:
    """Piece by piece: of a large job all together would be a text of gigabytes."""
    digest = hashlib.blake2b(digest_size=16)
    for (items, _), share in zip(gathered, shares, strict=True):
        for item in items:
            digest.update(repr(item).encode())
        digest.update(repr(share).encode())
    return digest.hexdigest()


def _collect(gathered: Sequence[tuple[Sequence[Held | None], str]]) -> list[_Piece]:
    held: dict[Identity, Held] = {}
    odd: set[Identity] = set()
    holders: dict[Identity, list[tuple[int, Part]]] = defaultdict(list)
    for rank, (items, _) in enumerate(gathered):
        for at, item in enumerate(items):
            if item is not None and not _is_needless(item):
                if held.setdefault(item.identity, item).stride != item.stride:
                    odd.add(item.identity)
                holders[item.identity].append((rank, Part(at)))
    return [_Piece(item, tuple(holders[identity]), identity not in odd) for identity, item in held.items()]


def _is_needless(item: Held) -> bool:
    """An empty shard of a tensor that has elements elsewhere."""
    return item.offsets is not None and item.size == 0 and 0 not in item.shape


# ---------------------------------------------------------------- cutting large ones


def _limit(gathered: Sequence[tuple[Sequence[Held | None], str]]) -> int:
    total = sum({item.identity: item.size for items, _ in gathered for item in items if item is not None}.values())
    return max(_MIN_CUT_BYTES, total // (len(gathered) * _CUTS_PER_RANK))


def _cut(piece: _Piece, limit: int) -> Iterator[_Piece]:
    """The piece in rows of at most `limit` bytes, where several ranks hold it and its rows lie one after the other."""
    held = piece.held
    is_plain = piece.is_alike and bool(held.sizes) and held.stride == dense_stride(held.sizes, range(len(held.sizes)))
    if held.offsets is None or len(piece.holders) < 2 or held.size <= limit or not is_plain:
        yield piece
        return
    rows = max(1, limit * held.sizes[0] // held.size)
    for first in range(0, held.sizes[0], rows):
        count = min(rows, held.sizes[0] - first)
        holders = tuple((rank, Part(part.at, first, count)) for rank, part in piece.holders)
        yield _Piece(held.rows(first, count), holders)


# ---------------------------------------------------------------- what does not fit together


def _find_differences(gathered: Sequence[tuple[Sequence[Held | None], str]]) -> Iterator[str]:
    """Keys that mean different things on different ranks, or whose parts do not make a whole."""
    first: dict[str, tuple[int, Held]] = {}
    chunks: dict[str, dict[tuple[int, ...], Chunk]] = defaultdict(dict)
    for rank, (items, _) in enumerate(gathered):
        for item in items:
            if item is None:
                continue
            other_rank, other = first.setdefault(item.key, (rank, item))
            if _meaning(item) != _meaning(other):
                yield f"{item.key} is {_show(other)} on rank {other_rank}, and {_show(item)} on rank {rank}"
            elif item.offsets is not None and item.size:
                chunks[item.key][item.offsets] = Chunk(offsets=item.offsets, sizes=item.sizes)
    for key, parts in chunks.items():
        _, item = first[key]
        try:
            check_tiling(key, Tensor(dtype=item.dtype, size=item.shape, chunks=tuple(parts.values())))
        except NotCovered as error:
            yield str(error)


def _meaning(item: Held) -> tuple[bool, str, tuple[int, ...]]:
    return item.offsets is None, item.dtype, item.shape


def _show(item: Held) -> str:
    return "bytes" if item.offsets is None else f"a tensor of {list(item.shape)} {item.dtype}"
