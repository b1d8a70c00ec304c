"""Reads the `.metadata` of a distributed checkpoint without unpickling: only its own few types are built, as stand-ins.

The file is a pickle that a job wrote. Every global that it names is looked up in a table; what is not in it ends the
reading. torch is never imported.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from supervisor.layouts.tree import Broken

MAX_METADATA_BYTES = 256 * 1024 * 1024
MAX_ITEMS = 5_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """Where one piece of state lies; `is_plain` False: it went through a transform (compressed, for example)."""

    key: str
    path: str
    offset: int
    length: int
    is_plain: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Metadata:
    """What the file says: the keys of the state, and where each piece of it lies."""

    keys: tuple[str, ...]
    items: tuple[Item, ...]


class _Record:
    """Stands in for a dataclass of torch: takes whatever state the pickle gives it, and does nothing."""

    def __init__(self, *values: object) -> None:
        self.values = values

    def __setstate__(self, state: object) -> None:
        if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):
            state = state[1]  # of a class with slots
        self.state: Mapping[Any, Any] = state if isinstance(state, dict) else {}

    def field(self, name: str) -> Any:
        return getattr(self, "state", {}).get(name)


def _take_first(*values: object) -> object:
    return values[0] if values else None


def _join(*parts: object) -> str:
    return "/".join(str(part) for part in parts)


_DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "bool"),
    *("uint8", "uint16", "uint32", "uint64", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
)
_DCP = "torch.distributed.checkpoint."

_KNOWN: Mapping[tuple[str, str], Any] = {
    **{
        (_DCP + "metadata", name): _Record
        for name in (
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
        )
    },
    (_DCP + "metadata", "_MEM_FORMAT_ENCODING"): _take_first,
    # Megatron keeps the plans of all ranks in it as well
    **{(_DCP + "planner", name): _Record for name in ("SavePlan", "WriteItem", "TensorWriteData", "BytesIOWriteData")},
    **{("megatron.core.dist_checkpointing.strategies.torch", n): _Record for n in ("MCoreMetadata", "MCoreSavePlan")},
    (_DCP + "planner", "WriteItemType"): _take_first,
    (_DCP + "filesystem", "_StorageInfo"): _Record,
    ("torch", "Size"): _take_first,
    ("torch.serialization", "_get_layout"): _take_first,
    **{("torch", name): name for name in _DTYPES},
    **{(module, name): _join for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "PurePosixPath")},
    ("collections", "OrderedDict"): dict,
}


class _Reader(pickle.Unpickler):
    """An unpickler that can name nothing but the table's entries."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        try:
            return _KNOWN[module_name, global_name]
        except KeyError:
            name = f"{module_name[:80]}.{global_name[:80]}"
            raise Broken(f"it names {name}, which is none of a checkpoint's types") from None

    def persistent_load(self, _pid: Any, /) -> Any:
        raise Broken("it refers to something outside of it")


def read_metadata(data: bytes) -> Metadata:
    """The content of a `.metadata` file; raises Broken for anything else."""
    if not data:
        raise Broken("it is empty")
    try:
        top = _Reader(io.BytesIO(data)).load()
        return _convert(top)
    except Broken:
        raise
    except Exception as error:  # noqa: BLE001 - garbage in a pickle may raise anything
        raise Broken(f"it can't be read: {type(error).__name__}: {str(error)[:100]}") from None


def _convert(top: Any) -> Metadata:
    if not isinstance(top, _Record):
        raise Broken("it is not a checkpoint's metadata")
    keys, places = top.field("state_dict_metadata"), top.field("storage_data")
    if not isinstance(keys, dict) or not isinstance(places, dict):
        raise Broken("it holds no list of what is stored")
    if len(places) > MAX_ITEMS:
        raise Broken(f"it lists more than {MAX_ITEMS} pieces")
    items = tuple(_item(index, info) for index, info in places.items())
    return Metadata(keys=tuple(str(key) for key in keys), items=items)


def _item(index: Any, info: Any) -> Item:
    key, path, offset, length = index.field("fqn"), *(info.field(n) for n in ("relative_path", "offset", "length"))
    if not isinstance(path, str) or type(offset) is not int or type(length) is not int or offset < 0 or length < 0:
        raise Broken("it says of a piece neither where it lies nor how long it is")
    return Item(key=str(key), path=path, offset=offset, length=length, is_plain=not info.field("transform_descriptors"))
