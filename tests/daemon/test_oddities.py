"""What Slurm says that the service can't read, or does not know, is in the log once."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from slurm.types import JobRecord, NodeBase, NodeRecord
from supervisor.accounts import user_name
from supervisor.model import Fresh
from tests.daemon.test_daemon import Bench
from tests.sim.standins import SimAnswers


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    one = Bench(tmp_path / "ledger.db")
    one.cycles()
    yield one
    one.close()


def look(bench: Bench, *flags: str, unreadable: tuple[str, ...] = ()) -> list[str]:
    """One turn after an answer with one node that has these flags; the reasons that the log then holds."""
    answers = bench.daemon.observer.slurm
    assert isinstance(answers, SimAnswers)
    node = NodeRecord(name="n1", base=NodeBase.IDLE, flags=frozenset(flags))
    nodes: Fresh[Mapping[str, NodeRecord]] = Fresh(value={"n1": node}, asked_at=bench.clock.now())
    answers.answers = replace(answers.answers, nodes=nodes, unreadable=unreadable)
    with capture_logs() as lines:
        bench.daemon.cycle()
    return [line["reason"] for line in lines if line["event"] in ("slurm.word_unknown", "source.changed")]


def test_a_flag_that_is_not_known_is_logged_once(bench: Bench) -> None:
    """NS-10."""
    (line,) = look(bench, "SOMETHING_NEW")
    assert "SOMETHING_NEW" in line
    assert look(bench, "SOMETHING_NEW", "DRAIN") == []
    assert len(look(bench, "SOMETHING_ELSE")) == 1


def test_flags_that_are_known_are_not_worth_a_line(bench: Bench) -> None:
    assert look(bench, "DRAIN", "PLANNED", "BLOCKED") == []


def test_a_job_with_the_token_of_a_run_that_the_ledger_does_not_know_is_logged_once(bench: Bench) -> None:
    answers = bench.daemon.observer.slurm
    assert isinstance(answers, SimAnswers)
    bench.add_run()
    bench.cycles(3)
    assert isinstance(answers.answers.jobs, Fresh)
    (ours,) = answers.answers.jobs.value.values()
    lost = replace(ours, job_id=99, comment="sup:lost:1:aa", user=user_name(os.geteuid()))
    plain = replace(ours, job_id=98, comment="")
    told = []
    for _ in range(2):
        jobs: Fresh[Mapping[int, JobRecord]] = Fresh(
            value={ours.job_id: ours, 99: lost, 98: plain}, asked_at=bench.clock.now()
        )
        answers.answers = replace(answers.answers, jobs=jobs)
        with capture_logs() as lines:
            bench.daemon.cycle()
        told += [line["job_id"] for line in lines if line["event"] == "job.unknown"]
    assert told == [99]


def test_rows_that_cant_be_read_are_logged_when_they_change(bench: Bench) -> None:
    """TX-01: dropped, and reported."""
    assert look(bench, unreadable=("squeue: 3 fields, 13 asked for",)) == ["squeue: 3 fields, 13 asked for"]
    assert look(bench, unreadable=("squeue: 3 fields, 13 asked for",)) == []
