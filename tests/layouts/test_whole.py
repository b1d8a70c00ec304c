"""Checkpoints that the frameworks wrote: found, whole, of the right step; and broken ones walked back past."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from supervisor.layouts.survey import Survey
from tests.layouts.folders import (
    DATA,
    LAYOUTS,
    SEALED,
    copy_of,
    cut,
    graft,
    look,
    payload_files,
    read,
    rewrite,
    view_of,
    whole_steps,
)

ALL = sorted(LAYOUTS)


@pytest.mark.parametrize("fixture", ALL)
def test_what_the_framework_wrote_is_whole_and_of_its_step(fixture: str, tmp_path: Path) -> None:
    layout = LAYOUTS[fixture][0]
    views = look(copy_of(fixture, tmp_path), layout).views
    assert [(v.step, v.is_complete) for v in views] == [(2, True), (4, True)]


@pytest.mark.parametrize("fixture", ALL)
def test_auto_finds_the_layout_by_the_names(fixture: str, tmp_path: Path) -> None:
    layout = LAYOUTS[fixture][0].replace("torchtitan", "dcp")  # the same names as others give a plain one
    sight = look(copy_of(fixture, tmp_path))
    assert (sight.layout, sight.notes) == (layout, ())
    assert {v.step for v in sight.views if v.is_complete} == {2, 4}


@pytest.mark.parametrize("fixture", ALL)
def test_any_file_cut_or_missing_leaves_the_older_one(fixture: str, tmp_path: Path) -> None:
    layout, _, newest = LAYOUTS[fixture]
    count = len(payload_files(copy_of(fixture, tmp_path / "count") / newest))
    for place in range(count):
        for damage in ("cut", "empty", "missing"):
            folder = copy_of(fixture, tmp_path / f"{place}-{damage}")
            file = payload_files(folder / newest)[place]
            if file.name.startswith("rng_state") and damage == "missing":
                continue  # one that is not there is not missed: a rank of another world size has none either
            if damage == "missing":
                file.unlink()
            else:
                cut(file, 0.7 if damage == "cut" else 0)
            assert whole_steps(folder, layout) == [2], f"{file.name} {damage}"


@pytest.mark.parametrize("fixture", ALL)
def test_an_empty_or_half_deleted_folder_leaves_the_older_one(fixture: str, tmp_path: Path) -> None:
    layout, _, newest = LAYOUTS[fixture]
    folder = copy_of(fixture, tmp_path)
    if (folder / newest).is_dir():
        shutil.rmtree(folder / newest)
        (folder / newest).mkdir()
        assert whole_steps(folder, layout) == [2]
        (folder / newest / "README.md").write_text("nothing")
        assert whole_steps(folder, layout) == [2]


@pytest.mark.parametrize("fixture", SEALED)
def test_a_checkpoint_of_zip_files_is_read_back_against_checksums(fixture: str, tmp_path: Path) -> None:
    layout, _, newest = LAYOUTS[fixture]
    reading = read(copy_of(fixture, tmp_path), layout, newest)
    assert (reading.is_whole, reading.unsealed) == (True, 0)


@pytest.mark.parametrize("fixture", SEALED)
def test_a_flipped_byte_in_the_state_is_found_by_reading_back(fixture: str, tmp_path: Path) -> None:
    layout, _, newest = LAYOUTS[fixture]
    folder = copy_of(fixture, tmp_path)
    for file in payload_files(folder / newest):
        whole = file.read_bytes()
        at = next(whole.index(word) for word in (b"ctorch", b"cargparse") if word in whole) + 1  # in its pickle
        rewrite(file, whole[:at] + b"O" + whole[at + 1 :])
        reading = read(folder, layout, newest)
        assert (reading.is_whole, "CRC32" in reading.detail) == (False, True), file.name
        rewrite(file, whole)


def test_safetensors_carry_no_checksum_and_the_reading_says_so(tmp_path: Path) -> None:
    reading = read(copy_of("huggingface", tmp_path), "huggingface", "checkpoint-4")
    assert reading.is_whole
    assert 0 < reading.unsealed < reading.size
    assert "no checksum" in reading.detail


def test_a_checkpoint_that_was_written_again_is_not_the_one_that_is_read_back(tmp_path: Path) -> None:
    from supervisor.layouts.readback import read_back

    folder = copy_of("dcp", tmp_path)
    stamp = view_of(folder, "dcp", "step-4").stamp
    os.utime(folder / "step-4" / "__0_0.distcp", (1, 1))
    assert read_back(folder / "step-4", "dcp", stamp).is_whole is None
    shutil.rmtree(folder / "step-4")
    assert read_back(folder / "step-4", "dcp", stamp).is_whole is None


@pytest.mark.parametrize(
    ("fixture", "mark"),
    [
        ("dcp", "step-4/.metadata"),
        ("megatron-dist", "iter_0000004/metadata.json"),
        ("huggingface", "checkpoint-4/trainer_state.json"),
        ("lightning-sharded", "epoch=0-step=4.ckpt/meta.pt"),
    ],
)
def test_a_save_that_did_not_end_is_told_from_a_damaged_checkpoint(fixture: str, mark: str, tmp_path: Path) -> None:
    layout, _, newest = LAYOUTS[fixture]
    folder = copy_of(fixture, tmp_path)
    cut(folder / mark, 0.5)
    assert not view_of(folder, layout, newest).is_unfinished
    (folder / mark).unlink()
    assert view_of(folder, layout, newest).is_unfinished


# ---------------------------------------------------------------- distributed checkpoints


@pytest.mark.parametrize("keep", [0.0, 0.3, 0.99])
def test_a_cut_metadata_file_is_no_commit_mark(keep: float, tmp_path: Path) -> None:
    folder = copy_of("dcp", tmp_path)
    cut(folder / "step-4" / ".metadata", keep)
    assert whole_steps(folder, "dcp") == [2]


def test_files_of_a_larger_world_that_was_there_before_are_no_fault(tmp_path: Path) -> None:
    """CK-10: only files that the metadata names count."""
    folder = copy_of("dcp", tmp_path)
    (folder / "step-4" / "__7_0.distcp").write_bytes(b"left over")
    assert whole_steps(folder, "dcp") == [2, 4]


@pytest.mark.parametrize(
    ("fixture", "mark"),
    [
        ("dcp", "step-4/.metadata"),
        ("torchtitan/checkpoint", "step-4/.metadata"),
        ("megatron-dist", "iter_0000004/metadata.json"),
        ("huggingface", "checkpoint-4/trainer_state.json"),
        ("lightning-sharded", "epoch=0-step=4.ckpt/meta.pt"),
    ],
)
def test_a_step_that_is_saved_over_its_old_files_is_not_whole_until_its_mark_is_new(
    fixture: str, mark: str, tmp_path: Path
) -> None:
    """CK-10: a mark that is older than the files that it stands for is refused."""
    folder = copy_of(fixture, tmp_path)
    now = time.time()
    written = next(file for file in payload_files((folder / mark).parent) if file != folder / mark)
    os.utime(written, (now, now))
    assert whole_steps(folder, LAYOUTS[fixture][0]) == [2]
    os.utime(folder / mark, (now, now))
    assert whole_steps(folder, LAYOUTS[fixture][0]) == [2, 4]


def test_a_link_to_the_latest_is_no_more_than_a_hint(tmp_path: Path) -> None:
    """CK-02: it points to a save that has not ended; an older one is taken, and the link stays as it is."""
    folder = copy_of("dcp", tmp_path)
    (folder / "step-4" / ".metadata").unlink()
    (folder / "latest").symlink_to("step-4")
    assert whole_steps(folder, "auto") == [2]
    assert (folder / "latest").readlink() == Path("step-4")


def test_folders_of_empty_files_after_a_power_cut_are_passed_over(tmp_path: Path) -> None:
    """CK-04."""
    folder = copy_of("dcp", tmp_path)
    for step in (6, 8):
        graft("dcp/step-4", folder / f"step-{step}")
        for file in (folder / f"step-{step}").iterdir():
            rewrite(file, b"")
    assert whole_steps(folder, "dcp") == [2, 4]


def test_a_temporary_metadata_file_is_no_commit_mark(tmp_path: Path) -> None:
    """CK-06."""
    folder = copy_of("dcp", tmp_path)
    (folder / "step-4" / ".metadata").rename(folder / "step-4" / ".metadata.tmp")
    graft("dcp/step-4", folder / "step-6")
    rewrite(folder / "step-6" / ".metadata", b"\x80\x04\x95garbage.")
    assert whole_steps(folder, "dcp") == [2]


@pytest.mark.parametrize(
    ("fixture", "mark"),
    [
        ("dcp", "step-4-unfinished"),
        ("lightning", "epoch=0-step=4-unfinished"),
        ("lightning", "epoch=0-step=4.ckpt.unfinished"),
    ],
)
def test_one_that_is_marked_as_unfinished_is_passed_over(fixture: str, mark: str, tmp_path: Path) -> None:
    """CK-09: even when all of its files are there."""
    folder = copy_of(fixture, tmp_path)
    (folder / mark).touch()
    assert whole_steps(folder, LAYOUTS[fixture][0]) == [2]


@pytest.mark.parametrize("name", ["100", "step_100", "epoch-3-step-100", "ckpt100", "iter_100"])
def test_a_distributed_checkpoint_may_have_any_name_that_ends_in_the_step(name: str, tmp_path: Path) -> None:
    graft("dcp/step-4", tmp_path / name)
    assert whole_steps(tmp_path, "dcp") == [100]


def test_a_file_whose_name_ends_in_a_number_is_no_damaged_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "events.out.tfevents.1700000000").write_text("log")
    (view,) = look(tmp_path, "auto").views
    assert (view.is_complete, view.is_unfinished) == (False, True)


@pytest.mark.parametrize("layout", ["torchtitan", "auto"])
def test_torchtitans_last_save_of_the_weights_alone_is_nothing_to_resume_from(layout: str, tmp_path: Path) -> None:
    folder = copy_of("torchtitan/checkpoint", tmp_path)
    shutil.rmtree(folder / "step-4")
    graft("torchtitan-weights/checkpoint/step-4", folder / "step-4")
    assert whole_steps(folder, layout) == [2]
    assert "weights alone" in view_of(folder, layout, "step-4").detail


def test_torchtitans_exported_weights_are_nothing_to_resume_from(tmp_path: Path) -> None:
    folder = copy_of("torchtitan/checkpoint", tmp_path)
    graft("huggingface-sharded/checkpoint-2", folder / "step-6")
    assert whole_steps(folder, "torchtitan") == [2, 4]
    assert "exported weights" in view_of(folder, "torchtitan", "step-6").detail


# ---------------------------------------------------------------- Megatron


@pytest.mark.parametrize("tracker", ["release", "99", "", "\0\0"])
@pytest.mark.parametrize("fixture", ["megatron", "megatron-dist"])
def test_a_tracker_that_leads_nowhere_hides_nothing(fixture: str, tracker: str, tmp_path: Path) -> None:
    folder = copy_of(fixture, tmp_path)
    (folder / "latest_checkpointed_iteration.txt").write_text(tracker)
    assert whole_steps(folder, "megatron") == [2, 4]


@pytest.mark.parametrize(
    ("fixture", "tracker"), [("megatron", "latest_checkpointed_iteration.txt"), ("deepspeed-zero1", "latest")]
)
@pytest.mark.parametrize("kind", ["link", "fifo", "folder", "large"])
def test_a_tracker_that_is_no_small_file_hides_nothing(fixture: str, tracker: str, kind: str, tmp_path: Path) -> None:
    folder = copy_of(fixture, tmp_path)
    file = folder / tracker
    file.unlink()
    if kind == "link":
        file.symlink_to(folder / LAYOUTS[fixture][1])
    elif kind == "fifo":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    else:
        file.write_text("1" * 5000)
    assert whole_steps(folder, LAYOUTS[fixture][0]) == [2, 4]


def test_what_is_newer_than_the_tracker_was_not_finished(tmp_path: Path) -> None:
    folder = copy_of("megatron", tmp_path)
    (folder / "latest_checkpointed_iteration.txt").write_text("2\n")
    assert whole_steps(folder, "megatron") == [2]


def test_a_tensor_rank_that_did_not_save_is_missed(tmp_path: Path) -> None:
    folder = copy_of("megatron", tmp_path)
    shutil.rmtree(folder / "iter_0000004" / "mp_rank_01")
    assert whole_steps(folder, "megatron") == [2]
    assert "1 of 2 ranks" in view_of(folder, "megatron", "iter_0000004").detail


def test_a_pipeline_rank_that_did_not_save_is_missed(tmp_path: Path) -> None:
    folder = copy_of("megatron", tmp_path)
    newest = folder / "iter_0000004"
    for tensor in ("00", "01"):
        (newest / f"mp_rank_{tensor}").rename(newest / f"mp_rank_{tensor}_000")
        shutil.copytree(newest / f"mp_rank_{tensor}_000", newest / f"mp_rank_{tensor}_001")
    assert whole_steps(folder, "megatron") == [2, 4]
    shutil.rmtree(newest / "mp_rank_01_001")
    assert whole_steps(folder, "megatron") == [2]


def test_without_a_mark_a_fresh_torch_checkpoint_is_waited_for(tmp_path: Path) -> None:
    folder = copy_of("megatron", tmp_path)
    (folder / "latest_checkpointed_iteration.txt").unlink()
    first = look(folder, "megatron", is_final=False)
    assert ([v.step for v in first.views], len(first.unsettled)) == ([], 2)
    assert [v.is_complete for v in look(folder, "megatron", is_final=True).views] == [True, True]


@pytest.mark.torch
def test_a_file_of_torchs_old_format_is_whole_as_far_as_can_be_told(tmp_path: Path) -> None:
    import torch

    folder = copy_of("megatron", tmp_path)
    file = folder / "iter_0000004" / "mp_rank_01" / "model_optim_rng.pt"
    torch.save({"w": torch.ones(1000)}, file, _use_new_zipfile_serialization=False)
    assert whole_steps(folder, "megatron") == [2, 4]
    assert read(folder, "megatron", "iter_0000004").unsealed == file.stat().st_size
    cut(file, 0.03)
    assert whole_steps(folder, "megatron") == [2]


@pytest.mark.torch
def test_zip_files_that_torch_wrote_without_checksums_are_not_called_verified(tmp_path: Path) -> None:
    import torch

    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"global_step": 7, "w": torch.ones(1000)}, tmp_path / "step=7.ckpt")
    finally:
        torch.serialization.set_crc32_options(True)
    reading = read(tmp_path, "lightning", "step=7.ckpt")
    assert reading.is_whole
    assert reading.unsealed >= 4000


@pytest.mark.parametrize("hours", [-1.0, 1.0])
def test_rest_is_told_by_two_looks_and_no_clock_of_a_file_server(hours: float, tmp_path: Path) -> None:
    """CK-15: file times may lie, in the future too; order is by step."""
    folder, now = copy_of("megatron", tmp_path), [0.0]
    (folder / "latest_checkpointed_iteration.txt").unlink()
    for file in payload_files(folder / "iter_0000004"):
        os.utime(file, (time.time() + hours * 3600,) * 2)
    survey = Survey(clock=lambda: now[0])
    steps = []
    for at in (0.0, 3.0, 6.0):
        now[0] = at
        steps.append([v.step for v in survey.look(folder, "megatron", time.monotonic() + 30).views])
    assert steps == [[], [], [2, 4]]


# ---------------------------------------------------------------- Hugging Face


def test_weights_in_several_files_are_all_looked_for(tmp_path: Path) -> None:
    folder = copy_of("huggingface-sharded", tmp_path)
    assert whole_steps(folder, "huggingface") == [2]
    (folder / "checkpoint-2" / "model-00002-of-00002.safetensors").unlink()
    assert whole_steps(folder, "huggingface") == []


def test_a_trainer_state_of_another_step_is_refused(tmp_path: Path) -> None:
    folder = copy_of("huggingface", tmp_path)
    (folder / "checkpoint-4").rename(folder / "checkpoint-9")
    assert whole_steps(folder, "huggingface") == [2]


def test_the_weights_alone_are_taken_when_that_is_what_the_trainer_saves(tmp_path: Path) -> None:
    folder = copy_of("huggingface", tmp_path)
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        (folder / "checkpoint-4" / name).unlink()
    view = view_of(folder, "huggingface", "checkpoint-4")
    assert (view.is_complete, view.detail) == (True, "the weights alone: the optimizer starts anew")


def test_a_folder_that_is_being_staged_is_none(tmp_path: Path) -> None:
    folder = copy_of("huggingface", tmp_path)
    (folder / "checkpoint-4").rename(folder / "tmp-checkpoint-4")
    assert [v.step for v in look(folder, "huggingface").views] == [2]


@pytest.mark.parametrize("inside", ["deepspeed-zero1", "deepspeed-zero3"])
def test_deepspeed_states_inside_count_as_its_weights_and_optimizer(inside: str, tmp_path: Path) -> None:
    folder = copy_of("huggingface", tmp_path)
    newest = folder / "checkpoint-4"
    for name in ("optimizer.pt", "model.safetensors"):
        (newest / name).unlink()
    graft(f"{inside}/global_step4", newest / "global_step4")
    assert whole_steps(folder, "huggingface") == [2, 4]
    next(newest.rglob("*zero_pp_rank_1*optim_states.pt")).unlink()
    assert whole_steps(folder, "huggingface") == [2]


def test_sharded_states_inside_count_as_its_weights_and_optimizer(tmp_path: Path) -> None:
    folder = copy_of("huggingface", tmp_path)
    newest = folder / "checkpoint-4"
    for name in ("optimizer.pt", "model.safetensors"):
        (newest / name).unlink()
    for name in ("pytorch_model_fsdp_0", "optimizer_0"):
        graft("dcp/step-4", newest / name)
    assert whole_steps(folder, "huggingface") == [2, 4]
    (newest / "optimizer_0" / ".metadata").unlink()
    assert whole_steps(folder, "huggingface") == [2]


# ---------------------------------------------------------------- Lightning


def test_the_step_is_in_the_file_when_the_name_does_not_tell_it(tmp_path: Path) -> None:
    graft("lightning/epoch=0-step=4.ckpt", tmp_path / "best-loss=0.3.ckpt")
    graft("lightning-sharded/epoch=0-step=2.ckpt", tmp_path / "other.ckpt")
    assert whole_steps(tmp_path, "lightning") == [2, 4]


def test_a_version_of_a_step_that_was_saved_again_stands_in_for_a_broken_one(tmp_path: Path) -> None:
    folder = copy_of("lightning", tmp_path)
    shutil.copy(folder / "epoch=0-step=4.ckpt", folder / "epoch=0-step=4-v1.ckpt")
    cut(folder / "epoch=0-step=4.ckpt")
    assert whole_steps(folder, "lightning") == [2, 4]


def test_a_link_to_the_best_one_is_not_followed(tmp_path: Path) -> None:
    folder = copy_of("lightning", tmp_path)
    (folder / "last.ckpt").symlink_to(folder / "epoch=0-step=4.ckpt")
    assert whole_steps(folder, "lightning") == [2, 4]


def test_a_sharded_checkpoint_without_its_meta_file_is_not_finished(tmp_path: Path) -> None:
    folder = copy_of("lightning-sharded", tmp_path)
    (folder / "epoch=0-step=4.ckpt" / "meta.pt").unlink()
    assert whole_steps(folder, "lightning") == [2]


# ---------------------------------------------------------------- DeepSpeed


def test_the_last_data_parallel_rank_is_missed_too(tmp_path: Path) -> None:
    folder = copy_of("deepspeed-zero1", tmp_path)
    (folder / "global_step4" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    assert whole_steps(folder, "deepspeed") == [2]
    assert "1 of 2 is missing" in view_of(folder, "deepspeed", "global_step4").detail


@pytest.mark.parametrize(("latest", "steps"), [("global_step2", [2]), ("global_step9", [2, 4]), ("", [2, 4])])
def test_latest_tells_which_save_ended_unless_it_leads_nowhere(latest: str, steps: list[int], tmp_path: Path) -> None:
    folder = copy_of("deepspeed-zero3", tmp_path)
    (folder / "latest").write_text(latest)
    assert whole_steps(folder, "deepspeed") == steps


def test_a_universal_checkpoint_has_the_weights_of_each_parameter(tmp_path: Path) -> None:
    state = DATA / "lightning" / "epoch=0-step=4.ckpt"  # any file of torch.save
    for parameter in ("w", "b"):
        for name in ("fp32.pt", "exp_avg.pt", "exp_avg_sq.pt"):
            (tmp_path / "global_step4" / "zero" / parameter).mkdir(parents=True, exist_ok=True)
            shutil.copy(state, tmp_path / "global_step4" / "zero" / parameter / name)
    assert whole_steps(tmp_path, "deepspeed") == [4]
    (tmp_path / "global_step4" / "zero" / "b" / "fp32.pt").unlink()
    assert whole_steps(tmp_path, "deepspeed") == []


# ---------------------------------------------------------------- auto


def test_of_several_layouts_the_one_with_the_most_is_taken_and_told(tmp_path: Path) -> None:
    folder = copy_of("huggingface", tmp_path)
    graft("lightning/epoch=0-step=4.ckpt", folder / "x.ckpt")
    sight = look(folder)
    assert sight.layout == "huggingface"
    assert "lightning 1" in sight.notes[0]


def test_a_folder_without_any_checkpoint_holds_none(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "train.py").write_text("")
    assert look(tmp_path).views == ()


@pytest.mark.parametrize("mark", ["step-4.writing", "step-4/.writing"])
def test_the_marks_of_an_unfinished_one_can_be_given_and_are_never_removed(mark: str, tmp_path: Path) -> None:
    """CK-09: a mark that is older than its folder, beside it or in it, stays where it is."""
    folder = copy_of("dcp", tmp_path)
    (folder / mark).touch()
    os.utime(folder / mark, (1, 1))
    survey = Survey()
    for _ in range(2):
        seen = survey.look(folder, "dcp", time.monotonic() + 30, is_final=True, marks=(".writing",))
        assert [v.step for v in seen.views if v.is_complete] == [2]
        assert (folder / mark).exists()
    assert whole_steps(folder, "dcp") == [2, 4]


def test_a_mark_that_comes_later_makes_a_known_one_unfinished(tmp_path: Path) -> None:
    """CK-09: a framework marks what it is about to remove."""
    folder = copy_of("dcp", tmp_path)
    clock = [0.0]
    survey = Survey(clock=lambda: clock[0])
    assert [v.step for v in survey.look(folder, "dcp", 1e9, is_final=True).views if v.is_complete] == [2, 4]
    (folder / "step-4" / ".in_progress").touch()
    clock[0] += 120.0
    assert [v.step for v in survey.look(folder, "dcp", 1e9, is_final=True).views if v.is_complete] == [2]
