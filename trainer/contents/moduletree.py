"""The modules of a model with the names of what they hold, and the check that these are still what torch would save.

`state_dict` walks all modules and makes new tensors. This is compared in its place before each save, and covers what
its answer depends on, but for the memory of the tensors (trainer.contents.aliases).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from operator import is_, itemgetter
from typing import Any

import torch

_HOLDERS = (  # of names; their order is that of the check
    "_parameters",
    "_buffers",
    "_modules",
    "_non_persistent_buffers_set",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
)
_METHODS = ("state_dict", "_save_to_state_dict")


class ModuleTree:
    """A model's modules as they are now. `is_plain` False: what is saved of them may differ from call to call."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._modules = list(model.modules())
        self._kinds = list(map(type, self._modules))
        self.is_plain = all(map(_is_plain, self._modules))
        if self.is_plain:
            insides = list(map(vars, self._modules))
            holders = _holders(insides)
            self._sizes = list(map(len, holders))
            self._names = list(chain.from_iterable(holders))
            self._children = _values(insides, "_modules")
            self._parameters = _values(insides, "_parameters")
            self._buffer_kinds = list(map(type, _values(insides, "_buffers")))

    def is_unchanged(self) -> bool:
        """True while the same modules hold the same parameters and children by the same names, and save themselves."""
        insides = list(map(vars, self._modules))
        if list(map(type, self._modules)) != self._kinds or _have_methods(insides):
            return False
        holders = _holders(insides)
        return (
            list(map(len, holders)) == self._sizes
            and list(chain.from_iterable(holders)) == self._names
            and _are_same(_values(insides, "_modules"), self._children)
            and _are_same(_values(insides, "_parameters"), self._parameters)
            and list(map(type, _values(insides, "_buffers"))) == self._buffer_kinds
        )

    def slots(self) -> list[Any]:
        """What is in the place of each parameter and buffer now: a tensor or None."""
        insides = list(map(vars, self._modules))
        return [*_values(insides, "_parameters"), *_values(insides, "_buffers")]


def _holders(insides: Sequence[dict[str, Any]]) -> list[Any]:
    return list(chain.from_iterable(map(itemgetter(*_HOLDERS), insides)))


def _values(insides: Sequence[dict[str, Any]], holder: str) -> list[Any]:
    return list(chain.from_iterable([inside[holder].values() for inside in insides if inside[holder]]))


def _are_same(now: Sequence[Any], then: Sequence[Any]) -> bool:
    return len(now) == len(then) and all(map(is_, now, then))


def _have_methods(insides: Sequence[dict[str, Any]]) -> bool:
    return any(any(name in inside for inside in insides) for name in _METHODS)


def _is_plain(module: torch.nn.Module) -> bool:
    inside = vars(module)
    return (
        all(name in inside for name in _HOLDERS)  # a compiled script's are not there
        and not _have_methods([inside])
        and all(_is_torch_s(getattr(type(module), name)) for name in _METHODS)
        and all(map(_is_torch_s, _hooks(inside)))
    )


def _hooks(inside: dict[str, Any]) -> Iterable[Any]:
    for hook in chain(inside["_state_dict_hooks"].values(), inside["_state_dict_pre_hooks"].values()):
        yield getattr(hook, "hook", hook)


def _is_torch_s(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).startswith("torch.")
