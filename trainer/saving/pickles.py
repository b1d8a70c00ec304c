"""The pickle in a saved tensor's zip: how its bytes are to be seen. The same as torch.save writes for one tensor."""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch._utils import _rebuild_tensor_v2, _rebuild_tensor_v3

MAX_PERMUTED_DIMENSIONS = 6  # of tensors that are saved in another order of dimensions than theirs
_PROTOCOL = 2  # torch.save's
_STORAGES = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.int64: torch.LongStorage,
    torch.int32: torch.IntStorage,
    torch.int16: torch.ShortStorage,
    torch.int8: torch.CharStorage,
    torch.uint8: torch.ByteStorage,
    torch.bool: torch.BoolStorage,
    torch.complex128: torch.ComplexDoubleStorage,
    torch.complex64: torch.ComplexFloatStorage,
}


def pickle_tensor(dtype: str, shape: Sequence[int], stride: Sequence[int]) -> bytes:
    """What stands in `data.pkl` for such a tensor, whose storage is the zip's `data/0` from its first byte.

    `dtype`: its name in torch.
    """
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=_PROTOCOL).dump(_Shown(getattr(torch, dtype), tuple(shape), tuple(stride)))
    return buffer.getvalue()


def dense_stride(sizes: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """The stride of a tensor without gaps whose dimensions lie in memory in this order, the outermost first."""
    stride, step = [0] * len(sizes), 1
    for dim in reversed(order):
        stride[dim] = step
        step *= max(sizes[dim], 1)
    return tuple(stride)


class _Bytes:
    """Stands for the storage of a tensor."""

    def __init__(self, persistent_id: tuple[Any, ...]) -> None:
        self.persistent_id = persistent_id


class _Shown:
    """Pickles as the tensor that it describes."""

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
        self._dtype, self._shape, self._stride = dtype, shape, stride

    def __reduce__(self) -> tuple[Any, ...]:
        count = 1
        for size in self._shape:
            count *= size
        storage_type = _STORAGES.get(self._dtype)
        hooks: OrderedDict[Any, Any] = OrderedDict()
        view = (0, self._shape, self._stride, False, hooks)
        if storage_type is not None:
            return _rebuild_tensor_v2, (_Bytes(("storage", storage_type, "0", "cpu", count)), *view)
        storage = _Bytes(("storage", torch.UntypedStorage, "0", "cpu", count * self._dtype.itemsize))
        return _rebuild_tensor_v3, (storage, *view, self._dtype)


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return obj.persistent_id if isinstance(obj, _Bytes) else None
