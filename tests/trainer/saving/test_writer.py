"""Writers, ranks and the guard that are killed or stopped in the middle of a save."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.trainer.saving.waiting import DEADLINE_S, await_that
from trainer.storage.stored import find_checkpoints, verify_checkpoint

if TYPE_CHECKING:
    from tests.trainer.saving.crew import Crew

pytestmark = pytest.mark.torch

ELEMENTS = 24_000_000  # copied in a few dozen milliseconds: long enough to be caught in the middle


@contextmanager
def _crew(root: Path, world: int = 2, elements: int = ELEMENTS, **options: object) -> Iterator[Crew]:
    import torch

    from tests.trainer.saving.crew import crew

    with crew(root, [[torch.full((elements,), float(rank))] for rank in range(world)], **options) as made:
        yield made


def _verified(root: Path) -> list[int]:
    found = [f for f in find_checkpoints(root / "checkpoints") if f.is_verified]
    for checkpoint in found:
        verify_checkpoint(checkpoint.path)
    return [checkpoint.step for checkpoint in found]


def _signal_writer(crew: Crew, rank: int, number: signal.Signals) -> None:
    pid = crew.savers[rank].writer_pid
    assert pid is not None
    os.kill(pid, number)


def _catch_in(crew: Crew, phase: str, first_step: int) -> int:
    """Begin saves until the writer of rank 0 is stopped in a phase; the step."""
    for step in range(first_step, first_step + 20):
        crew.begin(step)
        while crew.savers[0].is_busy and crew.savers[0].phase != phase:
            pass
        with suppress(ProcessLookupError):
            _signal_writer(crew, 0, signal.SIGSTOP)
        if crew.savers[0].phase == phase:
            return step
        _signal_writer(crew, 0, signal.SIGCONT)
        crew.results()
    raise AssertionError(f"never seen {phase}")


def _write_aside(crew: Crew) -> threading.Thread:
    import torch

    (value,) = crew.values[0]
    assert isinstance(value, torch.Tensor)
    thread = threading.Thread(target=value.add_, args=(1,), daemon=True)
    thread.start()
    return thread


def _stop_while_protected(crew: Crew, step: int) -> int:
    for at in range(step, step + 20):
        crew.begin(at)
        _signal_writer(crew, 0, signal.SIGSTOP)
        if crew.savers[0].phase == "staging" and crew.savers[0].holds_sources:
            return at
        _signal_writer(crew, 0, signal.SIGCONT)
        crew.results()
    raise AssertionError("it is always staged already")


def test_a_writer_that_dies_while_memory_is_protected_frees_the_training(tmp_path: Path) -> None:
    with _crew(tmp_path) as crew:
        if not crew.savers[0].is_protecting:
            pytest.skip("no write protection here")
        crew.save(1)
        _stop_while_protected(crew, 2)
        training = _write_aside(crew)
        _signal_writer(crew, 0, signal.SIGKILL)
        training.join(DEADLINE_S)
        assert not training.is_alive()
        errors = [result.error for result in crew.results()]
        assert "its writer ended (SIGKILL)" in errors[0]
        assert "rank 0" in errors[1]
        before = crew.snapshot()
        assert all(result.is_verified for result in crew.save(99))
        assert crew.stored(99) == before


def test_a_writer_that_hangs_while_memory_is_protected_is_ended_in_seconds(tmp_path: Path) -> None:
    with _crew(tmp_path, world=1) as crew:
        if not crew.savers[0].is_protecting:
            pytest.skip("no write protection here")
        crew.save(1)
        _stop_while_protected(crew, 2)
        training = _write_aside(crew)
        training.join(12)  # 3 s on a quiet machine
        assert not training.is_alive()
        assert "its writer ended" in crew.results()[0].error
        assert crew.save(99)[0].is_verified


@pytest.mark.parametrize("killed", [0, 1])
@pytest.mark.parametrize("phase", ["staging", "writing", "verifying"])
def test_a_writer_killed_in_any_phase_costs_the_save_in_flight_only(tmp_path: Path, phase: str, killed: int) -> None:
    with _crew(tmp_path) as crew:
        crew.save(1)
        _catch_in(crew, phase, 2)
        _signal_writer(crew, killed, signal.SIGKILL)
        if killed != 0:
            _signal_writer(crew, 0, signal.SIGCONT)
        began = time.monotonic()
        results = crew.results()
        assert time.monotonic() - began < DEADLINE_S
        assert len(results) == 2
        assert 1 in _verified(tmp_path)
        assert all(result.is_verified for result in crew.save(99))
        assert 99 in _verified(tmp_path)


def test_a_writer_killed_before_rank_0_has_begun_ends_the_save_there_too(tmp_path: Path) -> None:
    with _crew(tmp_path, elements=4096) as crew:
        crew.save(1)
        crew.begin(2, ranks=[1])
        _signal_writer(crew, 1, signal.SIGKILL)
        lost = crew.savers[1].wait(DEADLINE_S)
        assert lost is not None
        crew.begin(2, ranks=[0])
        (result,) = crew.results()
        assert "rank 1: its writer ended" in result.error
        assert all(result.is_verified for result in crew.save(3))


def _is_replaced(crew: Crew, rank: int, pid: int | None) -> bool:
    return not crew.savers[rank].is_busy and crew.savers[rank].writer_pid != pid


def test_a_writer_that_dies_between_saves_is_replaced_without_losing_one(tmp_path: Path) -> None:
    with _crew(tmp_path) as crew:
        crew.save(1)
        for rank in (1, 0):
            pid = crew.savers[rank].writer_pid
            _signal_writer(crew, rank, signal.SIGKILL)
            await_that(functools.partial(_is_replaced, crew, rank, pid))
        before = crew.snapshot()
        assert all(result.is_verified for result in crew.save(2))
        assert crew.stored(2) == before


def test_a_file_system_that_hangs_blocks_neither_the_training_nor_its_end(tmp_path: Path) -> None:
    from trainer.saving.saver import SaveInFlight

    with _crew(tmp_path, world=1) as crew:
        step = _catch_in(crew, "writing", 1)
        saver = crew.savers[0]
        began = time.monotonic()
        assert saver.poll() is None
        with pytest.raises(SaveInFlight):
            crew.begin(step + 1)
        assert saver.wait(0.1) is None
        saver.close(timeout_s=0.1)
        assert time.monotonic() - began < 5
        assert step not in _verified(tmp_path)


def _stop_one_that_writes(crew: Crew) -> int:
    """Begin saves until the writer of rank 1 is stopped while it writes; the step."""
    for step in range(1, 20):
        crew.begin(step)
        await_that(lambda: crew.savers[1].phase != "staging")
        with suppress(ProcessLookupError):
            _signal_writer(crew, 1, signal.SIGSTOP)
        if crew.savers[1].is_busy and not (crew.root / "checkpoints" / f"step-{step}.a1" / "MANIFEST.json").exists():
            return step
        _signal_writer(crew, 1, signal.SIGCONT)
        crew.results()
    raise AssertionError("no writer was stopped while it writes")


def test_writers_of_ranks_that_are_gone_leave_the_same_step_of_restarted_ranks_alone(tmp_path: Path) -> None:
    with _crew(tmp_path) as old, _crew(tmp_path, elements=4096) as new:
        step = _stop_one_that_writes(old)
        begun = tmp_path / "checkpoints" / f"step-{step}.a1" / "__0_0.distcp"
        await_that(begun.exists)  # else it may be made in the new ranks' folder: their save fails then, and says so
        assert [result.error for result in new.save(step)] == ["", ""]
        _signal_writer(old, 1, signal.SIGKILL)
        assert not any(result.is_verified for result in old.results())
        await_that(lambda: old.savers[0].phase == "idle")
        later = old.save(30)  # the failed save's folder was dealt with before
        assert [result.error for result in later] == ["", ""]
        assert step in _verified(tmp_path)
        new.stored(step)


@pytest.mark.parametrize("when", ["staging", "staged"])
def test_the_save_of_a_rank_that_dies_is_finished_if_its_bytes_are_staged(tmp_path: Path, when: str) -> None:
    child = subprocess.run(
        [sys.executable, "-m", "tests.trainer.saving.lone_rank", str(tmp_path), when],
        stdout=subprocess.PIPE,
        timeout=120,
        check=False,
    )
    assert child.returncode == -signal.SIGKILL
    pid, phase = child.stdout.split()
    if when == "staging" and phase == b"staging":
        os.kill(int(pid), signal.SIGCONT)
    await_that(lambda: not Path(f"/proc/{int(pid)}").exists())
    assert _verified(tmp_path) == ([1] if phase == b"staging" else [1, 2])
