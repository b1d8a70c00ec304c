"""Silence of the training: a limit per phase, bounded by the run file; what is stopped by Slurm has not stalled."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from slurm.types import JobFlag, JobState
from supervisor.core.attempts import SUSPENDED, fold_attempt
from supervisor.core.ends import judge_end
from supervisor.core.stalls import choose_limit, judge_stall
from supervisor.model import UNREPORTED, AttemptEnd, AttemptState, ProgressSpec, Run, Seen
from tests.core.builders import STALE, ago, attempt, job, launch, progress, run, sight, spec, view
from trainer.contract import PHASES

LIMITS = ProgressSpec()


def bounded(**limits: float) -> Run:
    """A run whose stalls are the service's own to judge (see test_launches for the others)."""
    return run(spec=spec(progress=limits, restart={"in_job": False}))


def stall(seen: Any, *, of: Run | None = None, **parts: Any) -> str | None:
    return judge_stall(sight(attempt(), job(), of=of or bounded(), view=view(progress=seen), **parts))


@pytest.mark.parametrize("phase", PHASES)
def test_each_phase_has_its_own_upper_bound(phase: str) -> None:
    high = LIMITS.bounds(phase)[1]
    assert stall(progress(phase=phase, unchanged_s=high)) is None
    assert stall(progress(phase=phase, unchanged_s=high + 1)) is not None


@pytest.mark.parametrize("phase", PHASES)
def test_an_announced_limit_counts_within_the_bounds_of_the_run_file(phase: str) -> None:
    low, high = LIMITS.bounds(phase)
    assert choose_limit(phase, None, LIMITS) == high
    assert choose_limit(phase, (low + high) / 2, LIMITS) == (low + high) / 2
    assert choose_limit(phase, low / 2, LIMITS) == low
    assert choose_limit(phase, high * 2, LIMITS) == high


@pytest.mark.parametrize("phase", PHASES)
def test_a_maximum_of_zero_turns_a_phase_off(phase: str) -> None:
    """Case HD-08: 0 means off, in every phase alike."""
    off = bounded(**{f"{phase}_min_s": 0.0, f"{phase}_max_s": 0.0})
    assert choose_limit(phase, 5.0, off.spec.progress) is None
    assert stall(progress(phase=phase, unchanged_s=1e6), of=off) is None


def test_a_limit_of_300_s_is_300_s() -> None:
    """Case HD-08."""
    limited = bounded(step_max_s=300.0)
    assert stall(progress(unchanged_s=299), of=limited) is None
    assert stall(progress(unchanged_s=301), of=limited) is not None


def test_a_first_step_that_takes_48_minutes_is_no_hang_within_its_own_limit() -> None:
    """Case HD-01: normal step 8 s, limit of a step 10 min, limit of the start 120 min."""
    patient = bounded(step_max_s=600.0, start_max_s=7200.0)
    assert stall(progress(-1, "start", unchanged_s=48 * 60), of=patient) is None
    assert stall(progress(10, "step", unchanged_s=48 * 60), of=patient) is not None


def test_after_a_restart_the_limit_of_the_start_applies_again() -> None:
    """Case HD-01: the file of the attempt before says nothing about this one."""
    patient = bounded(step_max_s=600.0, start_max_s=7200.0)
    second = attempt(2, started_at=ago(48 * 60))
    old_file = view(2, progress=progress(500, unchanged_s=48 * 60))
    assert judge_stall(sight(second, job(2), of=patient, view=old_file)) is None


def test_after_the_final_step_agents_may_wait_for_each_other() -> None:
    """Case HD-05: step 10000 of 10000, nothing for four minutes."""
    assert stall(progress(10000, "end", final_step=10000, unchanged_s=240, limit_s=1.0)) is None


def test_a_start_without_a_progress_file_is_judged_by_its_own_age() -> None:
    for started_s, is_stalled in ((3599, False), (3601, True)):
        seen = sight(attempt(started_at=ago(started_s)), job(), view=view(launch=launch()))
        assert (judge_stall(seen) is not None) is is_stalled


def test_an_attempt_whose_start_nobody_saw_does_not_stall_before_its_first_progress() -> None:
    assert judge_stall(sight(attempt(started_at=None), job(), view=view())) is None


def test_without_a_progress_file_a_start_limit_of_zero_is_off() -> None:
    off = bounded(start_min_s=0.0, start_max_s=0.0)
    assert judge_stall(sight(attempt(started_at=ago(1e6)), job(), of=off, view=view())) is None


