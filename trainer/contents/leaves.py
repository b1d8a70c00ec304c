"""The live tensors of a model and its optimizer, by names that don't depend on how the model is wrapped.

Finding them is slow (torch walks all modules and makes new tensors), and a save waits for it. So the found ones are
kept, and looked at again before each save: as long as everything that they were found by is as it was, and each shares
the memory of the live one exactly, the tensors found before are the ones to save.

They are detached and keep their memory: what is copied behind a training that gives its tensors other memory is theirs.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, compress
from operator import is_
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from trainer.contents.aliases import Aliases, place_of
from trainer.contents.moduletree import ModuleTree


class UnsupportedModel(TypeError):
    """A model or optimizer whose state can't be named here; the message says what to use."""


# ---------------------------------------------------------------- model


class ModelLeaves:
    """What `get_model_state_dict` gives, kept as long as it stays true.

    `tensors`: live ones, detached, by name. `others`: what is no tensor (a module's extra state).
    """

    def __init__(self, model: torch.nn.Module) -> None:
        if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
            raise UnsupportedModel("the model is wrapped by FullyShardedDataParallel (FSDP1): use fully_shard (FSDP2)")
        self._model = model
        self._tree: ModuleTree | None = None  # None: to be found anew
        self._is_saved: list[bool] = []  # of each slot of the tree
        self._aliases = Aliases([])
        self.tensors: dict[str, torch.Tensor] = {}
        self.others: dict[str, Any] = {}
        self.buffers: frozenset[str] = frozenset()

    def refresh(self) -> bool:
        """Bring the leaves up to date; True if they had to be found anew."""
        if self._tree is not None and self._is_unchanged(self._tree):
            return False
        self._tree = None
        found = get_model_state_dict(self._model)
        self.tensors = {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}
        self.others = {name: value for name, value in found.items() if name not in self.tensors}
        self.buffers = frozenset(clean_name(self._model, name) for name, _ in self._model.named_buffers())
        tree = ModuleTree(self._model)
        # State that is made on asking (extra state, hooks) is asked for again each time.
        if tree.is_plain and not self.others and self._watch(tree):
            self._tree = tree
        return True

    def _watch(self, tree: ModuleTree) -> bool:
        """Find the slots of what is saved; False when some of it is in no slot."""
        slots = tree.slots()
        places = [place_of(slot) if slot is not None else None for slot in slots]
        wanted = {place_of(value) for value in self.tensors.values()}
        self._is_saved = [place is not None and place in wanted for place in places]
        self._aliases = Aliases(list(compress(slots, self._is_saved)))
        return None not in wanted and wanted <= set(places)

    def _is_unchanged(self, tree: ModuleTree) -> bool:
        return tree.is_unchanged() and self._aliases.fit(list(compress(tree.slots(), self._is_saved)))


def clean_name(model: torch.nn.Module, name: str) -> str:
    """The name of a parameter without the parts that wrappers put in (DDP, torch.compile, activation checkpoints)."""
    kept = []
    current: Any = model
    for part in name.split("."):
        is_wrapper = (part == "module" and isinstance(current, DistributedDataParallel)) or part in (
            "_orig_mod",
            "_checkpoint_wrapped_module",
        )
        if not is_wrapper:
            kept.append(part)
        current = getattr(current, part, None)
    return ".".join(kept)


def name_parameters(model: torch.nn.Module) -> dict[torch.Tensor, str]:
    """The clean name of each parameter of the model; one that is shared has its first name."""
    return {parameter: clean_name(model, name) for name, parameter in model.named_parameters()}


# ---------------------------------------------------------------- optimizer

_PLACES = frozenset({"state", "param_groups"})  # of all that an optimizer of torch keeps


