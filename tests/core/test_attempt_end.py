"""How an attempt ended: one test per row of the table, and the order of the rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from slurm.types import JobFlag, JobRecord, JobState
from supervisor.core.ends import Ended, judge_end
from supervisor.core.restarts import NODE_ENDS
from supervisor.core.sight import Silence
from supervisor.model import AttemptEnd, AttemptState, Cause, Fresh, RunState, Stale
from tests.core.builders import (
    NOW,
    RUN,
    STALE,
    ago,
    attempt,
    attempt_in,
    attempts_in,
    exit_record,
    job,
    launch,
    plan_for,
    ports,
    progress,
    run,
    sight,
    snapshot,
    view,
    world,
)
from trainer import contract
from trainer.contract import CheckResult, NodeReport, Outcome

SILENT_N2 = (Silence(node="n2", evidence="n2: no heartbeat, slurmd silent"),)


def accounted(*jobs: JobRecord) -> Fresh[Mapping[int, JobRecord]]:
    return Fresh(value={j.job_id: j for j in jobs}, asked_at=NOW)


def end_of(ended: Ended | None) -> AttemptEnd | None:
    return ended.end if ended is not None else None


# ---------------------------------------------------------------- our own stop


def test_a_run_that_is_stopped_ends_its_attempt_before_anything_else_is_asked() -> None:
    stopping = run(state=RunState.STOPPING, reason="uid 1000 said so")
    seen = sight(attempt(), job(), of=stopping, view=view(exit=exit_record(1)))
    ended = judge_end(seen)
    assert end_of(ended) is AttemptEnd.STOPPED
    assert ended is not None
    assert ended.detail == "uid 1000 said so"


def test_a_stop_does_not_end_an_attempt_whose_job_is_not_known_yet() -> None:
    planned = attempt(state=AttemptState.PLANNED)
    assert judge_end(sight(planned, of=run(state=RunState.STOPPING))) is None


# ---------------------------------------------------------------- the launcher's own record


@pytest.mark.parametrize(
    ("code", "end"),
    [
        (contract.EXIT_FINISHED, AttemptEnd.FINISHED),
        (contract.EXIT_RESUBMIT, AttemptEnd.SAVED),
        (contract.EXIT_DO_NOT_RESTART, AttemptEnd.DO_NOT_RESTART),
        (contract.EXIT_NODE_CHECK_FAILED, AttemptEnd.NODE_CHECK),
        (contract.EXIT_HUNG, AttemptEnd.STALLED),
        (contract.EXIT_CHECKPOINT_REJECTED, AttemptEnd.CHECKPOINT_REJECTED),
        (1, AttemptEnd.CRASHED),
        (137, AttemptEnd.CRASHED),
    ],
)
def test_the_launchers_exit_code_says_how_the_attempt_ended(code: int, end: AttemptEnd) -> None:
    ended = judge_end(sight(attempt(), job(), view=view(exit=exit_record(code))))
    assert end_of(ended) is end
    assert ended is not None
    assert ended.exit_code == code


def test_the_launchers_record_goes_before_slurms_word() -> None:
    seen = sight(attempt(), job(state=JobState.FAILED, exit_code=75), view=view(exit=exit_record(75)))
    assert end_of(judge_end(seen)) is AttemptEnd.SAVED


@pytest.mark.parametrize(("code", "end"), [(75, AttemptEnd.SAVED), (93, AttemptEnd.DO_NOT_RESTART)])
def test_slurms_exit_code_is_the_launchers_where_its_record_does_not_show_yet(code: int, end: AttemptEnd) -> None:
    ended = judge_end(sight(attempt(), job(state=JobState.FAILED, exit_code=code), view=view()))
    assert end_of(ended) is end
    assert ended is not None
    assert ended.is_curable is (code == 75)


def test_exit_93_is_not_curable_by_a_restart() -> None:
    ended = judge_end(sight(attempt(), job(), view=view(exit=exit_record(93))))
    assert ended is not None
    assert not ended.is_curable


def test_an_exit_record_of_another_attempt_says_nothing() -> None:
    assert judge_end(sight(attempt(2), job(2), view=view(2, exit=exit_record(0, number=1)))) is None


def test_a_node_that_the_job_never_had_is_not_condemned_by_the_jobs_own_files() -> None:
    failed = CheckResult(check="disk", ok=False, detail="full")
    report = NodeReport(attempt=1, node="n9", host="n9", time=0.0, checks=(failed,))
    for reports in ((report,), ()):
        record = exit_record(contract.EXIT_NODE_CHECK_FAILED, node="n9")
        ended = judge_end(sight(attempt(), job(), view=view(exit=record, node_reports=reports)))
        assert end_of(ended) is AttemptEnd.NODE_CHECK
        assert ended is not None
        assert ended.nodes == ()


def test_every_node_whose_own_report_holds_a_failed_check_is_named() -> None:
    failed, passed = CheckResult(check="disk", ok=False, detail="full"), CheckResult(check="disk", ok=True)
    unknown = CheckResult(check="disk", ok=None, detail="time-out")
    reports = tuple(
        NodeReport(attempt=1, node=n, host=n, time=0.0, checks=(result,))
        for n, result in (("n1", failed), ("n2", passed), ("n3", failed), ("n4", unknown))
    )
    four = attempt(nodes=("n1", "n2", "n3", "n4"))
    ended = judge_end(sight(four, view=view(exit=exit_record(76, node="n1"), node_reports=reports)))
    assert ended is not None
    assert ended.nodes == ("n1", "n3")
    assert "n3: disk: full" in ended.evidence


def test_an_agent_that_could_not_be_started_says_nothing_against_its_node() -> None:
    ended = judge_end(sight(view=view(exit=exit_record(76, node="n2", nodes={"n1": 1, "n2": 1}, bad_nodes=("n2",)))))
    assert ended is not None
    assert ended.nodes == ()


def test_without_reports_the_node_that_the_launcher_names_failed_its_checks() -> None:
    ended = judge_end(sight(view=view(exit=exit_record(76, node="n2"))))
    assert ended is not None
    assert ended.nodes == ("n2",)


def test_the_trainings_own_message_is_part_of_the_evidence() -> None:
    outcome = Outcome(attempt=1, exit_code=78, message="shard 3 does not match")
    ended = judge_end(sight(view=view(exit=exit_record(78), outcome=outcome)))
    assert ended is not None
    assert "outcome: shard 3 does not match" in ended.evidence


def test_a_message_of_an_earlier_attempt_is_no_evidence() -> None:
    outcome = Outcome(attempt=7, exit_code=78, message="old")
    ended = judge_end(sight(view=view(exit=exit_record(78), outcome=outcome)))
    assert ended is not None
    assert len(ended.evidence) == 1


# ---------------------------------------------------------------- a silent node that only the launcher saw


def test_a_node_that_the_launcher_gave_up_is_named_once_a_second_sign_is_there() -> None:
    ended = judge_end(sight(view=view(exit=exit_record(77, node="n2"), launch=launch()), silent=SILENT_N2))
    assert end_of(ended) is AttemptEnd.NODE_SILENT
    assert ended is not None
    assert ended.nodes == ("n2",)


def test_a_second_sign_is_waited_for_when_the_launcher_gave_a_node_up() -> None:
    assert judge_end(sight(view=view(exit=exit_record(77, node="n2"), launch=launch(unchanged_s=3)))) is None


def test_a_node_that_only_the_launcher_gave_up_is_a_hint_and_not_condemned() -> None:
    ended = judge_end(sight(view=view(exit=exit_record(77, node="n2"), launch=launch(unchanged_s=9))))
    assert end_of(ended) is AttemptEnd.NODE_SILENT
    assert ended is not None
    assert (ended.nodes, ended.hint) == ((), "n2")


def test_without_a_launch_report_the_launchers_word_on_a_silent_node_is_not_waited_on() -> None:
    assert end_of(judge_end(sight(view=view(exit=exit_record(77, node="n2"))))) is AttemptEnd.NODE_SILENT


@pytest.mark.parametrize("code", [0, 1, 75, 77])
@pytest.mark.parametrize(("unknown_s", "is_over"), [(0.0, False), (59.0, False), (60.0, True)])
def test_an_ended_attempt_is_over_once_its_checkpoint_folder_was_looked_at_or_has_been_unreadable_for_a_minute(
    code: int, unknown_s: float, is_over: bool
) -> None:
    """What it published since the last look would be fenced, and be lost to the next attempt."""
    seen = sight(
        attempt(),
        job(state=JobState.COMPLETED),
        view=view(exit=exit_record(code), checkpoints_unknown="hangs", checkpoints_unknown_s=unknown_s),
        silent=SILENT_N2,
    )
    assert (judge_end(seen) is not None) is is_over


def test_a_stop_does_not_wait_for_a_checkpoint_folder_that_cannot_be_looked_at() -> None:
    seen = view(exit=exit_record(75), checkpoints_unknown="hangs", checkpoints_unknown_s=1)
    assert end_of(judge_end(sight(view=seen, of=run(state=RunState.STOPPING)))) is AttemptEnd.STOPPED


# ---------------------------------------------------------------- crashes and their causes


def test_a_crash_without_a_cause_names_the_launchers_node_as_a_hint_only() -> None:
    ended = judge_end(sight(view=view(exit=exit_record(1, node="n2"))))
    assert ended is not None
    assert (ended.nodes, ended.hint) == ((), "n2")


@pytest.mark.parametrize(("blames", "nodes"), [(True, ("n2",)), (False, ())])
def test_a_node_is_named_by_a_crash_only_where_the_cause_blames_it(blames: bool, nodes: tuple[str, ...]) -> None:
    cause = Cause(kind="gpu", sentence="XID 79 on n2", node="n2", blames_node=blames)
    ended = judge_end(sight(view=view(exit=exit_record(1, node="n1")), causes={"gpt": cause}))
    assert ended is not None
    assert (ended.nodes, ended.hint, ended.detail) == (nodes, "n2", "XID 79 on n2")


@pytest.mark.parametrize(("blames", "end"), [(True, AttemptEnd.NODE_FAILED), (False, AttemptEnd.CRASHED)])
def test_a_crash_that_a_nodes_hardware_brought_about_is_paid_by_the_budget_of_the_nodes(
    blames: bool, end: AttemptEnd
) -> None:
    cause = Cause(kind="gpu", sentence="XID 79 on n2", node="n2", blames_node=blames)
    assert end_of(judge_end(sight(view=view(exit=exit_record(1, node="n1")), causes={"gpt": cause}))) is end
    assert (end in NODE_ENDS) is blames


def test_a_cause_that_a_restart_cannot_cure_is_passed_on() -> None:
    cause = Cause(kind="configuration", sentence="command not found", is_curable=False)
    ended = judge_end(sight(view=view(exit=exit_record(127)), causes={"gpt": cause}))
    assert ended is not None
    assert not ended.is_curable


def test_a_host_that_ran_out_of_memory_has_its_own_end() -> None:
    cause = Cause(kind="host_memory", sentence="the kernel killed a process of n1")
    assert end_of(judge_end(sight(view=view(exit=exit_record(137)), causes={"gpt": cause}))) is AttemptEnd.HOST_MEMORY


# ---------------------------------------------------------------- silence


def test_a_silent_node_ends_the_attempt_and_is_named() -> None:
    ended = judge_end(sight(attempt(), job(), view=view(), silent=SILENT_N2))
    assert end_of(ended) is AttemptEnd.NODE_SILENT
    assert ended is not None
    assert ended.nodes == ("n2",)


def test_silence_goes_before_slurms_word_because_it_names_the_node() -> None:
    ended = judge_end(sight(attempt(), job(state=JobState.FAILED), view=view(), silent=SILENT_N2))
    assert end_of(ended) is AttemptEnd.NODE_SILENT


def test_a_node_that_slurm_turned_down_ends_the_attempt() -> None:
    ended = judge_end(sight(attempt(), job(), view=view(), failed_by_slurm=SILENT_N2))
    assert end_of(ended) is AttemptEnd.NODE_FAILED
    assert ended is not None
    assert ended.nodes == ("n2",)


# ---------------------------------------------------------------- Slurm's word


@pytest.mark.parametrize(
    ("state", "end"),
    [
        (JobState.COMPLETED, AttemptEnd.FINISHED),
        (JobState.CANCELLED, AttemptEnd.CANCELLED),
        (JobState.TIMEOUT, AttemptEnd.TIME_LIMIT),
        (JobState.NODE_FAIL, AttemptEnd.NODE_FAILED),
        (JobState.BOOT_FAIL, AttemptEnd.NODE_FAILED),
        (JobState.PREEMPTED, AttemptEnd.PREEMPTED),
        (JobState.OUT_OF_MEMORY, AttemptEnd.HOST_MEMORY),
        (JobState.DEADLINE, AttemptEnd.DO_NOT_RESTART),
        (JobState.FAILED, AttemptEnd.CRASHED),
    ],
)
def test_slurms_state_says_how_the_attempt_ended_where_the_launcher_did_not(state: JobState, end: AttemptEnd) -> None:
    assert end_of(judge_end(sight(attempt(), job(state=state), view=view()))) is end


@pytest.mark.parametrize("state", [JobState.RUNNING, JobState.PENDING, JobState.SUSPENDED, JobState.UNRECOGNIZED])
def test_a_job_that_is_live_has_not_ended(state: JobState) -> None:
    assert judge_end(sight(attempt(), job(state=state), view=view())) is None


def test_a_job_that_is_completing_has_no_end_state_yet_and_is_waited_for() -> None:
    completing = job(state=None, flags=frozenset({JobFlag.COMPLETING}))
    assert judge_end(sight(attempt(), completing, view=view())) is None


@pytest.mark.parametrize("lost", ["silent", "failed_by_slurm"])
@pytest.mark.parametrize("code", [None, 143, contract.EXIT_NODE_SILENT])
def test_a_person_who_cancels_a_job_just_after_a_node_was_lost_is_obeyed(lost: str, code: int | None) -> None:
    """Of a failed node Slurm says NODE_FAIL: CANCELLED is somebody's word."""
    said = exit_record(code, bad_nodes=("n2",), next="resubmit") if code is not None else None
    parts: dict[str, Any] = {"view": view(exit=said, launch=launch()), lost: SILENT_N2}
    assert end_of(judge_end(sight(attempt(), job(state=JobState.CANCELLED), **parts))) is AttemptEnd.CANCELLED


