"""Starts of the training inside one job: who acts when, what is known of the present one, what it is told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm.types import JobState, NodeBase
from supervisor.core.launches import NEGLECT_S, RECOVERY_LIMIT_S, STALL_MARGIN_S, recovery_limit_s
from supervisor.model import (
    AttemptEnd,
    CheckpointState,
    Drill,
    IntentKind,
    NodeMemory,
    RestartSpec,
    Verdict,
)
from tests.core.builders import (
    NOW,
    SPEC,
    ago,
    attempt_in,
    attempts_in,
    checkpoint,
    checkpoint_view,
    cluster,
    intents_of,
    job,
    node,
    node_in,
    ports,
    progress,
    run,
)
from tests.core.starts import BY_JOB, NODES, is_over, plan, report, trains
from trainer.contract import Straggler

N2_GONE: dict[str, Any] = {"launch": report({"n2": 4.0}), "ports": ports(n1=0, n2=2.0, n3=0)}
N2_DOWN = cluster(4, node("n2", NodeBase.DOWN, reason="Not responding"))
HUNG: dict[str, Any] = {"progress": progress(130, unchanged_s=30.0, limit_s=10.0)}


# ---------------------------------------------------------------- who acts


@pytest.mark.parametrize("parts", [N2_GONE, {"nodes": N2_DOWN}, HUNG], ids=["silent", "down", "hung"])
def test_a_live_launcher_is_left_to_deal_with_it(parts: dict[str, Any]) -> None:
    made = plan(**parts)
    assert not is_over(made)
    assert node_in(made, "n2") is None
    assert not intents_of(made, IntentKind.CANCEL)


@pytest.mark.parametrize(
    ("parts", "end"),
    [(N2_GONE, AttemptEnd.NODE_SILENT), ({"nodes": N2_DOWN}, AttemptEnd.NODE_FAILED), (HUNG, AttemptEnd.STALLED)],
    ids=["silent", "down", "hung"],
)
def test_without_starts_inside_the_job_the_service_acts_itself(parts: dict[str, Any], end: AttemptEnd) -> None:
    assert attempt_in(plan(of=BY_JOB, **parts)).end is end


def test_a_launcher_that_is_silent_with_its_host_is_replaced_by_a_new_job() -> None:
    lost = {"launch": report(unchanged_s=4.5), "ports": ports(n1=2.0, n2=0, n3=0)}
    made = plan(**lost)
    assert attempt_in(made).end is AttemptEnd.NODE_SILENT
    assert [i.job_id for i in intents_of(made, IntentKind.CANCEL)] == [101]
    assert node_in(made, "n1") == NodeMemory(
        node="n1", verdict=Verdict.BROKEN, since_at=NOW, reason=attempt_in(made).end_detail
    )


@pytest.mark.parametrize("phase", ["starting", "checking", "running", "recovering", "ending"])
@pytest.mark.parametrize("state", ["starting", "ready", "running", "ended", "spare", "lost"])
@pytest.mark.parametrize("training", [(), ("n1", "n2"), ("n2", "n3")])
def test_a_batch_host_is_missed_in_every_phase_whatever_its_ranks_do(
    phase: str, state: str, training: tuple[str, ...]
) -> None:
    """Seen in a recovery, where no rank of the host ran: only Slurm's own time-out had told of its loss."""
    silent = report(phase=phase, states={"n1": state}, training=training, why="n2 is lost", unchanged_s=4.5)
    one = trains(recovering="n2 is lost", recovering_at=ago(5))
    ended = attempt_in(plan(one, launch=silent, ports=ports(n1=2.0, n2=30.0, n3=0)))
    assert ended.end is AttemptEnd.NODE_SILENT
    assert "n1" in ended.end_detail


def test_a_launcher_that_pauses_for_seconds_is_waited_for() -> None:
    assert not is_over(plan(launch=report(unchanged_s=5.0), ports=ports(n1=0, n2=0, n3=0)))


def test_a_launcher_whose_host_answers_and_that_stays_silent_is_given_up_in_the_end() -> None:
    silent = ports(n1=0, n2=0, n3=0)
    assert not is_over(plan(launch=report(unchanged_s=15.0), ports=silent))
    assert attempt_in(plan(launch=report(unchanged_s=22.0), ports=silent)).end is AttemptEnd.NODE_SILENT


