"""Hours of cluster time under drawn fault schedules: the real loop, ledger, core and executor on a simulated cluster.

What must hold at every step stands in tests.sim.simulation; here it is played for SCHEDULES seeds. A failure names its
seed: `play(seed)` plays it again.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from supervisor.model import RunState
from tests.sim.schedule import draw_schedule
from tests.sim.simulation import Simulation

SCHEDULES = 500
BLOCKS = 10


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


def play(seed: int, folder: Path) -> Simulation:
    schedule = draw_schedule(seed)
    place = folder / str(seed)
    place.mkdir()
    simulation = Simulation(schedule, place)
    try:
        run = simulation.run()
        is_known = run.state in (RunState.FINISHED, RunState.STOPPED, RunState.HELD) or run.reason
        assert is_known, f"lost: {run.state} without a reason; attempts: {simulation.attempts()}"
        assert run.state is not RunState.FINISHED or simulation.cluster.has_finished, "finished before its final step"
        has_ended = run.state in (RunState.FINISHED, RunState.STOPPED, RunState.HELD)
        assert not has_ended or simulation.is_all_gone(), f"{run.state}, and something of it is left in the cluster"
        told = simulation.load_interruptions_in_job()
        assert len(told) == simulation.cluster.recoveries, f"{simulation.cluster.recoveries} recoveries, told: {told}"
        simulation.outcome = run.state.value
        simulation.ends = tuple(a.end.value for a in simulation.attempts() if a.end is not None)
    except Exception as error:
        raise AssertionError(f"seed {seed} at {simulation.now_s:.1f} s: {error}\n{schedule}") from error
    finally:
        simulation.close()
        shutil.rmtree(place)
    return simulation


@pytest.mark.parametrize("block", range(BLOCKS))
def test_no_fault_schedule_leads_to_two_trainings_a_lost_run_or_a_bad_checkpoint(block: int, folder: Path) -> None:
    size = SCHEDULES // BLOCKS
    for seed in range(block * size, (block + 1) * size):
        play(seed, folder)