def test_a_launcher_that_was_terminated_is_explained_by_slurm_before_a_silent_node_explains_it() -> None:
    def end(quiet_s: float, **parts: Any) -> AttemptEnd | None:
        seen = view(exit=exit_record(143), launch=launch(unchanged_s=quiet_s))
        return end_of(judge_end(sight(attempt(), job(), view=seen, silent=SILENT_N2, **parts)))

    assert end(3.0) is None
    assert end(3.0, jobs=STALE) is AttemptEnd.NODE_SILENT
    assert end(21.0) is AttemptEnd.NODE_SILENT


def test_slurm_is_asked_at_once_why_a_launcher_was_terminated() -> None:
    terminated = view(exit=exit_record(143), launch=launch(unchanged_s=2.0))
    made = plan_for(world(attempt()), snapshot(job(), view=terminated))
    assert made.ask_slurm
    assert 1 not in attempts_in(made) or not attempt_in(made).is_over


COMPLETING = job(state=None, raw_state="COMPLETING", flags=frozenset({JobFlag.COMPLETING}))


@pytest.mark.parametrize("has_spoken", [True, False])
def test_a_job_that_completes_shows_how_it_ended_only_when_slurm_has_let_go_of_the_lost_node(has_spoken: bool) -> None:
    """Seen on a real cluster: squeue says COMPLETING until SlurmdTimeout, minutes after scancel."""

    def end(quiet_s: float, **parts: Any) -> AttemptEnd | None:
        seen = view(exit=exit_record(143) if has_spoken else None, launch=launch(unchanged_s=quiet_s))
        return end_of(judge_end(sight(attempt(), parts.pop("of_slurm", COMPLETING), view=seen, **parts)))

    assert end(5.0, silent=SILENT_N2) is None
    assert end(300.0, silent=SILENT_N2) is None
    assert end(301.0, silent=SILENT_N2, of_slurm=job(state=JobState.CANCELLED)) is AttemptEnd.CANCELLED
    assert end(1000.0, silent=SILENT_N2) is AttemptEnd.NODE_SILENT
    expected = None if has_spoken else AttemptEnd.NODE_FAILED  # of a host that is DOWN nobody else need speak
    assert end(5.0, failed_by_slurm=SILENT_N2) is expected


