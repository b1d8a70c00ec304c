"""Tensors that share the memory of others, and the check, cheap enough for each save, that they still do.

A training may give a tensor other memory, or the same memory another shape, at any time, and the tensor stays the
same object. What was taken of it before is not it any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any

import torch
from torch.distributed.tensor import DTensor


class Aliases:
    """`tensors`: one for each given tensor, detached. They keep the memory that they were taken of."""

    def __init__(self, originals: Sequence[torch.Tensor]) -> None:
        self.tensors = [original.detach() for original in originals]
        self._kinds = list(map(type, originals))
        self._sharded = [at for at, kind in enumerate(self._kinds) if issubclass(kind, DTensor)]
        self._specs = self._specs_of(originals)
        self._locals = self._locals_of(self.tensors)
        self._dtypes = [part.dtype for part in self._locals]
        self._flags = _flags_of(self._locals)

    def fit(self, originals: Sequence[Any]) -> bool:
        """True when each original has exactly the elements of its alias: memory, offset, shape, stride, type."""
        if list(map(type, originals)) != self._kinds:
            return False
        if not all(map(is_, self._specs_of(originals), self._specs)):
            return False
        parts = self._locals_of(originals)
        try:
            return (
                [part.dtype for part in parts] == self._dtypes
                and _flags_of(parts) == self._flags
                and all(map(torch.Tensor.is_set_to, parts, self._locals))
            )
        except (RuntimeError, TypeError):
            return False  # of a kind that has no such memory

    def _specs_of(self, tensors: Sequence[Any]) -> list[Any]:
        return [tensors[at]._spec for at in self._sharded]  # noqa: SLF001 - how it is sharded

    def _locals_of(self, tensors: Sequence[Any]) -> list[torch.Tensor]:
        parts = list(tensors)
        for at in self._sharded:
            parts[at] = parts[at]._local_tensor  # noqa: SLF001 - to_local() makes a tensor, which is what costs
        return parts


def place_of(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """Equal for tensors with the very same elements, while both live; None for a kind that has no such memory."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor  # noqa: SLF001
    try:
        memory = (local.untyped_storage()._cdata, local.storage_offset(), local.shape, local.stride())  # noqa: SLF001
    except (RuntimeError, TypeError):
        return None
    return (*memory, local.dtype, local.is_conj(), local.is_neg())


def _flags_of(tensors: Sequence[torch.Tensor]) -> list[bool]:
    """Which are read conjugated, and which negated."""
    return [*map(torch.Tensor.is_conj, tensors), *map(torch.Tensor.is_neg, tensors)]
