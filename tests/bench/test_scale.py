"""What bench-scale makes of its numbers: a target that is missed, or that nobody measured, is told."""

from __future__ import annotations

from bench.large import MARK
from bench.scale import TARGETS, growth, judge, repeat_jobs
from slurm.commands import FIELD_SEPARATOR, SQUEUE_FIELDS, row_end
from slurm.parse import parse_squeue

WITHIN = {target.key: target.at_most for target in TARGETS}


def squeue_row(job_id: int, name: str) -> str:
    values = {
        "JobID": str(job_id),
        "State": "PENDING",
        "RestartCnt": "0",
        "exit_code": "0",
        "SubmitTime": "2026-01-01T00:00:00",
        "Name": name,
    }
    return FIELD_SEPARATOR.join(values.get(field, "") for field in SQUEUE_FIELDS) + row_end(MARK) + "\n"


def test_numbers_at_their_targets_miss_none() -> None:
    assert judge(WITHIN) == []


def test_each_number_past_its_target_is_named() -> None:
    for target in TARGETS:
        (missed,) = judge({**WITHIN, target.key: target.at_most * 1.1})
        assert missed.startswith(target.key)


def test_a_number_that_was_not_measured_is_no_success() -> None:
    assert judge({**WITHIN, "parse_cpu_s": None}) == ["parse_cpu_s was not measured"]


def test_linear_growth_is_one() -> None:
    small, linear = {"nodes": 64, "cpu_ms": 2.0}, {"nodes": 2048, "cpu_ms": 64.0}
    assert growth(small, linear) == 1.0
    assert growth(small, {"nodes": 2048, "cpu_ms": 128.0}) > 1.0


def test_repeated_rows_are_jobs_of_their_own() -> None:
    jobs = parse_squeue(repeat_jobs(squeue_row(7, "a") + squeue_row(8, "b"), 5), mark=MARK)
    assert jobs.unreadable == ()
    assert [job.job_id for job in jobs.jobs] == [1, 2, 3, 4, 5]
    assert [job.name for job in jobs.jobs] == ["a", "b", "a", "b", "a"]


def test_some_of_the_repeated_jobs_fill_the_cluster() -> None:
    jobs = parse_squeue(repeat_jobs(squeue_row(7, "a"), 1000), mark=MARK).jobs
    assert [(len(job.nodes), job.nodes[0]) for job in jobs if job.nodes] == [(100, "c0001"), (100, "c0101")]