def test_a_batch_host_that_is_lost_is_given_up_once_slurm_has_shown_the_job_as_running_since() -> None:
    def end(asked_s: float, quiet_s: float = 5.0) -> AttemptEnd | None:
        asked = Fresh(value={101: job()}, asked_at=ago(asked_s))
        return end_of(
            judge_end(sight(attempt(), view=view(launch=launch(unchanged_s=quiet_s)), jobs=asked, silent=SILENT_N2))
        )

    assert end(10.0) is None
    assert end(1.0) is AttemptEnd.NODE_SILENT
    assert end(30.0, quiet_s=13.0) is AttemptEnd.NODE_SILENT


def test_a_lost_node_has_slurm_asked_at_once_whether_somebody_cancelled_the_job() -> None:
    asked = Fresh(value={101: job()}, asked_at=ago(10))
    seen = view(launch=launch(unchanged_s=5.0), progress=progress())
    made = plan_for(world(attempt()), snapshot(view=seen, jobs=asked, ports=ports(n1=3.0, n2=0)))
    assert made.ask_slurm
    assert 1 not in attempts_in(made) or not attempt_in(made).is_over


def test_a_job_of_another_token_under_the_same_id_is_not_ours() -> None:
    other = job(state=JobState.COMPLETED, comment="sup:other:1", submit_at=ago(300))
    assert end_of(judge_end(sight(attempt(), other, view=view()))) is AttemptEnd.VANISHED


