"""Saves while processes are killed or stopped and file systems fill up, hang or fail: nothing good is lost, nothing bad
is believed, and the training goes on.

The training and its writers are real processes; the file system is a mount whose calls are held one by one, so that
each fault strikes exactly where it is meant to.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.trainer.faults.gates import Gates, mount_gates
from tests.trainer.faults.rig import Rig, is_running, start, verified
from tests.trainer.folders import flip_byte
from trainer.contract import RunPaths

pytestmark = [pytest.mark.torch, pytest.mark.mounts]

# Calls in the order of a save, and the rank whose writer makes them: a fault there strikes in the middle of that phase.
PHASES = {
    "the folder is made": ("mkdir", "*/step-*", 0),
    "a shard is written": ("write", "*/__1_0.distcp", 1),
    "a shard is made durable": ("fsync", "*/__1_0.distcp", 1),
    "the metadata is written": ("create", "*/.metadata*", 0),
    "the manifest is written": ("write", "*/.MANIFEST.json*", 0),
    "the manifest is renamed": ("rename*", "*/MANIFEST.json", 0),
    "a shard is read back": ("read", "*/__0_0.distcp", 1),
    "the record is renamed": ("rename*", "*/VERIFIED.json", 0),
}
PUBLISHED = (
    "a shard is read back",
    "the record is renamed",
)  # the manifest is there, the record of verification is not
NODE = ("rank", "writer")
QUICK_S = 1.0  # a step of the training's own takes a hundredth of it; the rest is for a busy machine


@pytest.fixture
def gates(tmp_path: Path) -> Iterator[Gates]:
    with mount_gates(tmp_path) as mounted:
        yield mounted


@contextmanager
def training(gates: Gates, name: str = "first", **options: object) -> Iterator[Rig]:
    with start(gates.folder, gates.folder.parent / name, **options) as rig:
        yield rig


def hold_in(gates: Gates, rig: Rig, phase: str) -> None:
    """Begin a save and let it come as far as this phase."""
    operation, pattern, _ = PHASES[phase]
    gates.hold(operation, pattern)
    rig.save()
    gates.wait_held()


def await_failures(rig: Rig, count: int) -> None:
    rig.await_true(lambda: rig.last(0)["failures"] == count, f"{count} failures in a row are told")


def await_saved(rig: Rig, after: int) -> None:
    rig.await_true(lambda: (rig.last(0)["saved"] or 0) > after, f"a step after {after} is verified")


def await_saving(rig: Rig, after: int) -> int:
    """The step that is being saved, once all ranks have told of it."""
    rig.await_true(lambda: all(rig.last(rank)["saving"] > after for rank in range(2)), "the save's step is told")
    return int(rig.last(0)["saving"])


def digests(rig: Rig, step: int) -> list[str]:
    """What each rank's state was after a step."""
    return [next(e["digest"] for e in rig.steps(rank) if e["step"] == step) for rank in range(2)]


def restored(rig: Rig) -> tuple[int, list[str]]:
    """(step, each rank's state) that a training began with."""
    return rig.last(0, "restored")["step"], [rig.last(rank, "restored")["digest"] for rank in range(2)]


def test_a_writer_killed_in_any_phase_costs_that_save_and_nothing_else(gates: Gates) -> None:
    with training(gates) as rig:
        saved = rig.save_and_wait()
        for phase, (_, _, rank) in PHASES.items():
            hold_in(gates, rig, phase)
            rig.kill(rank, ["writer"])
            gates.open()
            await_failures(rig, 1)
            assert saved in [found.step for found in verified(gates.folder)], phase
            saved = rig.save_and_wait()
            assert rig.last(0)["failures"] == 0


def begin_staging(rig: Rig) -> None:
    """Begin a save in which rank 1 still stages: its writer is stopped and does not protect the state."""
    os.kill(rig.writer(1), signal.SIGSTOP)
    rig.save()
    rig.await_true(lambda: rig.last(0)["is_busy"], "the save is begun")


def test_a_writer_killed_before_a_save_or_while_the_state_is_staged_is_replaced(gates: Gates) -> None:
    with training(gates) as rig:
        rig.kill(1, ["writer"])
        saved = rig.save_and_wait()
        begin_staging(rig)
        rig.kill(1, ["writer"])
        await_failures(rig, 1)
        assert [found.step for found in verified(gates.folder)] == [saved]
        assert rig.save_and_wait() > saved


