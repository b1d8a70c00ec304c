"""A nested Python value as JSON, with its tensors taken out; and back.

What JSON can't say is written as an object with one key that begins with "!": tuples, bytes, numpy arrays, dicts
with other keys than strings. A leaf of any other kind is saved as torch saves it, if `torch.load(weights_only=True)`
brings it back: nothing that is loaded may run code. Else it is refused, with its place in the value.
"""

from __future__ import annotations

import base64
import io
import json
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch


class UnsavableObject(TypeError):
    """A value that would not come back from a checkpoint; the message names the object and the place in it."""


def encode(value: Any, where: str, tensors: MutableMapping[str, torch.Tensor], path: str = "") -> Any:
    """`value` as what json.dumps takes; its tensors go to `tensors` under names made of their place.

    `where` names the object in errors. Raises `UnsavableObject`.
    """
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if isinstance(value, torch.Tensor):
        return {"!tensor": _take(value.detach(), tensors, path or "value")}
    if kind is list:
        return [encode(item, where, tensors, _join(path, i)) for i, item in enumerate(value)]
    if kind is dict and all(type(key) is str and not key.startswith("!") for key in value):
        return {key: encode(item, where, tensors, _join(path, key)) for key, item in value.items()}
    if kind in _MAPPINGS:
        return {_MAPPINGS[kind]: [_encode_pair(pair, where, tensors, path) for pair in value.items()]}
    if kind in _SEQUENCES:
        items = [encode(item, where, tensors, _join(path, i)) for i, item in enumerate(value)]
        # in one order on every rank and in every process, which a set's own is not
        return {_SEQUENCES[kind]: items if kind is tuple else sorted(items, key=json.dumps)}
    if kind is bytes:
        return {"!bytes": base64.b64encode(value).decode()}
    if _is_plain_numpy(value):
        return {
            "!numpy": [
                value.dtype.str,
                list(value.shape),
                base64.b64encode(value.tobytes()).decode(),
                kind is np.ndarray,
            ]
        }
    return {"!torch": _save(value, f"{where}{_spell(path)}")}


def decode(plain: Any, tensors: Callable[[str], torch.Tensor]) -> Any:
    """The value that `encode` was given; `tensors` gives a tensor by its name."""
    if isinstance(plain, list):
        return [decode(item, tensors) for item in plain]
    if not isinstance(plain, dict):
        return plain
    tag = next(iter(plain), "")
    if not tag.startswith("!"):
        return {key: decode(item, tensors) for key, item in plain.items()}
    content = plain[tag]
    if tag == "!tensor":
        return tensors(content["name"])
    if tag == "!bytes":
        return base64.b64decode(content)
    if tag == "!numpy":
        dtype, shape, data, is_array = content
        array = np.frombuffer(base64.b64decode(data), dtype=np.dtype(dtype)).reshape(shape).copy()
        return array if is_array else array[()]
    if tag == "!torch":
        return torch.load(io.BytesIO(base64.b64decode(content)), weights_only=True)
    return _MAKERS[tag]([decode(item, tensors) for item in content])


def find_tensors(plain: Any) -> list[dict[str, Any]]:
    """What `plain` says of the tensors that were taken out: name, dtype and shape of each."""
    if isinstance(plain, list):
        return [found for item in plain for found in find_tensors(item)]
    if not isinstance(plain, dict):
        return []
    if "!tensor" in plain:
        return [plain["!tensor"]]
    return [found for item in plain.values() for found in find_tensors(item)]


def dtype_named(name: str) -> torch.dtype:
    """The dtype that `find_tensors` names."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is no dtype of this torch")  # noqa: TRY004 - text of a file, not an argument
    return found


def _is_plain_numpy(value: Any) -> bool:
    """True for what its type's name, its shape and its bytes say all of: no mask, no fields, no type from elsewhere."""
    if type(value) is not np.ndarray and not isinstance(value, np.generic):
        return False
    return not value.dtype.hasobject and np.dtype(value.dtype.str) == value.dtype


def _encode_pair(pair: tuple[Any, Any], where: str, tensors: MutableMapping[str, torch.Tensor], path: str) -> list[Any]:
    key, item = pair
    return [encode(key, where, tensors, _join(path, "key")), encode(item, where, tensors, _join(path, key))]


def _take(tensor: torch.Tensor, tensors: MutableMapping[str, torch.Tensor], path: str) -> dict[str, Any]:
    name = path
    while name in tensors:  # {"a.b": …} beside {"a": {"b": …}}
        name += "'"
    tensors[name] = tensor
    return {"name": name, "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _spell(path: str) -> str:
    return f": {path}" if path else ""


_SEQUENCES: Mapping[type, str] = {tuple: "!tuple", set: "!set", frozenset: "!frozenset"}
_MAPPINGS: Mapping[type, str] = {dict: "!dict", OrderedDict: "!ordered", Counter: "!counter"}
_MAKERS: Mapping[str, Callable[[Any], Any]] = {
    "!tuple": tuple,
    "!set": set,
    "!frozenset": frozenset,
    "!dict": dict,
    "!ordered": OrderedDict,
    "!counter": lambda pairs: Counter(dict(pairs)),
}


def _save(value: Any, where: str) -> str:
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
        torch.load(io.BytesIO(stream.getvalue()), weights_only=True)
    except Exception as error:
        raise UnsavableObject(
            f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint can't bring back "
            f"without running code: let its state_dict() give numbers, text, tensors, lists and dicts of them"
        ) from error
    return base64.b64encode(stream.getvalue()).decode()