def test_accounting_is_believed_once_the_controller_has_forgotten_the_job() -> None:
    known = accounted(job(state=JobState.TIMEOUT))
    assert end_of(judge_end(sight(attempt(), view=view(), ended=known))) is AttemptEnd.TIME_LIMIT


def test_an_older_job_of_the_same_id_in_accounting_is_another_job() -> None:
    older = job(state=JobState.COMPLETED, submit_at=ago(86400))
    assert end_of(judge_end(sight(attempt(), view=view(), ended=accounted(older)))) is AttemptEnd.VANISHED


def test_accounting_without_a_submit_time_is_not_matched_to_a_job() -> None:
    unknown = job(state=JobState.COMPLETED, submit_at=None)
    assert end_of(judge_end(sight(attempt(), view=view(), ended=accounted(unknown)))) is AttemptEnd.VANISHED


# ---------------------------------------------------------------- terminated


@pytest.mark.parametrize(("unchanged_s", "end"), [(5, None), (21, AttemptEnd.CRASHED)])
def test_a_terminated_launcher_counts_once_slurm_has_had_its_time_to_say_why(
    unchanged_s: float, end: AttemptEnd | None
) -> None:
    young = attempt(submitted_at=ago(5))
    seen = sight(young, view=view(exit=exit_record(143), launch=launch(unchanged_s=unchanged_s)))
    assert end_of(judge_end(seen)) is end