def test_a_node_that_died_while_the_state_is_staged_leaves_the_last_verified_checkpoint(gates: Gates) -> None:
    with training(gates) as rig:
        saved = rig.save_and_wait()
        begin_staging(rig)
        rig.kill(1, NODE)
        rig.end()
    assert verified(gates.folder)[-1].step == saved
    with training(gates, "second") as again:
        assert restored(again) == (saved, digests(rig, saved))


def test_a_training_whose_node_died_in_any_phase_goes_on_from_a_whole_checkpoint(gates: Gates) -> None:
    whole: dict[int, list[str]] = {}
    for number, (phase, (_, _, rank)) in enumerate(PHASES.items()):
        with training(gates, f"start{number}") as rig:
            if whole:
                step, state = restored(rig)
                assert whole[step] == state
            saved = rig.save_and_wait()
            hold_in(gates, rig, phase)
            saving = await_saving(rig, saved)
            rig.kill(rank, NODE)
            gates.refuse("*", errno.EIO, "*/step-*")  # what hung in the middle of a call did not come to its end
            rig.end()
            gates.open()
            assert verified(gates.folder)[-1].step == saved, phase
            whole = {saved: digests(rig, saved)}
            if phase in PUBLISHED:
                whole[saving] = digests(rig, saving)  # nobody has vouched for it: every byte is checked at the restore


@pytest.mark.parametrize("phase", ["the folder is made", "a shard is written", "the manifest is renamed"])
def test_a_save_whose_state_is_staged_outlives_its_ranks(gates: Gates, phase: str) -> None:
    with training(gates) as rig:
        hold_in(gates, rig, phase)
        saving = await_saving(rig, 0)
        rig.await_step(after=saving + 1)  # by then all ranks have said that the step was sound
        rig.kill(PHASES[phase][2], ["rank"])
        gates.open()
        rig.await_true(lambda: not any(is_running(writer) for writer in rig.writers), "the writers are done")
        rig.end()
    assert [found.step for found in verified(gates.folder)] == [saving]
    with training(gates, "second") as again:
        assert restored(again) == (saving, digests(rig, saving))
        assert again.save_and_wait() > saving


# ---------------------------------------------------------------- stopped, hanging, slow


def longest_step_s(rig: Rig, since: int) -> float:
    return max(float(event["took_s"]) for event in rig.steps(0) if event["step"] > since)


def test_a_writer_stopped_in_any_phase_holds_up_no_step_and_goes_on_when_it_may(gates: Gates) -> None:
    with training(gates) as rig:
        for phase, (_, _, rank) in PHASES.items():
            hold_in(gates, rig, phase)
            os.kill(rig.writer(rank), signal.SIGSTOP)
            gates.open()
            since = rig.await_step()
            rig.save()
            rig.await_step(after=since + 20)
            assert longest_step_s(rig, since) < QUICK_S, phase
            assert rig.last(0)["is_busy"], phase
            os.kill(rig.writer(rank), signal.SIGCONT)
            await_saved(rig, since)
            assert rig.last(0)["failures"] == 0


def test_a_writer_stopped_before_a_save_costs_at_most_a_bounded_wait(gates: Gates) -> None:
    with training(gates) as rig:
        saved = rig.save_and_wait()
        os.kill(rig.writer(1), signal.SIGSTOP)
        rig.save()
        await_failures(rig, 1)
        since = rig.await_step()
        assert longest_step_s(rig, saved) < 15
        assert rig.save_and_wait() > since


def test_a_file_system_that_hangs_holds_up_no_step_and_the_save_is_made_when_it_answers(gates: Gates) -> None:
    with training(gates) as rig:
        saved = rig.save_and_wait()
        gates.hold("*")
        rig.save()
        gates.wait_held()
        since = rig.await_step()
        rig.await_step(after=since + 20)
        assert longest_step_s(rig, since) < QUICK_S
        assert rig.last(0)["saved"] == saved
        gates.open()
        await_saved(rig, saved)


