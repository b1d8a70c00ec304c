"""Interruptions that a job survives: what the ledger learns, what is held of the nodes, what is left to do."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from slurm.types import JobState, NodeBase
from supervisor.model import (
    AttemptEnd,
    Cause,
    IntentKind,
    Interruption,
    NodeEvent,
    NodeMemory,
    RunState,
    Verdict,
)
from tests.core.builders import (
    NOW,
    ago,
    attempt,
    attempt_in,
    attempts_in,
    broken,
    checkpoint,
    checkpoint_view,
    checkpoints_in,
    cluster,
    exit_record,
    intents_of,
    job,
    node,
    node_in,
    over,
    plan_for,
    progress,
    records,
    run_in,
    snapshot,
    view,
    world,
)
from tests.core.starts import NODES, interrupted, is_over, plan, report, trains
from trainer.contract import Outcome

# ---------------------------------------------------------------- interruptions


def test_an_interruption_that_the_job_survives_is_in_the_ledger() -> None:
    made = plan(launch=report(launch=1), interruptions=(interrupted(resumed_at=ago(5).timestamp()),))
    (row,) = records(made.facts, Interruption)
    assert (row.attempt, row.launch, row.is_in_job, row.kind, row.node) == (1, 0, True, "node_lost", "n2")
    assert (row.detected_at, row.resumed_at, row.recovery_s) == (ago(20), ago(5), 15.0)
    assert (row.last_step, row.resume_step, row.lost_steps, row.is_planned) == (120, 100, 20, False)
    assert [(p.name, p.seconds) for p in row.parts] == [("start", 3.0), ("stop", 0.5)]
    assert not is_over(made)
    assert attempt_in(made).interruptions_read == 1


@pytest.mark.parametrize("kind", ["node_lost", "node_cut_off", "node_frozen", "check_failed"])
def test_a_node_that_is_lost_is_condemned_while_the_job_goes_on(kind: str) -> None:
    made = plan(launch=report(launch=1), interruptions=(interrupted(kind=kind),))
    memory = node_in(made, "n2")
    assert memory is not None
    assert memory.verdict is Verdict.BROKEN
    assert kind in memory.reason
    assert [i.node for i in intents_of(made, IntentKind.DRAIN)] == ["n2"]
    assert not is_over(made)


@pytest.mark.parametrize("kind", ["agent_killed", "process", "hang", "straggler", "start_failed", "\x1b[2J"])
def test_a_node_that_soft_evidence_names_is_remembered_and_not_drained(kind: str) -> None:
    made = plan(launch=report(launch=1), interruptions=(interrupted(kind=kind),))
    memory = node_in(made, "n2")
    assert memory is not None
    assert memory.verdict is Verdict.SUSPECT
    assert not intents_of(made, IntentKind.DRAIN)
    assert [e.event for e in records(made.facts, NodeEvent)] == ["node.suspected"]


def test_a_straggler_that_was_replaced_is_a_planned_interruption() -> None:
    (row,) = records(plan(interruptions=(interrupted(kind="straggler"),)).facts, Interruption)
    assert row.is_planned


def test_a_hint_is_told_and_held_against_nobody() -> None:
    made = plan(interruptions=(interrupted(kind="hang", nodes=(), hint="n2"),))
    (row,) = records(made.facts, Interruption)
    assert row.node == "n2"
    assert node_in(made, "n2") is None


def test_nobody_elses_node_is_named_by_a_file_of_the_run() -> None:
    made = plan(interruptions=(interrupted(nodes=("n4", "gpu7"), hint="n4"),))
    (row,) = records(made.facts, Interruption)
    assert row.node is None
    assert not records(made.facts, NodeMemory)
    assert not intents_of(made, IntentKind.DRAIN)


def test_most_nodes_at_once_are_condemned_by_no_record() -> None:
    made = plan(interruptions=(interrupted(nodes=("n2", "n3")),))
    assert {m.verdict for m in records(made.facts, NodeMemory)} == {Verdict.SUSPECT}


def test_a_record_blames_once_even_while_it_is_read_again() -> None:
    first = plan(launch=report(launch=1), interruptions=(interrupted(),))
    (row,) = records(first.facts, Interruption)
    again = plan(
        attempt_in(first),
        known={"interruptions": (row,)},  # a person has returned n2 meanwhile
        launch=report(launch=1),
        interruptions=(interrupted(),),
    )
    assert not records(again.facts, NodeMemory)
    assert not records(again.facts, Interruption)


def test_a_node_that_turns_out_to_be_cut_off_is_said_to_be_so_everywhere() -> None:
    first = plan(launch=report(launch=1), interruptions=(interrupted(),))
    (row,), memory = records(first.facts, Interruption), node_in(first, "n2")
    later = interrupted(kind="node_cut_off", cause="n2 is cut off")
    known = {"interruptions": (row,), "nodes": [memory]}
    again = plan(attempt_in(first), known=known, launch=report(launch=1), interruptions=(later,))
    after = node_in(again, "n2")
    assert after is not None
    assert (after.verdict, after.reason) == (Verdict.BROKEN, "n2: node_cut_off: n2 is cut off")
    assert [e.detail for e in records(again.facts, NodeEvent)][-1] == after.reason


def test_records_of_starts_that_never_were_count_for_nothing() -> None:
    forged = tuple(interrupted(number, kind="process", nodes=()) for number in range(900))
    made = plan(launch=report(launch=1), interruptions=forged)
    assert [i.launch for i in records(made.facts, Interruption)] == [0, 1]
    young = trains(started_at=ago(60))
    counted = records(plan(young, launch=report(launch=899), interruptions=forged).facts, Interruption)
    assert len(counted) <= 15  # the report is the owner's word as well
    ended = plan(launch=report(launch=50), exit=exit_record(1, launches=2), interruptions=forged)
    assert [i.launch for i in records(ended.facts, Interruption) if i.is_in_job] == [0, 1]


def test_times_that_cannot_be_are_kept_within_what_can() -> None:
    for at in (-1e300, 1e300, 0.0, NOW.timestamp() + 1e6):
        (row,) = records(plan(interruptions=(interrupted(detected_at=at, resumed_at=at),)).facts, Interruption)
        assert trains().planned_at <= row.detected_at <= NOW
        assert row.resumed_at is not None
        assert row.detected_at <= row.resumed_at <= NOW


def test_the_work_is_caught_up_inside_the_job() -> None:
    row = Interruption(
        run="gpt",
        attempt=1,
        launch=0,
        is_in_job=True,
        kind="process",
        cause="x",
        node=None,
        is_planned=False,
        detected_at=ago(20),
        resumed_at=ago(5),
        last_step=120,
    )

    def caught_up(step: int) -> bool:
        one = trains(launch=1, launched_at=ago(10), launch_step=100, last_step=100, interruptions_read=1)
        made = plan(one, known={"interruptions": (row,)}, launch=report(launch=1), progress=progress(step, launch=1))
        return any(i.caught_up_at is not None for i in records(made.facts, Interruption))

    assert not caught_up(119)
    assert caught_up(120)


def test_a_start_that_never_stepped_is_resumed_with_the_one_that_did() -> None:
    both = (interrupted(0, last_step=120), interrupted(1, kind="process", resumed_at=ago(3).timestamp(), nodes=()))
    made = plan(trains(launch=2, launched_at=ago(9)), launch=report(launch=2), interruptions=both)
    assert [i.resumed_at for i in records(made.facts, Interruption)] == [ago(3), ago(3)]
    assert attempt_in(made).interruptions_read == 2


def test_a_training_that_tells_no_steps_goes_on_when_its_launcher_recovers_no_longer() -> None:
    def resumed(since_s: float = 9, **seen: Any) -> list[datetime | None]:
        one = trains(launch=1, launched_at=ago(since_s), launch_step=100, last_step=100)
        made = plan(one, interruptions=(interrupted(nodes=()),), **seen)
        return [i.resumed_at for i in records(made.facts, Interruption)]

    assert resumed(launch=report(launch=1, why="n2 is lost"), progress=None) == [None]
    assert resumed(launch=report(launch=1), progress=None) == [ago(9)]
    assert resumed(launch=report(launch=1), progress=progress(100, unchanged_s=0.5)) == [None]
    assert resumed(launch=report(launch=1), progress=progress(101, unchanged_s=0.5)) == [NOW]  # from the log
    assert resumed(launch=report(launch=1, why="n2 is lost"), progress=progress(101, unchanged_s=0.5)) == [NOW]
    assert resumed(11, launch=report(launch=1, why="n2 is lost"), progress=None) == [ago(11)]
    assert resumed(11, launch=report(launch=1, phase="recovering", why="n3 is lost"), progress=None) == [None]


@pytest.mark.parametrize("tells", [progress(104, unchanged_s=0.2), None], ids=["in its log", "nothing"])
def test_a_recovery_whose_first_step_the_launcher_cannot_see_is_over_and_written_once(tells: Any) -> None:
    """Seen with a script whose steps are in its log alone: learnt anew and written in each cycle, for ever."""
    seen = {"launch": report(launch=1, why="n2 is lost"), "interruptions": (interrupted(nodes=()),), "progress": tells}
    one = trains(launch=1, launched_at=ago(11), launch_step=100, last_step=100, progress_at=ago(6))
    first = plan(one, **seen)
    (row,) = records(first.facts, Interruption)
    assert row.resumed_at is not None
    after = attempt_in(first)
    assert (after.recovering, after.interruptions_read) == ("", 1)
    known = {"interruptions": () if row.caught_up_at else (row,)}  # one that is caught up is loaded no more
    again = plan(after, known=known, **seen)
    assert not again.facts


def test_a_start_that_failed_inside_a_job_keeps_where_the_next_one_began() -> None:
    one = over(1, AttemptEnd.CRASHED, nodes=NODES, launch=1)
    rows = [
        Interruption(
            run="gpt",
            attempt=1,
            launch=number,
            is_in_job=is_in_job,
            kind="process",
            cause="x",
            node=None,
            is_planned=False,
            detected_at=ago(90),
            last_step=6,
            resume_step=resume_step,
        )
        for number, is_in_job, resume_step in ((0, True, 0), (1, False, None))
    ]
    second = attempt(2, resume_step=8, stepped_at=ago(5), last_step=9)
    made = plan_for(world(one, second, interruptions=rows), snapshot(job(2), view=view(2)))
    assert [(i.resume_step, i.resumed_at) for i in records(made.facts, Interruption)] == [(0, ago(5)), (8, ago(5))]


def test_the_end_of_the_attempt_is_an_interruption_of_its_last_start() -> None:
    ended = {"launch": report(launch=1), "exit": exit_record(1, reason="rank 3 failed", launches=2)}
    made = plan(interruptions=(interrupted(0),), **ended)
    assert [(i.launch, i.is_in_job) for i in records(made.facts, Interruption)] == [(0, True), (1, False)]


def test_an_interruption_that_none_followed_is_told_once() -> None:
    last = interrupted(1, training=(), last_step=140)
    ended = {"launch": report(launch=1), "exit": exit_record(77, bad_nodes=("n2",), launches=2, next="resubmit")}
    made = plan(trains(interruptions_read=1, launch=1, launched_at=ago(60)), interruptions=(last,), **ended)
    (row,) = records(made.facts, Interruption)
    assert (row.launch, row.is_in_job, row.kind, row.node) == (1, False, "node_silent", "n2")


# ---------------------------------------------------------------- what the launcher leaves to do


def test_a_launcher_that_has_too_few_nodes_left_names_those_that_are_gone() -> None:
    made = plan(exit=exit_record(77, reason="n2 is lost, 1 is left", bad_nodes=("n2", "n9"), next="resubmit"))
    assert attempt_in(made).end is AttemptEnd.NODE_SILENT
    assert [m.node for m in records(made.facts, NodeMemory)] == ["n2"]
    other = plan(exit=exit_record(1, reason="n2 is lost, 1 is left", bad_nodes=("n2",), next="resubmit"))
    assert attempt_in(other).end is AttemptEnd.NODE_FAILED


def test_a_node_whose_agent_was_killed_is_not_condemned_by_the_end() -> None:
    killed = interrupted(0, kind="agent_killed", training=())
    made = plan(exit=exit_record(77, bad_nodes=("n2",), next="resubmit"), interruptions=(killed,), launch=report())
    memory = node_in(made, "n2")
    assert memory is not None
    assert memory.verdict is Verdict.SUSPECT


def test_a_training_that_fails_again_and_again_inside_the_job_is_held() -> None:
    made = plan(exit=exit_record(1, reason="step 131 failed 3 times", next="hold"))
    after = run_in(made)
    assert after is not None
    assert after.state is RunState.HELD
    assert "step 131 failed 3 times" in after.reason


@pytest.mark.parametrize(
    ("reason", "cause"),
    [
        ("the training step did not start; srun: unrecognized option '--container-image=x'", None),
        ("step 131 was the last one 3 times in a row", "rank 0: ValueError: bad shape"),
    ],
)
def test_a_run_that_its_launcher_wants_held_is_held_with_its_words_and_the_cause(
    reason: str, cause: str | None
) -> None:
    found: dict[str, Any] = {"causes": {"gpt": Cause(kind="code", sentence=cause)}} if cause is not None else {}
    ended = view(exit=exit_record(1, reason=reason, next="hold"), launch=report())
    after = run_in(plan_for(world(trains()), snapshot(job(nodes=NODES), view=ended, **found)))
    assert after is not None
    assert after.state is RunState.HELD
    assert reason in after.reason
    assert (cause or "") in after.reason


def test_a_program_that_cannot_be_started_is_named() -> None:
    cause = Cause(kind="configuration", sentence="n1: command not found (127)", is_curable=False)
    ended = view(exit=exit_record(127, reason="on every node: apptainer: not found"), launch=report())
    made = plan_for(world(trains()), snapshot(job(nodes=NODES), view=ended, causes={"gpt": cause}))
    assert attempt_in(made).end_detail == "on every node: apptainer: not found"


def test_a_failed_start_is_told_though_somebody_ended_the_job_before_the_next_one() -> None:
    failed = interrupted(0, kind="process", nodes=(), training=())
    cancelled = job(state=JobState.CANCELLED, nodes=NODES)
    made = plan(jobs=(cancelled,), launch=report(phase="recovering", why="x"), interruptions=(failed,))
    assert attempt_in(made).end is AttemptEnd.CANCELLED
    assert [(i.kind, i.is_planned) for i in records(made.facts, Interruption)] == [("process", False)]


def test_a_checkpoint_that_a_later_start_could_not_load_is_the_one_that_is_counted() -> None:
    first, later = checkpoint(100, 1), checkpoint(120, 1)
    seen = {"checkpoints": (checkpoint_view(100), checkpoint_view(120)), "launch": report(launch=1, resume_step=120)}
    one = trains(
        resume_path=first.path, resume_step=100, launch=1, launch_step=120, advised_path=later.path, advised_step=120
    )
    known = {"checkpoints": (first, later)}
    for outcome in (None, Outcome(attempt=1, exit_code=78, checkpoint=later.path)):
        made = plan(one, known=known, exit=exit_record(78, launches=2), outcome=outcome, **seen)
        assert {key: c.load_failures for key, c in checkpoints_in(made).items()} == {(120, 1): 1}


def test_a_node_that_left_the_job_is_left_out_of_the_next_one() -> None:
    condemned = broken("n2", reason="n2: node_lost", drain_reason="supervisor: node_lost", drained_at=ago(400))
    ended = over(1, AttemptEnd.PREEMPTED, nodes=NODES)
    slurms = cluster(4, node("n2", NodeBase.IDLE, "DRAIN", reason="supervisor: node_lost"))
    made = plan_for(world(ended, nodes=[condemned]), snapshot(view=view(), nodes=slurms))
    assert attempts_in(made)[2].exclude == ("n2",)
