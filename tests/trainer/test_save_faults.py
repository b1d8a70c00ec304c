"""Saves while processes are killed or stopped and file systems fill up, hang or fail: nothing good is lost, nothing bad
is believed, and the training goes on.

The training and its writers are real processes; the file system is a mount whose calls are held one by one, so that
each fault strikes exactly where it is meant to.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.trainer.faults.gates import Gates, mount_gates
from tests.trainer.faults.rig import Rig, is_running, start, verified

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
NODE = ("rank", "writer")


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
            rig.await_true(lambda: rig.last(0)["failures"] == 1, f"the failure is told ({phase})")
            assert saved in [found.step for found in verified(gates.folder)], phase
            saved = rig.save_and_wait()
            assert rig.last(0)["failures"] == 0


def test_a_training_whose_node_died_in_any_phase_goes_on_from_the_last_verified_checkpoint(gates: Gates) -> None:
    expected: tuple[int, list[str]] | None = None
    for number, (phase, (_, _, rank)) in enumerate(PHASES.items()):
        with training(gates, f"start{number}") as rig:
            if expected is not None:
                assert restored(rig) == expected
            saved = rig.save_and_wait()
            hold_in(gates, rig, phase)
            rig.kill(rank, NODE)
            gates.refuse("*", errno.EIO, "*/step-*")  # what hung in the middle of a call did not come to its end
            rig.end()
            gates.open()
            assert verified(gates.folder)[-1].step == saved, phase
            expected = saved, digests(rig, saved)


@pytest.mark.parametrize("phase", ["the folder is made", "a shard is written", "the manifest is renamed"])
def test_a_save_whose_state_is_staged_outlives_its_ranks(gates: Gates, phase: str) -> None:
    with training(gates) as rig:
        hold_in(gates, rig, phase)
        saving = rig.last(0)["saving"]
        rig.kill(PHASES[phase][2], ["rank"])
        gates.open()
        rig.await_true(lambda: not any(is_running(writer) for writer in rig.writers), "the writers are done")
        rig.end()
    assert [found.step for found in verified(gates.folder)] == [saving]
    with training(gates, "second") as again:
        assert restored(again) == (saving, digests(rig, saving))
        assert again.save_and_wait() > saving
