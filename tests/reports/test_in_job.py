"""What status and history tell of starts inside a job, and what those cost."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from supervisor.core.reliability import ettr, run_mtbf, split_gap
from supervisor.model import Attempt, AttemptState, Interruption, NodesSpec, Part, Run, RunSpec
from supervisor.reports.history import History, history_as_json, history_table, summary_line
from supervisor.reports.liveness import Liveness
from supervisor.reports.status import Status, judge_run, start_lines, state_word, status_as_json

NOW = datetime(2026, 1, 2, tzinfo=UTC)
RUN = Run(spec=RunSpec(name="a", command=("train.py",), root=Path("/shared"), nodes=NodesSpec(min=1, max=2)))
RUNNING = Attempt(
    run="a",
    number=1,
    token="t",
    state=AttemptState.RUNNING,
    job_id=7,
    nodes_wanted=2,
    nodes=("n1", "n2", "n3"),
    training=("n1", "n3"),
    planned_at=NOW - timedelta(seconds=1000),
    submitted_at=NOW - timedelta(seconds=1000),
    started_at=NOW - timedelta(seconds=1000),
    stepped_at=NOW - timedelta(seconds=1000),
    progress_at=NOW,
    launch=1,
    launch_step=400,
    last_step=900,
)
INSIDE = Interruption(
    run="a",
    attempt=1,
    launch=0,
    is_in_job=True,
    kind="node_lost",
    cause="n2 is lost",
    node="n2",
    nodes=("n2",),
    is_planned=False,
    detected_at=NOW - timedelta(seconds=550),
    resumed_at=NOW - timedelta(seconds=540),
    caught_up_at=NOW - timedelta(seconds=440),
    last_step=500,
    resume_step=400,
    parts=(Part(name="detect", seconds=3.0), Part(name="stop", seconds=1.0)),
)


def history(*interruptions: Interruption) -> History:
    return History(interruptions=interruptions, observed_s=3600, since=None, attempts=(RUNNING,), now=NOW)


def test_what_a_job_survived_counts_in_mtbf() -> None:
    mtbf = run_mtbf([RUNNING], [INSIDE], NOW)
    assert mtbf is not None
    assert mtbf.interruptions == 1


def test_down_time_inside_a_job_and_steps_done_again_are_no_progress() -> None:
    # 1000 s, 13 of them lost to the failure; 1000 steps made, 900 of them kept
    assert ettr([RUNNING], NOW) == pytest.approx(1.0)
    assert ettr([RUNNING], NOW, interruptions=[INSIDE]) == pytest.approx(987 / 1000 * 900 / 1000)


def test_the_parts_of_an_interruption_inside_a_job_rest_on_what_the_launcher_says() -> None:
    gap = split_gap(INSIDE, RUNNING, NOW)
    assert (gap.detection_s, gap.restart_s, gap.recompute_s, gap.is_open) == (3.0, 10.0, 100.0, False)
    assert not gap.has_clock_step
    unknown = split_gap(replace(INSIDE, parts=(Part(name="detect", seconds=1e300),)), RUNNING, NOW)
    assert unknown.detection_s <= 86_400


def test_history_tells_which_start_it_was_and_how_many_a_job_survived() -> None:
    ended = replace(INSIDE, launch=1, is_in_job=False, kind="crashed", detected_at=NOW)
    first = replace(ended, attempt=2, launch=0)
    told = history(INSIDE, ended, first)
    assert [row[2] for row in history_table(told).rows] == ["1.0", "1.1", "2"]
    assert "3 unplanned (1 inside a job)" in summary_line(told)
    report = history_as_json(told)
    assert report["summary"]["in_job"] == 1
    shown = report["interruptions"][0]
    assert (shown["launch"], shown["in_job"], shown["nodes"]) == (0, True, ["n2"])
    assert shown["parts_s"] == {"detect": 3.0, "stop": 1.0}
    assert shown["recovery_s"] == 10.0


LIVENESS = Liveness(is_answering=False, is_there=False, why="no socket")


def status(**changes: Any) -> Any:
    return judge_run(RUN, [replace(RUNNING, **changes)], [], [INSIDE], NOW)


def test_status_tells_the_nodes_that_train_and_what_the_job_has_survived() -> None:
    now = status(stragglers=("rank 1 on n3: 1.8 x the median",))
    assert (now.state, now.inside, now.recovery_s) == ("running", 1, 10.0)
    lines = start_lines(now)
    assert lines[0].strip() == "training on n1,n3; lost: n2"
    assert lines[1:] == (
        "started again inside its job once, the last one in 10.0 s",
        "straggler: rank 1 on n3: 1.8 x the median",
    )


def test_status_tells_spares_from_nodes_that_are_lost_or_left_out() -> None:
    slow = replace(INSIDE, launch=1, kind="straggler", nodes=("n4",))
    now = judge_run(RUN, [replace(RUNNING, nodes=("n1", "n2", "n3", "n4", "n5"), launch=2)], [], [INSIDE, slow], NOW)
    assert start_lines(now)[0].strip() == "training on n1,n3; spare: n5; lost: n2; left out: n4"
    (shown,) = status_as_json(Status(now=NOW, liveness=LIVENESS, daemon=None, is_paused=False, runs=(now,)))["runs"]
    assert (shown["spare_nodes"], shown["lost_nodes"], shown["left_out_nodes"]) == (["n5"], ["n2"], ["n4"])


def test_a_run_that_is_started_again_inside_its_job_recovers_and_says_why() -> None:
    now = status(recovering="n2 is lost")
    assert (now.state, now.reason) == ("recovering", "started again inside job 7: n2 is lost")
    over = replace(RUNNING, recovering="n2 is lost", state=AttemptState.OVER)
    assert state_word(RUN, over) == "recovering"


def test_a_job_that_was_never_started_again_is_told_without_a_word_of_it() -> None:
    assert start_lines(status(launch=0)) == ("\ntraining on n1,n3; lost: n2",)
    assert start_lines(status(training=())) == ()