def test_a_silent_node_that_the_launcher_never_acts_upon_ends_the_attempt() -> None:
    limit_s = SPEC.liveness.timeout_s + NEGLECT_S
    gone = ports(n1=0, n2=60.0, n3=0)
    assert not is_over(plan(launch=report({"n2": limit_s - 1}), ports=gone))
    assert attempt_in(plan(launch=report({"n2": limit_s + 1}), ports=gone)).end is AttemptEnd.NODE_SILENT


def test_a_node_that_was_left_out_is_looked_for_no_longer() -> None:
    after = report({"n2": 400.0}, training=("n1", "n3"), states={})
    made = plan(launch=after, nodes=N2_DOWN, ports=ports(n1=0, n2=300.0, n3=0))
    assert not is_over(made)
    assert not made.probe


def test_a_recovery_that_never_ends_is_taken_over() -> None:
    recovering = report(phase="recovering", why="n2 is lost")
    first = attempt_in(plan(launch=recovering))
    assert (first.recovering, first.recovering_at) == ("n2 is lost", NOW)
    limit_s = recovery_limit_s(SPEC.restart)
    assert not is_over(plan(replace(first, recovering_at=ago(limit_s - 5)), launch=recovering))
    late = attempt_in(plan(replace(first, recovering_at=ago(limit_s + 5)), launch=recovering))
    assert late.end is AttemptEnd.STALLED
    assert "n2 is lost" in late.end_detail


def test_the_launchers_own_pauses_are_no_part_of_what_a_recovery_may_take() -> None:
    assert recovery_limit_s(RestartSpec(backoff_s=0)) == RECOVERY_LIMIT_S
    assert recovery_limit_s(RestartSpec(max_without_progress=3, backoff_s=15)) == RECOVERY_LIMIT_S + 60
    assert recovery_limit_s(RestartSpec(max_without_progress=10**6, backoff_s=15)) == RECOVERY_LIMIT_S + 600


def test_a_recovery_stops_no_clock_while_the_job_is_suspended() -> None:
    stopped = (job(state=JobState.SUSPENDED, nodes=NODES),)
    was = trains(recovering="n2 is lost", recovering_at=ago(10_000))
    assert not is_over(plan(was, launch=report(phase="recovering", why="n2 is lost"), jobs=stopped))


def test_a_stall_that_the_launcher_does_not_see_is_the_services_after_a_margin() -> None:
    def after(silent_s: float, **changes: Any) -> bool:
        return is_over(plan(progress=progress(130, unchanged_s=silent_s, limit_s=10.0), launch=report(**changes)))

    assert not after(10.0 + STALL_MARGIN_S - 1)
    assert after(10.0 + STALL_MARGIN_S + 1)
    assert not after(10.0 + STALL_MARGIN_S + 1, phase="recovering", why="a hang")


def test_a_job_that_was_suspended_until_just_now_has_hung_nowhere() -> None:
    """Seen with a job that Slurm had stopped for 13 s: its progress and its launcher's report were as old."""
    after = {"launch": report(unchanged_s=14.0), "progress": progress(47, unchanged_s=13.0, limit_s=0.5)}
    answer = ports(n1=0, n2=0, n3=0)
    assert not is_over(plan(**after, ports=answer))  # no answer of squeue has shown it as suspended
    long = {"launch": report(unchanged_s=91.0), "progress": progress(47, unchanged_s=90.0, limit_s=0.5)}
    assert not is_over(plan(trains(phase="suspended", progress_at=ago(3)), **long, ports=answer))
    assert not is_over(plan(of=BY_JOB, **after, ports=answer))


AGES = st.sampled_from([0.0, 0.5, 2.5, 3.5, 9.0, 12.0, 30.0, 60.0])


@settings(max_examples=150)
@given(
    beats=st.dictionaries(st.sampled_from(NODES), AGES),
    silent=st.dictionaries(st.sampled_from(["n1", "n2", "n3", "n4"]), AGES, min_size=1),
    down=st.sets(st.sampled_from(NODES)),
    phase=st.sampled_from(["starting", "checking", "running", "recovering", "ending"]),
    unchanged_s=st.floats(0, 4),
    steps_s=st.floats(0, STALL_MARGIN_S),
    kept=st.sets(st.sampled_from(NODES)),
)
def test_no_attempt_is_ended_by_silence_while_its_launcher_handles_it(
    beats: dict[str, float],
    silent: dict[str, float],
    down: set[str],
    phase: str,
    unchanged_s: float,
    steps_s: float,
    kept: set[str],
) -> None:
    made = plan(
        launch=report(beats, phase=phase, unchanged_s=unchanged_s, training=tuple(sorted(kept)), why="x"),
        ports=ports(**silent),
        nodes=cluster(4, *(node(n, NodeBase.DOWN, reason="Not responding") for n in down)),
        progress=progress(130, unchanged_s=steps_s, limit_s=1.0),
    )
    assert not is_over(made)
    assert not intents_of(made, IntentKind.CANCEL)


