"""A pickle of any origin: what it says if it is plain, and nothing of it is ever run."""

from __future__ import annotations

import copyreg
import pickle
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer.hostile import burdens, exploits
from tests.trainer.pickles import Call, Global, Raw, Thing, spell
from trainer.format import pickled
from trainer.format.metadata import MetadataRefused, read_metadata
from trainer.format.pickled import Names, PickleRefused, Record, read_pickle

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=300) | st.binary(max_size=300),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.lists(inner, max_size=5).map(tuple)
        | st.dictionaries(st.text() | st.integers(-9, 2**40), inner, max_size=5)
    ),
    max_leaves=20,
)


@settings(max_examples=200, deadline=None)
@given(value=PLAIN, protocol=st.integers(3, 5))
def test_plain_values_come_back_as_they_were(value: object, protocol: int) -> None:
    assert read_pickle(pickle.dumps(value, protocol=protocol), {}) == value


def test_a_float_and_shared_values_come_back_as_they_were() -> None:
    shared = ["x", 0.5]
    first, second = read_pickle(pickle.dumps((shared, shared)), {})
    assert first == shared
    assert first is second


def test_a_name_of_the_table_makes_what_the_table_says() -> None:
    names: Names = {("a", "Thing"): Record, ("a", "word"): "word", ("a", "first"): lambda arguments: arguments[0]}
    thing = Thing(of=Global(module="a", name="Thing"), state={"x": Global(module="a", name="word")})
    read = read_pickle(spell([thing, Call(of=Global(module="a", name="first"), arguments=(7,))]), names)
    assert (read[0].field("x"), read[0].field("y"), read[1]) == ("word", None, 7)


def test_the_protocol_that_older_releases_wrote_is_read() -> None:
    data = b"\x80\x02ca\nThing\nq\x00)\x81q\x01}q\x02X\x01\x00\x00\x00xq\x03K\x05sb."
    assert read_pickle(data, {("a", "Thing"): Record}).field("x") == 5


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"garbage",
        b"\x80\x04",
        b"\x80\x04.",
        b"\x80\x04NN.",
        b"\x80\x04(N.",
        b"\x80\x04Na.",
        b"\x80\x04]Nu.",
        b"\x80\x04}(Nu.",
        b"\x80\x04h\x05.",
        b"\x80\x04\x86.",
        b"\x80\x04\x8c\x05ab.",
        b"\x80\x04\x8c\x01\xff.",
        spell(Raw(b"}N\x85b")),
        spell(Raw(b"NNb")),
        spell(Raw(b"N)R")),
        spell(Thing(of=Global(module="a", name="Thing"), state=1)),
    ],
)
def test_what_is_no_pickle_of_plain_values_is_refused(data: bytes) -> None:
    with pytest.raises(PickleRefused):
        read_pickle(data, {})


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=200))
def test_garbage_is_refused_or_plain_and_nothing_else_comes_of_it(data: bytes) -> None:
    try:
        read_pickle(b"\x80\x04" + data, {("a", "b"): Record})
    except PickleRefused:
        return


@settings(max_examples=300, deadline=None)
@given(place=st.integers(0, 300), byte=st.integers(0, 255))
def test_a_damaged_pickle_is_refused_or_says_something_else(place: int, byte: int) -> None:
    whole = pickle.dumps({"a": [1, 2, ("x", None)], "b": OrderedDict()})
    names = {("collections", "OrderedDict"): Record}
    try:
        read_pickle(whole[:place] + bytes([byte]) + whole[place + 1 :], names)
    except PickleRefused:
        return


# ---------------------------------------------------------------- hostile ones


@pytest.mark.parametrize("name", exploits(Path("mark")))
def test_a_pickle_that_would_run_a_command_is_refused_and_runs_none(name: str, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    with pytest.raises(MetadataRefused):
        read_metadata(exploits(mark)[name])
    assert not mark.exists()


def test_the_exploits_are_real(tmp_path: Path) -> None:
    """Else the test above would show nothing."""
    mark = tmp_path / "ran"
    ran = []
    wanted = {"protocol 0", "protocol 4", "GLOBAL and REDUCE", "INST", "OBJ", "STACK_GLOBAL", "eval"}
    for name, data in exploits(mark).items():
        if name not in wanted:
            continue
        subprocess.run(
            [sys.executable, "-c", "import pickle,sys; pickle.load(sys.stdin.buffer)"],
            input=data,
            check=False,
            capture_output=True,
        )
        if mark.exists():
            mark.unlink()
            ran.append(name)
    assert set(ran) == wanted


def test_a_code_of_the_extension_registry_is_refused_though_it_is_registered() -> None:
    copyreg.add_extension("os", "system", 0xF1)
    try:
        with pytest.raises(PickleRefused, match="0x82"):
            read_pickle(b"\x80\x02\x82\xf1\x8c\x04true\x85R.", {})
    finally:
        copyreg.remove_extension("os", "system", 0xF1)


_READ = """
import resource, sys
from pathlib import Path
from trainer.format.metadata import MetadataRefused, read_metadata
resource.setrlimit(resource.RLIMIT_AS, (600 << 20, 600 << 20))
for file in sorted(Path(sys.argv[1]).iterdir()):
    try:
        read_metadata(file.read_bytes())
    except MetadataRefused as error:
        assert len(str(error)) < 300, file
        file.unlink()
"""


def test_what_only_costs_the_reader_is_refused_in_bounded_memory_and_time(tmp_path: Path) -> None:
    for name, data in burdens(1_000_000).items():
        (tmp_path / name).write_bytes(data)
    argv = [sys.executable, "-c", _READ, str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr.decode()[-500:]
    assert list(tmp_path.iterdir()) == []


def test_a_pickle_of_more_opcodes_than_any_checkpoint_needs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickled, "MAX_OPCODES", 100)
    with pytest.raises(PickleRefused, match="too long"):
        read_pickle(b"\x80\x04" + b"N" * 200 + b".", {})
