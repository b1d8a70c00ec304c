"""The node's own disk gets each checkpoint first, and never costs one."""

from __future__ import annotations

import errno
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.saving.crew import Crew, plan_by_hand, raw
from tests.trainer.saving.waiting import await_that
from trainer.contract import MANIFEST_NAME
from trainer.saving.coordinator import Action, Coordinator, Describe, Publish, Tell
from trainer.saving.disk import write_image
from trainer.saving.memory import StagingMemory
from trainer.saving.nearby import NearbyDisk
from trainer.storage.stored import read_manifest, verify_checkpoint

pytestmark = pytest.mark.torch


def crew_with_disk(tmp_path: Path) -> Crew:
    values = [[torch.arange(4000.0) + rank, torch.ones(50_000)] for rank in range(2)]
    return Crew(tmp_path / "shared", values, local_dir=tmp_path / "disk")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_is_on_the_disk_is_what_is_in_the_run_directory_byte_for_byte(tmp_path: Path) -> None:
    crew = crew_with_disk(tmp_path)
    try:
        assert all(result.is_verified for result in crew.save(5))
    finally:
        crew.close()
    there, here = tmp_path / "shared" / "checkpoints" / "step-5.a1", tmp_path / "disk" / "gpt" / "step-5.a1"
    assert (here / MANIFEST_NAME).read_bytes() == (there / MANIFEST_NAME).read_bytes()
    assert verify_checkpoint(here) == read_manifest(there)


def test_the_disk_keeps_the_newest_two_and_the_run_directory_all(tmp_path: Path) -> None:
    crew = crew_with_disk(tmp_path)
    try:
        for step in (1, 2, 3):
            assert all(result.is_verified for result in crew.save(step))
        await_that(lambda: names(tmp_path / "disk" / "gpt") == ["step-2.a1", "step-3.a1"])  # beside the training
    finally:
        crew.close()
    assert {"step-1.a1", "step-2.a1", "step-3.a1"} <= set(names(tmp_path / "shared" / "checkpoints"))


def test_a_disk_that_cannot_be_written_is_told_once_and_costs_no_save(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "disk").write_bytes(b"a file where the folder should be")
    crew = crew_with_disk(tmp_path)
    try:
        for step in (1, 2):
            assert all(result.is_verified for result in crew.save(step))
    finally:
        crew.close()
    assert capfd.readouterr().err.count("saves go on without it") == 2  # once for each rank


# ---------------------------------------------------------------- one rank's writing


def image_of(values: list[torch.Tensor | bytes]) -> Any:
    image = plan_by_hand(0, values).image
    memory = StagingMemory.allocate(image.size)
    memory.fill(image.frame)
    for slot, value in zip(image.slots, values, strict=True):
        memory.view[slot.offset : slot.offset + slot.size] = raw(value)
    return image.name, memory, image.slots


def write(disk: NearbyDisk, name: str = "step-1.a1") -> Any:
    image = image_of([torch.ones(1000)])
    return disk.write(name, image, b"metadata", prepare_thread=lambda: None, is_cancelled=lambda: False)


def test_a_disk_that_hangs_is_left_within_bounds_and_not_asked_again_while_it_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()

    def hang(*_parts: Any, **_more: Any) -> None:
        answers.wait(60)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("trainer.saving.nearby.write_image", hang)
    disk = NearbyDisk(tmp_path, least_wait_s=0.2)
    began = time.monotonic()
    assert write(disk) is None
    assert write(disk, "step-2.a1") is None
    assert time.monotonic() - began < 10
    answers.set()


def test_a_step_that_is_saved_again_takes_the_place_of_the_earlier_try(tmp_path: Path) -> None:
    disk = NearbyDisk(tmp_path)
    assert write(disk) == write(disk)


def test_a_full_disk_makes_room_by_the_older_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = NearbyDisk(tmp_path)
    for name in ("step-1.a1", "step-2.a1"):
        assert write(disk, name) is not None
        (tmp_path / name / MANIFEST_NAME).write_bytes(b"{}")

    def write_if_there_is_room(*parts: Any, **more: Any) -> Any:
        if (tmp_path / "step-1.a1").exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_image(*parts, **more)

    monkeypatch.setattr("trainer.saving.nearby.write_image", write_if_there_is_room)
    assert [file.path for file in write(disk, "step-3.a1")] == ["__0_0.distcp", ".metadata"]
    assert names(tmp_path) == ["step-2.a1", "step-3.a1"]


# ---------------------------------------------------------------- what the writers agree on


def said(coordinator: Coordinator, rank: int, kind: str, **more: Any) -> list[Action]:
    return coordinator.handle(rank, {"kind": kind, "save": "7.1", **more})


def opened() -> Coordinator:
    coordinator = Coordinator(world=2, node_size=1)
    for rank in range(2):
        said(coordinator, rank, "staged", request={"step": 7})
    said(coordinator, 0, "opened", there=None, path="/c")
    return coordinator


FILES = [[{"path": "f0"}], [{"path": "f1"}]]


def test_the_disks_have_a_manifest_before_the_run_directory_and_it_is_the_same_one() -> None:
    coordinator = opened()
    assert said(coordinator, 0, "nearby", files=FILES[0]) == []
    (described,) = said(coordinator, 1, "nearby", files=FILES[1])
    assert isinstance(described, Describe)
    for rank in range(2):
        actions = said(coordinator, rank, "sealed", files=FILES[rank])
        assert not any(isinstance(action, Publish) for action in actions)  # not before it is described
    told = said(coordinator, 0, "described", manifest="{}")
    assert [(a.rank, a.message["kind"]) for a in told if isinstance(a, Tell)] == [(0, "nearby"), (1, "nearby")]
    assert [a.manifest for a in told if isinstance(a, Publish)] == ["{}"]


def test_a_rank_whose_disk_failed_leaves_the_disks_without_a_manifest_and_the_save_goes_on() -> None:
    coordinator = opened()
    said(coordinator, 0, "nearby", files=FILES[0])
    said(coordinator, 0, "sealed", files=FILES[0])
    actions = said(coordinator, 1, "sealed", files=FILES[1])
    assert [a.manifest for a in actions if isinstance(a, Publish)] == [""]
    assert said(coordinator, 1, "nearby", files=FILES[1]) == []  # too late
