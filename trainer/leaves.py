"""The live tensors of a model and its optimizer, by names that don't depend on how the model is wrapped.

Finding them is slow (torch walks all modules and makes new tensors), and a save waits for it. So the found ones are
kept, and looked at again before each save: as long as every parameter, buffer and optimizer state is the very object
it was, with its data where it was, the tensors found before are the ones to save.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel


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
        self._slots: tuple[_Slot, ...] = ()
        self._shape: tuple[tuple[dict[str, Any], int], ...] = ()
        self._is_kept = False
        self.tensors: dict[str, torch.Tensor] = {}
        self.others: dict[str, Any] = {}
        self.buffers: frozenset[str] = frozenset()

    def refresh(self) -> bool:
        """Bring the leaves up to date; True if they had to be found anew."""
        if self._is_kept and self._is_unchanged():
            return False
        found = get_model_state_dict(self._model)
        self.tensors = {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}
        self.others = {name: value for name, value in found.items() if name not in self.tensors}
        self._slots = tuple(_slots_of(self._model))
        self._shape = tuple(
            (part, len(part))
            for module in self._model.modules()
            for part in (module._parameters, module._buffers, module._modules)  # noqa: SLF001 - no public view is cheap
        )
        self.buffers = frozenset(clean_name(self._model, name) for name, _ in self._model.named_buffers())
        # State that is made on asking (extra state, hooks) is asked for again each time.
        places = {slot.place for slot in self._slots}
        self._is_kept = not self.others and all(place_of(value) in places for value in self.tensors.values())
        return True

    def _is_unchanged(self) -> bool:
        for slot in self._slots:
            tensor = slot.holder.get(slot.name)
            if tensor is not slot.tensor or place_of(tensor) != slot.place:
                return False
        return all(len(part) == size for part, size in self._shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slot:
    holder: dict[str, Any]  # a module's parameters or buffers
    name: str
    tensor: torch.Tensor
    place: int


def _slots_of(model: torch.nn.Module) -> Iterator[_Slot]:
    for module in model.modules():
        for holder in (module._parameters, module._buffers):  # noqa: SLF001
            for name, tensor in holder.items():
                if tensor is not None:
                    yield _Slot(holder=holder, name=name, tensor=tensor, place=place_of(tensor))


def place_of(tensor: torch.Tensor) -> int:
    """Where the data of a tensor (of this rank's part of it) lies."""
    if type(tensor) is DTensor or isinstance(tensor, DTensor):
        return tensor._local_tensor.data_ptr()  # noqa: SLF001 - to_local() makes a tensor, which is what costs
    return tensor.data_ptr()


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

# How an optimizer computes, not what: taken from the optimizer that is there, not from the checkpoint.
_IMPLEMENTATION = frozenset({"params", "foreach", "fused", "capturable", "differentiable"})


class OptimizerLeaves:
    """The state of an optimizer by the names of its parameters; found again when an entry is another object.

    `tensors`: per parameter its tensors by name. `others`: per parameter what is no tensor.
    `names`: the parameters of each group.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._entries: tuple[_Entry, ...] = ()
        self._groups: tuple[list[Any], ...] = ()
        self._sizes: tuple[int, ...] = ()
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
        groups = self._optimizer.param_groups
        try:
            self.names = [[names[parameter] for parameter in group["params"]] for group in groups]
        except KeyError:
            raise UnsupportedModel("the optimizer holds a parameter that is not one of the model's") from None
        self.parameters = {names[p]: p for group in groups for p in group["params"]}
        self._groups = tuple(group["params"] for group in groups)
        self._sizes = tuple(len(parameters) for parameters in self._groups)
        self._entries = tuple(self._find_entries(names))
        self.tensors, self.others = {}, {}
        for entry in self._entries:
            if entry.state is not None:
                self.tensors[entry.fqn] = dict(entry.tensors)
                others = {key: value for key, value in entry.state.items() if key not in self.tensors[entry.fqn]}
                if others:
                    self.others[entry.fqn] = others
        self._is_kept = not self.others  # numbers are no objects to watch

    def _find_entries(self, names: Mapping[torch.Tensor, str]) -> Iterator[_Entry]:
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                state = self._optimizer.state.get(parameter)
                tensors = {k: v for k, v in state.items() if isinstance(v, torch.Tensor)} if state else {}
                yield _Entry(
                    fqn=names[parameter], parameter=parameter, state=state or None, tensors=tuple(tensors.items())
                )

    def _is_unchanged(self) -> bool:
        groups = self._optimizer.param_groups
        if len(groups) != len(self._groups):
            return False
        for group, parameters, size in zip(groups, self._groups, self._sizes, strict=True):
            if group["params"] is not parameters or len(parameters) != size:
                return False
        get = self._optimizer.state.get
        for entry in self._entries:
            state = get(entry.parameter)
            if entry.state is None:
                if state:
                    return False
                continue
            if state is not entry.state or len(state) != len(entry.tensors):
                return False
            for name, tensor in entry.tensors:
                if state[name] is not tensor:
                    return False
        return True

    # ---- settings

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
        if any(kinds.values()):
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
class _Entry:
    fqn: str
    parameter: torch.Tensor
    state: dict[str, Any] | None
    tensors: tuple[tuple[str, torch.Tensor], ...]


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