def refuse_hidden_state(optimizer: torch.optim.Optimizer) -> None:
    """Raise `UnsupportedModel` for an optimizer that keeps state elsewhere than by parameter in `optimizer.state`.

    What is there is all that is saved: the rest would begin anew after a restart, without a word.
    """
    kind = type(optimizer).__qualname__
    if hasattr(optimizer, "consolidate_state_dict"):
        raise UnsupportedModel(
            f"the optimizer is a {kind}, which keeps a part of its state on each rank, where it is not found: "
            "shard the model with fully_shard (FSDP2), which shards the state of any optimizer"
        )
    for name, inner in vars(optimizer).items():
        if isinstance(inner, torch.optim.Optimizer) and inner.state is not optimizer.state:
            raise UnsupportedModel(
                f"the optimizer is a {kind} that keeps its state in its {name}, a {type(inner).__qualname__}: "
                "give that one to the Checkpointer, and what else is to be kept as extra"
            )
    keys: Iterable[Any] = optimizer.state
    strange = [key for key in keys if not isinstance(key, torch.Tensor)]
    if not strange and type(optimizer).state_dict is not torch.optim.Optimizer.state_dict:
        strange = [key for key in _state_dict_of(optimizer, kind) if key not in _PLACES]
    if strange:
        raise UnsupportedModel(
            f"the optimizer is a {kind} with state that is of no parameter, {strange[0]!r} for one: "
            "keep it in an object with state_dict and load_state_dict, and give that as extra"
        )


def _state_dict_of(optimizer: torch.optim.Optimizer, kind: str) -> Mapping[str, Any]:
    try:
        return optimizer.state_dict()
    except Exception as error:
        raise UnsupportedModel(f"the optimizer is a {kind} that does not give its state: {error}") from error


def _refuse_sharded(optimizer: torch.optim.Optimizer, values: list[torch.Tensor]) -> None:
    if any(isinstance(value, DTensor) for value in values):
        raise UnsupportedModel(
            f"the optimizer is a {type(optimizer).__qualname__} of a sharded model, whose state can't be made anew "
            "before it is loaded: use another optimizer, or DDP"
        )


# How an optimizer computes, not what: taken from the optimizer that is there, not from the checkpoint.
_IMPLEMENTATION = frozenset({"params", "foreach", "fused", "capturable", "differentiable"})


class OptimizerLeaves:
    """The state of an optimizer by the names of its parameters; found again when any entry is another one.

    `tensors`: per parameter its tensors by name: live ones, detached. `others`: per parameter what is no tensor.
    `names`: the parameters of each group. Raises `UnsupportedModel`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UnsupportedModel(f"the optimizer is a {type(optimizer).__qualname__}, not a torch.optim.Optimizer")
        refuse_hidden_state(optimizer)
        self._optimizer = optimizer
        self._sizes: list[int] = []  # of the groups
        self._known: list[torch.Tensor] = []
        self._entries: list[tuple[str, ...]] = []  # their names, for each parameter
        self._aliases = Aliases([])
        self._is_kept = False
        self.tensors: dict[str, dict[str, torch.Tensor]] = {}
        self.others: dict[str, dict[str, Any]] = {}
        self.names: list[list[str]] = []
        self.parameters: dict[str, torch.Tensor] = {}

    @property
    def is_current(self) -> bool:
        """True if what was found is still what there is."""
        return self._is_kept and self._is_unchanged()

    def find(self, names: Mapping[torch.Tensor, str]) -> None:
        """Find the state anew. Raises `UnsupportedModel`."""
        refuse_hidden_state(self._optimizer)
        groups = self._optimizer.param_groups
        try:
            self.names = [[names[parameter] for parameter in group["params"]] for group in groups]
        except KeyError:
            raise UnsupportedModel("the optimizer holds a parameter that is not one of the model's") from None
        self._sizes = [len(group["params"]) for group in groups]
        self._known = [parameter for group in groups for parameter in group["params"]]
        self.parameters = {names[parameter]: parameter for parameter in self._known}
        states = self._states(self._known)
        self._entries = list(map(tuple, states))
        values = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
        self._aliases = Aliases(values)
        self.tensors, self.others = {}, {}
        aliases = iter(self._aliases.tensors)
        for parameter, state in zip(self._known, states, strict=True):
            self._take(names[parameter], state, aliases)
        if self.others and needs_closure(self._optimizer):
            _refuse_sharded(self._optimizer, values)
        self._is_kept = not self.others  # numbers are no objects to watch

    def _take(self, name: str, state: Mapping[str, Any], aliases: Iterator[torch.Tensor]) -> None:
        if not state:
            return
        self.tensors[name] = {key: next(aliases) for key, value in state.items() if isinstance(value, torch.Tensor)}
        others = {key: value for key, value in state.items() if key not in self.tensors[name]}
        if others:
            self.others[name] = others

    def _states(self, parameters: list[torch.Tensor]) -> list[dict[str, Any]]:
        get = self._optimizer.state.get
        return [get(parameter) or {} for parameter in parameters]

    def _is_unchanged(self) -> bool:
        lists = [group["params"] for group in self._optimizer.param_groups]
        parameters = list(chain.from_iterable(lists))
        if list(map(len, lists)) != self._sizes or not all(map(is_, parameters, self._known)):
            return False
        states = self._states(parameters)
        return list(map(tuple, states)) == self._entries and self._aliases.fit(
            [value for state in states for value in state.values()]
        )

    # ---- settings

    @property
    def kind(self) -> str:
        """The name of the optimizer's class: the state of another one is of no use to it."""
        return type(self._optimizer).__qualname__

    def settings(self) -> list[dict[str, Any]]:
        """The settings of each group (learning rate and the like)."""
        return [
            {key: value for key, value in group.items() if key not in _IMPLEMENTATION}
            for group in self._optimizer.param_groups
        ]

    def apply_settings(self, saved: list[dict[str, Any]], saved_names: list[list[str]]) -> None:
        """Take over saved settings, by the names of the parameters. Raises ValueError when groups don't agree."""
        of = {name: number for number, names in enumerate(saved_names) for name in names}
        for group, names in zip(self._optimizer.param_groups, self.names, strict=True):
            sources = {of.get(name) for name in names}
            if len(sources) != 1 or None in sources:
                raise ValueError("the optimizer's parameter groups are not those of the checkpoint")
            for key, value in saved[sources.pop() or 0].items():
                _set(group, key, value)

    # ---- making state that is not there yet

    def prepare(self, kinds: Mapping[str, Mapping[str, _Description]]) -> None:
        """Have exactly the state entries that a checkpoint describes, ready to be filled; weights stay as they are."""
        if any(kinds.values()) and not needs_closure(self._optimizer):
            initialise(self._optimizer)
        for name, parameter in self.parameters.items():
            wanted = kinds.get(name, {})
            state = self._optimizer.state.get(parameter)
            if not wanted:
                self._optimizer.state.pop(parameter, None)
                continue
            if state is None:
                state = self._optimizer.state[parameter]
            for key in [key for key in state if key not in wanted]:
                del state[key]
            for key, description in wanted.items():
                if not isinstance(state.get(key), torch.Tensor):
                    state[key] = description.make(parameter)
        self._is_kept = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Description:
    """What one entry of an optimizer's state looks like; `shape` None: as its parameter."""

    dtype: torch.dtype
    shape: tuple[int, ...] | None

    def make(self, parameter: torch.Tensor) -> torch.Tensor:
        if self.shape is None:
            return torch.zeros_like(parameter, dtype=self.dtype, requires_grad=False)
        return torch.zeros(self.shape, dtype=self.dtype, device=parameter.device)


