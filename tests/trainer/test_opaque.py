"""Values that are no tensors: as JSON and back, and nothing that would run code."""

from __future__ import annotations

import enum
import json
import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.torch

_LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.frozensets(st.integers() | st.text())
)
_VALUES: st.SearchStrategy[Any] = st.recursive(
    _LEAVES,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.integers(), st.text()), inner)
    ),
    max_leaves=20,
)


def _there_and_back(value: Any) -> Any:
    from trainer.contents.opaque import decode, encode

    tensors: dict[str, Any] = {}
    plain = json.loads(json.dumps(encode(value, "it", tensors)))
    return decode(plain, tensors.__getitem__)


@given(_VALUES)
def test_what_went_in_comes_out(value: Any) -> None:
    assert _there_and_back(value) == value


@given(_VALUES)
def test_types_and_the_order_of_keys_are_kept(value: Any) -> None:
    assert repr(_there_and_back({"a": value})) == repr({"a": value}) or "frozenset" in repr(value)


@pytest.mark.parametrize(
    "value",
    [math.inf, -math.inf, Counter({3: 2, 9: 1}), OrderedDict([("b", 1), ("a", 2)]), {"!tensor": 1}, (), -0.0, 2**80],
)
def test_what_schedulers_and_optimizers_hold_comes_back_as_it_was(value: Any) -> None:
    back = _there_and_back(value)
    assert (repr(back), type(back)) == (repr(value), type(value))


def test_numbers_and_arrays_of_numpy_come_back_with_their_type() -> None:
    import numpy as np

    for value in (np.float32(0.1), np.arange(6, dtype=np.uint16).reshape(2, 3), np.zeros((0, 2))):
        back = _there_and_back({"x": value})["x"]
        assert type(back) is type(value)
        assert back.dtype == value.dtype
        assert np.array_equal(back, value)


def test_tensors_are_taken_out_under_names_of_their_place() -> None:
    import torch

    from trainer.contents.opaque import encode, find_tensors

    tensors: dict[str, torch.Tensor] = {}
    value = {"ema": {"w": torch.ones(2), 3: [torch.zeros(1, dtype=torch.int64)]}, "ema.w": torch.ones(5)}
    plain = encode(value, "extra", tensors)
    assert {name: tuple(t.shape) for name, t in tensors.items()} == {"ema.w": (2,), "ema.3.0": (1,), "ema.w'": (5,)}
    assert {(f["name"], f["dtype"]) for f in find_tensors(plain)} == {
        ("ema.w", "float32"),
        ("ema.3.0", "int64"),
        ("ema.w'", "float32"),
    }


def test_what_torch_brings_back_without_running_code_is_saved_as_torch_saves_it() -> None:
    import torch

    assert _there_and_back([torch.float16, torch.device("cpu"), torch.Size([2, 3])]) == [
        torch.float16,
        torch.device("cpu"),
        torch.Size([2, 3]),
    ]


class Colour(enum.Enum):
    RED = 1


def _lambda() -> Callable[[], int]:
    return lambda: 1


@pytest.mark.parametrize("make", [lambda: Colour.RED, object, _lambda])
def test_an_object_that_would_not_come_back_is_refused_by_its_name(make: Callable[[], Any]) -> None:
    from trainer.contents.opaque import UnsavableObject, encode

    with pytest.raises(UnsavableObject, match=r"extra\['vocabulary'\]: tables.1.colour is a "):
        encode({"tables": [1, {"colour": make()}]}, "extra['vocabulary']", {})


def test_arrays_that_would_come_back_as_others_are_refused_by_name() -> None:
    import numpy as np

    from trainer.contents.opaque import UnsavableObject, encode

    records = np.zeros(2, dtype=[("a", "i4"), ("b", "f8")])
    for value in (np.ma.masked_array([1, 2, 3], mask=[False, True, False]), records, records[0], np.rec.array(records)):
        with pytest.raises(UnsavableObject, match=r"the state of it: x\.y is a numpy"):
            encode({"x": {"y": value}}, "the state of it", {})
