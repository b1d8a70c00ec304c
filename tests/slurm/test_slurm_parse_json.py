"""JSON in the shapes of eight releases: recorded where a release was at hand, else written after its description."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm import parse, parse_json
from slurm.parse_json import JsonUnusable, load_document, parse_nodes_json, parse_sacct_json, parse_squeue_json
from slurm.types import JobFlag, JobListing, JobRecord, JobState, NodeAvailability, NodeListing, NodeRecord

DATA = Path(__file__).parents[1] / "data"
RECORDED = ["slurm-22.05/same-moment", "slurm-24.11", "slurm-25.11"]
WRITTEN = ["slurm-23.02", "slurm-23.11", "slurm-24.05", "slurm-25.05", "slurm-26.05"]


def read(folder: str, name: str) -> str:
    return (DATA / folder / name).read_bytes().decode()


def squeue(folder: str) -> JobListing:
    return parse_squeue_json(load_document(read(folder, "squeue.json"), "jobs"))


def nodes(folder: str) -> NodeListing:
    return parse_nodes_json(load_document(read(folder, "nodes.json"), "nodes"))


def sacct(folder: str) -> JobListing:
    return parse_sacct_json(load_document(read(folder, "sacct.json"), "jobs"))


def by_id(listing: JobListing) -> dict[int, JobRecord]:
    return {job.job_id: job for job in listing.jobs}


def one_job(**fields: Any) -> JobRecord:
    row = {"job_id": 55, "job_state": ["RUNNING"], "nodes": "gpu01"} | fields
    (job,) = parse_squeue_json({"jobs": [row]}).jobs
    return job


def one_node(**fields: Any) -> NodeRecord:
    (node,) = parse_nodes_json({"nodes": [{"name": "gpu01", "state": ["IDLE"]} | fields]}).nodes
    return node


# ---------------------------------------------------------------- recorded: the same moment in both forms


@pytest.mark.parametrize("folder", RECORDED)
def test_json_and_text_of_one_moment_give_the_same_jobs(folder: str) -> None:
    as_text = by_id(parse.parse_squeue(read(folder, "squeue.txt"), mark="MARK"))
    as_json = by_id(squeue(folder))
    as_text.pop(16)  # the second component of a heterogeneous job, which JSON shows to be one
    assert as_json == as_text


@pytest.mark.parametrize("folder", RECORDED)
def test_json_and_text_of_one_moment_give_the_same_nodes(folder: str) -> None:
    as_text = parse.parse_nodes(read(folder, "nodes.txt")).nodes
    as_json = nodes(folder).nodes
    # scontrol leaves out the port that is the cluster's own.
    assert [replace(node, port=None) for node in as_json] == [replace(node, port=None) for node in as_text]
    assert all(node.port for node in as_json)


@pytest.mark.parametrize("folder", ["slurm-24.11", "slurm-25.11"])
def test_json_and_text_of_one_moment_give_the_same_accounting_but_for_statuses_over_128(folder: str) -> None:
    as_text, as_json = parse.parse_sacct(read(folder, "sacct.txt"), mark="MARK").jobs, sacct(folder).jobs
    assert len(as_json) == len(as_text)
    blurred = {job.job_id: job.exit_code for job in as_text if job.state is JobState.FAILED}
    for shown, whole in zip(as_text, as_json, strict=True):
        assert replace(whole, exit_code=0, restarts=0) == replace(shown, exit_code=0)
    exact = {job.job_id: job.exit_code for job in as_json if job.state is JobState.FAILED}
    assert exact == {2: 1, 3: 137, 4: 128, 5: 0}
    assert {job_id: code for job_id, code in blurred.items() if code != exact[job_id]} in ({3: 9}, {})


@pytest.mark.parametrize(
    ("folder", "is_complete"),
    [
        ("slurm-22.05/same-moment", False),  # no submit lines, and every exit status 0
        ("slurm-23.02", False),  # every exit status 0
        ("slurm-23.11", True),
        ("slurm-24.11", True),
        ("slurm-26.05", True),
    ],
)
def test_accounting_that_leaves_out_what_the_text_has_is_told_apart(folder: str, *, is_complete: bool) -> None:
    document = load_document(read(folder, "sacct.json"), "jobs")
    assert parse_json.is_accounting_complete(document) is is_complete


def test_accounting_without_submit_lines_is_not_complete_since_tokens_stand_there() -> None:
    row = {"exit_code": {"return_code": {"set": True, "number": 0}}}
    assert not parse_json.is_accounting_complete({"jobs": [row]})
    assert parse_json.is_accounting_complete({"jobs": [row | {"submit_line": "sbatch a.sh"}]})


def test_an_exit_status_that_a_release_does_not_write_is_unknown_and_not_0() -> None:
    failed = [job for job in sacct("slurm-22.05/same-moment").jobs if job.state is JobState.FAILED]
    assert [(job.job_id, job.exit_code, job.exit_signal) for job in failed] == [
        (2, None, 0),
        (3, None, 0),
        (4, None, 0),
        (5, 0, 9),
    ]


@pytest.mark.parametrize("folder", ["slurm-24.11", "slurm-25.11"])
def test_the_text_of_later_releases_is_read_without_loss(folder: str) -> None:
    jobs = by_id(parse.parse_squeue(read(folder, "squeue.txt"), mark="MARK"))
    assert len(jobs) >= 20
    assert (jobs[3].exit_code, jobs[4].exit_code, jobs[5].exit_signal) == (137, 128, 9)
    facts = parse.parse_cluster(read(folder, "config.txt"), read(folder, "partitions.txt"))
    assert facts.version.startswith(folder.removeprefix("slurm-"))  # type: ignore[union-attr]


# ---------------------------------------------------------------- written after the description


@pytest.mark.parametrize("folder", WRITTEN)
def test_jobs_are_read_alike_in_every_shape(folder: str) -> None:
    jobs = by_id(squeue(folder))
    ended = {n: (job.state, job.exit_code, job.exit_signal) for n, job in jobs.items() if job.state and n < 4}
    assert ended == {1: (JobState.COMPLETED, 0, 0), 2: (JobState.FAILED, 137, 0), 3: (JobState.FAILED, 0, 9)}
    assert {n for n, job in jobs.items() if job.is_live} == {4, 5, 6, 7}
    assert jobs[4].nodes == ("gpu01", "gpu02")
    assert (jobs[5].state, jobs[5].flags) == (JobState.RUNNING, frozenset({JobFlag.CONFIGURING}))
    assert (jobs[6].reason, jobs[6].nodes) == ("ReqNodeNotAvail, UnavailableNodes:gpu[03-04]", ())
    assert (jobs[7].state, jobs[7].flags, jobs[7].restarts) == (JobState.PENDING, frozenset({JobFlag.REQUEUED}), 1)
    assert (jobs[8].is_ended, jobs[8].is_completing) == (True, True)
    assert jobs[4].submit_at == datetime(2026, 3, 2, 8, 0, tzinfo=UTC)
    assert (jobs[4].comment, jobs[4].user, jobs[4].end_at) == ("sup:run:4", "ada", None)


@pytest.mark.parametrize("folder", WRITTEN)
def test_nodes_are_read_alike_in_every_shape(folder: str) -> None:
    seen = {node.name: node for node in nodes(folder).nodes}
    assert {name: node.availability.value for name, node in seen.items() if name != "gpu04"} == {
        "gpu01": "usable",
        "gpu02": "drained",
        "gpu03": "down",
        "gpu05": "draining",
    }
    assert (seen["gpu02"].reason, seen["gpu02"].reason_user) == ("sup#41 xid48: memory", "root")
    assert seen["gpu02"].reason_at == "2026-03-02T08:00:10"
    assert seen["gpu05"].reason == "line one line two"
    assert (seen["gpu01"].partitions, seen["gpu01"].gpus, seen["gpu01"].memory_mb) == (("main", "long"), 8, 2048000)


@pytest.mark.parametrize("folder", WRITTEN)
def test_accounting_is_read_alike_in_every_shape(folder: str) -> None:
    jobs = sacct(folder).jobs
    assert [job.state for job in jobs] == ["COMPLETED", "FAILED", "NODE_FAIL", "RUNNING"]
    assert jobs[1].exit_code == (None if folder == "slurm-23.02" else 137)
    assert [job.comment for job in jobs] == ["sup:run:1", "sup:run:2", "sup:run:9", "sup:run:9"]
    assert jobs[3].end_at is None
    assert jobs[2].submit_at != jobs[3].submit_at


@pytest.mark.parametrize("folder", [*RECORDED, *WRITTEN])
def test_every_document_names_its_release(folder: str) -> None:
    release = parse_json.read_release(load_document(read(folder, "squeue.json"), "jobs"))
    assert release == tuple(map(int, Path(folder).parts[0].removeprefix("slurm-").split(".")))


# ---------------------------------------------------------------- odd values


@pytest.mark.parametrize("start", [1772438410, {"set": True, "infinite": False, "number": 1772438410}, "1772438410"])
def test_a_number_is_read_in_each_of_its_shapes(start: object) -> None:
    assert one_job(start_time=start).start_at == datetime(2026, 3, 2, 8, 0, 10, tzinfo=UTC)


@pytest.mark.parametrize(
    "start",
    [None, {}, 0, [], "", {"set": False, "infinite": False, "number": 5}, {"set": True, "infinite": True, "number": 5}],
)
def test_a_number_that_is_not_set_is_not_known(start: object) -> None:
    assert one_job(start_time=start).start_at is None


def test_components_of_a_heterogeneous_job_stand_under_its_id() -> None:
    rows = [
        {"job_id": 21, "het_job_id": 21, "job_state": ["RUNNING"], "nodes": "gpu01"},
        {"job_id": 22, "het_job_id": 21, "job_state": ["PENDING"], "nodes": ""},
    ]
    (job,) = parse_squeue_json({"jobs": rows}).jobs
    assert (job.job_id, job.state) == (21, JobState.PENDING)


@pytest.mark.parametrize("row", [None, 5, "x", [], {}, {"job_id": 0}, {"job_id": True}, {"job_id": 2**70}])
def test_a_row_that_is_no_job_is_reported_and_the_others_are_kept(row: object) -> None:
    listing = parse_squeue_json({"jobs": [row, {"job_id": 2, "job_state": ["RUNNING"]}]})
    assert [job.job_id for job in listing.jobs] == [2]
    assert len(listing.unreadable) == 1


def test_a_time_that_is_none_makes_its_row_unreadable() -> None:
    listing = parse_squeue_json({"jobs": [{"job_id": 2, "job_state": ["RUNNING"], "submit_time": 10**17}]})
    assert (listing.jobs, len(listing.unreadable)) == ((), 1)


def test_the_report_of_a_row_holds_its_comment_so_that_a_token_is_found_in_it() -> None:
    listing = parse_squeue_json({"jobs": [{"job_id": -1, "comment": "sup:run:7"}]})
    assert "sup:run:7" in listing.unreadable[0].text


def test_a_node_that_is_listed_twice_counts_once_and_is_reported() -> None:
    rows = [{"name": "n1", "state": ["IDLE"]}, {"name": "n1", "state": ["DOWN"]}]
    listing = parse_nodes_json({"nodes": rows})
    assert [node.availability for node in listing.nodes] == [NodeAvailability.USABLE]
    assert "twice" in listing.unreadable[0].why


def test_a_node_without_a_state_is_reported_and_never_usable() -> None:
    listing = parse_nodes_json({"nodes": [{"name": "n1"}, {"name": "n2", "state": []}, {"state": ["IDLE"]}]})
    assert (listing.nodes, len(listing.unreadable)) == ((), 3)


# ---------------------------------------------------------------- documents


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Notice: maintenance on Friday",
        "{",
        '{"jobs":',
        "[]",
        "null",
        '{"nodes":[]}',
        '{"jobs":{}}',
        '{"jobs":null}',
        '{"jobs":[],"errors":[{"error":"Unable to contact slurm controller"}]}',
        '{"jobs":' + "[" * 100_000,
        '{"jobs":[' + "9" * 10_000 + "]}",
    ],
)
def test_what_is_no_document_of_the_kind_is_an_error_and_never_an_empty_list(text: str) -> None:
    with pytest.raises(JsonUnusable):
        load_document(text, "jobs")


# ---------------------------------------------------------------- garbage

_KEY_NAMES = """job_id job_state state current state_flags nodes job_resources list exit_code return_code status
    signal id signal_id set infinite number name comment job time submission start end user partitions reason
    reason_changed_at boot_time het_job_id submit_time start_time end_time restart_cnt submit_line step_id"""
_KEYS = st.sampled_from(_KEY_NAMES.split())
_LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=10**17, max_value=10**40),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["RUNNING", "FAILED", "IDLE", "gpu[01-02]", "n[1", "2026-03-02T08:00:00", "55.0", "21+0.batch"]),
)
_VALUES = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(_KEYS, inner, max_size=8)),
    max_leaves=30,
)
_ROWS = st.lists(st.one_of(_VALUES, st.dictionaries(_KEYS, _VALUES, max_size=12)), max_size=5)


@settings(max_examples=300, deadline=None)
@given(rows=_ROWS)
def test_no_json_makes_a_parser_raise_and_no_row_is_lost_unsaid(rows: list[Any]) -> None:
    accounted = parse_sacct_json({"jobs": rows})
    assert len(accounted.jobs) + len(accounted.unreadable) == len(rows)
    seen = parse_nodes_json({"nodes": rows})
    assert len(seen.nodes) + len(seen.unreadable) == len(rows)
    listed = parse_squeue_json({"jobs": rows})
    assert len(listed.jobs) + len(listed.unreadable) <= len(rows)
    assert isinstance(parse_json.is_accounting_complete({"jobs": rows}), bool)


@given(value=_VALUES)
def test_no_value_makes_a_reader_raise(value: Any) -> None:
    parse_json.read_exit(value)
    parse_json.read_step_id(value)
    parse_json.read_release({"meta": value})
    parse_json.read_release({"meta": {"slurm": {"version": value}}})


@given(text=st.one_of(st.text(), _VALUES.map(json.dumps), _VALUES.map(lambda v: json.dumps({"jobs": v}))))
def test_any_text_is_a_document_or_unusable(text: str) -> None:
    try:
        document = load_document(text, "jobs")
    except JsonUnusable:
        return
    assert isinstance(document["jobs"], list)


@pytest.mark.parametrize("key", ["job_id", "name", "job_state", "nodes", "exit_code", "submit_time"])
def test_a_value_that_is_nested_deeply_does_not_hurt(key: str) -> None:
    deep: Any = 1
    for _ in range(20_000):
        deep = [deep] if key == "job_state" else {"id": deep}
    row = {"job_id": 1, "name": "run", "job_state": ["FAILED"]}
    listing = parse_squeue_json({"jobs": [row | {key: deep}]})
    assert len(listing.jobs) + len(listing.unreadable) == 1
    parse_json.read_step_id(deep)