@pytest.mark.parametrize("ending", ["leave", "finish"])
def test_the_last_save_waits_for_a_hanging_file_system_so_long_and_no_longer(gates: Gates, ending: str) -> None:
    with training(gates, final_wait_s=2) as rig:
        saved = rig.save_and_wait()
        gates.hold("*", "checkpoints*")
        getattr(rig, ending)()
        rig.await_true(lambda: not any(rank.is_alive() for rank in rig.ranks), "the ranks have ended", 40)
        assert rig.last(0, "closed")["took_s"] < 30
        assert rig.ranks[0].exitcode == (75 if ending == "leave" else 1)
        rig.end()
        gates.open()
    assert verified(gates.folder)[-1].step == saved


def test_a_training_can_be_ended_while_its_file_system_hangs(gates: Gates) -> None:
    with training(gates) as rig:
        saved = rig.save_and_wait()
        gates.hold("*")
        rig.save()
        gates.wait_held()
        for rank in rig.ranks:
            rank.terminate()
        rig.await_true(lambda: not any(rank.is_alive() for rank in rig.ranks), "the ranks have ended")
        rig.end()
        gates.open()
    assert verified(gates.folder)[-1].step == saved


# ---------------------------------------------------------------- full, failing, lying


@contextmanager
def small_disk(folder: Path, mib: int) -> Iterator[Path]:
    """A file system of so many MiB."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={mib}m", "none", str(folder)], check=True, timeout=10)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True, timeout=10)


def folders(run_dir: Path) -> set[str]:
    return {path.name for path in RunPaths(run_dir).checkpoints().glob("step-*")}


def warnings_of(rig: Rig, word: str) -> list[str]:
    return [line for line in rig.text().splitlines() if word in line]


def test_a_full_disk_costs_saves_and_a_warning_until_there_is_space_again(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 60) as disk, start(disk, tmp_path / "first", keep_last=2) as rig:
        saved = [rig.save_and_wait(), rig.save_and_wait()]
        for failures in (1, 2, 3):
            rig.save()
            await_failures(rig, failures)
        assert "No space left" in rig.last(0)["error"]
        assert [found.step for found in verified(disk)] == saved
        rig.await_true(lambda: folders(disk) == {f"step-{step}.a1" for step in saved}, "what failed is removed")
        assert len(warnings_of(rig, "No space left")) == 1
        assert longest_step_s(rig, saved[-1]) < QUICK_S
        subprocess.run(["mount", "-o", "remount,size=200m", str(disk)], check=True, timeout=10)
        assert rig.save_and_wait() > saved[-1]
        assert rig.last(0)["failures"] == 0


def test_a_slow_file_system_makes_saves_slow_and_no_step(gates: Gates) -> None:
    with training(gates) as rig:
        gates.slow("write", 0.05, "*.distcp")
        since = rig.await_step()
        saved = rig.save_and_wait()
        assert rig.last(0)["step"] > saved + 10
        assert longest_step_s(rig, since) < QUICK_S
        assert [found.step for found in verified(gates.folder)] == [saved]


@pytest.mark.parametrize(
    ("operation", "pattern"),
    [
        ("mkdir", "*/step-*"),
        ("write", "*/__1_0.distcp"),
        ("fsync", "*/__0_0.distcp"),
        ("create", "*/.metadata*"),
        ("rename*", "*/MANIFEST.json"),
        ("read", "*/__1_0.distcp"),
        ("rename*", "*/VERIFIED.json"),
    ],
)
def test_a_call_that_fails_costs_that_save_and_nothing_else(gates: Gates, operation: str, pattern: str) -> None:
    with training(gates) as rig:
        saved = rig.save_and_wait()
        gates.refuse(operation, errno.EIO, pattern)
        rig.save()
        await_failures(rig, 1)
        gates.open()
        assert [found.step for found in verified(gates.folder)] == [saved]
        assert rig.save_and_wait() > saved


def test_bytes_that_changed_on_their_way_to_the_disk_are_found_and_never_believed(gates: Gates) -> None:
    with training(gates) as rig:
        saved = rig.save_and_wait()
        gates.hold("fsync", "*/__1_0.distcp")
        rig.save()
        _, name = gates.wait_held()
        flip_byte(gates.behind / name, 5_000_000)
        gates.open()
        await_failures(rig, 1)
        assert "__1_0.distcp" in rig.last(0)["error"]
        rig.end()
        assert [found.step for found in verified(gates.folder)] == [saved]
        with training(gates, "second") as again:
            assert restored(again) == (saved, digests(rig, saved))
