"""A rank's own time: the time of ordinary steps without the waits for others."""

from __future__ import annotations

import json
import threading
import time

import pytest

from trainer.steptime import FLIGHT_EVERY_S, FlightLook, StepTimes


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def times(clock: Clock) -> StepTimes:
    begun = StepTimes(clock)
    begun.see_waits()
    begun.step_done(1)
    return begun


def test_a_steps_own_time_leaves_out_what_was_waited_for(times: StepTimes, clock: Clock) -> None:
    clock.now += 0.3
    with times.waiting():
        clock.now += 0.7
    times.step_done(2)
    assert times.told() == {"timed_step": 2, "timed": 1, "step_s": 1.0, "own_s": 0.3}


def test_a_wait_inside_a_wait_counts_once(times: StepTimes, clock: Clock) -> None:
    with times.waiting(), times.waiting():
        clock.now += 0.7
    times.step_done(2)
    assert times.told()["own_s"] == 0


def test_what_another_thread_waits_for_is_no_wait_of_the_training(times: StepTimes, clock: Clock) -> None:
    def wait() -> None:
        with times.waiting():
            clock.now += 0.7

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    times.step_done(2)
    assert times.told()["own_s"] == 0.7


def test_the_first_step_and_steps_with_a_save_in_them_are_left_out(times: StepTimes, clock: Clock) -> None:
    assert times.told() == {}  # the first one
    clock.now += 9
    times.spoil()
    times.step_done(2)
    clock.now += 0.2
    times.step_done(3)
    assert times.told() == {"timed_step": 3, "timed": 1, "step_s": 0.2, "own_s": 0.2}


def test_a_script_may_say_its_own_time(clock: Clock) -> None:
    times = StepTimes(clock)
    times.step_done(1)
    clock.now += 1
    times.step_done(2, own_s=0.4)
    assert times.told()["own_s"] == 0.4


def test_without_a_source_of_waits_the_own_time_is_unknown(clock: Clock) -> None:
    times = StepTimes(clock)
    for step in (1, 2, 3):
        clock.now += 1
        times.step_done(step)
    assert times.told() == {}


def test_a_step_costs_microseconds() -> None:
    times = StepTimes()
    times.see_waits()
    costs = []
    for step in range(2000):
        began = time.perf_counter()
        for _ in range(4):
            with times.waiting():
                pass
        times.step_done(step)
        costs.append(time.perf_counter() - began)
    assert sorted(costs)[1000] < 50e-6


# ---------------------------------------------------------------- Flight Recorder


class Recorder:
    """A Flight Recorder of 100 records: two collectives of `wait_s` each step."""

    def __init__(self) -> None:
        self.records: dict[int, float] = {}

    def add(self, wait_s: float) -> None:
        for _ in range(2):
            self.records[len(self.records)] = wait_s / 2

    def look(self) -> FlightLook | None:
        kept = dict(list(self.records.items())[-100:])
        return FlightLook(durations_s=kept, first=min(kept), last=max(kept)) if kept else None


def _train(times: StepTimes, clock: Clock, recorder: Recorder, steps: range, *, waits: float) -> None:
    for step in steps:
        clock.now += 1.0
        recorder.add(waits)
        times.step_done(step)


def test_on_gpus_the_waits_are_the_recorded_collectives(clock: Clock) -> None:
    times, recorder = StepTimes(clock), Recorder()
    times.read_flight(recorder.look)
    _train(times, clock, recorder, range(1, 4), waits=0.75)
    assert times.told() == {}  # where it begins to count
    _train(times, clock, recorder, range(4, 16), waits=0.75)
    assert times.told() == {"timed_step": 15, "timed": 12, "step_s": 12.0, "own_s": 3.0}


def test_a_span_with_a_save_or_with_lost_records_is_left_out(clock: Clock) -> None:
    times, recorder = StepTimes(clock), Recorder()
    times.read_flight(recorder.look)
    _train(times, clock, recorder, range(1, 4), waits=0.75)
    times.told()
    times.spoil()
    _train(times, clock, recorder, range(4, 20), waits=0.75)
    assert times.told() == {}
    _train(times, clock, recorder, range(20, 90), waits=0.75)  # 140 records, of which 100 are kept
    assert times.told() == {}
    clock.now += FLIGHT_EVERY_S
    _train(times, clock, recorder, range(90, 91), waits=0.5)
    assert times.told()["timed"] == 1


@pytest.mark.torch
def test_the_flight_recorders_json_is_read_and_garbage_is_not() -> None:
    from trainer.session.waits import parse_flight

    entries = [
        {"record_id": 7, "profiling_name": "nccl:all_reduce", "duration_ms": 12.5, "state": "completed"},
        {"record_id": 8, "profiling_name": "nccl:all_reduce", "state": "started"},
    ]
    assert parse_flight(json.dumps({"version": "2.10", "entries": entries})) == FlightLook(
        durations_s={7: 0.0125}, first=7, last=8
    )
    for garbage in ("", "{}", "[]", '{"entries": []}', '{"entries": [{"record_id": "x"}]}', '{"entries": 3}'):
        assert parse_flight(garbage) is None
