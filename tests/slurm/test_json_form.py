"""A client that asks for JSON, over scripted tools: what it asks, and when it goes back to text."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from slurm.client import CliClient
from slurm.commands import FIELD_SEPARATOR, SACCT_FIELDS, SQUEUE_FIELDS
from slurm.errors import SlurmError, SlurmRefused, SlurmUnavailable
from slurm.run_tool import Completed

DATA = Path(__file__).parents[1] / "data"
SINCE = datetime(2026, 3, 2, 7, 0, tzinfo=UTC)
NO_OPTION = Completed(returncode=1, stderr="scontrol: unrecognized option '--json'\nTry \"scontrol --help\"\n")
NO_PLUGIN = Completed(returncode=1, stderr="squeue: error: Unable to find plugin: data_parser\n")
DOWN = Completed(returncode=1, stderr="slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n")
NO_ACCOUNTING = Completed(returncode=1, stderr="Slurm accounting storage is disabled\n")
Answer = Completed | Callable[[tuple[str, ...]], Completed]


class Tools:
    """Answers by tool, with ` json` behind its name where JSON was asked for."""

    def __init__(self, **answers: Answer) -> None:
        self.answers: dict[str, Answer] = {"squeue": squeue_text, "scontrol": nodes_text, "sacct": sacct_text}
        self.answers |= {name.replace("_", " "): answer for name, answer in answers.items()}
        self.asked: list[str] = []

    def __call__(self, argv: tuple[str, ...], timeout_s: float, env: Mapping[str, str]) -> Completed:
        name = argv[0] + (" json" if "--json" in argv else "")
        self.asked.append(name)
        answer = self.answers.get(name, NO_PLUGIN)
        return answer(argv) if callable(answer) else answer


def squeue_text(argv: tuple[str, ...]) -> Completed:
    mark = argv[-1].rpartition(FIELD_SEPARATOR)[2]
    row = dict.fromkeys(SQUEUE_FIELDS, "") | {"JobID": "1", "State": "RUNNING", "Name": "by text"}
    return Completed(returncode=0, stdout=FIELD_SEPARATOR.join(row.values()) + FIELD_SEPARATOR + mark + "\n")


def sacct_text(argv: tuple[str, ...]) -> Completed:
    delimiter = next(word for word in argv if word.startswith("--delimiter=")).partition("=")[2]
    row = dict.fromkeys(SACCT_FIELDS, "") | {"JobIDRaw": "1", "State": "COMPLETED", "JobName": "by text"}
    return Completed(returncode=0, stdout="".join(value + delimiter for value in row.values()) + "\n")


def nodes_text(_argv: tuple[str, ...]) -> Completed:
    return Completed(returncode=0, stdout="NodeName=bytext State=IDLE\n")


def said(document: object) -> Completed:
    return Completed(returncode=0, stdout=json.dumps(document))


def recorded(folder: str, name: str) -> Completed:
    return Completed(returncode=0, stdout=(DATA / folder / name).read_text())


class Asked:
    """A client in JSON form, what it asked, and what it had to say."""

    def __init__(self, **answers: Answer) -> None:
        self.tools, self.notices = Tools(**answers), []  # type: ignore[var-annotated]
        self.client = CliClient(run=self.tools, parent={"PATH": "/usr/bin"}, form="json", on_notice=self.notices.append)

    def job_names(self) -> list[str]:
        return [job.name for job in self.client.fetch_jobs().jobs]


def job(**fields: Any) -> dict[str, Any]:
    return {"job_id": 7, "job_state": ["RUNNING"], "name": "by json"} | fields


def test_text_is_what_is_asked_for_unless_told_otherwise() -> None:
    tools = Tools()
    CliClient(run=tools, parent={}).fetch_jobs()
    assert tools.asked == ["squeue"]


def test_jobs_nodes_and_accounting_are_asked_for_as_json_one_command_each() -> None:
    asked = Asked(
        squeue_json=recorded("slurm-24.11", "squeue.json"),
        scontrol_json=recorded("slurm-24.11", "nodes.json"),
        sacct_json=recorded("slurm-24.11", "sacct.json"),
    )
    jobs, nodes = asked.client.fetch_jobs().jobs, asked.client.fetch_nodes().nodes
    ended = asked.client.fetch_ended_jobs(since=SINCE).jobs
    assert (len(jobs), len(nodes), len(ended)) == (20, 4, 15)
    assert asked.tools.asked == ["squeue json", "scontrol json", "sacct json"]
    assert asked.notices == []


def test_nodes_of_22_05_come_from_sinfo_which_is_remembered() -> None:
    asked = Asked(scontrol_json=NO_OPTION, sinfo_json=recorded("slurm-22.05/same-moment", "nodes.json"))
    assert [len(asked.client.fetch_nodes().nodes) for _ in range(2)] == [4, 4]
    assert asked.tools.asked == ["scontrol json", "sinfo json", "sinfo json"]
    assert asked.notices == []


def test_accounting_that_says_less_than_the_text_is_read_as_text_and_the_rest_as_json() -> None:
    asked = Asked(
        sacct_json=recorded("slurm-22.05/same-moment", "sacct.json"),
        squeue_json=recorded("slurm-22.05/same-moment", "squeue.json"),
    )
    for _ in range(2):
        assert [job.name for job in asked.client.fetch_ended_jobs(since=SINCE).jobs] == ["by text"]
    assert len(asked.job_names()) == 19
    assert asked.tools.asked == ["sacct json", "sacct", "sacct", "squeue json"]
    assert len(asked.notices) == 1


@pytest.mark.parametrize(
    "answer",
    [
        NO_PLUGIN,  # JX-11
        NO_OPTION,
        Completed(returncode=0, stdout=""),
        Completed(returncode=0, stdout="Notice: maintenance on Friday\n"),
        Completed(returncode=0, stdout='{"jobs":['),
        Completed(returncode=0, stdout='{"jobs":' + "[" * 5000),
        said({"jobs": None}),
        said({"nodes": []}),
        said({"jobs": [{"id": 7}, "x"]}),
        Completed(returncode=None, stdout="{", is_truncated=True),
    ],
)
def test_json_that_cant_be_used_is_left_for_text_for_the_session_and_said_once(answer: Completed) -> None:
    """JX-11: and it is never an empty list."""
    asked = Asked(squeue_json=answer, scontrol_json=said({"nodes": [{"name": "byjson", "state": ["IDLE"]}]}))
    assert [asked.job_names() for _ in range(3)] == [["by text"]] * 3
    assert [node.name for node in asked.client.fetch_nodes().nodes] == ["bytext"]
    assert asked.tools.asked == ["squeue json", "squeue", "squeue", "squeue", "scontrol"]
    (notice,) = asked.notices
    assert "as text from now on" in notice


def test_json_behind_a_notice_of_the_site_is_used() -> None:
    """JX-11."""
    text = "Notice: maintenance on Friday\n" + json.dumps({"jobs": [job()]})
    asked = Asked(squeue_json=Completed(returncode=0, stdout=text))
    assert (asked.job_names(), asked.notices) == (["by json"], [])


def test_an_empty_queue_is_an_empty_listing() -> None:
    asked = Asked(squeue_json=said({"jobs": []}))
    assert (asked.job_names(), asked.notices) == ([], [])


def test_a_cluster_without_nodes_is_no_answer() -> None:
    asked = Asked(scontrol_json=said({"nodes": []}))
    assert [node.name for node in asked.client.fetch_nodes().nodes] == ["bytext"]


@pytest.mark.parametrize("answer", [DOWN, Completed(returncode=None)])
def test_no_answer_is_no_reason_to_give_json_up(answer: Completed) -> None:
    asked = Asked(squeue_json=answer)
    with pytest.raises(SlurmUnavailable):
        asked.client.fetch_jobs()
    asked.tools.answers["squeue json"] = said({"jobs": [job()]})
    assert (asked.job_names(), asked.notices) == (["by json"], [])


def test_an_error_that_22_05_reports_in_json_with_exit_0_is_no_empty_queue_and_no_reason_to_give_json_up() -> None:
    error = {"description": "Failed while looking for jobs", "error_number": -1, "source": "slurm_load_jobs"}
    asked = Asked(squeue_json=said({"meta": {}, "errors": [error], "jobs": []}), squeue=DOWN)
    with pytest.raises(SlurmUnavailable, match="Unable to contact"):
        asked.client.fetch_jobs()
    asked.tools.answers["squeue json"] = said({"jobs": [job()]})
    assert (asked.job_names(), asked.notices) == (["by json"], [])


def test_a_cluster_without_accounting_is_refused_as_with_text() -> None:
    asked = Asked(sacct_json=NO_ACCOUNTING)
    with pytest.raises(SlurmRefused):
        asked.client.fetch_ended_jobs(since=SINCE)
    assert asked.notices == []


def test_a_release_newer_than_tested_is_read_and_said_once() -> None:
    """JX-10."""
    meta = {"slurm": {"version": {"major": "27", "micro": "0", "minor": "05"}}}
    asked = Asked(squeue_json=said({"meta": meta, "jobs": [job()]}))
    assert [asked.job_names() for _ in range(2)] == [["by json"]] * 2
    assert asked.notices == ["Slurm 27.05 is newer than the releases known here (up to 26.05)"]


def test_a_row_that_cant_be_read_is_reported_and_the_others_are_kept() -> None:
    asked = Asked(squeue_json=said({"jobs": [job(), {"job_id": "x", "comment": "sup:gpt:1"}]}))
    listing = asked.client.fetch_jobs()
    assert ([one.job_id for one in listing.jobs], len(listing.unreadable)) == ([7], 1)


def test_a_token_in_a_row_that_cant_be_read_is_not_called_unknown() -> None:
    asked = Asked(squeue_json=said({"jobs": [job(), {"job_id": "x", "comment": "sup:gpt:1"}]}), sacct=NO_ACCOUNTING)
    with pytest.raises(SlurmError, match="can't be read"):
        asked.client.find_by_token("sup:gpt:1", since=SINCE)


def test_a_token_is_found_in_the_submit_line_of_json_accounting() -> None:
    found = Asked(
        squeue_json=said({"jobs": []}), sacct_json=recorded("slurm-24.11", "sacct.json")
    ).client.find_by_token("sup:exit137:1", since=SINCE)
    assert [(one.job_id, one.exit_code) for one in found] == [(3, 137)]
