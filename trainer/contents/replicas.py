"""What is saved once must be the same on every rank. Compared when saves are planned, and refused by name.

A checkpoint has rank 0's names, its settings, and its tensors where they are not sharded. Ranks that train parameters
of their own under the same names would all come back with rank 0's; ranks with other names would not come back at all.
Of large tensors the beginning and the end are compared, `LIMIT_BYTES` in all on each rank: copies that have become
different, or were never copies, differ everywhere.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import xxhash
from torch.nn.parallel import DistributedDataParallel

from trainer.contents.leaves import ModelLeaves, OptimizerLeaves, UnsupportedModel, name_parameters
from trainer.contents.opaque import UnsavableObject, encode

Key = tuple[str, str]  # (kind, name); the kinds are those of _REFUSALS
Gather = Callable[[Any], list[Any]]

LIMIT_BYTES = 256 << 20
_END_BYTES = 1 << 20  # of each end of a tensor, at most
_LEAST_BYTES = 4096
_NAMED_RANKS = 8


def digest_model(model: torch.nn.Module, leaves: ModelLeaves, optimizer: OptimizerLeaves) -> dict[Key, str]:
    """A digest by name of all that ranks must have alike of a model and its optimizer; "" where the name is all.

    Not of buffers, which are rank 0's, nor of what DDP keeps alike, nor of a module's extra state.
    """
    settings: dict[str, torch.Tensor] = {}
    plain = {
        "class": optimizer.kind,
        "parameter groups": optimizer.names,
        "settings": encode(optimizer.settings(), "the optimizer", settings),
    }
    names = name_parameters(model)
    alike = {names[parameter] for parameter in _find_synchronized(model) if parameter in names} | leaves.buffers
    found: dict[Key, str] = {("setting", name): _digest_value(value) for name, value in plain.items()}
    tensors: dict[Key, torch.Tensor] = {("setting", name): tensor for name, tensor in settings.items()}
    for name, tensor in leaves.tensors.items():
        found["name", name] = ""
        if name not in alike:
            tensors["parameter", name] = tensor
    for name, entries in optimizer.tensors.items():
        found |= {("state name", f"{name}.{key}"): "" for key in entries}
        if name not in alike:
            tensors |= {("state", f"{name}.{key}"): tensor for key, tensor in entries.items()}
    return found | _digest_tensors(tensors)


def digest_objects(objects: Mapping[str, Any]) -> dict[Key, str]:
    """A digest of the state of each object by its name, and of each tensor in it; buffers of modules are rank 0's."""
    found: dict[Key, str] = {}
    tensors: dict[Key, torch.Tensor] = {}
    for name, held in objects.items():
        own: dict[str, torch.Tensor] = {}
        found["object", name] = _digest_value(encode(held.state_dict(), f"the state of {name}", own))
        buffers = dict(held.named_buffers()) if isinstance(held, torch.nn.Module) else {}
        tensors |= {("object", f"{name}: {key}"): own[key] for key in own.keys() - buffers.keys()}
    return found | _digest_tensors(tensors)


def refuse_differing(mine: Mapping[Key, str], rank: int, gather: Gather) -> None:
    """Raise, on every rank, what is not the same on all: `UnsupportedModel`, `UnsavableObject` for other objects."""
    whole = _digest_value(sorted((*key, digest) for key, digest in mine.items()))
    if len(set(gather(whole))) == 1:
        return
    first = gather(dict(mine) if rank == 0 else None)[0]
    found = gather(_find_difference(mine, first))
    key = _earliest(answer for answer in found if answer is not None)
    assert key is not None
    ranks = [str(other) for other, answer in enumerate(found) if answer == key]
    raise _refusal(key, ", ".join(ranks[:_NAMED_RANKS]))