def test_a_terminated_launcher_says_nothing_while_squeue_does_not_answer() -> None:
    seen = sight(view=view(exit=exit_record(143), launch=launch(unchanged_s=60)), jobs=STALE)
    assert judge_end(seen) is None


def test_a_terminated_launcher_says_nothing_while_its_job_runs() -> None:
    seen = sight(attempt(), job(), view=view(exit=exit_record(143), launch=launch(unchanged_s=60)))
    assert judge_end(seen) is None


def test_a_terminated_launcher_says_nothing_before_its_report_has_been_silent() -> None:
    seen = sight(attempt(submitted_at=ago(5)), view=view(exit=exit_record(143)))
    assert judge_end(seen) is None


# ---------------------------------------------------------------- vanished


def test_a_job_that_nobody_knows_any_more_has_vanished() -> None:
    assert end_of(judge_end(sight(attempt(), view=view()))) is AttemptEnd.VANISHED


def test_a_job_is_not_absent_in_an_answer_that_was_under_way_when_it_was_submitted() -> None:
    assert judge_end(sight(attempt(submitted_at=ago(5)), view=view())) is None


def test_a_job_does_not_vanish_while_accounting_does_not_answer() -> None:
    assert judge_end(sight(attempt(), view=view(), ended=STALE)) is None


def test_a_job_does_not_vanish_while_squeue_does_not_answer() -> None:
    """Case CO-01: a squeue that failed is no sign that a job has ended."""
    assert judge_end(sight(attempt(), view=view(), jobs=STALE)) is None


@pytest.mark.parametrize("state", [JobState.COMPLETED, JobState.FAILED, None])
def test_slurms_word_waits_for_a_run_directory_that_does_not_answer(state: JobState | None) -> None:
    """Over means fenced: what was published while nobody could look must be seen first. Nothing starts blind anyway."""
    jobs = (job(state=state),) if state else ()
    blind = {"gpt": Stale(why="the file system hangs", since_at=NOW)}
    assert judge_end(sight(attempt(), *jobs, runs=blind)) is None