def test_a_job_that_waits_in_the_queue_does_not_stall() -> None:
    waiting = attempt(state=AttemptState.SUBMITTED, submitted_at=ago(1e6))
    assert judge_stall(sight(waiting, job(state=JobState.PENDING), view=view())) is None


def test_an_unreadable_run_directory_is_no_stall() -> None:
    assert judge_stall(sight(attempt(), job(), runs={"gpt": STALE})) is None


def test_nothing_is_called_a_stall_while_squeue_does_not_answer() -> None:
    """A suspended job is silent too, and only squeue tells the two apart."""
    assert judge_stall(sight(attempt(), view=view(progress=progress(unchanged_s=1e6)), jobs=STALE)) is None


def test_a_stall_ends_the_attempt_and_condemns_no_node() -> None:
    ended = judge_end(sight(attempt(), job(), view=view(progress=progress(unchanged_s=1000))))
    assert ended is not None
    assert (ended.end, ended.nodes) == (AttemptEnd.STALLED, ())
    assert "step 10" in ended.detail


# ---------------------------------------------------------------- suspended by Slurm


@pytest.mark.parametrize(
    "stopped",
    [job(state=JobState.SUSPENDED), job(state=None, flags=frozenset({JobFlag.STOPPED}))],
    ids=["suspended", "stopped"],
)
def test_a_job_that_slurm_has_stopped_does_not_stall(stopped: Any) -> None:
    seen = view(progress=progress(unchanged_s=1e5), launch=launch(unchanged_s=1e5))
    assert judge_end(sight(attempt(), stopped, view=seen)) is None


def test_the_time_in_suspension_does_not_count_once_the_job_goes_on() -> None:
    resumed = attempt(phase=SUSPENDED, progress_at=ago(10), last_step=10)
    assert judge_stall(sight(resumed, job(), view=view(progress=progress(10, unchanged_s=1e5)))) is None
    late = replace(resumed, progress_at=ago(1000))
    assert judge_stall(sight(late, job(), view=view(progress=progress(10, unchanged_s=1e5)))) is not None


def test_the_time_in_suspension_does_not_count_before_the_first_progress_either() -> None:
    resumed = attempt(phase=SUSPENDED, progress_at=ago(10), started_at=ago(1e5))
    assert judge_stall(sight(resumed, job(), view=view())) is None


def test_a_suspension_is_remembered_until_the_training_goes_on() -> None:
    suspended = sight(attempt(), job(state=JobState.SUSPENDED), view=view(progress=progress())).attempt
    assert suspended.phase == SUSPENDED
    silent = sight(replace(suspended, progress_at=ago(60)), job(), view=view(progress=progress(unchanged_s=99)))
    assert silent.attempt.phase == SUSPENDED
    stepping = sight(replace(suspended, progress_at=ago(60)), job(), view=view(progress=progress(11)))
    assert (stepping.attempt.phase, stepping.attempt.last_step) == ("step", 11)


def test_a_suspension_is_stored_every_few_seconds_only() -> None:
    just_stored = attempt(phase=SUSPENDED, progress_at=ago(2))
    assert sight(just_stored, job(state=JobState.SUSPENDED), view=view()).attempt == just_stored


# ---------------------------------------------------------------- scripts that report no progress


def silent_log(unchanged_s: float, **parts: Any) -> str | None:
    log = Seen(value=4096, unchanged_s=unchanged_s)
    old = attempt(started_at=ago(100_000))
    return judge_stall(sight(old, job(), view=view(log=log, launch=launch({"n1": 0.2}), **parts)))


def test_a_script_without_a_progress_file_is_alive_while_its_log_grows() -> None:
    assert silent_log(600) is None


def test_a_script_without_a_progress_file_has_stalled_when_its_log_is_silent_for_too_long() -> None:
    said = silent_log(LIMITS.start_max_s + 1)
    assert said is not None
    assert "progress.start_max_s" in said


def phase_after(started_s: float, phase: str) -> tuple[str, bool]:
    report = replace(launch({"n1": 0.2}).value, phase=phase)
    seen = view(launch=Seen(value=report, unchanged_s=0.3))
    after = fold_attempt(sight(attempt(started_at=ago(started_s), stepped_at=None), job(), view=seen))
    return after.phase, after.stepped_at is not None


def test_workers_that_run_and_report_nothing_count_as_under_way_after_a_while() -> None:
    assert phase_after(31, "running") == (UNREPORTED, True)


@pytest.mark.parametrize(("started_s", "phase"), [(10, "running"), (300, "checking")])
def test_a_start_without_a_report_is_not_under_way_yet(started_s: float, phase: str) -> None:
    assert phase_after(started_s, phase)[1] is False
