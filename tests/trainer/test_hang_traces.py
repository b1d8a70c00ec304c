"""Recorded trainings (tests/data/traces) and drawn ones, as the launcher saw them: no healthy one is called hung.

`python -m tests.trainer.hangs.record` makes the recordings: of real processes, four ranks on two nodes.
"""

from __future__ import annotations

import pytest

from tests.trainer.hangs.drawn import HEALTHY_KINDS, HUNG_KINDS, draw
from tests.trainer.hangs.replay import Trace, read_traces, replay

RECORDED = read_traces()
HEALTHY = [trace for trace in RECORDED if trace.hung_s is None]
HUNG = [trace for trace in RECORDED if trace.hung_s is not None]


def _name(trace: Trace) -> str:
    return trace.name


@pytest.mark.parametrize("trace", HEALTHY, ids=_name)
def test_a_recorded_healthy_training_is_never_called_hung(trace: Trace) -> None:
    assert replay(trace) is None


@pytest.mark.parametrize("trace", HUNG, ids=_name)
def test_a_recorded_hang_is_found_within_its_bound(trace: Trace) -> None:
    found = replay(trace)

    assert found is not None
    assert trace.hung_s is not None
    assert 0 < found[0] - trace.hung_s <= trace.within_s
    assert found[1].ranks == (() if trace.rank is None else (trace.rank,))


def test_there_are_twenty_healthy_recordings_of_every_kind() -> None:
    names = {trace.name for trace in HEALTHY}

    assert len(names) >= 20
    assert {"slow_saves", "one_evaluates", "recompile", "suspended_job", "restore", "data_stall"} <= names


@pytest.mark.parametrize("seed", range(40))
def test_a_drawn_healthy_training_is_never_called_hung(seed: int) -> None:
    trace = draw(seed, HEALTHY_KINDS)

    assert replay(trace) is None, trace.name


@pytest.mark.parametrize("seed", range(40))
def test_a_drawn_hang_is_found_and_no_other_rank_is_named(seed: int) -> None:
    trace = draw(seed, HUNG_KINDS)
    found = replay(trace)

    assert found is not None, trace.name
    assert trace.hung_s is not None
    assert 0 < found[0] - trace.hung_s <= trace.within_s
    assert set(found[1].ranks) <= {trace.rank}
