"""Runs whose job is a person's own batch script: no launcher tells, so Slurm and the log do."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from slurm.types import JobFlag, JobState, NodeBase
from supervisor.core import nodes as node_rules
from supervisor.core import restarts
from supervisor.core.ends import judge_end
from supervisor.core.identity import is_own
from supervisor.core.reliability import ettr
from supervisor.core.sight import Sight, Silence
from supervisor.model import (
    UNREPORTED,
    Attempt,
    AttemptEnd,
    AttemptState,
    Cause,
    IntentKind,
    Interruption,
    NodesSpec,
    Run,
    RunState,
    ScriptSpec,
    Seen,
    Snapshot,
)
from supervisor.reports.status import state_word
from tests.core.builders import (
    LATER,
    NOW,
    SPEC,
    ago,
    attempt,
    attempt_in,
    attempts_in,
    broken,
    checkpoint,
    cluster,
    intents_of,
    job,
    node,
    over,
    plan_for,
    ports,
    progress,
    records,
    run_in,
    run_state,
    sight,
    snapshot,
    submit_intent,
    view,
    world,
)

SCRIPT = ScriptSpec(path="train.sh", digest="", job_name="train", output="/home/ann/slurm-%j.out")
OF = Run(spec=replace(SPEC, command=()), script=SCRIPT, created_at=NOW - timedelta(days=1))
ALL_DOWN = {f"n{i}": node(f"n{i}", NodeBase.DOWN) for i in range(1, 5)}
QUIET = OF.spec.liveness.timeout_s + 1


def log(unchanged_s: float = 0.5) -> Seen[int]:
    return Seen(value=100, unchanged_s=unchanged_s)


def seen(one: Attempt | None = None, *jobs: Any, **parts: Any) -> Sight:
    return sight(one, *(jobs or (job(name="train"),)), of=OF, **parts)


# ---------------------------------------------------------------- how an attempt ends


@pytest.mark.parametrize(
    ("state", "code", "end"),
    [
        (JobState.COMPLETED, 0, AttemptEnd.FINISHED),
        (JobState.FAILED, 75, AttemptEnd.SAVED),
        (JobState.FAILED, 93, AttemptEnd.DO_NOT_RESTART),
        (JobState.FAILED, 1, AttemptEnd.CRASHED),
        (JobState.CANCELLED, 0, AttemptEnd.CANCELLED),
        (JobState.TIMEOUT, 0, AttemptEnd.TIME_LIMIT),
        (JobState.PREEMPTED, 0, AttemptEnd.PREEMPTED),
        (JobState.NODE_FAIL, 0, AttemptEnd.NODE_FAILED),
        (JobState.OUT_OF_MEMORY, 0, AttemptEnd.HOST_MEMORY),
        (JobState.DEADLINE, 0, AttemptEnd.DO_NOT_RESTART),
    ],
)
def test_slurms_word_and_the_scripts_exit_code_say_how_it_ended(state: JobState, code: int, end: AttemptEnd) -> None:
    ended = judge_end(seen(None, job(name="train", state=state, exit_code=code), view=view()))
    assert ended is not None
    assert ended.end is end


def test_a_running_script_that_says_nothing_counts_as_under_way_after_a_while() -> None:
    plan = plan_for(world(attempt(), of=OF), snapshot(job(name="train"), view=view(log=log())))
    assert attempt_in(plan).stepped_at == NOW


def test_a_script_that_tells_no_steps_runs_as_soon_as_its_log_grows() -> None:
    young = attempt(2, started_at=ago(2))
    (grown,) = (attempt_in(plan_for(world(over(), young, of=OF), writing(log())), 2),)
    assert (grown.phase, state_word(OF, grown)) == (UNREPORTED, "running")
    assert attempts_in(plan_for(world(over(), young, of=OF), writing(replace(log(), value=0)))) == {}
    later = attempt_in(plan_for(world(over(), replace(grown, started_at=ago(31)), of=OF), writing(log()), now=LATER), 2)
    assert later.stepped_at == grown.progress_at == NOW


def test_a_script_whose_log_is_not_known_runs_after_some_seconds() -> None:
    assert attempts_in(plan_for(world(over(), attempt(2, started_at=ago(4)), of=OF), writing(None))) == {}
    grown = attempt_in(plan_for(world(over(), attempt(2, started_at=ago(6)), of=OF), writing(None)), 2)
    assert state_word(OF, grown) == "running"


def writing(seen_log: Seen[int] | None) -> Snapshot:
    return snapshot(job(2, name="train"), view=view(2, log=seen_log))


# ---------------------------------------------------------------- scripts that resume by themselves

LOST = Interruption(
    run="gpt", attempt=1, kind="node_failed", cause="n2", node="n2", is_planned=False, detected_at=ago(60), last_step=35
)


def learn(first: int | None, step: int | None, **changes: Any) -> Interruption:
    """What the interruption of attempt 1 has cost, once attempt 2 shows these steps."""
    told = progress(step, attempt=2) if step is not None else None
    seen_now = snapshot(job(2, name="train"), view=view(2, log=log(), progress=told, first_step=first))
    before = world(over(last_step=35), attempt(2, **changes), of=OF, interruptions=(LOST,))
    return records(plan_for(before, seen_now).facts, Interruption)[-1]  # type: ignore[no-any-return]


@pytest.mark.parametrize(("first", "lost"), [(36, 0), (31, 5), (1, 35)])
def test_lost_steps_count_from_where_the_next_attempts_own_first_step_shows_that_it_went_on(
    first: int, lost: int
) -> None:
    assert learn(first, first + 2).lost_steps == lost


def test_lost_steps_are_unknown_where_nothing_shows_where_a_script_went_on() -> None:
    assert learn(None, None).lost_steps is None
    assert learn(None, None, resume_step=30, resume_path="/ckpt/30").lost_steps == 5


def test_ettr_of_a_script_is_unknown_without_steps_and_counts_nothing_as_done_again_before_its_steps_say_so() -> None:
    first = over(stepped_at=ago(580), over_at=ago(190), progress_at=ago(190), last_step=35)
    second = attempt(2, started_at=ago(180), submitted_at=ago(190))
    assert ettr([replace(first, last_step=None)], NOW, is_script=True) is None
    waiting = ettr([first, second], NOW, is_script=True)
    going = replace(second, stepped_at=ago(170), progress_at=NOW, first_step=36, last_step=60)
    assert waiting == pytest.approx(390 / 580)
    assert ettr([first, going], NOW, is_script=True) == pytest.approx(560 / 580)


# ---------------------------------------------------------------- launches that fail


@pytest.mark.parametrize(("ran_s", "down", "named"), [(40, True, ("n1",)), (3, True, ("n1",)), (3, False, ())])
def test_a_job_that_slurm_requeues_before_it_has_begun_is_a_failed_launch(
    ran_s: float, down: bool, named: tuple[str, ...]
) -> None:
    """Nobody requeued it: the node had died just before."""
    nodes = cluster(4, node("n1", NodeBase.ALLOCATED, "NOT_RESPONDING")) if down else cluster()
    one = attempt(started_at=ago(ran_s), nodes=("n1",))
    back = job(name="train", state=JobState.PENDING, flags=frozenset({JobFlag.REQUEUED}), nodes=())
    ended = judge_end(seen(one, back, view=view(), nodes=nodes))
    assert ended is not None
    assert (ended.end, ended.nodes, ended.hint) == (AttemptEnd.NODE_FAILED, named, "n1")
    wrote = judge_end(seen(one, back, view=view(log=log()), nodes=nodes))
    assert wrote is not None
    assert wrote.end is AttemptEnd.PREEMPTED


# ---------------------------------------------------------------- silence


def test_a_node_is_gone_when_the_log_and_its_port_are_silent() -> None:
    both = seen(view=view(log=log(QUIET)))
    assert node_rules.suspects(both, cluster()) == {"n1", "n2"}
    (gone,) = node_rules.judge_silence(both, ports(n1=0, n2=10))
    assert (gone.node, "nothing new in the job's log" in gone.evidence) == ("n2", True)


@pytest.mark.parametrize(
    ("parts", "silent_s"),
    [
        ({"log": log(1)}, 10),  # the log goes on
        ({"log": log(QUIET), "progress": progress(unchanged_s=1)}, 10),  # steps go on
        ({"log": log(QUIET)}, 0),  # the port answers
        ({}, 10),  # no log is known
    ],
    ids=["log", "progress", "port", "nothing known"],
)
def test_one_sign_of_silence_alone_condemns_nobody(parts: dict[str, Any], silent_s: float) -> None:
    one = seen(view=view(**parts))
    assert node_rules.judge_silence(one, ports(n1=0, n2=silent_s)) == ()


def test_ports_are_left_alone_while_a_script_talks() -> None:
    assert node_rules.suspects(seen(view=view(log=log(1))), cluster()) == frozenset()
    assert node_rules.suspects(seen(view=view()), cluster()) == frozenset()


def test_a_silent_log_ends_an_attempt_only_where_a_limit_was_asked_for() -> None:
    quiet = seen(view=view(log=log(99_999)))
    asked = replace(quiet, run=replace(OF, spec=replace(OF.spec, progress=replace(OF.spec.progress, start_max_s=60))))
    never = replace(quiet, run=replace(OF, spec=replace(OF.spec, progress=replace(OF.spec.progress, start_max_s=0))))
    ended = judge_end(asked)
    assert ended is not None
    assert ended.end is AttemptEnd.STALLED
    assert judge_end(never) is None
    assert judge_end(replace(asked, view=view())) is None  # where it writes is not known


# ---------------------------------------------------------------- restarts


def failures(*ended: Attempt, checkpoints: tuple[Any, ...] = ()) -> int:
    return restarts.count_failures(OF, ended, checkpoints)


def test_a_script_that_meets_its_time_limit_again_and_again_without_getting_further_is_held() -> None:
    """RR-05 frees the time limit of a training that saves; one that starts at 0 each time would loop for ever."""
    limits = [over(n, AttemptEnd.TIME_LIMIT) for n in (1, 2, 3)]
    assert failures(*limits) == 3
    assert run_state(plan_for(world(*limits, of=OF), snapshot(view=view(3)))) is RunState.HELD


def test_a_newer_checkpoint_or_a_newer_step_frees_the_time_limit() -> None:
    limits = [over(n, AttemptEnd.TIME_LIMIT, last_step=10 * n) for n in (1, 2, 3)]
    assert failures(*limits) == 0
    stuck = [over(n, AttemptEnd.TIME_LIMIT, last_step=10) for n in (1, 2, 3)]
    assert failures(*stuck) == 2
    assert failures(*stuck, checkpoints=(checkpoint(20, 3),)) == 0


def test_preemption_costs_a_script_nothing() -> None:
    assert failures(*[over(n, AttemptEnd.PREEMPTED) for n in range(1, 6)]) == 0


def test_a_script_that_saved_is_submitted_again_without_a_pause() -> None:
    saved = [over(n, AttemptEnd.SAVED, over_at=ago(1)) for n in (1, 2)]
    plan = plan_for(world(*saved, of=OF), snapshot(view=view(2)))
    assert [i.attempt for i in intents_of(plan, IntentKind.SUBMIT)] == [3]


def test_a_first_submission_that_sbatch_refuses_ends_the_run() -> None:
    """Who submits it is told at once; a later one is held for a person."""
    first = plan_for(world(over(1, AttemptEnd.REFUSED), of=OF), snapshot(view=view(1)))
    assert run_state(first) is RunState.STOPPED
    later = plan_for(world(over(1), over(2, AttemptEnd.REFUSED), of=OF), snapshot(view=view(2)))
    assert run_state(later) is RunState.HELD


# ---------------------------------------------------------------- the first submission


def test_a_first_submission_goes_to_slurm_though_too_few_nodes_are_healthy() -> None:
    plan = plan_for(world(of=OF), snapshot(nodes=ALL_DOWN))
    assert attempt_in(plan).nodes_wanted == OF.spec.nodes.min


def test_broken_nodes_are_left_out_of_it_where_enough_others_are() -> None:
    few = restarts.choose_first_size(OF.spec, ALL_DOWN, {"n1": broken("n1")})
    assert (few.nodes, few.exclude) == (2, ("n1",))
    all_broken = {f"n{i}": broken(f"n{i}") for i in range(1, 4)}
    assert restarts.choose_first_size(OF.spec, ALL_DOWN, all_broken).exclude == ()


def test_a_later_submission_waits_for_healthy_nodes() -> None:
    """RR-11."""
    plan = plan_for(world(over(), of=OF), snapshot(nodes=ALL_DOWN, view=view(1)))
    assert intents_of(plan, IntentKind.SUBMIT) == ()


def test_a_script_without_a_number_of_nodes_is_never_too_large() -> None:
    spec = replace(OF.spec, nodes=NodesSpec(min=1, max=1))
    of = replace(OF, spec=spec, script=replace(SCRIPT, nodes_given=False))
    waiting = attempt(state=AttemptState.SUBMITTED, nodes_wanted=1)
    pending = job(name="train", state=JobState.PENDING)
    plan = plan_for(world(waiting, of=of), snapshot(pending, view=view()))
    assert intents_of(plan, IntentKind.CANCEL) == ()


# ---------------------------------------------------------------- whose job it is


def test_an_adopted_job_is_ours_by_its_submission_until_it_carries_our_token() -> None:
    adopted = attempt(submitted_at=ago(700))  # before it was planned
    assert adopted.is_adopted
    theirs = job(name="train", comment="the person's own", submit_at=ago(700))
    assert is_own(theirs, adopted, OF)
    assert not is_own(replace(theirs, submit_at=ago(650)), adopted, OF)
    assert is_own(replace(theirs, submit_at=ago(650), comment=adopted.token), adopted, OF)
    assert not is_own(theirs, attempt(submitted_at=ago(600)), OF)


def test_a_job_that_was_requeued_before_it_was_adopted_goes_on() -> None:
    adopted = attempt(submitted_at=ago(700))
    requeued = job(name="train", restarts=2, submit_at=ago(700))
    assert judge_end(seen(adopted, requeued, view=view(log=log()))) is None
    again = replace(requeued, submit_at=ago(5), state=JobState.PENDING, flags=frozenset({JobFlag.REQUEUED}))
    ended = judge_end(seen(adopted, replace(again, comment=adopted.token), view=view(log=log())))
    assert ended is not None
    assert ended.end is AttemptEnd.PREEMPTED


def test_a_second_job_of_an_attempt_is_known_by_the_jobs_name() -> None:
    twin = job(name="train", job_id=999)
    plan = plan_for(world(attempt(), of=OF), snapshot(job(name="train"), twin, view=view(log=log())))
    assert [i.job_id for i in intents_of(plan, IntentKind.CANCEL)] == [999]


def test_the_story_of_an_end_names_the_scripts_own_log() -> None:
    ended = job(name="train", state=JobState.FAILED, exit_code=1)
    cause = Cause(kind="crash", sentence="it crashed", evidence=("a line",))
    plan = plan_for(world(attempt(), of=OF), snapshot(ended, view=view(), causes={"gpt": cause}))
    stories = [f.record for f in plan.facts if type(f.record).__name__ == "Interruption"]
    assert stories[0].evidence[-1] == "log: /home/ann/slurm-101.out"  # type: ignore[union-attr]


# ---------------------------------------------------------------- scripts that have themselves requeued

ASKING = replace(OF, script=replace(SCRIPT, options=("--requeue",)))
AGAIN = job(name="train", state=JobState.PENDING, restarts=1)


@pytest.mark.parametrize(("of", "end"), [(ASKING, AttemptEnd.SAVED), (OF, AttemptEnd.PREEMPTED)])
def test_a_script_that_has_itself_requeued_has_saved_and_goes_on_at_once(of: Run, end: AttemptEnd) -> None:
    ended = judge_end(sight(attempt(), AGAIN, of=of))
    assert ended is not None
    assert ended.end is end


def test_a_node_that_failed_is_why_slurm_requeued_though_the_script_may_ask_too() -> None:
    ended = judge_end(sight(attempt(), AGAIN, of=ASKING, failed_by_slurm=(Silence(node="n2", evidence="DOWN"),)))
    assert ended is not None
    assert (ended.end, ended.nodes) == (AttemptEnd.NODE_FAILED, ("n2",))


def test_a_job_that_its_node_could_not_start_says_where_to_look() -> None:
    ended = judge_end(seen(attempt(), job(name="train", state=JobState.FAILED, reason="JobLaunchFailure")))
    assert ended is not None
    assert "folder of its log" in ended.detail


# ---------------------------------------------------------------- a submission that does not get through


@pytest.mark.parametrize(("age_s", "is_shown", "is_told"), [(1, False, False), (5, True, False), (70, True, True)])
def test_why_nothing_can_be_submitted_is_the_reason_soon_and_told_after_a_minute(
    age_s: float, is_shown: bool, is_told: bool
) -> None:
    outcome = "no answer: write /home/ann/.supervisor/gpt: OSError: [Errno 30] Read-only file system"
    of = replace(OF, reason="submitted by ann")
    planned = attempt(state=AttemptState.PLANNED, job_id=None, planned_at=ago(age_s))
    plan = plan_for(world(planned, of=of, open_intents=(submit_intent(outcome=outcome),)), snapshot())
    changed = run_in(plan)
    assert (changed is not None and "write /home/ann/.supervisor/gpt" in changed.reason) is is_shown
    assert len(intents_of(plan, IntentKind.NOTIFY)) == is_told


def test_the_reason_goes_when_the_submission_got_through() -> None:
    of = replace(OF, reason="not submitted yet: write /home/ann/.supervisor/gpt: Read-only file system")
    changed = run_in(plan_for(world(attempt(), of=of), snapshot(job(name="train"), view=view(log=log()))))
    assert changed is not None
    assert changed.reason == ""