# ---------------------------------------------------------------- the present start


def test_a_new_start_is_followed_from_its_own_step_on() -> None:
    new = report(launch=1, training=("n1", "n3"), resume_step=100, why="n2 is lost")
    seen = attempt_in(plan(trains(last_step=130, phase="step"), launch=new, progress=progress(130, launch=0)))
    assert (seen.launch, seen.launched_at, seen.launch_step) == (1, NOW, 100)
    assert (seen.training, seen.spare_nodes, seen.last_step) == (("n1", "n3"), ("n2",), 100)
    later = replace(seen, launched_at=ago(30))
    assert attempt_in(plan(later, launch=new, progress=progress(103, launch=1, unchanged_s=0.2))).last_step == 103


@pytest.mark.parametrize("told", [0, None])
def test_what_the_start_before_had_written_is_no_progress_of_this_one(told: int | None) -> None:
    new = report(launch=1, resume_step=100)
    one = trains(launch=1, launched_at=ago(20), launch_step=100, last_step=100, phase="start", progress_at=ago(60))
    made = plan(one, launch=new, progress=progress(130, launch=told, unchanged_s=25.0))
    assert 1 not in attempts_in(made) or attempt_in(made).last_step == 100


def test_a_new_start_has_the_time_of_a_start() -> None:
    new = report(launch=1, resume_step=100)
    one = trains(launch=1, launched_at=ago(600), launch_step=100, last_step=100, phase="start")
    assert not is_over(plan(one, launch=new, progress=progress(130, launch=0, unchanged_s=625.0, limit_s=1.0)))
    late = replace(one, launched_at=ago(3700))
    assert is_over(plan(late, launch=new, progress=progress(130, launch=0, unchanged_s=3725.0, limit_s=1.0)))


def test_a_report_names_only_the_jobs_own_nodes_and_says_little() -> None:
    slow = Straggler(node="n2", rank=1, ratio=1.8, detail="1.8 s of 1 s\x1b[2J")
    others = replace(slow, node="n9")
    odd = report(training=("n1", "n9", "n1"), why="\x1b[31m" + "x" * 9000, stragglers=(slow, others), launch=2**62)
    seen = attempt_in(plan(launch=odd))
    assert seen.training == ("n1",)
    assert seen.recovering.isprintable()
    assert len(seen.recovering) <= 500
    assert seen.launch <= 1000
    assert [line[:11] for line in seen.stragglers] == ["rank 1 on n"]
    assert all(line.isprintable() for line in seen.stragglers)


def test_a_slow_rank_is_named_once_in_its_line() -> None:
    slow = Straggler(node="n1", rank=3, ratio=2.5, detail="rank 3 on n1: 50 ms of own time per step")
    (line,) = attempt_in(plan(launch=report(stragglers=(slow,)))).stragglers
    assert line == "rank 3 on n1: 2.50 x the median (50 ms of own time per step)"


# ---------------------------------------------------------------- what the launcher is told


def test_the_launcher_is_told_of_each_checkpoint_that_was_read_back() -> None:
    known = {"checkpoints": (checkpoint(100, 1), checkpoint(120, 1, CheckpointState.COMPLETE, verified_at=None))}
    there = (checkpoint_view(100), checkpoint_view(120))
    made = plan(known=known, checkpoints=there)
    told = attempt_in(made)
    assert told.advised_step == 100
    assert told.advised_path == str(SPEC.paths.checkpoint(100, 1))
    assert [i.kind for i in intents_of(made, IntentKind.ADVISE)] == [IntentKind.ADVISE]
    assert not intents_of(plan(told, known=known, checkpoints=there), IntentKind.ADVISE)


def test_a_drill_is_told_once_and_to_the_attempt_that_it_is_for() -> None:
    asked = run(drill=Drill(id="ab12", kind="process", attempt=1))
    told = attempt_in(plan(of=asked))
    assert told.drill == asked.drill
    assert not intents_of(plan(told, of=asked), IntentKind.ADVISE)
    other = run(drill=Drill(id="ab12", kind="process", attempt=7))
    assert not intents_of(plan(of=other), IntentKind.ADVISE)
