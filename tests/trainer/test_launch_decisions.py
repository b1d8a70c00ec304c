"""The launcher's decisions on built views: who is lost, who trains, what comes next, when to give up."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from trainer.contract import Advice, AttemptSpec, CutOff, DrillRequest
from trainer.launching.choice import choose_training, count_nodes
from trainer.launching.course import choose_fewer, find_failure, is_final
from trainer.launching.drills import Drills
from trainer.launching.interruptions import Finding, Interruption, finding_of, record_of
from trainer.launching.nodes import Node
from trainer.launching.ports import knock, parse_addresses
from trainer.launching.recovery import Member, Needs, Scene, Short, Stage, Start, next_move
from trainer.launching.resume import ResumePoint, choose_point
from trainer.launching.silence import Patience, Signs, judge_loss
from trainer.launching.streak import GiveUp, Streak, extend_streak, judge_streak
from trainer.launching.training import Training
from trainer.storage.stored import Found
from trainer.verdict import Candidate, Go, NodeEnd, Verdict

PATIENCE = Patience(suspect_s=3, liveness_s=10, closed_s=1)


def kind(**signs: object) -> str | None:
    loss = judge_loss(Signs(node="n2", **{"age_s": 0.1, **signs}), PATIENCE)  # type: ignore[arg-type]
    return loss.kind if loss else None


# ---------------------------------------------------------------- losses


@pytest.mark.parametrize("answers", [True, False, None])
@pytest.mark.parametrize("others", [True, False, None])
def test_a_node_that_beats_is_never_lost(answers: bool | None, others: bool | None) -> None:
    assert kind(age_s=2.9, answers=answers, others_answer=others) is None


@pytest.mark.parametrize(
    ("age_s", "answers", "others", "expected"),
    [
        (3.1, False, True, "node_lost"),
        (3.1, False, False, None),  # it is we who are cut off
        (3.1, False, None, None),
        (3.1, True, True, None),  # slow
        (9.9, None, None, None),
        (10.1, True, True, "node_frozen"),
        (10.1, None, None, "node_lost"),
        (10.1, False, False, "node_lost"),
    ],
)
def test_silence_is_a_loss_only_with_a_silent_port_or_after_the_longer_time(
    age_s: float, answers: bool | None, others: bool | None, expected: str | None
) -> None:
    assert kind(age_s=age_s, answers=answers, others_answer=others) == expected


@pytest.mark.parametrize(
    ("signs", "expected"),
    [
        ({"closed_s": 0.5, "answers": True}, None),  # it may come back
        ({"closed_s": 1.1, "answers": True}, "agent_killed"),
        ({"closed_s": 0.0, "is_told_dead": True, "answers": True}, "agent_killed"),
        ({"closed_s": 1.1, "answers": False, "others_answer": True}, "node_lost"),
        ({"closed_s": 1.1, "answers": False, "others_answer": False}, None),
        ({"closed_s": 1.1}, None),
        ({"closed_s": 6.1}, "agent_killed"),
        ({"closed_s": 1.1, "has_left_word": True}, "node_cut_off"),
    ],
)
def test_a_closed_connection_is_a_killed_agent_unless_its_node_is_silent(
    signs: dict[str, object], expected: str | None
) -> None:
    assert kind(**signs) == expected


def test_a_nodes_own_word_that_it_lives_settles_that_it_is_cut_off() -> None:
    assert kind(age_s=3.1, answers=True, has_left_word=True) == "node_cut_off"
    assert kind(age_s=2.9, answers=True, has_left_word=True) is None


def test_nobody_is_blamed_when_no_other_node_answers_either() -> None:
    loss = judge_loss(Signs(node="n2", age_s=11, answers=False, others_answer=False), PATIENCE)
    assert loss is not None
    assert not loss.is_blamed
    assert finding_of(loss, 77).nodes == ()


# ---------------------------------------------------------------- which nodes


@pytest.mark.parametrize(
    ("usable", "minimum", "multiple", "expected"),
    [
        (("n1", "n2", "n3", "n4"), 3, 1, ("n1", "n2", "n3")),
        (("n1", "n3", "n4"), 3, 1, ("n1", "n4", "n3")),  # the spare takes the place of n2
        (("n4", "n2", "n3"), 3, 1, ("n4", "n2", "n3")),
        (("n1", "n3"), 2, 1, ("n1", "n3")),
        (("n1", "n3"), 3, 1, ()),
        (("n1", "n3"), 1, 2, ("n1", "n3")),
        (("n3",), 1, 2, ()),
        ((), 0, 1, ()),
    ],
)
def test_each_node_keeps_its_place_and_a_spare_takes_that_of_one_that_is_gone(
    usable: tuple[str, ...], minimum: int, multiple: int, expected: tuple[str, ...]
) -> None:
    chosen = choose_training(("n1", "n2", "n3"), usable, wanted=3, minimum=minimum, multiple=multiple)
    assert chosen == expected


def test_a_training_that_has_shrunk_grows_again_when_there_are_nodes() -> None:
    assert choose_training(("n1", "n3"), ("n1", "n2", "n3"), wanted=3, minimum=1, multiple=1) == ("n1", "n3", "n2")


def test_the_number_wanted_need_be_no_multiple_but_any_smaller_one() -> None:
    assert count_nodes(5, wanted=5, minimum=1, multiple=2) == 5
    assert count_nodes(4, wanted=5, minimum=1, multiple=2) == 4
    assert count_nodes(3, wanted=5, minimum=1, multiple=2) == 2


def test_the_first_start_waits_for_who_may_still_come_before_it_takes_fewer() -> None:
    spec = AttemptSpec(run="r", attempt=1, command=("x",), nodes=3, nodes_min=2)
    refusal = Verdict(exit_code=76, reason="n2: disk", node="n2")
    bad = Candidate(node="n2", is_connected=True, is_checked=True, failed="disk")
    good = [Candidate(node=n, is_connected=True, is_checked=True) for n in ("n1", "n3")]
    assert choose_fewer(refusal, [*good, bad], spec, is_too_late=False) == Go(nodes=("n1", "n3"))
    late = [good[0], bad, Candidate(node="n3", is_connected=True)]
    assert choose_fewer(refusal, late, spec, is_too_late=False) is None
    ended = choose_fewer(refusal, late, spec, is_too_late=True)
    assert isinstance(ended, Verdict)
    assert (ended.next, set(ended.bad_nodes)) == ("resubmit", {"n2", "n3"})
    assert choose_fewer(refusal, [*good, bad], replace(spec, in_job=False), is_too_late=False) is refusal


# ---------------------------------------------------------------- the course of a recovery

NEEDS = Needs(wanted=2, minimum=2, multiple=1, evidence_s=5, stop_s=8, check_s=25, spare_grace_s=1)


def old(node: str, **flags: object) -> Member:
    return Member(node=node, was_training=True, **{"is_here": True, "is_stopped": True, **flags})  # type: ignore[arg-type]


def spare(node: str, **flags: object) -> Member:
    return Member(node=node, **{"is_here": True, "is_checked": True, **flags})  # type: ignore[arg-type]


def move(*members: Member, stage: Stage = Stage.CHECK, needs: Needs = NEEDS, **scene: object) -> object:
    values = {"stage_s": 0.1, "wait_s": 0.0, "is_point_known": True, "previous": ("n1", "n2"), **scene}
    return next_move(Scene(stage=stage, members=members, **values), needs)  # type: ignore[arg-type]


LOST = Member(node="n2", was_training=True)


def test_evidence_and_stopping_wait_for_the_living_and_have_their_bounds() -> None:
    busy = old("n1", is_stopped=False)
    assert move(busy, LOST, stage=Stage.EVIDENCE) is None
    assert move(replace(busy, has_evidence=True), LOST, stage=Stage.EVIDENCE) is Stage.STOP
    assert move(busy, LOST, stage=Stage.EVIDENCE, stage_s=5.1) is Stage.STOP
    assert move(busy, LOST, stage=Stage.STOP) is None
    assert move(old("n1"), LOST, stage=Stage.STOP) is Stage.CHECK
    assert move(busy, LOST, stage=Stage.STOP, stage_s=8.1) is Stage.CHECK


def test_a_start_needs_checks_a_resume_point_and_the_end_of_the_back_off() -> None:
    sound = (old("n1", is_checked=True), LOST, spare("n3"))
    assert move(*sound) == Start(nodes=("n1", "n3"))
    assert move(*sound, is_point_known=False) is None
    assert move(*sound, wait_s=0.1) is None
    assert move(old("n1"), LOST, spare("n3")) is None


def test_a_slow_check_is_not_waited_for_where_spares_are_enough() -> None:
    members = (old("n1", is_checked=True), old("n2"), spare("n3"))
    assert move(*members) is None  # n2 may be ready any moment
    assert move(*members, stage_s=1.1) == Start(nodes=("n1", "n3"))


def test_a_failed_check_takes_the_node_out_and_too_few_end_it_at_once() -> None:
    bad = old("n2", is_checked=True, failed="disk: full")
    short = move(old("n1"), bad)
    assert isinstance(short, Short)
    assert "n2: disk: full" in short.reason


def test_checks_that_never_end_are_given_up() -> None:
    members = (old("n1", is_checked=True), old("n2"))
    assert move(*members, stage_s=24.0) is None
    assert isinstance(move(*members, stage_s=25.1), Short)


def test_no_start_while_ranks_of_the_old_one_may_write_on_a_node_that_answers() -> None:
    unfenced = Member(node="n2", was_training=True, is_coming=True, is_unfenced=True)
    sound = (old("n1", is_checked=True), spare("n3"))
    assert move(*sound, unfenced) is None
    assert isinstance(move(*sound, replace(unfenced, is_unfenced=False)), Start)


def test_a_new_agent_is_waited_for_only_where_nodes_are_short() -> None:
    coming = Member(node="n2", was_training=True, is_coming=True)
    assert move(old("n1", is_checked=True), coming) is None
    assert move(old("n1", is_checked=True), coming, spare("n3")) == Start(nodes=("n1", "n3"))


def test_a_node_that_was_lost_before_is_the_last_to_be_taken() -> None:
    returned = old("n2", is_checked=True, blamed=1)
    assert move(old("n1", is_checked=True), returned, spare("n3")) == Start(nodes=("n1", "n3"))
    assert move(old("n1", is_checked=True), returned) == Start(nodes=("n1", "n2"))


def test_every_scene_has_a_move_once_its_bounds_have_passed() -> None:
    """No recovery waits for ever, whatever its nodes look like."""
    flags = [
        Member(node="n1", was_training=True, is_here=h, is_stopped=s, is_checked=c, failed=f, has_evidence=s)
        for h, s, c, f in product((True, False), (True, False), (True, False), ("", "bad"))
    ]
    for stage, one, other in product(Stage, flags, flags):
        for minimum in (1, 2):
            members = (one, replace(other, node="n2"))
            needs = replace(NEEDS, minimum=minimum)
            assert move(*members, stage=stage, stage_s=99.0, needs=needs) is not None


# ---------------------------------------------------------------- giving up


def test_a_back_off_begins_with_the_second_start_without_progress_and_doubles() -> None:
    def judge(failures: int) -> float | GiveUp:
        return judge_streak(Streak(failures=failures, steps=(1,) * failures), max_without_progress=9, backoff_s=15)

    assert [judge(n) for n in range(5)] == [0, 0, 15, 30, 60]


@pytest.mark.parametrize(
    ("steps", "expected"), [((7, 7, 7), "hold"), ((7, 8, 7), "resubmit"), ((None, None, None), "resubmit")]
)
def test_the_same_step_again_and_again_is_held(steps: tuple[int | None, ...], expected: str) -> None:
    judged = judge_streak(Streak(failures=3, steps=steps), max_without_progress=3, backoff_s=15)
    assert isinstance(judged, GiveUp)
    assert judged.next == expected


def test_a_newer_checkpoint_or_a_node_to_blame_is_not_counted_against_the_training() -> None:
    streak = extend_streak(Streak(), has_newer=False, is_blamed=False, last_step=3)
    assert streak == Streak(failures=1, steps=(3,), places=("",))
    assert extend_streak(streak, has_newer=False, is_blamed=True, last_step=3) == streak
    assert extend_streak(streak, has_newer=True, is_blamed=False, last_step=9) == Streak(
        failures=1, steps=(9,), places=("",)
    )


@pytest.mark.parametrize(
    ("born", "places", "expected"),
    [
        ((True, True), ("", ""), "hold"),  # it fails at once wherever it starts
        ((True, True), ("n1", "n2"), "hold"),
        ((True, True), ("n2", "n2"), "resubmit"),  # it may be that node
        ((False, True), ("", ""), "resubmit"),
    ],
)
def test_starts_that_fail_before_their_first_step_are_held(
    born: tuple[bool, ...], places: tuple[str, ...], expected: str
) -> None:
    streak = Streak()
    for is_stillborn, place in zip(born, places, strict=True):
        streak = extend_streak(
            streak, has_newer=False, is_blamed=False, last_step=None, is_stillborn=is_stillborn, place=place
        )
    judged = judge_streak(streak, max_without_progress=2, backoff_s=15)
    assert isinstance(judged, GiveUp)
    assert judged.next == expected


# ---------------------------------------------------------------- where a start begins

SPEC = AttemptSpec(run="r", attempt=3, command=("x",), nodes=1, resume_from="/given", resume_step=10)


def found(step: int, attempt: int, *, is_verified: bool = True) -> Found:
    return Found(path=Path(f"/c/{step}"), step=step, attempt=attempt, is_complete=True, is_verified=is_verified)


@pytest.mark.parametrize(
    ("stored", "advised", "expected"),
    [
        ([], None, ("/given", 10)),
        ([found(20, 3), found(30, 3, is_verified=False), found(5, 3)], None, ("/c/20", 20)),
        ([found(40, 2), found(50, 4)], None, ("/given", 10)),  # known when the attempt was given its start
        ([found(20, 3)], ("/advised", 25), ("/advised", 25)),
        ([found(20, 3)], ("/advised", 15), ("/c/20", 20)),
    ],
)
def test_a_start_begins_from_the_newest_verified_checkpoint_of_its_own(
    stored: list[Found], advised: tuple[str, int] | None, expected: tuple[str, int]
) -> None:
    path, step = advised or ("", 0)
    advice = Advice(attempt=3, seq=1, checkpoint_every_s=1, resume_from=path, resume_step=step) if advised else None
    assert choose_point(stored, SPEC, advice) == ResumePoint(path=expected[0], step=expected[1])


# ---------------------------------------------------------------- ends


def training_with(*ends: NodeEnd) -> Training:
    training = Training(0, ("n1", "n2"), ResumePoint(), 0.0)
    training.ends = list(ends)
    return training


def test_the_first_failure_that_is_no_consequence_is_the_cause() -> None:
    nodes = {name: Node(name) for name in ("n1", "n2")}
    victim = NodeEnd(node="n1", exit_code=1, reason="connection closed", is_victim=True)
    failed = find_failure(training_with(victim, NodeEnd(node="n2", exit_code=9, reason="rank 1 died")), nodes)
    assert failed is not None
    assert (failed.kind, failed.hint, failed.exit_code, failed.is_weak) == ("process", "n2", 9, False)
    nodes["n1"].is_port_taken = True
    taken = find_failure(training_with(NodeEnd(node="n1", exit_code=1, reason="address in use")), nodes)
    assert taken is not None
    assert taken.kind == "start_failed"


@pytest.mark.parametrize(
    ("code", "expected"), [(75, True), (78, True), (79, True), (93, True), (127, True), (9, False)]
)
def test_codes_that_are_meant_end_the_attempt(code: int, expected: bool) -> None:
    assert is_final([NodeEnd(node="n1", exit_code=code, reason="")], [], None) is expected


# ---------------------------------------------------------------- the record


def interruption(kind: str = "node_lost") -> Interruption:
    finding = Finding(kind=kind, cause="n2 is lost", exit_code=77, nodes=("n2",), detect_s=3.0)
    return Interruption(record_of(finding, attempt=1, launch=0, last_step=5), 100.0)


def test_a_late_word_makes_a_lost_node_one_that_was_cut_off() -> None:
    record = interruption()
    word = CutOff(attempt=1, node="n2", boot_id="b", since_s=4.0, time=1.0)
    assert not record.take_word(replace(word, node="n1"))
    assert record.take_word(word)
    assert record.record.kind == "node_cut_off"
    assert not interruption("hang").take_word(word)


def test_the_record_says_where_the_seconds_went_once_a_new_step_is_done() -> None:
    record = interruption()
    training = Training(1, ("n1",), ResumePoint(step=4), 101.0)
    training.feed([{"rank": 0, "step": 4}, "nonsense", {"rank": True, "step": 9}], 103.0)
    assert not record.follow(training, 9.0)
    training.feed([{"rank": 0, "step": 5}], 104.0)
    assert record.follow(training, 9.0)
    assert record.record.resumed_at == pytest.approx(record.record.detected_at + 4.0)
    assert record.record.parts_s == {"detect": 3.0, "start": 2.0, "first_step": 1.0}
    assert not record.follow(training, 9.0)


@pytest.mark.parametrize(
    ("was_mute", "prints", "now", "resumed_s"),
    [
        (True, True, 105.0, 4.0),
        (True, False, 105.0, None),
        (True, False, 114.0, 3.0),  # its ranks live
        (False, True, 105.0, None),  # the start before told steps, or was too short to tell
        (False, True, 162.0, 4.0),
    ],
)
def test_the_record_of_a_training_that_tells_no_steps_ends(
    was_mute: bool, prints: bool, now: float, resumed_s: float | None
) -> None:
    finding = Finding(kind="process", cause="killed", exit_code=137)
    record = Interruption(record_of(finding, attempt=1, launch=0, last_step=None), 100.0, was_mute=was_mute)
    training = Training(1, ("n1",), ResumePoint(), 101.0)
    training.feed([{"rank": 0, "log_bytes": 70}], 103.0)
    training.feed([{"rank": 0, "log_bytes": 71 if prints else 70}], 104.0)
    assert record.follow(training, now) == (resumed_s is not None)
    resumed_at = record.record.resumed_at
    assert resumed_s == (None if resumed_at is None else pytest.approx(resumed_at - record.record.detected_at))
    assert record.record.last_step is None


# ---------------------------------------------------------------- drills, ports


def test_a_drill_waits_for_its_step_and_is_made_once() -> None:
    drills = Drills()

    def ask(last_step: int | None, **request: object) -> object:
        wish = DrillRequest(**{"id": "a", "kind": "node", "at_step": 5, **request})  # type: ignore[arg-type]
        return drills.next_order(wish, training=("n1", "n2"), own_node="n1", last_step=last_step)

    assert ask(None) is None
    assert ask(4) is None
    order = ask(5)
    assert order is not None
    assert getattr(order, "node", "") == "n2"
    assert ask(6) is None
    assert getattr(ask(6, id="b", node="n9"), "refusal", "") == "n9 does not train"
    assert "none of" in getattr(ask(6, id="c", kind="flood"), "refusal", "")


def test_only_the_launchers_own_node_is_not_cut_by_a_drill() -> None:
    for kind_, expected in (("process", "n1"), ("hang", "n1"), ("node", ""), ("network", "")):
        wish = DrillRequest(id="a", kind=kind_)
        order = Drills().next_order(wish, training=("n1",), own_node="n1", last_step=None)
        assert order is not None
        assert order.node == expected
        assert bool(order.refusal) is not bool(expected)


def test_addresses_of_slurmds_are_read_for_all_nodes_at_once() -> None:
    nodes = (
        "NodeName=n1 CPUTot=1 NodeAddr=10.0.0.1 NodeHostName=n1 Port=7001\nNodeName=n2 NodeAddr=10.0.0.2 Version=22\n"
    )
    assert parse_addresses(nodes, "SlurmctldPort = 1\nSlurmdPort              = 7777\n") == {
        "n1": ("10.0.0.1", 7001),
        "n2": ("10.0.0.2", 7777),
    }
    assert parse_addresses("", "") == {}


def test_a_refused_connection_is_an_answer_and_no_way_is_none() -> None:
    answers = knock({"a": ("127.0.0.1", 1), "b": ("255.255.255.255", 6818)}, 0.2)
    assert answers == {"a": True, "b": False}
