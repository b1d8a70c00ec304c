"""Fault schedules as planned data: what goes wrong, and when. One seed gives one schedule, for ever."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

NODES = 6
SPAN_S = 4500.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that goes wrong `at_s` seconds after the start; `pick` chooses the node or the job that it meets."""

    at_s: float
    kind: str
    pick: int = 0
    lasts_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Everything that a seed decides."""

    seed: int
    faults: tuple[Fault, ...]
    deaths: frozenset[int]  # numbers of the daemon's touches that are its last
    downtimes: tuple[float, ...]  # how long the daemon stays down each time
    has_accounting: bool
    spares: int
    max_nodes: int
    final_step: int
    min_job_age_s: int
    is_queued_ahead: bool = False  # the next job waits behind each running one


# kind: how often, among the others
_KINDS = {
    "power_cut": 6,
    "cable_cut": 4,
    "rack_loses_power": 2,
    "scratch_full_everywhere": 1,
    "outage": 4,
    "crash": 4,
    "crash_without_a_word": 2,
    "hang": 3,
    "flip_newest": 4,
    "save_and_exit": 2,
    "checks_fail": 2,
    "preempt": 2,
    "time_limit": 2,
    "node_fail": 1,
    "cancelled_by_a_person": 1,
    "do_not_restart": 1,
    "disk_hangs": 3,
    "scratch_full": 2,
    "drained_by_alice": 3,
    "undrained_by_alice": 3,
    "submit:unavailable": 2,
    "submit:lost_reply": 4,
    "submit:lost_request": 3,
    "submit:late": 3,
    "submit:refused": 1,
    "cancel:lost_reply": 2,
    "cancel:lost_request": 2,
    "cancel:unavailable": 1,
    "drain:lost_reply": 2,
    "drain:lost_request": 2,
    "drain:refused": 1,
    "find_by_token:unavailable": 2,
    "find_by_token:refused": 1,
    "fetch_jobs:unavailable": 1,
    "fetch_nodes:unavailable": 1,
    "fetch_ended_jobs:unavailable": 1,
    "pause": 1,
    "daemon_killed": 4,
    "stop": 0.3,
}


def draw_schedule(seed: int) -> Schedule:
    random = Random(seed)
    count = random.randint(2, 7)
    kinds = random.choices(list(_KINDS), weights=list(_KINDS.values()), k=count)
    final_step = random.choice([12, 25, 40])
    moments = sorted(random.uniform(0, final_step * 75.0) for _ in kinds)  # while the training lasts
    if random.random() < 0.3:  # one on top of the other
        moments = sorted(random.uniform(m, m + 40) for m in moments[:1] * count)
    faults = tuple(
        Fault(at_s=at, kind=kind, pick=random.randrange(100), lasts_s=random.choice([5, 30, 90, 400, 1200]))
        for at, kind in zip(moments, kinds, strict=True)
    )
    deaths = frozenset(random.sample(range(1, 120), k=random.choice([0, 0, 1, 2, 4, 8])))
    return Schedule(
        seed=seed,
        faults=faults,
        deaths=deaths,
        downtimes=tuple(random.choice([0, 1, 5, 20, 60, 900]) for _ in range(40)),
        has_accounting=random.random() < 0.5,
        spares=random.choice([0, 0, 1]),
        max_nodes=random.choice([2, 3, 4]),
        final_step=final_step,
        min_job_age_s=random.choice([30, 300]),
        is_queued_ahead=random.random() < 0.5,
    )
