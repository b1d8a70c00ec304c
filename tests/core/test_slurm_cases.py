"""What the service makes of Slurm's states, as bug reports brought them. How they are read is in tests/slurm."""

from __future__ import annotations

import pytest

from slurm.types import JobFlag, JobRecord, JobState, NodeBase, NodeRecord
from supervisor.core import nodes as node_rules
from supervisor.core.ends import judge_end
from supervisor.core.nodes import STUCK_AFTER_S, is_fit, judge_slurm_failure, suspects
from supervisor.core.sight import Silence
from supervisor.model import AttemptEnd, AttemptState, Fresh, IntentKind, Interruption, Plan, RunState
from tests.core.builders import (
    LATER,
    NOW,
    STALE,
    ago,
    attempt,
    attempts_in,
    cluster,
    intents_of,
    job,
    launch,
    node,
    node_in,
    over,
    plan_for,
    ports,
    records,
    run,
    run_in,
    sight,
    snapshot,
    view,
    world,
)

WAITING = attempt(state=AttemptState.SUBMITTED)


def told(plan: Plan) -> list[str]:
    return [intent.text for intent in intents_of(plan, IntentKind.NOTIFY)]


def has_interruption(plan: Plan) -> bool:
    return bool(records(plan.facts, Interruption))


def waiting(reason: str, **changes: object) -> JobRecord:
    return job(state=JobState.PENDING, nodes=(), reason=reason, **changes)  # type: ignore[arg-type]


# ---------------------------------------------------------------- nodes


@pytest.mark.parametrize("base", [NodeBase.IDLE, NodeBase.ALLOCATED])
def test_a_node_that_does_not_respond_is_not_used_and_has_not_failed(base: NodeBase) -> None:
    """NS-04: Slurm's own grace runs until it turns the node DOWN."""
    silent = node("n1", base, "NOT_RESPONDING")
    assert not is_fit(silent, None)
    assert judge_slurm_failure(sight(), snapshot(nodes=cluster(4, silent))) == ()
    assert judge_slurm_failure(sight(), snapshot(nodes=cluster(4, node("n1", NodeBase.DOWN, "NOT_RESPONDING")))) != ()


def test_the_node_of_a_running_job_that_does_not_respond_is_looked_at_and_nothing_is_given_up() -> None:
    """NS-04."""
    nodes = cluster(4, node("n1", NodeBase.ALLOCATED, "NOT_RESPONDING"))
    seen = view(launch=launch())
    assert suspects(sight(attempt(), job(), view=seen), nodes) == {"n1"}
    plan = plan_for(world(attempt()), snapshot(job(), nodes=nodes, view=seen, ports=ports(n1=0.0, n2=0.0)))
    assert AttemptState.OVER not in {a.state for a in attempts_in(plan).values()}
    assert "n1" in plan.probe


@pytest.mark.parametrize(
    "rebooting",
    [
        node("n1", NodeBase.DOWN, "REBOOT_ISSUED", reason="reboot issued"),
        node("n1", NodeBase.DOWN, "REBOOT_ISSUED", "NOT_RESPONDING", reason="reboot issued"),
        node("n1", NodeBase.IDLE, "DRAIN", "REBOOT_ISSUED", "NOT_RESPONDING", reason="reboot ASAP"),
        node("n1", NodeBase.MIXED, "REBOOT_REQUESTED"),
        node("n1", NodeBase.ALLOCATED, "REBOOT_REQUESTED"),
    ],
)
def test_a_planned_reboot_is_no_failure_and_condemns_nobody(rebooting: NodeRecord) -> None:
    """NS-08: not used, no failure event, no drain."""
    nodes = cluster(4, rebooting)
    assert not is_fit(rebooting, None)
    assert judge_slurm_failure(sight(), snapshot(nodes=nodes)) == ()
    plan = plan_for(world(), snapshot(nodes=nodes))
    assert node_in(plan, "n1") is None
    assert intents_of(plan, IntentKind.DRAIN) == ()


@pytest.mark.parametrize(("flags", "is_smaller"), [(("REBOOT_ISSUED",), False), ((), True)])
def test_a_job_that_waits_for_a_node_in_a_planned_reboot_keeps_its_place_in_the_queue(
    flags: tuple[str, ...], *, is_smaller: bool
) -> None:
    """NS-08."""
    nodes = cluster(3, *(node(name, NodeBase.DOWN, *flags) for name in ("n2", "n3")), node("n4"))
    wants_three = attempt(state=AttemptState.SUBMITTED, nodes_wanted=3)
    plan = plan_for(world(wants_three), snapshot(waiting("Resources"), nodes=nodes))
    assert (1 in attempts_in(plan)) is is_smaller


def test_a_reboot_that_took_too_long_is_a_failure() -> None:
    """NS-08: Slurm then takes the flag back and says so."""
    late = node("n1", NodeBase.DOWN, "NOT_RESPONDING", reason="reboot timed out")
    assert [s.node for s in judge_slurm_failure(sight(), snapshot(nodes=cluster(4, late)))] == ["n1"]


