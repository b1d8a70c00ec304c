"""What an attempt is now: running, on which nodes, at which step."""

from __future__ import annotations

from slurm.types import JobFlag, JobState
from supervisor.core.attempts import last_step_seen
from supervisor.model import AttemptState
from tests.core.builders import NOW, STALE, ago, attempt, job, launch, progress, sight, view

SUBMITTED = attempt(state=AttemptState.SUBMITTED)


def test_an_attempt_runs_once_slurm_says_so() -> None:
    seen = sight(SUBMITTED, job(), view=view()).attempt
    assert (seen.state, seen.started_at, seen.nodes) == (AttemptState.RUNNING, NOW, ("n1", "n2"))


def test_an_attempt_runs_once_its_launcher_reports_though_squeue_does_not_answer() -> None:
    seen = sight(SUBMITTED, view=view(launch=launch({"n2": 0.1, "n1": 0.1})), jobs=STALE).attempt
    assert (seen.state, seen.nodes) == (AttemptState.RUNNING, ("n1", "n2"))


def test_a_pending_job_does_not_run_and_its_planned_nodes_are_not_its_own() -> None:
    seen = sight(SUBMITTED, job(state=JobState.PENDING), view=view()).attempt
    assert (seen.state, seen.nodes) == (AttemptState.SUBMITTED, ())


def test_the_nodes_of_the_start_stay_when_slurm_shows_fewer_later() -> None:
    completing = job(state=None, flags=frozenset({JobFlag.COMPLETING}), nodes=("n2",))
    assert sight(attempt(), completing, view=view()).attempt.nodes == ("n1", "n2")


def test_the_first_new_step_is_remembered() -> None:
    seen = sight(attempt(resume_step=9), job(), view=view(progress=progress(10))).attempt
    assert (seen.stepped_at, seen.last_step, seen.phase) == (NOW, 10, "step")


def test_the_step_that_was_resumed_from_is_no_new_step() -> None:
    assert sight(attempt(resume_step=10), job(), view=view(progress=progress(10))).attempt.stepped_at is None


def test_a_start_has_made_no_step() -> None:
    seen = sight(attempt(resume_step=5), job(), view=view(progress=progress(10, "start"))).attempt
    assert seen.stepped_at is None


def test_progress_is_stored_every_few_seconds_only() -> None:
    stored = attempt(stepped_at=ago(60), last_step=9, phase="step", progress_at=ago(2))
    assert sight(stored, job(), view=view(progress=progress(10))).attempt == stored


def test_progress_that_does_not_change_is_not_stored_again() -> None:
    stored = attempt(stepped_at=ago(60), last_step=10, phase="step", progress_at=ago(60))
    assert sight(stored, job(), view=view(progress=progress(10))).attempt == stored


def test_a_change_of_phase_is_stored() -> None:
    stored = attempt(stepped_at=ago(60), last_step=10, phase="step", progress_at=ago(60))
    assert sight(stored, job(), view=view(progress=progress(10, "save"))).attempt.phase == "save"


def test_the_progress_of_another_attempt_is_not_ours() -> None:
    assert sight(attempt(2), job(2), view=view(2, progress=progress(50))).attempt.last_step is None


def test_the_last_step_seen_is_the_newest_of_ledger_and_file() -> None:
    assert last_step_seen(sight(attempt(last_step=8), job(), view=view(progress=progress(10)))) == 10
    assert last_step_seen(sight(attempt(last_step=8), job(), view=view())) == 8
    assert last_step_seen(sight(attempt(), job(), view=view())) is None
