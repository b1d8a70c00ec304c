"""The progress file and the limits that it announces."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.contract import Progress, parse
from trainer.progress import LimitPolicy, PhaseLimits, ProgressWriter

POLICY = LimitPolicy(factor=5, min_s=10, max_s=600, recent=3, first_s={"start": 7200.0, "step": 300.0})


class _Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def _writer(clock: Callable[[], float], path: Path | None = None, **options: object) -> ProgressWriter:
    return ProgressWriter(path, 1, final_step=100, policy=POLICY, clock=clock, **options)  # type: ignore[arg-type]


def test_before_anything_was_seen_the_configured_limit_holds() -> None:
    limits = PhaseLimits(policy=POLICY)
    assert limits.limit_s("start") == 7200
    assert limits.limit_s("step") == 300
    assert limits.limit_s("save") > 0


def test_the_limit_follows_the_longest_recent_duration_between_its_bounds() -> None:
    limits = PhaseLimits(policy=POLICY)
    assert limits.learn("step", 8).limit_s("step") == 40
    assert limits.learn("step", 0.01).limit_s("step") == 10
    assert limits.learn("step", 3000).limit_s("step") == 600


def test_an_old_slow_step_is_forgotten() -> None:
    limits = PhaseLimits(policy=POLICY).learn("step", 100)
    for _ in range(POLICY.recent):
        limits = limits.learn("step", 4)
    assert limits.limit_s("step") == 20


@given(durations=st.lists(st.floats(min_value=-1, max_value=1e6), min_size=1, max_size=30))
def test_a_learnt_limit_is_always_within_its_bounds_and_covers_the_last_duration(durations: list[float]) -> None:
    limits = PhaseLimits(policy=POLICY)
    for duration in durations:
        limits = limits.learn("save", duration)
    assert POLICY.min_s <= limits.limit_s("save") <= POLICY.max_s
    assert limits.limit_s("save") >= min(durations[-1], POLICY.max_s)


def test_a_policy_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="min_s"):
        LimitPolicy(min_s=10, max_s=5)
    with pytest.raises(ValueError, match="warmup"):
        LimitPolicy(first_s={"warmup": 1.0})


def test_the_first_step_has_the_limit_of_the_start_and_teaches_nothing_about_steps() -> None:
    clock = _Clock()
    with _writer(clock) as progress:
        assert (progress.record.step, progress.record.phase, progress.record.limit_s) == (-1, "start", 7200)
        clock.now += 2880  # compiling
        progress.step_done(1)
        assert (progress.record.phase, progress.record.limit_s) == ("step", 300)
        clock.now += 8
        progress.step_done(2)
        assert progress.record.limit_s == 40


@pytest.mark.parametrize(("start_s", "limit_s"), [(3.0, 120.0), (40.0, 200.0), (2880.0, 300.0)])
def test_the_second_step_is_measured_by_the_start_until_steps_are_known(start_s: float, limit_s: float) -> None:
    limits = PhaseLimits(policy=POLICY).learn("start", start_s)

    assert limits.limit_s("step") == limit_s
    assert limits.learn("step", 4.0).limit_s("step") == 20.0


def test_a_wait_that_is_known_to_last_is_announced_and_says_nothing_of_the_next_save() -> None:
    clock = _Clock()
    with _writer(clock) as progress:
        progress.step_done(1)
        with progress.phase("save"):
            clock.now += 3
        with progress.phase("save", limit_s=500.0, is_counted=False):
            assert (progress.record.phase, progress.record.limit_s) == ("save", 500)
            clock.now += 400
        assert (progress.record.phase, progress.record.save_blocking_s) == ("step", 3)
        assert progress.limits.limit_s("save") == 15
        clock.now += 2
        progress.step_done(2)
        assert progress.record.limit_s == 10


def test_a_resumed_run_shows_its_step_and_keeps_the_limit_of_the_start() -> None:
    with _writer(_Clock()) as progress:
        progress.resumed(40, 480)
        record = progress.record
        assert (record.step, record.samples, record.phase, record.limit_s) == (40, 480, "start", 7200)


def test_a_save_between_two_steps_does_not_lengthen_the_limit_of_a_step() -> None:
    clock = _Clock()
    with _writer(clock) as progress:
        progress.step_done(1)
        with progress.phase("save"):
            assert progress.record.phase == "save"
            clock.now += 90
        assert progress.record.phase == "step"
        assert progress.record.save_blocking_s == 90
        clock.now += 4
        progress.step_done(2)
        assert progress.record.limit_s == 20
        assert progress.limits.limit_s("save") == 450
        clock.now += 10
        progress.step_done(3)
        assert progress.record.limit_s == 50


def test_a_phase_that_fails_is_left_again() -> None:
    with _writer(_Clock()) as progress:
        progress.step_done(1)
        with pytest.raises(OSError, match="disk"), progress.phase("save"):
            raise OSError("disk")
        assert progress.record.phase == "step"


def test_after_the_final_step_the_phase_is_end() -> None:
    with _writer(_Clock()) as progress:
        progress.step_done(99)
        progress.step_done(100)
        assert progress.record.phase == "end"


def test_the_file_holds_the_newest_record(tmp_path: Path) -> None:
    path = tmp_path / "progress" / "a1.json"
    with _writer(time.monotonic, path) as progress:
        progress.step_done(1, loss=2.5, samples=12)
        assert progress.flush()
        assert parse(Progress, path.read_bytes()) == progress.record
        assert progress.record.loss == 2.5
        progress.step_done(2)
    assert parse(Progress, path.read_bytes()).step == 2


def test_it_is_written_at_most_once_an_interval_except_when_the_phase_changes(tmp_path: Path) -> None:
    path = tmp_path / "a1.json"
    with _writer(time.monotonic, path, min_interval_s=3600.0) as progress:
        progress.step_done(1)
        _await(lambda: path.exists() and parse(Progress, path.read_bytes()).step == 1)
        first = path.read_bytes()
        for step in range(2, 50):
            progress.step_done(step)
        assert path.read_bytes() == first
        with progress.phase("save"):
            _await(lambda: parse(Progress, path.read_bytes()).phase == "save")


def test_a_step_that_came_too_soon_is_written_when_the_interval_is_over(tmp_path: Path) -> None:
    path = tmp_path / "a1.json"
    with _writer(time.monotonic, path, min_interval_s=0.05) as progress:
        for step in range(1, 6):
            progress.step_done(step)
        _await(lambda: path.exists() and parse(Progress, path.read_bytes()).step == 5)


def test_a_progress_file_that_cannot_be_written_does_not_stop_the_training(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with _writer(time.monotonic, tmp_path / "file" / "a1.json") as progress:
        progress.step_done(1)
        assert progress.flush()


def test_writing_resumes_when_the_disk_has_room_again(tmp_path: Path) -> None:
    blocked = tmp_path / "progress"
    blocked.touch()
    with _writer(time.monotonic, blocked / "a1.json") as progress:
        progress.step_done(1)
        assert progress.flush()
        blocked.unlink()
        progress.step_done(2)
        assert progress.flush()
    assert parse(Progress, (blocked / "a1.json").read_bytes()).step == 2


def test_its_thread_ends_with_it(tmp_path: Path) -> None:
    with _writer(time.monotonic, tmp_path / "a1.json"):
        assert any(thread.name == "progress" for thread in threading.enumerate())
    assert not any(thread.name == "progress" for thread in threading.enumerate())


def _await(condition: Callable[[], bool], within_s: float = 10.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it never became true"
        threading.Event().wait(0.005)
