"""Long series of records in `.metadata`: read by patterns, they say what they say opcode by opcode."""

from __future__ import annotations

import pickle
import time

import pytest

from tests.trainer.pickles import small
from trainer.format import metadata, pickled, series
from trainer.format.metadata import Metadata, MetadataRefused, MetadataTooLarge, read_metadata

pytestmark = pytest.mark.torch

FILE = "__{}_0.distcp"


def render(*, ranks: int, keys: int, shape: tuple[int, ...] = (64, 3), is_shared: bool = True) -> bytes:
    """What torch pickles; `is_shared` False: each rank's texts are objects of its own, as in gathered plans."""
    import torch
    from torch.distributed.checkpoint import metadata as dcp
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    names = [f"layer.{n}.weight" for n in range(keys)]
    described = {name: dcp.TensorStorageMetadata(dcp.TensorProperties(), torch.Size(shape), []) for name in names}
    stored = {}
    rows = shape[0] // ranks
    for rank in range(ranks):
        for at, name in enumerate(names):
            offsets = torch.Size((rank * rows, *[0] * (len(shape) - 1)))
            chunk = dcp.ChunkStorageMetadata(offsets, torch.Size((rows, *shape[1:])))
            described[name].chunks.append(chunk)
            key = name if is_shared else name[:1] + name[1:]
            index = dcp.MetadataIndex(key, offsets if is_shared else torch.Size(offsets), rank)
            stored[index] = _StorageInfo(FILE.format(rank), at * 10**6, 10**6)
    described["step"] = dcp.BytesStorageMetadata()  # type: ignore[assignment]
    stored[dcp.MetadataIndex("step")] = _StorageInfo(FILE.format(0), 10**12, 2**40)
    return pickle.dumps(dcp.Metadata(described, planner_data=None, storage_data=stored))  # type: ignore[arg-type]


def read_slowly(data: bytes, monkeypatch: pytest.MonkeyPatch) -> Metadata:
    with monkeypatch.context() as patch:
        patch.setattr(metadata, "make_readers", dict)
        return read_metadata(data)


def flat(found: Metadata) -> tuple[object, ...]:
    entries = sorted(found.entries, key=lambda entry: (entry.path, entry.offset))
    return found.tensors, found.byte_keys, entries


@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("shape", [(64,), (64, 3), (6400, 300, 7), (64, 2**40, 1, 1, 2)])
def test_patterns_read_what_reading_opcode_by_opcode_does(
    shape: tuple[int, ...], is_shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = render(ranks=8, keys=40, shape=shape, is_shared=is_shared)
    found = read_metadata(data)
    assert flat(found) == flat(read_slowly(data, monkeypatch))
    assert len(found.entries) == 8 * 40 + 1


def test_a_changed_byte_reads_as_it_does_opcode_by_opcode(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = render(ranks=3, keys=2)
    for at in range(0, len(whole), 3):
        data = whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :]
        answers = []
        for read in (read_metadata, lambda data: read_slowly(data, monkeypatch)):
            try:
                answers.append(flat(read(data)))
            except MetadataRefused:
                answers.append(())
        assert answers[0] == answers[1], at


def test_what_a_pattern_passed_over_and_is_fetched_later_is_read_after_all(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = pickle.loads(render(ranks=4, keys=1))
    whole.storage_meta = list(whole.storage_data)  # comes after it
    data = pickle.dumps(whole)
    assert flat(read_metadata(data)) == flat(read_slowly(data, monkeypatch))


def test_a_hundred_thousand_parts_take_a_second_and_few_opcodes() -> None:
    data = render(ranks=64, keys=1600)
    began = time.process_time()
    found = pickled.read_pickle(data, metadata._NAMES, series=series.make_readers, max_opcodes=500_000)
    assert len(found.field("storage_data").pairs) > 100_000
    assert time.process_time() - began < 10


def test_more_than_is_read_here_is_told_from_damage_and_a_restore_reads_it_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metadata, "MAX_METADATA_BYTES", 100)
    with pytest.raises(MetadataTooLarge):
        read_metadata(small())
    assert read_metadata(small(), is_bounded=False).keys == ("w",)
    monkeypatch.undo()
    monkeypatch.setattr(metadata, "MAX_OPCODES", 50)
    with pytest.raises(MetadataTooLarge):
        read_metadata(small())
    with pytest.raises(MetadataRefused) as caught:
        read_metadata(small()[:30], is_bounded=False)
    assert not isinstance(caught.value, MetadataTooLarge)


def test_a_long_tuple_that_is_a_key_again_and_again_is_refused_at_once() -> None:
    data = b"\x80\x04(" + b"K\x01" * 500_000 + b"tq\x000}" + b"h\x00Ns" * 100_000 + b"."
    began = time.process_time()
    with pytest.raises(MetadataRefused):
        read_metadata(data)
    assert time.process_time() - began < 10
