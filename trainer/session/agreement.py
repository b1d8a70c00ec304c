"""How the ranks of a training decide alike without waiting for each other.

Once a step each rank says a word: its loss, whether it was asked to exit or to save, whether its save is still in
flight. The words are added up by one small all-reduce that is started in a step and awaited in the next, when it is
long over. So what one rank is told in step k all ranks know in step k + 1, and act upon alike.

The group is one of its own, on gloo: the training's collectives must not be mixed up with it, nor be waited for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """What one rank says, and what all ranks know afterwards: each field is the sum over the ranks.

    `loss`: of the global batch, when each rank gives its own divided by their number; NaN where any is.
    """

    loss: float = math.nan
    exits: float = 0.0  # ranks that were asked to save and exit
    saves: float = 0.0  # ranks that want a save now, by signal, by advice or because it is due by time
    busy: float = 0.0  # ranks whose save is in flight
    unready: float = 0.0  # ranks whose state isn't the planned one
    failed: float = 0.0  # ranks that can't collect their state
    failures: float = 0.0  # rank 0's: saves that failed in a row


_NAMES = tuple(field.name for field in fields(Word))


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """The sum of all ranks' words of a step. `loss_step`: the step that the loss is of; None where nobody gave one."""

    step: int
    word: Word
    loss_step: int | None


class Agreement:
    """The ranks' talk. Every rank has one and makes the same calls in the same order; made before anything is saved.

    Without torch.distributed, or alone, a word is known at once.
    """

    def __init__(self, *, timeout: timedelta | None = None) -> None:
        is_joined = dist.is_available() and dist.is_initialized()
        self.group: dist.ProcessGroup | None = dist.new_group(backend="gloo", timeout=timeout) if is_joined else None
        self.rank = dist.get_rank() if is_joined else 0
        self.world = dist.get_world_size() if is_joined else 1
        self._open: tuple[int, int | None, torch.Tensor, Any] | None = None

    def say(self, step: int, word: Word, loss_step: int | None) -> None:
        """Begin to add up the words of a step; what was begun before must have been heard."""
        assert self._open is None, "the word before has not been heard"  # a call too many would end in a dead wait
        told = torch.tensor([getattr(word, name) for name in _NAMES], dtype=torch.float64)
        # the group's own method: dist.all_reduce costs twice as much, each step
        work = self.group.allreduce([told]) if self.group is not None and self.world > 1 else None
        self._open = (step, loss_step, told, work)

    def hear(self) -> Agreed | None:
        """What was begun last, once all ranks have said it; None when it was heard before. Raises the group's error."""
        if self._open is None:
            return None
        step, loss_step, told, work = self._open
        self._open = None
        if work is not None:
            work.wait()
        return Agreed(step=step, loss_step=loss_step, word=Word(**dict(zip(_NAMES, told.tolist(), strict=True))))

    @property
    def is_over(self) -> bool:
        """True when `hear` would not wait."""
        return self._open is None or self._open[3] is None or bool(self._open[3].is_completed())

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in the order of ranks. Waits for all: for starts, ends and errors only."""
        if self.world == 1:
            return [value]
        gathered: list[Any] = [None] * self.world
        dist.all_gather_object(gathered, value, group=self.group)
        return gathered

    def from_rank_0(self, make: Callable[[], T]) -> T:
        """What rank 0 makes, on every rank; its error is raised on every rank."""
        made: Any = None
        error: Exception | None = None
        if self.rank == 0:
            try:
                made = make()
            except Exception as failure:  # noqa: BLE001 - the others must not wait for it
                error = failure
        made, error = self.gather((made, error))[0]
        if error is not None:
            raise error
        return made  # type: ignore[no-any-return]
