"""Files of safetensors: a header that says where each tensor lies, and no checksum."""

from __future__ import annotations

import struct

import msgspec

from supervisor.layouts.found import Piece
from supervisor.layouts.tree import Broken, Tree, read_at

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_INDEX_BYTES = 64 * 1024 * 1024


class _Tensor(msgspec.Struct):
    data_offsets: tuple[int, int]


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def to_piece(tree: Tree, path: str) -> Piece:
    """The file as one piece; raises Broken unless its tensors fill it exactly."""
    return tree.once("safetensors", path, lambda: _inspect(tree, path))


def _inspect(tree: Tree, path: str) -> Piece:
    size = tree.file(path).size
    with tree.open(path) as fd:
        start = read_at(fd, 0, 8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
            raise Broken(f"{path} has no header: it is cut, or not of safetensors")
        header = read_at(fd, 8, length)
    end = 8 + length + _data_size(path, header)
    if size != end:
        raise Broken(f"{path} has {size} bytes, {end} are needed")
    return Piece(path=path, offset=0, length=size, seal="none")


def _data_size(path: str, header: bytes) -> int:
    try:
        raw = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        tensors = [msgspec.json.decode(value, type=_Tensor) for key, value in raw.items() if key != "__metadata__"]
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError):
        raise Broken(f"{path}: its header can't be read") from None
    return max((tensor.data_offsets[1] for tensor in tensors), default=0)


def read_index(tree: Tree, path: str) -> tuple[str, ...]:
    """Names of the files that a `...index.json` of a sharded model lists, sorted."""
    try:
        index = msgspec.json.decode(tree.read(path, MAX_INDEX_BYTES), type=_Index)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError):
        raise Broken(f"{path} can't be read") from None
    if not index.weight_map:
        raise Broken(f"{path} lists no file")
    return tuple(sorted(set(index.weight_map.values())))
