"""Time limits, preemption, and what people do to a job with Slurm's own tools, through the whole chain."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from slurm.sandbox import Sandbox
from supervisor.model import Attempt, AttemptEnd
from tests.e2e.stage import Stage

pytestmark = pytest.mark.slurm

SAVES = ("save_every=100000", "saves=*")  # nothing but the request makes it save

PREEMPTION = """
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
PartitionName=low Nodes=ALL PriorityTier=1 PreemptMode={mode} GraceTime={grace_s}
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF
"""


def ask(stage: Stage, *command: str) -> str:
    """One of Slurm's own tools, as a person uses it."""
    return stage.sandbox.run(*command).stdout.strip()


def await_end(stage: Stage, number: int = 1, limit_s: float = 30) -> Attempt:
    stage.wait(f"the end of attempt {number}", lambda: stage.attempt(number).is_over, limit_s)
    return stage.attempt(number)


# ---- the warning before the time limit


@pytest.fixture(scope="module")
def warned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """Two runs whose jobs came near their time limit: "saves" does as it is asked, "ignores" goes on until it is ended.

    Slurm looks at time limits every 30 s, so this happens once.
    """
    directory = tmp_path_factory.mktemp("limits")
    with Sandbox.start(nodes=2, directory=directory / "sandbox") as sandbox:
        stage = Stage(directory / "stage", sandbox)
        stage.start_daemon()
        stage.submit("saves", *SAVES, max_without_progress=1)
        stage.submit("ignores", max_without_progress=1)
        for name, limit in (("saves", "TimeLimit=1"), ("ignores", "EndTime=now+1")):
            stage.await_step(1, name)
            if name == "ignores":
                stage.await_verified(1, name)
            ask(stage, "scontrol", "update", f"JobId={stage.attempt(1, name).job_id}", limit)
        for name in ("saves", "ignores"):
            stage.await_step(2, name, limit_s=75)
        yield stage
        stage.assert_one_job_per_attempt()
        stage.close()


def test_slurms_own_warning_makes_the_training_save_and_the_next_job_is_submitted_at_once(warned: Stage) -> None:
    first, second = warned.attempt(1, "saves"), warned.attempt(2, "saves")
    assert (first.end, first.exit_code) == (AttemptEnd.SAVED, 75)
    assert first.over_at is not None
    assert second.resume_step == first.last_step
    assert (second.planned_at - first.over_at).total_seconds() < 3
    assert [i.is_planned for i in warned.interruptions("saves")] == [True]


def test_a_training_that_ignores_the_warning_goes_on_from_its_last_checkpoint(warned: Stage) -> None:
    first, second = warned.attempt(1, "ignores"), warned.attempt(2, "ignores")
    assert first.end is AttemptEnd.TIME_LIMIT
    assert first.last_step is not None
    assert 0 < second.resume_step <= first.last_step
    assert [i.is_planned for i in warned.interruptions("ignores")] == [True]
