"""One Flight Recorder dump: what is read of it, and that nothing of it is run nor believed."""

from __future__ import annotations

import json
import os
import pickle
import random
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.trainer.flight.nccl_dumps import BEGAN_NS, dump, entry
from trainer.flight import reader
from trainer.flight.reader import Dump, Entry, FlightUnreadable, Group, Status, read_dump

DATA = Path(__file__).parents[2] / "data" / "flight"
REAL = (DATA / "sleeper" / "fr_trace_rank_0").read_bytes()
NCCL = dump([entry(1), entry(2, state="started")], groups={"0": "[0, 1]"})


def test_a_dump_of_gloo_is_read_with_its_quirks() -> None:
    found = read_dump(REAL)
    assert found.version == (2, 10)
    assert found.groups["0"].description == "default_pg"
    assert found.groups["0"].ranks == (0, 1, 2, 3)
    assert [(e.seq, e.op, e.state, e.is_over) for e in found.entries] == [
        (1, "gloo:all_reduce", "scheduled", True),
        (2, "gloo:all_reduce", "scheduled", True),
        (3, "gloo:all_reduce", "scheduled", True),
        (4, "gloo:all_reduce", "scheduled", False),
    ]
    assert found.entries[0].input_sizes == ((16, 4),)


def test_a_dump_of_nccl_is_read_with_all_that_it_tells() -> None:
    found = read_dump(NCCL)
    assert found.library == "2.27.3"
    assert found.groups == {"0": Group(name="0", description="default_pg", ranks=(0, 1))}
    assert found.status == {"0": Status(enqueued=2, started=None, completed=1)}
    assert found.entries[1] == Entry(
        record=2,
        group="0",
        seq=2,
        op="nccl:all_reduce",
        input_sizes=((8,),),
        output_sizes=((8,),),
        input_dtypes=("Float",),
        output_dtypes=("Float",),
        state="started",
        created_ns=BEGAN_NS + 2_000_000_000,
        started_ns=BEGAN_NS + 2_000_001_000,
        timeout_ms=600000,
        frames=(
            "/env/lib/python3.11/site-packages/torch/distributed/x.py:9 all_reduce",
            "/home/u/train.py:42 step",
        ),
    )
    assert found.entries[0].duration_ms == 0.25


def test_the_json_form_says_the_same_with_texts_for_numbers_and_0_for_no_time() -> None:
    raw = pickle.loads(NCCL)
    raw["pg_status"] = {k: {n: str(v) for n, v in s.items()} for k, s in raw["pg_status"].items()}
    for item in raw["entries"]:
        del item["frames"]
        item["time_discovered_completed_ns"] = item["time_discovered_completed_ns"] or 0
    found = read_dump(json.dumps(raw).encode())
    assert found.status == {"0": Status(enqueued=2, started=None, completed=1)}
    assert found.entries[1].completed_ns is None
    assert [e.seq for e in found.entries] == [1, 2]


def test_a_dump_that_harms_whoever_unpickles_it_is_refused_and_nothing_of_it_runs(tmp_path: Path) -> None:
    """FR-05"""

    class Harm:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "pwned"),)

    for harm in (Harm(), {"version": "2.10", "entries": [Harm()]}):
        with pytest.raises(FlightUnreadable, match="mkdir"):
            read_dump(pickle.dumps(harm, protocol=2))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "version"), [("2.10", (2, 10)), ("2.9", (2, 9)), ("3.0.1", (3, 0, 1)), ("new", ()), ("", ())]
)
def test_a_version_is_a_row_of_numbers_and_an_unknown_one_is_read_as_far_as_it_goes(
    text: str, version: tuple[int, ...]
) -> None:
    """FR-05: "2.10" is newer than "2.9"."""
    found = read_dump(dump([entry(1)], groups={"0": "[0, 1]"}, version=text, something_new=[1, 2]))
    assert found.version == version
    assert found.is_known_version is (version[:1] == (2,))
    assert len(found.entries) == 1


def test_entries_of_another_shape_are_counted_and_left_out() -> None:
    raw = pickle.loads(NCCL)
    raw["entries"] += [7, {"collective_seq_id": "x"}, {"collective_seq_id": 5}]
    found = read_dump(pickle.dumps(raw, protocol=2))
    assert (len(found.entries), found.skipped) == (2, 3)


def test_a_group_s_number_within_the_rank_leads_to_its_name() -> None:
    found = read_dump(dump([entry(4, group="tp", number=17)], groups={"tp": "[0, 1]"}))
    assert found.status == {"tp": Status(enqueued=4, started=None, completed=4)}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[1, 2]",
        b"{}",
        b"not a pickle",
        pickle.dumps([1, 2], protocol=2),
        pickle.dumps({"a": 1}, protocol=2),
        b'{"version": "2.10", "entries": ' + b"[" * 200_000 + b"}",
        b'{"version": ' + b"1" * 10_000 + b"}",
        REAL[:-40],
    ],
)
def test_what_is_no_dump_is_refused_with_a_reason(data: bytes) -> None:
    with pytest.raises(FlightUnreadable, match=r"\w"):
        read_dump(data)


def test_a_dump_that_is_too_large_is_not_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MAX_BYTES", 100)
    with pytest.raises(FlightUnreadable, match="bytes"):
        read_dump(NCCL)
    monkeypatch.undo()
    monkeypatch.setattr(reader, "MAX_ENTRIES", 1)
    with pytest.raises(FlightUnreadable, match="entries"):
        read_dump(NCCL)


def test_a_small_dump_that_names_one_value_over_and_over_is_read_at_once() -> None:
    frames = [{"name": "\x01" * 300, "filename": "\x02" * 300, "line": 1}] * 1000
    sizes = [[2] * 1000] * 1000
    one = {**entry(1), "frames": frames, "input_sizes": sizes, "output_sizes": sizes}
    group = {"name": "x", "desc": "y", "ranks": "1, " * 300_000}
    groups = {str(number): group for number in range(20_000)}
    raw = {"version": "2.10", "pg_config": groups, "entries": [one] * 5000}
    data = pickle.dumps(raw, protocol=2)
    began = time.monotonic()
    read_dump(data)
    assert time.monotonic() - began < 20


def read_or_refuse(data: bytes) -> Dump | None:
    try:
        return read_dump(data)
    except FlightUnreadable:
        return None


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32), is_nccl=st.booleans(), count=st.integers(1, 20))
@example(seed=0, is_nccl=True, count=1)
def test_bytes_changed_at_random_are_read_or_refused_and_nothing_else(seed: int, is_nccl: bool, count: int) -> None:
    drawn = random.Random(seed)
    data = bytearray(NCCL if is_nccl else REAL)
    for _ in range(count):
        place = drawn.randrange(len(data))
        change = drawn.randrange(3)
        if change == 0:
            data[place] = drawn.randrange(256)
        elif change == 1:
            del data[place : place + drawn.randrange(1, 9)]
        else:
            data[place:place] = drawn.randbytes(drawn.randrange(1, 9))
    read_or_refuse(bytes(data))


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=10,
)
FIELDS = sorted(set(entry(1)) | {"version", "pg_config", "pg_status"})


@settings(max_examples=200, deadline=None)
@given(value=PLAIN, field=st.sampled_from(FIELDS))
def test_any_field_may_hold_anything(value: Any, field: str) -> None:
    raw = pickle.loads(NCCL)
    if field in raw:
        raw[field] = value
    else:
        raw["entries"][1][field] = value
    read_or_refuse(json.dumps(raw).encode())