def test_a_flag_of_another_release_keeps_a_node_out_of_the_size_and_drains_nothing() -> None:
    """NS-10."""
    odd = node("n1", NodeBase.IDLE, "SOMETHING_NEW")
    assert not is_fit(odd, None)
    plan = plan_for(world(), snapshot(nodes=cluster(4, odd)))
    assert intents_of(plan, IntentKind.DRAIN) == ()
    assert attempts_in(plan)[1].nodes_wanted == 3


# ---------------------------------------------------------------- ends


@pytest.mark.parametrize("code", [0, 1, None])
def test_a_node_failure_is_one_whatever_the_exit_code(code: int | None) -> None:
    """JS-05."""
    ended = judge_end(sight(attempt(), job(state=JobState.NODE_FAIL, exit_code=code, exit_signal=0), view=view()))
    assert ended is not None
    assert ended.end is AttemptEnd.NODE_FAILED


def stuck(since_s: float, **changes: object) -> JobRecord:
    shown = job(state=None, raw_state="COMPLETING", flags=frozenset({JobFlag.COMPLETING}), end_at=ago(since_s))
    return JobRecord(**{slot: getattr(shown, slot) for slot in JobRecord.__slots__} | changes)


def test_a_job_that_completes_is_waited_for_until_it_says_how_it_ended() -> None:
    """JS-07."""
    plan = plan_for(world(attempt()), snapshot(stuck(12), view=view()))
    assert attempts_in(plan).get(1, attempt()).end is None
    assert plan.ask_slurm
    assert told(plan) == []


def test_a_job_that_is_stuck_completing_is_told_once_with_its_nodes_and_does_not_block_the_next_attempt() -> None:
    """JS-07."""
    seen = snapshot(stuck(STUCK_AFTER_S + 1))
    plan = plan_for(world(over(is_job_gone=False)), seen)
    assert attempts_in(plan)[1].is_job_gone
    (text,) = told(plan)
    assert "stuck completing on n1, n2" in text
    assert told(plan_for(world(over(), settled_intents=intents_of(plan, IntentKind.NOTIFY)), seen)) == []


def test_nodes_with_a_job_that_is_stuck_are_left_out_of_the_next_attempt() -> None:
    """JS-07: whoever's job it is."""
    nodes = cluster(4, node("n1", NodeBase.IDLE, "COMPLETING"))
    theirs = stuck(STUCK_AFTER_S + 1, job_id=900, name="other", comment="x", nodes=("n1",))
    for seen, excluded in ((snapshot(theirs, nodes=nodes), ("n1",)), (snapshot(nodes=nodes), ())):
        planned = attempts_in(plan_for(world(over(), of=run()), seen, now=NOW))
        assert planned[2].exclude == excluded
    assert node_rules.find_stuck(snapshot(theirs, jobs=STALE), NOW) == frozenset()


@pytest.mark.parametrize("reason", ["launch failed requeued held", "launch_failed_requeued_held"])
@pytest.mark.parametrize("restarts", [0, 1])
def test_a_launch_that_failed_and_is_held_ends_the_attempt_as_a_fault_of_a_node(reason: str, restarts: int) -> None:
    """JS-08: cancelled and submitted anew, counted once; Slurm would let it wait for ever."""
    plan = plan_for(world(WAITING), snapshot(waiting(reason, restarts=restarts)))
    assert attempts_in(plan)[1].end is AttemptEnd.NODE_FAILED
    assert len(records(plan.facts, Interruption)) == 1
    assert [intent.job_id for intent in intents_of(plan, IntentKind.CANCEL)] == [101]


# ---------------------------------------------------------------- waiting


@pytest.mark.parametrize(
    "reason",
    ["DependencyNeverSatisfied", "AssocMaxWallDurationPerJobLimit", "JobHeldUser", "JobHeldAdmin", "BadConstraints"],
)
def test_a_job_that_waits_for_what_never_comes_is_told_once_and_is_the_runs_reason(reason: str) -> None:
    """JS-09."""
    seen = snapshot(waiting(reason))
    plan = plan_for(world(WAITING), seen)
    changed = run_in(plan)
    assert changed is not None
    assert (changed.state, reason in changed.reason) == (RunState.ACTIVE, True)
    (text,) = told(plan)
    assert reason in text
    again = world(WAITING, of=changed, settled_intents=intents_of(plan, IntentKind.NOTIFY))
    assert told(plan_for(again, seen)) == []


@pytest.mark.parametrize("reason", ["DependencyNeverSatisfied", "JobHeldUser", "Priority", "ReqNodeNotAvail"])
def test_waiting_is_no_interruption_and_ends_nothing(reason: str) -> None:
    """JS-09."""
    plan = plan_for(world(WAITING), snapshot(waiting(reason)))
    assert not has_interruption(plan)
    assert attempts_in(plan) == {}
    assert intents_of(plan, IntentKind.CANCEL) == ()


