"""Who writes what: everything once, evenly, and nothing that contradicts itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from trainer.saving.sharing import Share, share_out
from trainer.saving.structure import Held, Part

pytestmark = pytest.mark.torch

MIB = 2**20


def whole(key: str, size: int, *, rows: int = 1024) -> Held:
    """A tensor of bytes that a rank holds as a whole."""
    shape = (rows, size // rows)
    return Held(key, (key,), rows * shape[1], "uint8", shape, (0, 0), shape, (shape[1], 1))


def shard(key: str, rank: int, world: int, rows: int = 8) -> Held:
    """One rank's rows of a tensor."""
    count = rows // world
    return Held(key, (key,), count * 4, "uint8", (rows, 4), (rank * count, 0), (count, 4), (4, 1))


def opaque(key: str, size: int = 64) -> Held:
    return Held(key, (key,), size)


def share(*ranks: Sequence[Held | None]) -> list[Share]:
    return share_out([(items, "") for items in ranks])


def loads(shares: Sequence[Share], ranks: Sequence[Sequence[Held]]) -> list[int]:
    """Bytes that each rank writes."""
    return [
        sum(item.size if part.is_whole else item.rows(part.first, part.count).size for part, item in zip_parts(one, of))
        for one, of in zip(shares, ranks, strict=True)
    ]


def zip_parts(one: Share, items: Sequence[Held]) -> list[tuple[Part, Held]]:
    return [(part, items[part.at]) for part in one.mine]


def test_replicated_tensors_are_spread_evenly_and_written_once() -> None:
    held = [whole(f"layer{n}", n * 64 * 1024) for n in range(1, 40)]
    shares = share(held, held, held, held)
    assert Counter(part.at for one in shares for part in one.mine) == Counter(range(len(held)))
    bytes_written = loads(shares, [held] * 4)
    assert sum(bytes_written) == sum(item.size for item in held)
    assert max(bytes_written) <= 1.05 * min(bytes_written)


def test_one_large_replicated_tensor_is_cut_and_spread() -> None:
    held = [whole("embedding", 200 * MIB), whole("head", 3 * MIB)]
    shares = share(held, held, held, held)
    bytes_written = loads(shares, [held] * 4)
    assert sum(bytes_written) == 203 * MIB
    assert max(bytes_written) <= 1.15 * min(bytes_written)


def test_rows_that_lie_differently_in_memory_on_two_ranks_are_not_cut() -> None:
    row_first = whole("embedding", 200 * MIB)
    column_first = Held(**{name: getattr(row_first, name) for name in Held.__slots__} | {"stride": (1, 1024)})
    shares = share([row_first], [column_first])
    assert [part.is_whole for one in shares for part in one.mine] == [True]


def test_of_two_replicas_of_shards_each_shard_is_written_once() -> None:
    ranks = [[shard("w", rank % 2, 2), shard("v", rank % 2, 2)] for rank in range(4)]
    shares = share(*ranks)
    written = [item.identity for one, items in zip(shares, ranks, strict=True) for _, item in zip_parts(one, items)]
    assert sorted(written) == [("v", (0, 0)), ("v", (4, 0)), ("w", (0, 0)), ("w", (4, 0))]
    assert loads(shares, ranks) == [16, 16, 16, 16]


def test_a_rank_may_have_nothing_to_write() -> None:
    held = [whole("small", 1024)]
    assert sorted(len(one.mine) for one in share(held, held)) == [0, 1]


def test_what_one_rank_alone_holds_is_written_by_it() -> None:
    shares = share([whole("w", 1024)], [whole("w", 1024), opaque("own of 1")])
    assert Part(1) in shares[1].mine


def test_an_empty_shard_is_written_only_where_the_whole_tensor_is_empty() -> None:
    full = Held("w", ("w",), 4, "uint8", (1, 4), (0, 0), (1, 4), (4, 1))
    empty = Held("w", ("w",), 0, "uint8", (1, 4), (1, 0), (0, 4), (4, 1))
    nothing = Held("e", ("e",), 0, "uint8", (0, 4), (0, 0), (0, 4), (4, 1))
    ranks = [[full, nothing], [empty, nothing]]
    written = [item for one, items in zip(share(*ranks), ranks, strict=True) for _, item in zip_parts(one, items)]
    assert sorted(item.key for item in written) == ["e", "w"]
    assert full in written


def test_equal_holdings_have_equal_signatures_on_all_ranks() -> None:
    held = [whole("w", 1024)]
    first, second = share(held, held), share(held, held)
    assert {one.signature for one in (*first, *second)} == {first[0].signature}
    assert share(held)[0].signature != first[0].signature


@pytest.mark.parametrize(
    ("ranks", "problem"),
    [
        ([[whole("w", 1024)], [whole("w", 2048)]], r"w is a tensor of .* on rank 0, and a tensor of .* on rank 1"),
        ([[whole("w", 1024)], [opaque("w")]], r"w is a tensor of .* on rank 0, and bytes on rank 1"),
        ([[shard("w", 0, 2)], [None]], "w: its parts leave a hole"),
        ([[shard("w", 0, 4)], [shard("w", 1, 2)]], "w: its parts leave a hole"),
    ],
)
def test_ranks_that_contradict_each_other_are_refused_on_all(ranks: list[list[Held | None]], problem: str) -> None:
    shares = share(*ranks)
    assert len({one.problem for one in shares}) == 1
    with pytest.raises(ValueError, match=problem):
        raise ValueError(shares[0].problem)


def test_a_rank_that_could_not_say_what_it_holds_is_named_on_all() -> None:
    shares = share_out([([], ""), ([], "rank 1: model.odd: a list")])
    assert [one.problem for one in shares] == ["rank 1: model.odd: a list"] * 2
