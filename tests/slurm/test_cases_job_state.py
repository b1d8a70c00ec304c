"""Job states as bug reports brought them. What the service makes of them is in tests/core/test_slurm_cases.py."""

from __future__ import annotations

from typing import Any

import pytest

from slurm.commands import (
    FIELD_SEPARATOR,
    SACCT_FIELDS,
    SQUEUE_FIELDS,
    row_end,
    sacct_argv,
    sacct_delimiter,
    squeue_argv,
)
from slurm.parse import parse_sacct, parse_squeue
from slurm.parse_json import parse_squeue_json
from slurm.pending import PendingKind, PendingReason, classify_pending, is_launch_failure
from slurm.states import find_unknown_words, parse_job_state
from slurm.types import JobFlag, JobListing, JobRecord, JobState
from slurm.values import StepId, parse_job_id, parse_step_id
from tests.core.builders import NOW

MARK = "MARK"


def squeue(*rows: dict[str, str]) -> JobListing:
    wanted = [dict.fromkeys(SQUEUE_FIELDS, "") | row for row in rows]
    return parse_squeue("".join(FIELD_SEPARATOR.join(r.values()) + row_end(MARK) + "\n" for r in wanted), mark=MARK)


def sacct(*rows: dict[str, str]) -> JobListing:
    wanted = [dict.fromkeys(SACCT_FIELDS, "") | row for row in rows]
    end = sacct_delimiter(MARK)
    return parse_sacct("".join("".join(v + end for v in r.values()) + "\n" for r in wanted), mark=MARK)


def one(listing: JobListing) -> JobRecord:
    (job,) = listing.jobs
    return job


def test_cut_words_are_not_asked_for_and_are_read_all_the_same() -> None:
    """JS-02."""
    assert "-p" in sacct_argv(NOW, MARK)  # parsable: full width, unlike the tables for people
    assert all(field.startswith(f"{name}:") for name, field in zip(SQUEUE_FIELDS, _fields_asked_for(), strict=True))
    assert parse_job_state("CANCELLED+") == (JobState.CANCELLED, frozenset())
    assert parse_step_id("6564055.bat+") == StepId(job_id=6564055, name="batch")


def _fields_asked_for() -> list[str]:
    return squeue_argv(MARK)[-1].split(",")


@pytest.mark.parametrize("code", ["0:0", "1:0"])
def test_a_node_failure_is_told_by_its_state_whatever_the_exit_code(code: str) -> None:
    """JS-05: 0:0 before 24.11, 1:0 from there on."""
    assert one(sacct({"JobIDRaw": "901", "State": "NODE_FAIL", "ExitCode": code})).state is JobState.NODE_FAIL


def test_a_completing_job_is_over_but_not_what_it_was() -> None:
    """JS-07: the word hides the base state; how it ended is asked for again."""
    job = one(squeue({"JobID": "55", "State": "CG", "NodeList": "gpu[01-04]"}))
    assert (job.state, job.is_completing, len(job.nodes)) == (None, True, 4)


@pytest.mark.parametrize("reason", ["launch failed requeued held", "launch_failed_requeued_held"])
def test_a_launch_failure_on_hold_is_known_in_both_spellings(reason: str) -> None:
    """JS-08."""
    job = one(squeue({"JobID": "80634", "State": "PENDING", "Reason": reason, "RestartCnt": "1"}))
    assert (job.is_pending, job.restarts, is_launch_failure(job.reason)) == (True, 1, True)
    assert classify_pending(job.reason).kind is PendingKind.HELD


@pytest.mark.parametrize(
    ("reason", "kind", "nodes"),
    [
        ("DependencyNeverSatisfied", PendingKind.BLOCKED, ()),
        ("AssocMaxWallDurationPerJobLimit", PendingKind.BLOCKED, ()),
        ("(ReqNodeNotAvail, UnavailableNodes:gpu[03-04])", PendingKind.NODES, ("gpu03", "gpu04")),
        ("Priority", PendingKind.WAITS, ()),
        ("QOSMaxJobsPerUserLimit", PendingKind.WAITS, ()),
    ],
)
def test_reasons_that_never_clear_are_told_from_those_that_do(
    reason: str, kind: PendingKind, nodes: tuple[str, ...]
) -> None:
    """JS-09."""
    job = one(squeue({"JobID": "1", "State": "PENDING", "Reason": reason}))
    assert classify_pending(job.reason) == PendingReason(kind=kind, nodes=nodes)


@pytest.mark.parametrize("start", ["None", "Unknown"])
def test_a_job_cancelled_before_it_started_has_no_start_and_no_nodes(start: str) -> None:
    """JS-10."""
    job = one(
        sacct(
            {
                "JobIDRaw": "31178",
                "State": "CANCELLED by 1001",
                "Start": start,
                "End": "2026-03-02T10:37:04",
                "NodeList": "None assigned",
            }
        )
    )
    assert (job.state, job.start_at, job.nodes, job.is_ended) == (JobState.CANCELLED, None, (), True)


