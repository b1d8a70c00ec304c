"""Which nodes train in a start inside the allocation. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def choose_training(
    previous: Sequence[str], usable: Sequence[str], *, wanted: int, minimum: int, multiple: int
) -> tuple[str, ...]:
    """The nodes in rank order, or none when there are too few.

    Who trained before keeps its place; a spare takes that of one that is gone, in the order of `usable`. With fewer
    than `wanted` the number is a multiple of `multiple`, and never below `minimum`.
    """
    count = count_nodes(len(usable), wanted=wanted, minimum=minimum, multiple=multiple)
    spares = iter([node for node in usable if node not in previous])
    filled = [node if node in usable else next(spares, None) for node in previous]
    chosen = [node for node in filled if node is not None]
    return tuple([*chosen, *spares][:count])


def count_nodes(available: int, *, wanted: int, minimum: int, multiple: int) -> int:
    """How many of the available nodes can train; 0: too few."""
    if available >= wanted:
        return wanted
    count = available - available % max(1, multiple)
    return count if count >= max(1, minimum) else 0
