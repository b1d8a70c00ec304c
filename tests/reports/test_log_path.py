"""Where `supervisor status` says that the newest attempt's log is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from supervisor.model import EPOCH, Attempt, NodesSpec, Run, RunSpec, ScriptSpec
from supervisor.reports.status import find_log_of, judge_run

RUN = Run(spec=RunSpec(name="a", command=("t.py",), root=Path("/shared"), nodes=NodesSpec(min=1, max=1)))
SCRIPT = ScriptSpec(path="t.sh", digest="", job_name="a", output="/home/ann/logs/%x-%j.out")
ATTEMPT = Attempt(run="a", number=2, token="t", nodes_wanted=1, planned_at=EPOCH)


def log_of(run: Run, *attempts: Attempt) -> str | None:
    return find_log_of(judge_run(run, attempts, (), (), EPOCH))


def test_the_log_of_a_script_is_where_its_output_goes_once_it_has_a_job() -> None:
    run = replace(RUN, script=SCRIPT)
    assert log_of(run, ATTEMPT) is None
    assert log_of(run, replace(ATTEMPT, job_id=12)) == "/home/ann/logs/a-12.out"


def test_the_log_of_a_run_file_lies_with_its_attempt() -> None:
    assert log_of(RUN) is None
    assert log_of(RUN, ATTEMPT) == "/shared/a/attempts/2/job.log"
