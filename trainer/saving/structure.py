"""One rank's state: what it holds, and a check, cheap enough for every save, that it is still the same.

A value is taken from the state anew for each save, since code may replace a tensor or its memory at any time; only
what the plan depends on must have stayed: keys, types, shapes, dtypes, sharding, and the order of dimensions in memory.
Values are detached: one that is copied behind the training keeps its memory when the training's tensor gets another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.tensor import DTensor

from trainer.saving.pickles import MAX_PERMUTED_DIMENSIONS, dense_stride
from trainer.saving.zipimage import choose_capacity, fits, render_bytes

Value = torch.Tensor | bytes


class PlanChanged(Exception):
    """The state is not the one that was planned for: plan again, on every rank."""


class UnsupportedState(TypeError):
    """A leaf of the state can't be saved; the message names its key."""


@dataclass(frozen=True, slots=True)
class Held:
    """One chunk of a tensor, or one byte item, that a rank holds and could write. Plain values only.

    `size`: bytes of a chunk, or the capacity of a byte item's slot. `stride`: of the chunk as its bytes are saved.
    """

    key: str
    path: tuple[str, ...]
    size: int
    dtype: str = ""
    shape: tuple[int, ...] = ()  # of the whole tensor
    offsets: tuple[int, ...] | None = None  # None for a byte item
    sizes: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    requires_grad: bool = False

    @property
    def identity(self) -> tuple[str, tuple[int, ...] | None]:
        """Equal for what need not be written twice."""
        return self.key, self.offsets

    def rows(self, first: int, count: int) -> Held:
        """So many rows of a chunk whose rows lie one after the other."""
        assert self.offsets is not None
        return replace(
            self,
            size=self.size // self.sizes[0] * count,
            offsets=(self.offsets[0] + first, *self.offsets[1:]),
            sizes=(count, *self.sizes[1:]),
        )


@dataclass(frozen=True, slots=True, order=True)
class Part:
    """What is taken of the leaf number `at`: so many rows, or all of it when `count` is negative."""

    at: int
    first: int = 0
    count: int = -1

    @property
    def is_whole(self) -> bool:
        return self.count < 0


class Structure:
    """The leaves of a state dict, in its order. `held` has an entry for each of them, or None: held by others only.

    Raises `UnsupportedState` for what can't be saved.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._keys, leaves = flatten(state)
        paths = _paths(state)
        if len(set(join_paths(state))) < len(paths):
            raise UnsupportedState("two keys are the same when their parts are joined by dots")
        self._checks = [_look(".".join(path), leaf) for path, leaf in zip(paths, leaves, strict=True)]
        self.held = [_describe(path, leaf) for path, leaf in zip(paths, leaves, strict=True)]
        self._has_copies = False  # among the values given last
        self._capacities = [held.size if held is not None and held.offsets is None else 0 for held in self.held]

    def values(self, state: Mapping[str, Any], wanted: Sequence[Part]) -> list[Value]:
        """What stands in the state for the parts `wanted`, ready to be copied: tensors are contiguous.

        Raises `PlanChanged` when anything of the whole state is not as planned.
        """
        keys, leaves = flatten(state)
        if keys != self._keys:
            raise PlanChanged("the keys of the state changed")
        for leaf, seen in zip(leaves, self._checks, strict=True):
            if not seen.matches(leaf):
                raise PlanChanged(f"{seen.key} changed its type, shape, dtype, device or sharding")
        self._has_copies = False
        return [self._value(leaves[part.at], part) for part in wanted]

    def renew(self, values: Sequence[Value], items: Mapping[str, bytes], wanted: Sequence[Part]) -> list[Value] | None:
        """The `values` given last with other byte items, by key, where all tensors share the state's memory; else None.

        For a caller that knows the state's tensors to be as they were then, memory and all: nothing is looked at.
        Raises `PlanChanged`.
        """
        if self._has_copies:
            return None
        return [
            self._render(items[self._checks[part.at].key], part.at) if self._capacities[part.at] else value
            for value, part in zip(values, wanted, strict=True)
        ]

    def _value(self, leaf: Any, part: Part) -> Value:
        if isinstance(leaf, bytes):
            return self._render(leaf, part.at)
        seen, local = self._checks[part.at], local_tensor(leaf).detach()
        exposed = seen.expose(local)
        self._has_copies = self._has_copies or exposed is not local
        return exposed if part.is_whole else exposed[part.first : part.first + part.count]

    def _render(self, data: bytes, at: int) -> bytes:
        if not fits(data, self._capacities[at]):
            raise PlanChanged(f"{self._checks[at].key} outgrew its place")
        return render_bytes(data, self._capacities[at])


def flatten(state: Mapping[str, Any]) -> tuple[list[tuple[Any, ...]], list[Any]]:
    """(the keys of each dict, all leaves), both in the order of a walk."""
    keys: list[tuple[Any, ...]] = []
    leaves: list[Any] = []
    _walk(state, keys, leaves)
    return keys, leaves


def _walk(node: Mapping[str, Any], keys: list[tuple[Any, ...]], leaves: list[Any]) -> None:
    keys.append(tuple(node))
    for value in node.values():
        if isinstance(value, dict):
            _walk(value, keys, leaves)
        else:
            leaves.append(value)


def _paths(node: Mapping[str, Any], head: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = []
    for key, value in node.items():
        path = (*head, str(key))
        found += _paths(value, path) if isinstance(value, dict) else [path]
    return found


def join_paths(state: Mapping[str, Any]) -> list[str]:
    """The key of each leaf as it is on disk, in the order of `flatten`."""
    return [".".join(path) for path in _paths(state)]


def local_tensor(leaf: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this rank holds, without a copy."""
    return leaf._local_tensor if isinstance(leaf, DTensor) else leaf  # noqa: SLF001 - to_local() records a view