def describe_entry(value: torch.Tensor, parameter: torch.Tensor) -> list[Any]:
    """What a checkpoint says of a state entry, for `read_description`."""
    shape = None if value.shape == parameter.shape and value.dim() else list(value.shape)
    return [str(value.dtype).removeprefix("torch."), shape]


def read_description(plain: list[Any]) -> _Description:
    """The description in a checkpoint. Raises ValueError."""
    dtype = getattr(torch, str(plain[0]), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{plain[0]!r} is no dtype of this torch")  # noqa: TRY004 - text of a file
    return _Description(dtype=dtype, shape=None if plain[1] is None else tuple(int(n) for n in plain[1]))


def _set(group: dict[str, Any], key: str, value: Any) -> None:
    current = group.get(key)
    if isinstance(current, torch.Tensor):
        current.fill_(float(value))  # a learning rate that a compiled or captured step reads
    else:
        group[key] = value.item() if isinstance(value, torch.Tensor) else value


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """True when a step can't be made without being given something (LBFGS: a function that computes the loss)."""
    parameters = list(inspect.signature(type(optimizer).step).parameters.values())[1:]
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return any(parameter.kind in named and parameter.default is inspect.Parameter.empty for parameter in parameters)


@torch.no_grad()
def initialise(optimizer: torch.optim.Optimizer) -> None:
    """Have an optimizer without state make it, by one step with zero gradients and a learning rate of zero.

    As torch's own loading does it; gradients that are there are kept. The values are meant to be overwritten.
    """
    if optimizer.state:
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    gradients = [p.grad for p in parameters]
    rates = [(group, group["lr"]) for group in optimizer.param_groups if "lr" in group]
    try:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        for group, rate in rates:
            group["lr"] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
        optimizer.step()
    finally:
        for group, rate in rates:
            group["lr"] = rate
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