def _find_difference(mine: Mapping[Key, str], first: Mapping[Key, str]) -> Key | None:
    missing = _earliest(mine.keys() ^ first.keys())  # before contents: these would be said of the wrong tensors
    return missing or _earliest(key for key, digest in mine.items() if first[key] != digest)


def _earliest(keys: Iterable[Key]) -> Key | None:
    order = list(_REFUSALS)
    return min(keys, key=lambda key: (order.index(key[0]), key[1]), default=None)


def _refusal(key: Key, ranks: str) -> TypeError:
    kind, name = key
    make, words = _REFUSALS[kind]
    return make(words.format(name=name, ranks=ranks))


_ALL_ALIKE = (
    "every rank must have the same ones, whole or sharded (DDP, fully_shard, DTensor); the stages of a pipeline "
    "can't be saved"
)
_OWN_WEIGHTS = (
    "and a tensor that is not sharded is saved once, as rank 0's. Use DDP or fully_shard (FSDP2), make it a DTensor, "
    "or keep what is a rank's own in a module that is not part of `model`, given as per_rank"
)
_REFUSALS: Mapping[str, tuple[type[TypeError], str]] = {  # causes before what comes of them
    "name": (
        UnsupportedModel,
        "ranks {ranks} have other parameters than rank 0, {name} for one: " + _ALL_ALIKE,
    ),
    "setting": (
        UnsupportedModel,
        "the optimizer's {name} on ranks {ranks} differs from rank 0's: it is saved once and must be the same",
    ),
    "parameter": (UnsupportedModel, "{name} of the model on ranks {ranks} differs from rank 0's, " + _OWN_WEIGHTS),
    "state name": (
        UnsupportedModel,
        "ranks {ranks} have other optimizer state than rank 0, {name} for one: every rank must train the same ones",
    ),
    "state": (UnsupportedModel, "the optimizer's {name} on ranks {ranks} differs from rank 0's, " + _OWN_WEIGHTS),
    "object": (UnsavableObject, "the state of {name} on ranks {ranks} differs from rank 0's: give it as per_rank"),
}


def _find_synchronized(model: torch.nn.Module) -> set[torch.Tensor]:
    return {
        parameter
        for module in model.modules()
        if isinstance(module, DistributedDataParallel)
        for name, parameter in module.module.named_parameters()
        if name not in module.parameters_to_ignore
    }


def _digest_value(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=8).hexdigest()


def _digest_tensors(tensors: Mapping[Key, torch.Tensor]) -> dict[Key, str]:
    """A digest of each; "" where each rank has a part of its own, or there are no such bytes."""
    plain = sum(type(tensor) is torch.Tensor for tensor in tensors.values())
    end_bytes = max(_LEAST_BYTES, min(_END_BYTES, LIMIT_BYTES // (2 * max(1, plain))))
    return {key: _digest(tensor, end_bytes) for key, tensor in tensors.items()}


def _digest(tensor: torch.Tensor, end_bytes: int) -> str:
    if type(tensor) is not torch.Tensor:
        return ""
    try:
        hasher = xxhash.xxh3_64()
        for part in _ends(tensor, end_bytes):
            hasher.update(part.contiguous().view(torch.uint8).cpu().numpy().data)
    except (RuntimeError, NotImplementedError, TypeError):  # sparse, quantized, on no device
        return ""
    return hasher.hexdigest()


def _ends(tensor: torch.Tensor, end_bytes: int) -> list[torch.Tensor]:
    if not tensor.numel():
        return []
    plain = tensor.detach().resolve_conj().resolve_neg() if tensor.dim() else tensor.detach().reshape(1)
    count = max(1, end_bytes // plain.element_size())
    rows = -(-count * len(plain) // plain.numel())
    if 2 * rows >= len(plain):
        flat = plain.reshape(-1)
        return [flat] if flat.numel() <= 2 * count else [flat[:count], flat[-count:]]
    return [plain[:rows].reshape(-1)[:count], plain[-rows:].reshape(-1)[-count:]]