# ---------------------------------------------------------------- what a leaf must stay


@dataclass(frozen=True, slots=True)
class _Seen:
    """A leaf as it was planned; `order`: its dimensions by falling stride when its bytes are saved in that order."""

    key: str
    kind: type[Any]
    shape: torch.Size | None = None
    dtype: torch.dtype | None = None
    device: torch.device | None = None
    layout: torch.layout | None = None
    spread: Any = None  # how a DTensor is sharded
    is_contiguous: bool = False
    stride: tuple[int, ...] = ()
    order: tuple[int, ...] = ()

    def matches(self, leaf: Any) -> bool:
        if type(leaf) is not self.kind:
            return False
        if self.shape is None:
            return True
        local: torch.Tensor = leaf._local_tensor if self.kind is DTensor else leaf  # noqa: SLF001
        if local.dtype is not self.dtype or local.layout is not self.layout or local.device != self.device:
            return False
        if local.shape != self.shape or (self.spread is not None and self.spread != _spread_of(leaf)):
            return False
        return local.is_contiguous() if self.is_contiguous else local.stride() == self.stride

    def expose(self, local: torch.Tensor) -> torch.Tensor:
        """The tensor with its bytes in the order in which they are saved: itself, where they lie so."""
        if self.is_contiguous and not (local.is_conj() or local.is_neg()):
            return local
        plain = local.detach().resolve_conj().resolve_neg()
        return (plain.permute(self.order) if self.order else plain).contiguous()


def _look(key: str, leaf: Any) -> _Seen:
    if isinstance(leaf, bytes):
        return _Seen(key, bytes)
    if not isinstance(leaf, torch.Tensor):
        raise UnsupportedState(f"{key}: {type(leaf).__name__} is neither a tensor nor bytes")
    local = local_tensor(leaf)
    if name_oddity(local):
        raise UnsupportedState(f"{key}: a {name_oddity(local)} tensor can't be saved")
    return _Seen(
        key=key,
        kind=type(leaf),
        shape=local.shape,
        dtype=local.dtype,
        device=local.device,
        layout=local.layout,
        spread=_spread_of(leaf),
        is_contiguous=local.is_contiguous(),
        stride=local.stride(),
        order=_dense_order(local),
    )


def _spread_of(leaf: Any) -> tuple[Any, ...] | None:
    return (leaf.shape, leaf.device_mesh, leaf.placements) if isinstance(leaf, DTensor) else None


def name_oddity(tensor: torch.Tensor) -> str:
    """What keeps a tensor from having bytes of its own that can be saved and loaded; empty for most."""
    if tensor.is_meta:
        return "meta"
    if tensor.is_quantized:
        return "quantized"
    return "" if tensor.layout is torch.strided else str(tensor.layout).removeprefix("torch.")


def _dense_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """The order of dimensions in which the tensor's bytes lie without gaps; empty when it is plain or there is none."""
    if tensor.is_contiguous() or tensor.dim() > MAX_PERMUTED_DIMENSIONS:
        return ()
    order = tuple(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
    return order if tensor.detach().permute(order).is_contiguous() else ()


# ---------------------------------------------------------------- what a leaf is on disk


def _describe(path: tuple[str, ...], leaf: Any) -> Held | None:
    key = ".".join(path)
    if isinstance(leaf, bytes):
        return Held(key=key, path=path, size=choose_capacity(len(leaf)))
    items = create_default_local_save_plan({key: leaf}, is_coordinator=False).items
    if not items:
        return None  # of a mesh that this rank is not part of
    (item,) = items
    assert item.tensor_data is not None
    assert item.index.offset is not None
    chunk, local = item.tensor_data.chunk, local_tensor(leaf)
    return Held(
        key=key,
        path=path,
        size=local.numel() * local.itemsize,
        dtype=str(local.dtype).removeprefix("torch."),
        shape=tuple(item.tensor_data.size),
        offsets=tuple(item.index.offset),
        sizes=tuple(chunk.sizes),
        stride=dense_stride(local.shape, _dense_order(local) or range(local.dim())),
        requires_grad=leaf.requires_grad,
    )
