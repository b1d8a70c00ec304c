"""What the `.metadata` of a distributed checkpoint says: which tensors there are, and where each part of them lies.

The file is a pickle. It is read by `trainer.format.pickled`: only the names of this table may occur in it, nothing of
it is run, and torch is never imported. Whoever may write to a folder of checkpoints may have written this file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainer.format.entries import Chunk, Entries, Entry
from trainer.format.pickled import MAX_OPCODES, Names, PickleRefused, PickleTooLong, Record, Table, read_pickle
from trainer.format.series import MAX_DIMENSIONS, make_readers

__all__ = [
    "ITEM_BYTES",
    "MAX_METADATA_BYTES",
    "METADATA_NAME",
    "Chunk",
    "Entries",
    "Entry",
    "Metadata",
    "MetadataRefused",
    "MetadataTooLarge",
    "Tensor",
    "read_metadata",
]

METADATA_NAME = ".metadata"
MAX_METADATA_BYTES = 768 * 1024 * 1024  # some 5 million parts
MAX_PATH_CHARS = 4096


class MetadataRefused(ValueError):
    """It is not the metadata of a distributed checkpoint; the message says why."""


class MetadataTooLarge(MetadataRefused):
    """It may well be, and is larger than is read here: that says nothing of the checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """One tensor as it is saved; `dtype` is torch's name of it, "float32"."""

    dtype: str
    size: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metadata:
    """What the file says. `byte_keys`: of everything that is no tensor."""

    tensors: Mapping[str, Tensor]
    byte_keys: frozenset[str]
    entries: Entries

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of all that is stored."""
        return (*self.tensors, *self.byte_keys)


ITEM_BYTES: Mapping[str, int] = {
    **dict.fromkeys(("complex128",), 16),
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    **dict.fromkeys(("float32", "int32", "uint32", "complex32", "qint32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16", "bits16"), 2),
    **dict.fromkeys(("int8", "uint8", "bool", "qint8", "quint8", "bits8", "float4_e2m1fn_x2"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
    **dict.fromkeys(("quint4x2", "quint2x4", "bits1x8", "bits2x4", "bits4x2"), 1),
    **{f"{kind}{bits}": 1 for kind in ("int", "uint") for bits in range(1, 8)},
}


def read_metadata(data: bytes, *, is_bounded: bool = True) -> Metadata:
    """The content of a `.metadata` file; raises `MetadataRefused` for anything else.

    Raises `MetadataTooLarge` where it could take more than 3 GB of memory, unless `is_bounded` is False.
    """
    if not data:
        raise MetadataRefused("it is empty")
    if is_bounded and len(data) > MAX_METADATA_BYTES:
        raise MetadataTooLarge(f"it has {len(data)} bytes, more than {MAX_METADATA_BYTES}")
    limit = MAX_OPCODES if is_bounded else len(data)
    try:
        return _convert(read_pickle(data, _NAMES, series=make_readers, max_opcodes=limit))
    except PickleTooLong as error:
        raise MetadataTooLarge(str(error)) from None
    except PickleRefused as error:
        raise MetadataRefused(str(error)) from None


# ---------------------------------------------------------------- the names that may occur in it


def _take_first(arguments: tuple[Any, ...]) -> Any:
    if not arguments:
        raise PickleRefused("it makes a value of nothing")
    return arguments[0]


def _start_dict(arguments: tuple[Any, ...]) -> Table:
    if arguments:
        raise PickleRefused("it makes a dictionary of something")
    return Table()


def _join(arguments: tuple[Any, ...]) -> str:
    if not all(type(part) is str for part in arguments) or sum(map(len, arguments)) > MAX_PATH_CHARS:
        raise PickleRefused("it makes a path of what is none")
    return "/".join(arguments)


_DCP = "torch.distributed.checkpoint."
_RECORDS = {
    _DCP + "metadata": (
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "BytesStorageMetadata"),
        *("ChunkStorageMetadata", "TensorProperties"),
    ),
    _DCP + "filesystem": ("_StorageInfo",),
    # Megatron keeps the plans of all ranks in it as well
    _DCP + "planner": ("SavePlan", "WriteItem", "TensorWriteData", "BytesIOWriteData"),
    "megatron.core.dist_checkpointing.strategies.torch": ("MCoreMetadata", "MCoreSavePlan"),
}

_NAMES: Names = {
    **{(module, name): Record for module, names in _RECORDS.items() for name in names},
    **{("torch", name): name for name in ITEM_BYTES},
    (_DCP + "metadata", "_MEM_FORMAT_ENCODING"): _take_first,
    (_DCP + "planner", "WriteItemType"): _take_first,
    ("torch", "Size"): _take_first,
    ("torch.serialization", "_get_layout"): _take_first,
    **{(module, name): _join for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "PurePosixPath")},
    ("collections", "OrderedDict"): _start_dict,
}

# ---------------------------------------------------------------- from stand-ins to what they say


def _convert(top: Any) -> Metadata:
    if type(top) is not Record:
        raise MetadataRefused("it is not a checkpoint's metadata")
    described, places = top.field("state_dict_metadata"), top.field("storage_data")
    if type(described) is not Table or type(places) is not Table:
        raise MetadataRefused("it holds no list of what is stored")
    if not all(type(key) is str for key in described):
        raise MetadataRefused("it names what is stored by something that is no text")
    tensors = {key: _tensor(key, said) for key, said in described.items() if _is_tensor(said)}
    return Metadata(
        tensors=tensors,
        byte_keys=frozenset(key for key in described if key not in tensors),
        entries=_entries(places),
    )


def _entries(places: Table) -> Entries:
    entries = places.pairs if places.pairs is not None else Entries()
    entries.extend(_entry(index, info) for index, info in places.items())
    return entries


def _is_tensor(said: Any) -> bool:
    if type(said) is not Record:
        raise MetadataRefused("it describes something by what is no record")
    return said.state is not None and said.field("size") is not None


def _tensor(key: str, said: Record) -> Tensor:
    properties, chunks = said.field("properties"), said.field("chunks")
    if type(properties) is not Record or type(chunks) is not list:
        raise MetadataRefused(f"it does not say how {key[:100]} is stored")
    return Tensor(
        dtype=_dtype(key, properties),
        size=_numbers(said.field("size")),
        chunks=tuple(_chunk(key, chunk) for chunk in chunks),
    )


def _dtype(key: str, properties: Record) -> str:
    state = properties.state
    found = state[0] if type(state) is tuple and state else properties.field("dtype")
    if type(found) is not str or found not in ITEM_BYTES:
        raise MetadataRefused(f"it does not say of which type {key[:100]} is")
    return found


def _chunk(key: str, said: Any) -> Chunk:
    if type(said) is Chunk:
        return said
    if type(said) is not Record:
        raise MetadataRefused(f"it describes a part of {key[:100]} by what is no record")
    return Chunk(offsets=_numbers(said.field("offsets")), sizes=_numbers(said.field("sizes")))


def _numbers(said: Any) -> tuple[int, ...]:
    if type(said) is not tuple or len(said) > MAX_DIMENSIONS:
        raise MetadataRefused("it gives a size that is none")
    for number in said:
        if type(number) is not int or not 0 <= number < 2**63:
            raise MetadataRefused("it gives a size that is none")
    return said


def _entry(index: Any, info: Any) -> Entry:
    if type(index) is not Record or type(info) is not Record:
        raise MetadataRefused("it says of an item neither what it is nor where it lies")
    key, offsets, path = index.field("fqn"), index.field("offset"), info.field("relative_path")
    offset, length = info.field("offset"), info.field("length")
    if type(key) is not str or type(path) is not str or type(offset) is not int or type(length) is not int:
        raise MetadataRefused("it says of an item neither where it lies nor how long it is")
    if not 0 <= offset < 2**63 or not 0 <= length < 2**63:
        raise MetadataRefused("it says of an item neither where it lies nor how long it is")
    return Entry(
        key=key,
        offsets=None if offsets is None else _numbers(offsets),
        path=path,
        offset=offset,
        length=length,
        is_plain=not info.field("transform_descriptors"),
    )