@pytest.mark.parametrize(
    ("words", "state", "flags", "is_ended"),
    [
        (["RUNNING"], JobState.RUNNING, set(), False),
        (["RUNNING", "COMPLETING"], JobState.RUNNING, {JobFlag.COMPLETING}, True),
        (["PENDING", "REQUEUED"], JobState.PENDING, {JobFlag.REQUEUED}, False),
        (["PENDING", "LAUNCH_FAILED"], JobState.PENDING, {JobFlag.LAUNCH_FAILED}, False),
        ([], JobState.UNRECOGNIZED, set(), False),
        (["SOMETHING_NEW"], JobState.UNRECOGNIZED, set(), False),
    ],
)
def test_a_list_of_words_is_a_base_state_and_flags(
    words: list[str], state: JobState, flags: set[JobFlag], *, is_ended: bool
) -> None:
    """JS-11. A job that completes is over for us: its processes are gone or going, and its nodes not free yet."""
    job = one(parse_squeue_json({"jobs": [{"job_id": 7, "job_state": words}]}))
    assert (job.state, job.flags, job.is_ended) == (state, frozenset(flags), is_ended)


def test_words_that_are_not_known_are_named_for_the_log() -> None:
    """JS-11."""
    rows: list[dict[str, Any]] = [{"job_id": 5, "job_state": []}, {"job_id": 6, "job_state": ["SOMETHING_NEW"]}]
    jobs = parse_squeue_json({"jobs": [*rows, {"job_id": 7, "job_state": ["RUNNING"]}]}).jobs
    assert find_unknown_words(jobs, []) == {"job state without a word", "job state SOMETHING_NEW"}


@pytest.mark.parametrize(
    ("states", "whole"),
    [
        (("RUNNING", "PENDING"), JobState.PENDING),
        (("RUNNING", "RUNNING"), JobState.RUNNING),
        (("RUNNING", "FAILED"), JobState.FAILED),
        (("COMPLETED", "NODE_FAIL"), JobState.NODE_FAIL),
        (("COMPLETED", "RUNNING"), JobState.RUNNING),
        (("COMPLETED", "COMPLETED"), JobState.COMPLETED),
    ],
)
def test_components_of_a_heterogeneous_job_are_one_job(states: tuple[str, str], whole: JobState) -> None:
    """JS-12."""
    rows = [
        {"JobID": f"21+{i}", "State": state, "NodeList": "" if state == "PENDING" else f"gpu0{i}"}
        for i, state in enumerate(states)
    ]
    job = one(squeue(*rows))
    assert (job.job_id, job.state) == (21, whole)


def test_a_component_is_accepted_where_a_job_id_is_read() -> None:
    """JS-12."""
    assert parse_job_id("21+0") == 21
    assert parse_step_id("21+0.0") == StepId(job_id=21, name="0", component=0)
    assert one(sacct({"JobIDRaw": "21+0", "State": "RUNNING", "NodeList": "gpu01"})).job_id == 21


def test_a_component_has_the_nodes_of_all() -> None:
    """JS-12."""
    rows = [{"JobID": f"21+{i}", "State": "RUNNING", "NodeList": f"gpu0{i}"} for i in (1, 2)]
    assert one(squeue(*rows)).nodes == ("gpu01", "gpu02")


@pytest.mark.parametrize("order", [1, -1])
def test_a_revoked_sibling_is_neither_a_failure_nor_an_end(order: int) -> None:
    """JS-15."""
    rows = [{"JobID": "88", "State": "REVOKED"}, {"JobID": "88", "State": "RUNNING", "NodeList": "west1"}][::order]
    job = one(squeue(*rows))
    assert (job.state, job.is_live, job.nodes) == (JobState.RUNNING, True, ("west1",))


def test_a_revoked_job_alone_has_not_ended() -> None:
    """JS-15: its sibling runs on another cluster."""
    assert one(squeue({"JobID": "88", "State": "REVOKED"})).is_live


def test_earlier_runs_of_a_requeued_job_are_asked_for_and_kept_apart() -> None:
    """JS-16."""
    assert "-D" in sacct_argv(NOW, MARK)
    runs = [("NODE_FAIL", "08"), ("PREEMPTED", "10"), ("RUNNING", "12")]
    rows = [{"JobIDRaw": "55", "State": state, "Submit": f"2026-03-02T{hour}:00:00"} for state, hour in runs]
    jobs = sacct(*rows).jobs
    assert [(job.job_id, job.raw_state, job.is_ended) for job in jobs] == [
        (55, "NODE_FAIL", True),
        (55, "PREEMPTED", True),
        (55, "RUNNING", False),
    ]
    assert len({job.submit_at for job in jobs}) == 3
