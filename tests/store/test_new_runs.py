"""A new run with what is known of it already, and one in place of a run that never had a job."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from supervisor.model import (
    Attempt,
    AttemptEnd,
    AttemptState,
    Intent,
    IntentKind,
    IntentState,
    NodesSpec,
    Run,
    RunSpec,
    RunState,
)
from supervisor.store import NameInUse, Store, TwoLiveAttempts

NOW = datetime(2026, 1, 2, tzinfo=UTC)
RUN = Run(spec=RunSpec(name="gpt", command=(), root=Path("/shared"), nodes=NodesSpec(min=1, max=1)))
ATTEMPT = Attempt(run="gpt", number=1, token="sup:gpt:1:a", nodes_wanted=1, planned_at=NOW, job_id=7)
CLAIM = Intent(kind=IntentKind.CLAIM, key="claim:7:gpt", reason="adopted", run="gpt", attempt=1, job_id=7)


def test_a_run_its_attempt_and_what_is_meant_of_it_come_together(path: Path) -> None:
    with Store.open(path, now=NOW) as store:
        store.add_run(RUN, NOW, attempts=(replace(ATTEMPT, state=AttemptState.SUBMITTED),), intents=(CLAIM,))
        world = store.load_world(NOW)
    assert [a.job_id for a in world.attempts["gpt"]] == [7]
    assert [i.key for i in world.open_intents] == ["claim:7:gpt"]


def test_nothing_is_kept_of_a_run_whose_attempt_can_not_be(path: Path) -> None:
    """Two live attempts of one run: the database refuses the second."""
    two = (replace(ATTEMPT, state=AttemptState.RUNNING), replace(ATTEMPT, number=2, token="x"))
    with Store.open(path, now=NOW) as store:
        with pytest.raises(TwoLiveAttempts):
            store.add_run(RUN, NOW, attempts=two)
        assert store.load_run("gpt") is None


def test_a_run_in_place_of_a_refused_one_keeps_nothing_of_it(path: Path) -> None:
    over = replace(ATTEMPT, state=AttemptState.OVER, end=AttemptEnd.REFUSED, job_id=None)
    with Store.open(path, now=NOW) as store:
        old = store.add_run(
            replace(RUN, state=RunState.STOPPED, reason="sbatch refused the job"), NOW, attempts=(over,)
        )
        store.add_run(replace(RUN, owner_uid=5), NOW, in_place_of=old)
        found = store.load_run("gpt")
        assert found is not None
        assert (found.owner_uid, found.state, store.load_attempts("gpt")) == (5, RunState.ACTIVE, ())
        assert store.load_intents(IntentState.OPEN) == ()


@pytest.mark.parametrize("state", [RunState.ACTIVE, RunState.HELD, RunState.FINISHED])
def test_a_run_that_went_on_meanwhile_is_not_replaced(path: Path, state: RunState) -> None:
    with Store.open(path, now=NOW) as store:
        known = store.add_run(replace(RUN, state=state), NOW)
        for in_place_of in (known, replace(known, state=RunState.STOPPED), None):
            with pytest.raises(NameInUse):
                store.add_run(RUN, NOW, in_place_of=in_place_of)
