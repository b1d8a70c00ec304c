"""One writer's threads: what is written is what was staged, and what is read back is compared with what was sealed."""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Any

import pytest

from trainer.contract import ManifestFile
from trainer.saving import disk
from trainer.saving.disk import Cancelled, Frontier, read_back, write_image
from trainer.saving.image import Image
from trainer.saving.job import Job, Prepared
from trainer.saving.memory import StagingMemory
from trainer.saving.zipimage import Piece, lay_out
from trainer.storage.stored import checksum_file

SIZES = (disk.SEGMENT_BYTES * 2 + 17, 100, 70_000, disk.SEGMENT_BYTES)


def _staged(sizes: tuple[int, ...] = SIZES) -> tuple[StagingMemory, Image]:
    image, _ = lay_out("__0_0.distcp", [Piece(pickle=b"p", size=size) for size in sizes])
    memory = StagingMemory.allocate(image.size)
    memory.fill(image.frame)
    for at, slot in enumerate(image.slots):
        memory.view[slot.offset : slot.offset + slot.size] = bytes([at + 1]) * slot.size
    return memory, image


@pytest.fixture(params=["direct", "buffered"])
def is_direct(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param == "buffered":
        opening = os.open

        def refuse(path: Any, flags: int, *more: Any) -> int:
            if flags & os.O_DIRECT:
                raise OSError(22, "Invalid argument")
            return opening(path, flags, *more)

        monkeypatch.setattr(os, "open", refuse)
    return bool(request.param == "direct")


def test_the_file_is_the_image_with_the_checksums_of_its_slots(tmp_path: Path, is_direct: bool) -> None:
    memory, image = _staged()
    path = tmp_path / image.name
    entry = write_image(memory, image.slots, path)
    data = path.read_bytes()
    assert (len(data), entry.size_bytes) == (image.size, image.size)
    assert checksum_file(path) == (entry.size_bytes, entry.xxh3_128)
    for slot in image.slots:
        crc = zlib.crc32(data[slot.offset : slot.offset + slot.size]).to_bytes(4, "little")
        assert all(data[at : at + 4] == crc for at in slot.crc_at)


def test_others_hear_of_bytes_only_in_order_and_only_when_they_can_read_them(tmp_path: Path, is_direct: bool) -> None:
    memory, image = _staged()
    heard: list[int] = []
    write_image(memory, image.slots, tmp_path / image.name, on_written=heard.append)
    assert heard == sorted(heard)
    assert heard[-1:] == ([image.size] if is_direct else [])  # what is only cached is no news


def test_reading_back_follows_the_writer(tmp_path: Path) -> None:
    memory, image = _staged()
    path, written = tmp_path / image.name, Frontier()
    entry = write_image(memory, image.slots, path, on_written=written.advance)
    assert read_back(path, image.size, written) in (entry.xxh3_128, None)


def test_a_file_that_ends_too_early_is_not_taken_for_read(tmp_path: Path) -> None:
    memory, image = _staged()
    path, written = tmp_path / image.name, Frontier()
    write_image(memory, image.slots, path, on_written=written.advance)
    os.truncate(path, image.size // 2)
    assert read_back(path, image.size, written) is None


def test_writing_stops_when_the_save_has_ended(tmp_path: Path) -> None:
    memory, image = _staged()
    with pytest.raises(Cancelled):
        write_image(memory, image.slots, tmp_path / image.name, is_cancelled=lambda: True)


def test_a_failed_write_is_raised_and_not_the_waiting_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, image = _staged()

    def fail(fd: int, data: object, offset: int) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "pwrite", fail)
    with pytest.raises(OSError, match="Input/output error"):
        write_image(memory, image.slots, tmp_path / image.name)


@pytest.mark.parametrize("damage", ["none", "flipped", "truncated", "gone"])
def test_the_reader_says_what_is_not_as_it_was_sealed(tmp_path: Path, damage: str) -> None:
    memory, image = _staged((100_000,))
    path = tmp_path / image.name
    entry = write_image(memory, image.slots, path)
    if damage == "flipped":
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    elif damage == "truncated":
        os.truncate(path, 5)
    elif damage == "gone":
        path.unlink()
    (checked,) = [event for event in _read_back(memory, image, tmp_path, entry) if event["kind"] == "checked"]
    assert [problem["path"] for problem in checked["bad"]] == ([] if damage == "none" else [image.name])


def _read_back(memory: StagingMemory, image: Image, folder: Path, entry: ManifestFile) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    job = Job("1.1", Prepared(memory, image.name, image.slots, None), {}, events.append)
    sealed = {"path": entry.path, "size_bytes": entry.size_bytes, "xxh3_128": entry.xxh3_128}
    told = {"kind": "peer_written", "name": image.name, "size": image.size, "done": image.size}
    job.hear_peer(told)
    job.hear_peer({"kind": "peer_sealed", "files": [sealed]})
    job._read_back(folder, lambda: None)
    return events