# ---------------------------------------------------------------- pause


def test_while_paused_nothing_that_still_runs_is_given_up() -> None:
    assert judge_end(sight(attempt(), job(), view=view(), silent=SILENT_N2), is_paused=True) is None
    assert judge_end(sight(attempt(), job(), view=view(), failed_by_slurm=SILENT_N2), is_paused=True) is None
    hung = view(progress=progress(unchanged_s=9999))
    assert judge_end(sight(attempt(), job(), view=hung), is_paused=True) is None


def test_while_paused_an_end_that_has_happened_counts() -> None:
    ended = judge_end(sight(attempt(), job(), view=view(exit=exit_record(0))), is_paused=True)
    assert end_of(ended) is AttemptEnd.FINISHED


def test_the_default_reason_of_a_stop_is_a_sentence() -> None:
    ended = judge_end(sight(attempt(), job(), of=replace(RUN, state=RunState.STOPPING)))
    assert ended is not None
    assert ended.detail == "stopped by a person"


# ---------------------------------------------------------------- requeued


@pytest.mark.parametrize(
    "requeued",
    [job(state=JobState.PENDING, restarts=1), job(state=None, flags=frozenset({JobFlag.REQUEUED}))],
    ids=["started again", "waiting"],
)
def test_a_job_that_slurm_requeued_by_itself_is_over_so_that_two_never_train(requeued: JobRecord) -> None:
    """Case RR-01: one owner of retries."""
    ended = judge_end(sight(attempt(), requeued, view=view(), failed_by_slurm=SILENT_N2))
    assert end_of(ended) is AttemptEnd.NODE_FAILED
    assert ended is not None
    assert ended.nodes == ("n2",)


def test_a_vanished_job_waits_for_the_second_sign_of_a_silent_node() -> None:
    seen = view(exit=exit_record(77, node="n2"), launch=launch(unchanged_s=3))
    assert judge_end(sight(attempt(), view=seen)) is None
    assert judge_end(sight(attempt(), job(state=JobState.FAILED, exit_code=77), view=seen)) is None


def test_a_ranks_own_last_word_says_nothing_against_its_node() -> None:
    for code in (75, 78, 93):
        ended = judge_end(sight(view=view(exit=exit_record(code, node="n2"))))
        assert ended is not None
        assert ended.nodes == ()


def test_an_exit_record_without_a_word_still_says_its_code() -> None:
    ended = judge_end(sight(view=view(exit=exit_record(1, reason=""))))
    assert ended is not None
    assert ended.detail == "exit code 1"


def test_a_job_that_ran_and_was_requeued_with_all_its_nodes_well_is_nobodys_failure() -> None:
    """RR-05: what an operator or a preemption does costs no restart."""
    requeued = job(state=JobState.PENDING, nodes=(), flags=frozenset({JobFlag.REQUEUED}), restarts=1)
    assert end_of(judge_end(sight(attempt(), requeued, view=view()))) is AttemptEnd.PREEMPTED


STEP_TERMINATED = replace(exit_record(143), is_step_terminated=True)


def test_a_job_that_ends_upon_sigterm_to_its_step_alone_was_preempted_though_slurm_says_failed() -> None:
    failed = job(state=JobState.FAILED, exit_code=143)
    assert end_of(judge_end(sight(attempt(), failed, view=view(exit=STEP_TERMINATED)))) is AttemptEnd.PREEMPTED


@pytest.mark.parametrize("state", [JobState.CANCELLED, JobState.TIMEOUT])
def test_sigterm_to_the_step_says_nothing_where_slurm_says_why(state: JobState) -> None:
    """RR-03: the cause comes from the final state."""
    ended = judge_end(sight(attempt(), job(state=state), view=view(exit=STEP_TERMINATED)))
    assert end_of(ended) in (AttemptEnd.CANCELLED, AttemptEnd.TIME_LIMIT)


def test_sigterm_to_the_step_alone_counts_as_preemption_where_slurm_has_forgotten_the_job() -> None:
    gone = attempt(submitted_at=ago(100))
    seen = sight(gone, view=view(exit=STEP_TERMINATED, launch=launch(unchanged_s=60)))
    assert end_of(judge_end(seen)) is AttemptEnd.PREEMPTED
