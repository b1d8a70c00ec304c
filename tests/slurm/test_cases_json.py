"""JSON of Slurm's tools as bug reports brought it."""

from __future__ import annotations

from typing import Any

import pytest

from slurm.parse_json import (
    Exit,
    load_document,
    parse_nodes_json,
    parse_sacct_json,
    parse_squeue_json,
    read_exit,
    read_release,
    read_step_id,
)
from slurm.types import JobRecord
from slurm.values import StepId


def job(**fields: Any) -> JobRecord:
    (one,) = parse_squeue_json({"jobs": [{"job_id": 55, "job_state": ["RUNNING"]} | fields]}).jobs
    return one


SIGNALED = {
    "status": ["SIGNALED"],
    "return_code": {"set": True, "infinite": False, "number": 0},
    "signal": {"id": {"set": True, "infinite": False, "number": 9}, "name": "KILL"},
}


@pytest.mark.parametrize(
    ("value", "code", "signal"),
    [
        (256, 1, 0),
        ({"set": True, "infinite": False, "number": 256}, 1, 0),
        ({"status": "ERROR", "return_code": 1}, 1, 0),
        (SIGNALED, 0, 9),
        ({"status": ["SIGNALED"], "return_code": {"set": False, "number": 0}, "signal": SIGNALED["signal"]}, 0, 9),
        ({"status": "SIGNALED", "return_code": None, "signal": {"signal_id": 9, "name": "Killed"}}, 0, 9),
        ({"status": "SIGNALED", "return_code": -127, "signal": {"signal_id": 9}}, 0, 9),
        ({"status": ["ERROR"], "return_code": {"set": True, "number": 137}, "signal": {"id": {"set": False}}}, 137, 0),
        ({"status": ["ERROR"], "return_code": 3, "signal": {}}, 3, 0),
        ({"status": ["ERROR"], "return_code": 3, "signal": None}, 3, 0),
        ({}, None, None),
        (None, None, None),
        ("", None, None),
        (2**40, None, None),
    ],
)
def test_exit_codes_are_read_in_each_shape(value: object, code: int | None, signal: int | None) -> None:
    """JX-04."""
    assert read_exit(value).pair == (code, signal)


def test_a_status_word_that_is_not_known_is_kept() -> None:
    """JX-04."""
    assert read_exit({"status": ["NEW_WORD"], "return_code": 3}) == Exit(code=3, signal=0, word="NEW_WORD")


@pytest.mark.parametrize(
    "fields",
    [
        {"nodes": "gpu[01-02]"},
        {
            "job_resources": {
                "nodes": {"list": "gpu[01-02]", "allocation": [{"name": "gpu01"}, {"name": "gpu02"}]},
            }
        },
        {"job_resources": {"nodes": "gpu[01-02]"}},
        {"nodes": "", "job_resources": {"nodes": {"list": "gpu[01-02]"}}},
        {"nodes": None, "job_resources": {"nodes": "gpu[01-02]", "allocated_nodes": []}},
    ],
)
def test_the_nodes_of_a_job_are_found_in_each_place(fields: dict[str, Any]) -> None:
    """JX-05."""
    assert job(**fields).nodes == ("gpu01", "gpu02")


@pytest.mark.parametrize(
    "fields",
    [
        {"job_resources": None, "nodes": ""},
        {"job_resources": {}, "nodes": None},
        {"job_resources": {"nodes": None}},
        {"job_resources": {"nodes": {}}},
        {"job_resources": []},
        {},
    ],
)
def test_null_at_any_level_means_no_nodes(fields: dict[str, Any]) -> None:
    """JX-05."""
    assert job(job_state=["PENDING"], **fields).nodes == ()
    assert job(job_state=["RUNNING"], **fields).nodes == ()


@pytest.mark.parametrize("empty", [{}, None, "", [], 0])
def test_empty_values_of_each_type_are_empty(empty: object) -> None:
    """JX-06."""
    row = {"name": "n1", "state": "idle", "state_flags": empty, "reason": "x", "reason_changed_at": empty}
    (node,) = parse_nodes_json({"nodes": [row | {"partitions": empty, "gres": empty, "boot_time": empty}]}).nodes
    assert (node.flags, node.reason_at, node.partitions, node.gpus, node.boot_at) == (frozenset(), "", (), 0, "")


def test_a_flag_field_that_is_a_string_yields_words_and_not_characters() -> None:
    """JX-06."""
    (node,) = parse_nodes_json({"nodes": [{"name": "n1", "state": "idle", "state_flags": "DRAIN,PLANNED"}]}).nodes
    assert node.flags == {"DRAIN", "PLANNED"}


def test_being_listed_is_not_being_alive() -> None:
    """JX-07: 22.05's squeue --json lists all that the controller remembers."""
    rows = [{"job_id": 1, "job_state": ["COMPLETED"]}, {"job_id": 2, "job_state": ["RUNNING"]}]
    assert {job.job_id for job in parse_squeue_json({"jobs": rows}).jobs if job.is_live} == {2}


@pytest.mark.parametrize(
    "value",
    [
        {"id": {"job_id": 55, "step_id": "0"}},
        {"id": "55.0"},
        {"job_id": 55, "step_id": "0"},
        {"job_id": 55, "step_id": {"set": True, "infinite": False, "number": 0}},
        "55.0",
    ],
)
def test_a_step_is_read_in_each_shape(value: object) -> None:
    """JX-09."""
    assert read_step_id(value) == StepId(job_id=55, name="0")


@pytest.mark.parametrize("value", [None, {}, {"id": {}}, {"id": None}, {"job_id": 55}, 5, "55"])
def test_what_is_no_step_is_none(value: object) -> None:
    """JX-09."""
    assert read_step_id(value) is None


def test_a_field_that_is_missing_costs_no_job() -> None:
    """JX-09."""
    row: dict[str, Any] = {"job_id": 55, "state": {"current": ["COMPLETED"]}}
    (one,) = parse_sacct_json({"jobs": [row]}).jobs
    assert (one.job_id, one.is_ended, one.nodes, one.start_at, one.exit_code, one.comment) == (
        55,
        True,
        (),
        None,
        None,
        "",
    )


@pytest.mark.parametrize(
    "version", [{"major": "27", "micro": "0", "minor": "05"}, {"major": 27, "micro": 0, "minor": 5}]
)
def test_the_release_is_read_from_words_or_numbers(version: dict[str, Any]) -> None:
    """JX-10."""
    for key in ("slurm", "Slurm"):
        assert read_release({"meta": {"plugin": {}, key: {"version": version}}}) == (27, 5)


@pytest.mark.parametrize("meta", [None, {}, {"slurm": None}, {"slurm": {"version": {}}}, {"Slurm": {"version": "x"}}])
def test_a_document_that_names_no_release_is_read_all_the_same(meta: object) -> None:
    """JX-10."""
    assert read_release({"meta": meta}) is None
    assert load_document('{"jobs":[]}', "jobs") == {"jobs": []}


def test_json_behind_a_notice_is_found() -> None:
    """JX-11."""
    text = 'Notice: maintenance on Friday\n{"jobs":[{"job_id":7,"job_state":["RUNNING"]}]}\n'
    assert [job.job_id for job in parse_squeue_json(load_document(text, "jobs")).jobs] == [7]
