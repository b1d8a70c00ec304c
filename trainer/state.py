"""Everything that a resumed training needs, as one nested dict of tensors and a few opaque items.

`model.<name>` and `optimizer.state.<name>.<entry>` are tensors, by names that don't depend on wrapping, so that they
load on another number of ranks and into other wrappers. Tensors in the state of other objects are `extra.<object>.…`.
All the rest is JSON in few items: "shared", written by rank 0, and "rank.<r>" for what differs by rank: random states,
positions of data loaders that can't be resized, objects that are given as per rank. A number of ranks other than the
saved one takes no rank's item over: random states are seeded anew from (seed, step, rank), and the load says so.

`collect` is what a save waits for: what it found at its last call is kept, see `trainer.contents.leaves`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from trainer.contents.leaves import (
    ModelLeaves,
    OptimizerLeaves,
    UnsupportedModel,
    describe_entry,
    name_parameters,
    read_description,
)
from trainer.contents.opaque import decode, dtype_named, encode, find_tensors
from trainer.contents.randomness import apply_rng, collect_rng, seed_rng
from trainer.contents.replicas import Key, digest_model, digest_objects
from trainer.data import DataChanged
from trainer.loaders import DataNotElastic

__all__ = ["DataChanged", "DataNotElastic", "Loaded", "StateMismatch", "Stateful", "TrainState"]

VERSION = 1


class StateMismatch(ValueError):
    """The checkpoint is whole and does not fit this model, optimizer or set of objects; the message says where."""


class Stateful(Protocol):
    """What can be saved beside model and optimizer."""

    def state_dict(self) -> dict[str, Any]:
        """Numbers, text, tensors, and lists and dicts of them."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Take over what `state_dict` gave."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What a load found.

    `is_reseeded`: random states could not be carried over, the run is no longer bit-identical. `notes`: what could
    not be taken over, one sentence each.
    """

    step: int
    samples: int
    world_size: int
    is_reseeded: bool
    tokens: int | None = None
    notes: tuple[str, ...] = ()


@dataclass(kw_only=True)
class TrainState:
    """Model, optimizer, and all else that one rank trains with.

    `step` counts finished optimizer steps, `samples` and `tokens` what they consumed over all ranks (`tokens` None:
    nobody counts). `extra`: objects whose state is the same on every rank. `per_rank`: those whose state differs.
    `data` has `is_elastic` True when its state is the same on every rank and fits any number of them.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Stateful | None = None
    scaler: Stateful | None = None
    data: Stateful | None = None
    extra: Mapping[str, Stateful] = field(default_factory=dict)
    per_rank: Mapping[str, Stateful] = field(default_factory=dict)
    seed: int = 0
    rank: int = 0
    world: int = 1
    step: int = 0
    samples: int = 0
    tokens: int | None = None

    def __post_init__(self) -> None:
        given: dict[str, object] = {"scheduler": self.scheduler, "scaler": self.scaler, "data": self.data}
        given |= {f"extra[{name!r}]": held for name, held in self.extra.items()}
        given |= {f"per_rank[{name!r}]": held for name, held in self.per_rank.items()}
        for name, held in given.items():
            if held is not None:
                _refuse_stateless(name, held)
        self._model = ModelLeaves(self.model)
        self._optimizer = OptimizerLeaves(self.optimizer)
        self._tensors: dict[str, Any] = {}
        self._structure: bytes | None = None  # None: to be found anew

    @property
    def is_elastic(self) -> bool:
        """False when the position in the data can't be carried to another number of ranks."""
        return self.data is None or bool(getattr(self.data, "is_elastic", False))

    # ------------------------------------------------------------ saving

    def collect(self) -> dict[str, Any]:
        """The state to save; its tensors are the live ones: whoever saves them copies them before training goes on.

        "model" and "optimizer" are the same dicts as the last time when all tensors in them are the same.
        Raises `trainer.contents.opaque.UnsavableObject` and `trainer.contents.leaves.UnsupportedModel`.
        """
        self._refresh()
        tensors: dict[str, torch.Tensor] = {}
        own_tensors: dict[str, torch.Tensor] = {}
        own = self._own_item(own_tensors)
        state = dict(self._tensors)
        state["rank"] = {str(self.rank): json.dumps(own).encode()}
        shared = self._shared_item(tensors)  # on every rank: their tensors may be shards
        if tensors:
            state["extra"] = tensors
        if own_tensors:
            state["own"] = {str(self.rank): own_tensors}
        if self.rank == 0 and self._structure is not None:
            state["shared"] = b'{"structure":%b,"now":%b}' % (self._structure, json.dumps(shared).encode())
        return state

    def _refresh(self) -> None:
        is_new = self._model.refresh()
        if not is_new and self._structure is not None and self._optimizer.is_current:
            return
        self._optimizer.find(name_parameters(self.model))
        self._tensors = {"model": self._saved_tensors(), "optimizer": {"state": self._optimizer.tensors}}
        self._structure = json.dumps(self._describe(), separators=(",", ":")).encode()

    def _saved_tensors(self) -> dict[str, torch.Tensor]:
        # Buffers of several ranks may differ (BatchNorm under DDP, which hands rank 0's to all): rank 0's are saved.
        if self.rank == 0:
            return self._model.tensors
        return {
            name: tensor
            for name, tensor in self._model.tensors.items()
            if name not in self._model.buffers or type(tensor) is not torch.Tensor
        }

    def _describe(self) -> dict[str, Any]:
        names = list(self._model.tensors)
        number = {name: i for i, name in enumerate(names)}
        if missing := {name for group in self._optimizer.names for name in group} - number.keys():
            raise UnsupportedModel(f"the optimizer trains what the model does not save, {min(missing)} for one")
        kinds: dict[str, int] = {}
        kind_of = {}
        for name, entries in self._optimizer.tensors.items():
            parameter = self._optimizer.parameters[name]
            kind = json.dumps({key: describe_entry(value, parameter) for key, value in entries.items()})
            kind_of[str(number[name])] = kinds.setdefault(kind, len(kinds))
        return {
            "model": names,
            "optimizer": self._optimizer.kind,
            "groups": [[number[name] for name in group] for group in self._optimizer.names],
            "kinds": [json.loads(kind) for kind in kinds],
            "kind_of": kind_of,
        }

    def _shared_item(self, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        def plain(name: str, value: Any, what: str = "") -> Any:
            return encode(value, f"the state of {what or name}", tensors, name)

        return {
            "version": VERSION,
            "step": self.step,
            "samples": self.samples,
            "tokens": self.tokens,
            "world_size": self.world,
            "is_elastic": self.is_elastic,
            "model": plain("model", self._model.others),
            "settings": plain("optimizer", self._optimizer.settings()),
            "entries": plain("optimizer.state", self._optimizer.others),
            "scheduler": plain("scheduler", self.scheduler.state_dict()) if self.scheduler is not None else None,
            "scaler": plain("scaler", self.scaler.state_dict()) if self.scaler is not None else None,
            "data": plain("data", self.data.state_dict()) if self.data is not None and self.is_elastic else None,
            "extra": {name: plain(name, held.state_dict(), f"extra {name!r}") for name, held in self.extra.items()},
        }

    def digests(self) -> dict[Key, str]:
        """Of all that is saved once and must be the same on every rank, as `collect` found it last."""
        data = self.data if self.is_elastic else None
        given = {"scheduler": self.scheduler, "scaler": self.scaler, "data": data}
        objects = {name: held for name, held in given.items() if held is not None}
        objects |= {f"extra[{name!r}]": held for name, held in self.extra.items()}
        return digest_model(self.model, self._model, self._optimizer) | digest_objects(objects)

    def _own_item(self, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        data = self.data.state_dict() if self.data is not None and not self.is_elastic else None
        return {
            "version": VERSION,
            "rng": collect_rng(),
            "data": encode(data, "the state of data", tensors, "data"),
            "per_rank": {
                name: encode(held.state_dict(), f"the state of per_rank {name!r}", tensors, name)
                for name, held in self.per_rank.items()
            },
        }

    # ------------------------------------------------------------ loading

    def template(self, items: Mapping[str, bytes]) -> dict[str, Any]:
        """The tensors to be filled from a checkpoint with these opaque items; the optimizer's are made if missing.

        Model and optimizer are the live ones. Raises `StateMismatch`, and `DataNotElastic` when the number of ranks
        would have to be the saved one.
        """
        shared, own = self._parse(items)
        self._check_fit(shared)
        self._structure = None
        self._optimizer.find(name_parameters(self.model))
        self._optimizer.prepare(_read_kinds(shared["structure"]))
        self._optimizer.find(name_parameters(self.model))
        now = shared["now"]
        likes = self._similar_tensors()
        state: dict[str, Any] = {
            "model": dict(self._model.tensors),
            "optimizer": {"state": self._optimizer.tensors},
        }
        described = find_tensors([now[part] for part in _SHARED_PARTS])
        if described:
            state["extra"] = {item["name"]: _empty_like(item, likes) for item in described}
        if own is not None and (described := find_tensors([own["data"], own["per_rank"]])):
            state["own"] = {str(self.rank): {item["name"]: _empty_like(item, {}) for item in described}}
        return state

    def apply(self, items: Mapping[str, bytes], filled: Mapping[str, Any]) -> Loaded:
        """Take over the rest of a checkpoint, once the tensors of `template` are filled.

        Raises `StateMismatch`, `DataChanged` when it was made on other data, and what the objects raise.
        """
        shared, own = self._parse(items)
        now = shared["now"]
        tensors = filled.get("extra", {}).__getitem__
        notes: list[str] = []
        self._apply_model(decode(now["model"], tensors))
        self._apply_optimizer(shared["structure"], decode(now["settings"], tensors), decode(now["entries"], tensors))
        for name, held in (("scheduler", self.scheduler), ("scaler", self.scaler)):
            _hand_over(name, held, now[name], tensors, notes)
        for name in {**self.extra, **now["extra"]}:
            _hand_over(f"extra {name!r}", self.extra.get(name), now["extra"].get(name), tensors, notes)
        self.step, self.samples, self.tokens = now["step"], now["samples"], now["tokens"]
        is_reseeded = own is None
        if own is not None:
            self._apply_own(own, filled.get("own", {}).get(str(self.rank), {}).__getitem__, notes)
        elif self.per_rank:
            names = ", ".join(sorted(self.per_rank))
            notes.append(
                f"{names}: one state for each of {now['world_size']} ranks, none is taken over by {self.world}"
            )
        if self.is_elastic:
            _hand_over("data", self.data, now["data"], tensors, notes)
        if is_reseeded:  # last: what is handed over may draw
            seed_rng(self.seed, self.step, self.rank)
        elif own is not None:
            apply_rng(own["rng"])
        return Loaded(
            step=self.step,
            samples=self.samples,
            tokens=self.tokens,
            world_size=now["world_size"],
            is_reseeded=is_reseeded,
            notes=tuple(notes),
        )

    def _parse(self, items: Mapping[str, bytes]) -> tuple[dict[str, Any], dict[str, Any] | None]:
        try:
            shared = json.loads(items["shared"])
            version = shared["now"]["version"]
            own = items.get(f"rank.{self.rank}") if shared["now"]["world_size"] == self.world else None
            parsed = json.loads(own) if own is not None else None
        except (KeyError, ValueError, TypeError) as error:
            raise StateMismatch(f"it is no checkpoint of a trainer.state: {error!r}") from None
        if version != VERSION:
            raise StateMismatch(f"its items are of version {version}, this release reads {VERSION}")
        if parsed is None and shared["now"]["world_size"] == self.world:
            raise StateMismatch(f"it has no item of rank {self.rank}")
        return shared, parsed

    def _check_fit(self, shared: Mapping[str, Any]) -> None:
        now = shared["now"]
        if now["world_size"] != self.world and not now["is_elastic"]:
            raise DataNotElastic(now["world_size"], self.world)
        if self.data is not None and bool(now["is_elastic"]) != self.is_elastic:
            raise StateMismatch("the position in the data is that of another kind of loader than the one here")
        self._model.refresh()
        saved, here = set(shared["structure"]["model"]), set(self._model.tensors)
        if saved != here:
            raise StateMismatch(_compare("the checkpoint", saved, "the model", here))
        kind = shared["structure"].get("optimizer", self._optimizer.kind)
        if kind != self._optimizer.kind:
            raise StateMismatch(
                f"it has the state of the optimizer {kind}, and this training has {self._optimizer.kind}: train on "
                f"with {kind}, or begin a new run with the weights alone (torch.distributed.checkpoint loads them)"
            )

    def _similar_tensors(self) -> dict[str, torch.Tensor]:
        # Of objects that are sharded as this process has them (the averaged weights of an FSDP2 model).
        found: dict[str, torch.Tensor] = {}
        self._shared_item(found)
        return found

    def _apply_model(self, others: dict[str, Any]) -> None:
        if others:
            self.model.load_state_dict(others, strict=False)

    def _apply_optimizer(self, structure: Mapping[str, Any], settings: Any, entries: Any) -> None:
        names = structure["model"]
        try:
            self._optimizer.apply_settings(settings, [[names[i] for i in group] for group in structure["groups"]])
        except ValueError as error:
            raise StateMismatch(str(error)) from None
        for name, values in entries.items():
            self.optimizer.state[self._optimizer.parameters[name]].update(values)

    def _apply_own(self, own: Mapping[str, Any], tensors: Callable[[str], torch.Tensor], notes: list[str]) -> None:
        for name in {**self.per_rank, **own["per_rank"]}:
            _hand_over(f"per_rank {name!r}", self.per_rank.get(name), own["per_rank"].get(name), tensors, notes)
        if not self.is_elastic:
            _hand_over("data", self.data, own["data"], tensors, notes)


_SHARED_PARTS = ("model", "settings", "entries", "scheduler", "scaler", "data", "extra")


def _refuse_stateless(name: str, held: object) -> None:
    missing = [method for method in ("state_dict", "load_state_dict") if not callable(getattr(held, method, None))]
    if not missing:
        return
    instead = (
        "give what says which samples come next: trainer.loaders.GlobalBatches as the batch_sampler of a DataLoader, "
        "or trainer.loaders.PerRankData around a loader with a state of its own"
        if name == "data"
        else "give an object whose state can be saved"
    )
    raise TypeError(f"{name} is a {type(held).__qualname__}, which has no {missing[0]}(): {instead}")


def _read_kinds(structure: Mapping[str, Any]) -> dict[str, Any]:
    try:
        kinds = [{key: read_description(plain) for key, plain in kind.items()} for kind in structure["kinds"]]
        return {structure["model"][int(i)]: kinds[kind] for i, kind in structure["kind_of"].items()}
    except (ValueError, LookupError, AttributeError, TypeError) as error:
        raise StateMismatch(f"its description of the optimizer can't be read: {error!r}") from None


def _empty_like(item: Mapping[str, Any], likes: Mapping[str, torch.Tensor]) -> torch.Tensor:
    dtype, shape = dtype_named(item["dtype"]), tuple(item["shape"])
    like = likes.get(item["name"])
    if like is not None and (tuple(like.shape), like.dtype) == (shape, dtype):
        return torch.empty_like(like, requires_grad=False)
    return torch.empty(shape, dtype=dtype)


def _hand_over(
    name: str, held: Stateful | None, plain: Any, tensors: Callable[[str], torch.Tensor], notes: list[str]
) -> None:
    if held is None and plain is not None:
        notes.append(f"{name}: the checkpoint has its state, and this process nothing to take it over")
    elif held is not None and plain is None:
        notes.append(f"{name}: the checkpoint has no state of it, it begins anew")
    elif held is not None and plain:  # a disabled gradient scaler's state is empty
        held.load_state_dict(decode(plain, tensors))


def _compare(saved_by: str, saved: set[str], here_by: str, here: set[str]) -> str:
    parts = [
        f"{one} has {len(left)} tensors that {other} lacks, {min(left)} for one"
        for one, left, other in ((saved_by, saved - here, here_by), (here_by, here - saved, saved_by))
        if left
    ]
    return "; ".join(parts)
