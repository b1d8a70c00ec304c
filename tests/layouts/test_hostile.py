"""A job wrote the files: they may be anything. Nothing raises, runs, follows a link out or waits."""

from __future__ import annotations

import os
import pickle
import struct
import tempfile
import time
import zipfile
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from supervisor.layouts.metadata import read_metadata
from supervisor.layouts.registry import LAYOUTS
from supervisor.layouts.scalars import find_numbers
from supervisor.layouts.survey import NoFolder, Survey
from supervisor.layouts.torchzip import list_entries, read_back
from supervisor.layouts.tree import Broken, Tree
from tests.layouts.folders import DATA, copy_of, look, view_of, whole_steps

EVERY = sorted(LAYOUTS)


class Bomb:
    """Runs a command when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self._mark}",)


def test_metadata_that_names_anything_else_is_refused_and_nothing_runs(tmp_path: Path) -> None:
    folder = copy_of("dcp", tmp_path)
    mark = tmp_path / "ran"
    (folder / "step-4" / ".metadata").write_bytes(pickle.dumps(Bomb(mark)))
    assert whole_steps(folder, "dcp") == [2]
    assert "system" in view_of(folder, "dcp", "step-4").detail
    assert not mark.exists()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b".",
        b"\x80\x04N.",
        pickle.dumps({"a": 1}),
        pickle.dumps([1] * 1000),
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81.",
        b"Ptext\n.",
        b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f",
    ],
)
def test_metadata_that_is_none_is_broken(data: bytes) -> None:
    with pytest.raises(Broken):
        read_metadata(data)


def test_a_path_that_leads_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    folder = copy_of("dcp", tmp_path)
    outside = tmp_path / "out" / "__0_0.distcp"
    outside.parent.mkdir()
    (folder / "step-4" / "__0_0.distcp").rename(outside)
    metadata = folder / "step-4" / ".metadata"
    for path in (b"../x", b"/etc/hosts.co"):
        metadata.write_bytes(metadata.read_bytes().replace(b"__0_0.distcp", path.ljust(12, b"x")[:12]))
        assert whole_steps(folder, "dcp") == [2]


@pytest.mark.parametrize("kind", ["link", "fifo", "folder"])
def test_what_is_no_regular_file_is_never_opened(kind: str, tmp_path: Path) -> None:
    folder = copy_of("huggingface", tmp_path)
    for name in ("trainer_state.json", "model.safetensors", "optimizer.pt"):
        whole = (folder / "checkpoint-4" / name).read_bytes()
        file = folder / "checkpoint-4" / name
        elsewhere = tmp_path / f"{name}.moved"
        file.rename(elsewhere)
        if kind == "link":
            file.symlink_to(elsewhere)
        elif kind == "fifo":
            os.mkfifo(file)
        else:
            file.mkdir()
        assert whole_steps(folder, "huggingface") == [2]
        file.rmdir() if kind == "folder" else file.unlink()
        file.write_bytes(whole)


def test_a_linked_folder_is_not_followed(tmp_path: Path) -> None:
    folder = copy_of("dcp", tmp_path)
    (folder / "step-4").rename(tmp_path / "elsewhere")
    (folder / "step-4").symlink_to(tmp_path / "elsewhere")
    assert whole_steps(folder, "dcp") == [2]


@pytest.mark.parametrize("layout", [*EVERY, "auto"])
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=300), size=st.integers(0, 2**63), data=st.data())
def test_garbage_is_never_whole_and_never_raises(
    layout: str, content: bytes, size: int, data: st.DataObject, tmp_path: Path
) -> None:
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    names = {
        "step-7": (".metadata", "__0_0.distcp"),
        "iter_0000007": ("metadata.json", "common.pt", ".metadata"),
        "checkpoint-7": ("trainer_state.json", "model.safetensors", "optimizer.pt", "model.safetensors.index.json"),
        "global_step7": ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"),
    }
    for place, files in names.items():
        (folder / place).mkdir(parents=True)
        for file in files:
            (folder / place / file).write_bytes(data.draw(st.sampled_from([content, struct.pack("<Q", size), b""])))
    (folder / "iter_0000007" / "mp_rank_00").mkdir()
    (folder / "iter_0000007" / "mp_rank_00" / "model_optim_rng.pt").write_bytes(content)
    (folder / "x.ckpt").write_bytes(content)
    for mark in ("latest", "latest_checkpointed_iteration.txt"):
        (folder / mark).write_bytes(content)
    assert [v for v in look(folder, layout).views if v.is_complete] == []


@settings(max_examples=150, deadline=None)
@given(place=st.integers(0, 4000), byte=st.integers(0, 255))
def test_any_changed_byte_of_a_zip_is_refused_or_harmless(place: int, byte: int) -> None:
    """Between the entries lies padding that nobody reads: a change there is no fault. Whatever it is, nothing else."""
    whole = (DATA / "lightning" / "epoch=0-step=4.ckpt").read_bytes()
    fd = os.memfd_create("zip")
    try:
        os.write(fd, whole[:place] + bytes([byte]) + whole[place + 1 :])
        try:
            read_back(fd, 0, len(whole))
        except Broken:
            return
    finally:
        os.close(fd)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=400))
def test_a_zip_of_garbage_is_broken(data: bytes) -> None:
    fd = os.memfd_create("zip")
    try:
        os.write(fd, data)
        with pytest.raises(Broken):
            list_entries(fd, 0, len(data))
    finally:
        os.close(fd)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=400))
def test_a_pickle_of_garbage_gives_no_numbers_and_no_error(data: bytes) -> None:
    assert find_numbers(data, ("global_step",)) == {}


def test_numbers_are_found_where_a_dictionary_stores_them() -> None:
    for protocol in range(2, 6):
        text = pickle.dumps({"x": "global_step", "global_step": 7, "y": {"global_step": 8}}, protocol=protocol)
        assert find_numbers(text, ("global_step", "absent")) == {"global_step": 7}


def test_a_compressed_zip_is_not_inflated(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "step=1.ckpt", "w", zipfile.ZIP_DEFLATED) as bomb:
        bomb.writestr("archive/data.pkl", b"\0" * 50_000_000)
    assert whole_steps(tmp_path, "lightning") == []


def test_a_zip_of_more_than_four_gigabytes_is_read_by_its_large_records(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x", "w") as large, large.open("archive/data.pkl", "w", force_zip64=True) as entry:
        entry.write(b"abc")
    data = (tmp_path / "x").read_bytes()
    count, size, start = struct.unpack_from("<HII", data, len(data) - 12)
    end_64 = struct.pack("<4sQHHIIQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, count, count, size, start)
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, len(data) - 22, 1)
    end = struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    (tmp_path / "y").write_bytes(data[:-22] + end_64 + locator + end)
    with (tmp_path / "y").open("rb") as file:
        (entry_64,) = list_entries(file.fileno(), 0, len(data) - 22 + 56 + 20 + 22)
    assert (entry_64.name, entry_64.size) == ("archive/data.pkl", 3)


# ---------------------------------------------------------------- looking again


def test_a_look_without_time_knows_nothing_and_the_next_one_goes_on(tmp_path: Path) -> None:
    folder, survey = copy_of("dcp", tmp_path), Survey()
    sight = survey.look(folder, "dcp", time.monotonic() - 1)
    assert (sight.views, len(sight.unknown)) == ((), 2)
    assert len(survey.look(folder, "dcp", time.monotonic() + 30).views) == 2


def test_what_has_not_changed_is_not_opened_again(tmp_path: Path) -> None:
    folder, survey = copy_of("dcp", tmp_path), Survey()
    before = survey.look(folder, "dcp", time.monotonic() + 30)
    data = (folder / "step-4" / "__0_0.distcp").read_bytes()
    (folder / "step-4" / "__0_0.distcp").write_bytes(b"")
    assert survey.look(folder, "dcp", time.monotonic() + 30).views == before.views
    assert whole_steps(folder, "dcp") == [2]
    (folder / "step-4" / "__0_0.distcp").write_bytes(data)


def test_after_a_while_the_files_are_looked_at_again_and_nothing_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, now = copy_of("dcp", tmp_path), [0.0]
    survey = Survey(clock=lambda: now[0])
    before = survey.look(folder, "dcp", 1e12).views
    monkeypatch.setattr(Tree, "open", lambda *_: pytest.fail("opened"))
    now[0] = 1000.0
    assert survey.look(folder, "dcp", 1e12).views == before
    monkeypatch.undo()
    (folder / "step-4" / "__0_0.distcp").write_bytes(b"")
    now[0] = 2000.0
    assert [v.is_complete for v in survey.look(folder, "dcp", 1e12).views] == [True, False]


def test_a_tracker_that_a_person_has_set_back_and_a_mark_are_seen_at_a_whole_one_too(tmp_path: Path) -> None:
    folder, now = copy_of("megatron-dist", tmp_path), [0.0]
    survey = Survey(clock=lambda: now[0])
    assert [v.is_complete for v in survey.look(folder, "megatron", 1e12).views] == [True, True]
    (folder / "latest_checkpointed_iteration.txt").write_text("2\n")
    (folder / "iter_0000002-unfinished").touch()
    now[0] = 1000.0
    assert [v.is_complete for v in survey.look(folder, "megatron", 1e12).views] == [False, False]


def test_a_checkpoint_that_grows_changes_the_digest(tmp_path: Path) -> None:
    folder, survey = copy_of("dcp", tmp_path), Survey()
    survey.look(folder, "dcp", time.monotonic() + 30)
    before = survey.look(folder, "dcp", time.monotonic() + 30).digest
    assert survey.look(folder, "dcp", time.monotonic() + 30).digest == before
    (folder / "step-6").mkdir()
    (folder / "step-6" / "__0_0.distcp").write_bytes(b"x")
    started = survey.look(folder, "dcp", time.monotonic() + 30).digest
    (folder / "step-6" / "__0_0.distcp").write_bytes(b"xx")
    assert len({before, started, survey.look(folder, "dcp", time.monotonic() + 30).digest}) == 3


def test_a_checkpoint_written_again_has_another_stamp(tmp_path: Path) -> None:
    folder = copy_of("dcp", tmp_path)
    before = view_of(folder, "dcp", "step-4").stamp
    assert view_of(folder, "dcp", "step-4").stamp == before
    os.utime(folder / "step-4" / "__0_0.distcp", (1, 1))
    assert view_of(folder, "dcp", "step-4").stamp != before


@pytest.mark.parametrize("layout", ["dcp", "huggingface", "lightning"])
def test_a_name_that_is_not_utf8_is_left_out_with_a_note_and_the_rest_counts(layout: str, tmp_path: Path) -> None:
    folder = copy_of(layout, tmp_path)
    steps = whole_steps(folder, layout)
    Path(os.fsdecode(os.fsencode(folder) + b"/step-\xff1")).mkdir()
    for inner in [path for path in folder.iterdir() if path.is_dir()]:
        Path(os.fsdecode(os.fsencode(inner) + b"/x\xff.bin")).write_bytes(b"")
    sight = Survey().look(folder, layout, time.monotonic() + 30, is_final=True)
    assert [view.step for view in sight.views if view.is_complete] == steps
    assert "not UTF-8" in " ".join(sight.notes)
    msgspec.json.encode(sight)


def test_no_folder_is_told_from_an_empty_one(tmp_path: Path) -> None:
    with pytest.raises(NoFolder):
        look(tmp_path / "absent", "dcp")
    assert look(tmp_path, "dcp").views == ()


def test_a_checkpoint_of_many_files_is_whole_after_several_short_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, survey = copy_of("deepspeed-zero3", tmp_path), Survey()
    questions = 0

    def count_up() -> float:
        nonlocal questions
        questions += 1
        return float(questions)

    monkeypatch.setattr("supervisor.layouts.tree.time.monotonic", count_up)
    looks = 0
    while len(survey.look(folder, "deepspeed", questions + 8.5).views) < 2:  # eight questions to the file system each
        looks += 1
        assert looks < 20
    assert looks > 1
