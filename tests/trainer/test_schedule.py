"""When the next checkpoint is due."""

from __future__ import annotations

from trainer.session.schedule import SaveSchedule


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_saves_by_steps_follow_the_step() -> None:
    schedule = SaveSchedule(every_steps=20)
    assert [step for step in range(1, 61) if schedule.is_due(step)] == [20, 40, 60]


def test_saves_by_time_follow_the_clock_and_the_first_comes_early() -> None:
    clock = Clock()
    schedule = SaveSchedule(every_s=100, clock=clock)
    clock.now = 49
    assert not schedule.is_due(1)
    clock.now = 50  # failures gather just after a restart
    assert schedule.is_due(1)
    schedule.saved()
    clock.now = 149
    assert not schedule.is_due(2)
    clock.now = 150
    assert schedule.is_due(2)


def test_without_an_interval_nothing_is_due() -> None:
    assert not SaveSchedule().is_due(1)


def test_another_interval_counts_from_the_last_save() -> None:
    clock = Clock()
    schedule = SaveSchedule(every_s=100, clock=clock)
    schedule.saved()
    clock.now = 30
    assert not schedule.is_due_by_time()
    schedule.retime(30)
    assert schedule.is_due_by_time()
    schedule.retime(31)
    assert not schedule.is_due_by_time()


def test_an_interval_where_there_was_none_begins_with_half_of_it() -> None:
    clock = Clock()
    schedule = SaveSchedule(clock=clock)
    clock.now = 1000
    schedule.retime(60)
    assert not schedule.is_due_by_time()
    clock.now = 1030
    assert schedule.is_due_by_time()
