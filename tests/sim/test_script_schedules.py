"""A person's script under drawn fault schedules: the real loop, ledger, core, executor and kept submission.

What must hold at every step stands in tests.sim.script_simulation and tests.sim.script_cluster. A failure names its
seed: `play(seed, folder)` plays it again.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from supervisor.model import AttemptEnd, RunState
from tests.sim.script_simulation import ScriptSimulation, draw_schedule

SCHEDULES = 160
BLOCKS = 4


@pytest.fixture(autouse=True)
def _silent_log() -> Iterator[None]:
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield
    structlog.configure(**before)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder in memory where there is one: every commit is synced."""
    base = Path("/dev/shm")
    path = Path(tempfile.mkdtemp(dir=base if base.is_dir() else None))
    yield path
    shutil.rmtree(path)


def play(seed: int, folder: Path) -> tuple[RunState, tuple[AttemptEnd | None, ...]]:
    """The run's state at the end, and how its attempts ended."""
    schedule = draw_schedule(seed)
    place = folder / str(seed)
    place.mkdir()
    simulation = ScriptSimulation(schedule, place)
    try:
        run = simulation.run()
        is_known = run.state in (RunState.FINISHED, RunState.STOPPED, RunState.HELD) or run.reason
        assert is_known, f"lost: {run.state} without a reason; attempts: {simulation.attempts()}"
        assert run.state is not RunState.FINISHED or simulation.cluster.has_finished, "finished before its final step"
        return run.state, tuple(a.end for a in simulation.attempts())
    except Exception as error:
        raise AssertionError(f"seed {seed} at {simulation.now_s:.1f} s: {error}\n{schedule}") from error
    finally:
        simulation.close()
        shutil.rmtree(place)


@pytest.mark.parametrize("block", range(BLOCKS))
def test_no_fault_schedule_runs_a_script_twice_at_once_loses_it_or_sends_it_back_to_its_beginning(
    block: int, folder: Path
) -> None:
    size = SCHEDULES // BLOCKS
    played = [play(seed, folder) for seed in range(block * size, (block + 1) * size)]
    assert sum(state is RunState.FINISHED for state, _ in played) > size / 2
    assert any(AttemptEnd.VANISHED in ends for _, ends in played)  # a job that nobody saw end is among them