@pytest.mark.parametrize("reason", ["Priority", "Resources", "QOSMaxJobsPerUserLimit", "Dependency", ""])
def test_a_job_that_waits_for_its_turn_says_nothing(reason: str) -> None:
    """JS-09."""
    plan = plan_for(world(WAITING), snapshot(waiting(reason)))
    assert (run_in(plan), told(plan)) == (None, [])


def test_a_job_that_waits_for_nodes_names_them_and_nobody_is_called() -> None:
    """JS-09: a smaller job is submitted where the run allows it (tests/core/test_outgrown.py)."""
    plan = plan_for(world(WAITING), snapshot(waiting("ReqNodeNotAvail, UnavailableNodes:gpu[03-04]")))
    changed = run_in(plan)
    assert changed is not None
    assert "gpu03, gpu04" in changed.reason
    assert told(plan) == []


def test_a_reason_of_the_last_moments_is_not_told_yet() -> None:
    """JS-09: a cluster that is being reconfigured shows odd reasons for a while."""
    young = attempt(state=AttemptState.SUBMITTED, submitted_at=ago(20))
    assert told(plan_for(world(young), snapshot(waiting("BadConstraints")))) == []


@pytest.mark.parametrize("now", [waiting("Priority"), job(state=JobState.RUNNING)])
def test_the_reason_goes_once_it_has_cleared(now: JobRecord) -> None:
    """JS-09."""
    held = run_in(plan_for(world(WAITING), snapshot(waiting("JobHeldUser"))))
    assert held is not None
    changed = run_in(plan_for(world(WAITING, of=held), snapshot(now)))
    assert changed is not None
    assert changed.reason == ""


def test_without_an_answer_of_squeue_the_reason_stands() -> None:
    """JS-09."""
    held = run_in(plan_for(world(WAITING), snapshot(waiting("JobHeldUser"))))
    assert held is not None
    assert run_in(plan_for(world(WAITING, of=held), snapshot(jobs=STALE))) is None


# ---------------------------------------------------------------- identity


def test_a_job_cancelled_before_it_started_is_no_failure_and_no_lost_work() -> None:
    """JS-10."""
    cancelled = job(state=JobState.CANCELLED, nodes=(), start_at=None)
    plan = plan_for(world(WAITING), snapshot(cancelled, view=view()))
    assert attempts_in(plan)[1].end is AttemptEnd.CANCELLED
    (interruption,) = records(plan.facts, Interruption)
    assert (interruption.is_planned, interruption.lost_steps, interruption.node) == (True, None, None)


@pytest.mark.parametrize("raw", ["", "SOMETHING_NEW"])
def test_a_state_that_is_not_known_ends_nothing(raw: str) -> None:
    """JS-11."""
    unknown = job(state=JobState.UNRECOGNIZED, raw_state=raw)
    assert judge_end(sight(attempt(), unknown, view=view(launch=launch()))) is None


def test_a_revoked_job_ends_nothing() -> None:
    """JS-15."""
    revoked = job(state=None, raw_state="REVOKED", flags=frozenset({JobFlag.REVOKED}))
    assert judge_end(sight(attempt(), revoked, view=view(launch=launch()))) is None


def test_an_earlier_job_under_the_same_id_is_not_the_attempts() -> None:
    """JS-16: accounting is matched by id and time of submission."""
    old = job(state=JobState.NODE_FAIL, submit_at=ago(20_000))
    seen = sight(attempt(), view=view(), ended=Fresh(value={101: old}, asked_at=NOW))
    assert seen.accounting is None


def test_the_nodes_of_a_requeued_job_are_those_that_were_stored() -> None:
    """JS-17: the job that waits again shows none."""
    requeued = job(state=JobState.PENDING, nodes=(), flags=frozenset({JobFlag.REQUEUED}), restarts=1)
    silence = (Silence(node="n2", evidence="n2: Slurm says DOWN"),)
    ended = judge_end(sight(attempt(), requeued, view=view(launch=launch()), failed_by_slurm=silence))
    assert ended is not None
    assert (ended.end, ended.nodes) == (AttemptEnd.NODE_FAILED, ("n2",))


def test_nodes_once_stored_stay_whatever_the_job_shows_later() -> None:
    """JS-17."""
    plan = plan_for(world(attempt()), snapshot(waiting("BeginTime", restarts=1), view=view(launch=launch())))
    assert attempts_in(plan)[1].nodes == ("n1", "n2")


def test_a_job_that_is_missing_from_one_answer_is_asked_for_again_and_not_gone() -> None:
    """TX-12."""
    seen = snapshot(view=view(launch=launch()), absent_s={101: 1.0})
    plan = plan_for(world(attempt()), seen)
    assert attempts_in(plan).get(1, attempt()).end is None
    assert plan.ask_slurm


def test_a_stop_of_a_held_job_is_not_undone_by_its_reason() -> None:
    stopping = run(state=RunState.STOPPING, reason="stopped by ada")
    changed = run_in(plan_for(world(WAITING, of=stopping), snapshot(waiting("JobHeldUser")), now=LATER))
    assert changed is None or changed.reason == "stopped by ada"
