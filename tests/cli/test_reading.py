"""Reading commands: what they show, in which shape, with and without a daemon."""

from __future__ import annotations

import json
from datetime import datetime, timedelta

import pytest

from supervisor.cli.options import parse_since
from supervisor.model import (
    Attempt,
    AttemptEnd,
    AttemptState,
    Checkpoint,
    CheckpointState,
    Interruption,
    NodeEvent,
    NodeMemory,
    Record,
    RunState,
    Verdict,
)
from tests.cli.conftest import NOW, Service, run


def at(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


def story() -> tuple[Record, ...]:
    """One run that lost a node and goes on."""
    first = Attempt(
        run="llama",
        number=1,
        token="t1",
        nodes_wanted=2,
        planned_at=NOW,
        submitted_at=NOW,
        started_at=at(10),
        stepped_at=at(20),
        over_at=at(110),
        progress_at=at(100),
        last_step=80,
        state=AttemptState.OVER,
        end=AttemptEnd.NODE_SILENT,
        nodes=("n1", "n2"),
        job_id=5,
        is_job_gone=True,
    )
    second = Attempt(
        run="llama",
        number=2,
        token="t2",
        nodes_wanted=2,
        planned_at=at(111),
        submitted_at=at(112),
        started_at=at(113),
        stepped_at=at(120),
        progress_at=at(200),
        last_step=130,
        resume_step=60,
        state=AttemptState.RUNNING,
        nodes=("n2", "n3"),
        job_id=6,
        phase="step",
    )
    checkpoint = Checkpoint(
        run="llama",
        step=120,
        attempt=2,
        state=CheckpointState.VERIFIED,
        path="/shared/llama/checkpoints/step-120.a2",
        first_seen_at=at(190),
        verified_at=at(191),
    )
    lost = Interruption(
        run="llama",
        attempt=1,
        kind="node_silent",
        cause="node n1 stopped answering",
        node="n1",
        is_planned=False,
        detected_at=at(110),
        resumed_at=at(120),
        last_step=80,
        resume_step=60,
        evidence=("no heartbeat for 3.2 s", "slurmd's port silent for 1.6 s"),
    )
    memory = NodeMemory(node="n1", verdict=Verdict.BROKEN, reason="stopped answering", since_at=at(110))
    event = NodeEvent(node="n1", at=at(111), event="node.drained", detail="supervisor: silent", run="llama", attempt=1)
    return run(), first, second, checkpoint, lost, memory, event


def test_status_as_json_has_the_documented_keys(service: Service) -> None:
    service.keep(*story())
    report = json.loads(service.call("status", "--json").stdout)
    (shown,) = report["runs"]
    assert {key: shown[key] for key in ("run", "state", "attempt", "job_id", "nodes", "step", "verified_step")} == {
        "run": "llama",
        "state": "running",
        "attempt": 2,
        "job_id": 6,
        "nodes": ["n2", "n3"],
        "step": 130,
        "verified_step": 120,
    }
    assert shown["interruptions"] == 1
    assert shown["mtbf_h"] > 0
    assert 0 < shown["ettr"] < 1


def test_status_works_without_a_daemon_and_says_that_it_is_down(service: Service) -> None:
    service.keep(run())
    assert json.loads(service.call("status", "--json").stdout)["daemon"]["running"] is False
    result = service.call("status")
    assert result.exit_code == 0
    assert "NOT RUNNING" in result.stdout
    assert "llama" in result.stdout


def test_status_knows_a_daemon_that_answers(service: Service) -> None:
    with service.running():
        daemon = json.loads(service.call("status", "--json").stdout)["daemon"]
        text = service.call("status").stdout
    assert (daemon["running"], daemon["paused"], daemon["slurm"]) == (True, False, "answering")
    assert "daemon: running" in text


def test_status_of_one_run_shows_no_other(service: Service) -> None:
    service.keep(run(), run("other"))
    assert [r["run"] for r in json.loads(service.call("status", "other", "--json").stdout)["runs"]] == ["other"]


def test_a_table_in_a_pipe_is_one_line_per_run_however_wide(service: Service) -> None:
    service.keep(run(state=RunState.HELD, reason="x" * 190))
    lines = service.call("status").stdout.splitlines()
    assert [line for line in lines if line.startswith("llama") and line.endswith("x" * 190)]


def test_terminal_codes_in_a_reason_do_not_reach_the_terminal(service: Service) -> None:
    service.keep(run(state=RunState.HELD, reason="bad \x1b[31m\nnews"))
    assert "\x1b" not in service.call("status").stdout


def test_history_as_json_has_the_documented_keys(service: Service) -> None:
    service.keep(*story())
    report = json.loads(service.call("history", "--json").stdout)
    (shown,) = report["interruptions"]
    gap = shown.pop("gap")
    assert (gap["restart_s"], gap["open"], gap["clock_stepped"]) == (10.0, True, False)
    assert shown == {
        "run": "llama",
        "attempt": 1,
        "launch": 0,
        "in_job": False,
        "kind": "node_silent",
        "cause": "node n1 stopped answering",
        "node": "n1",
        "nodes": [],
        "parts_s": {},
        "planned": False,
        "drill": None,
        "injected_at": None,
        "detected_at": "2026-01-02T12:01:50.000Z",
        "resumed_at": "2026-01-02T12:02:00.000Z",
        "caught_up_at": None,
        "recovery_s": 10.0,
        "last_step": 80,
        "resume_step": 60,
        "lost_steps": 20,
        "evidence": ["no heartbeat for 3.2 s", "slurmd's port silent for 1.6 s"],
    }
    assert report["summary"]["interruptions"] == 1
    assert report["summary"]["recovery_median_s"] == 10.0


def test_history_shows_evidence_when_asked(service: Service) -> None:
    service.keep(*story())
    assert "no heartbeat" not in service.call("history").stdout
    assert "no heartbeat for 3.2 s" in service.call("history", "--evidence").stdout


def test_history_since_leaves_out_what_was_before(service: Service) -> None:
    service.keep(*story())
    assert json.loads(service.call("history", "--json", "--since", "2026-01-03").stdout)["interruptions"] == []
    assert len(json.loads(service.call("history", "--json", "--since", "2026-01-01").stdout)["interruptions"]) == 1


def test_nodes_shows_what_is_remembered_when_slurm_does_not_answer(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    service.keep(*story())
    report = json.loads(service.call("nodes", "--json").stdout)
    assert report["slurm"]["answering"] is False
    n1, *_ = report["nodes"]
    assert (n1["node"], n1["verdict"], n1["reason"]) == ("n1", "broken", "stopped answering")
    text = service.call("nodes", "n1").stdout
    assert "Slurm does not answer" in text
    assert "node.drained" in text


@pytest.mark.parametrize(("save_s", "interval_min", "lost_percent"), [("60", 109, 2.0), ("5", 31, 0.7)])
def test_the_plan_has_its_published_numbers(
    service: Service, save_s: str, interval_min: int, lost_percent: float
) -> None:
    words = ["plan", "--gpus", "512", "--save-s", save_s, "--restart-s", "600", "--json"]
    answer = json.loads(service.call(*words).stdout)
    assert answer["mtbf_h"] == 99.0
    assert (answer["interval_min"], answer["lost_percent"]) == (interval_min, lost_percent)


@pytest.mark.parametrize(
    ("gpus", "save_s", "told"),
    [("512", "60", "save every 109 min"), ("1", "60", "save every 41.1 h"), ("1", "1e12", "save every 221,084 days")],
)
def test_a_planned_interval_is_written_in_a_unit_that_fits(service: Service, gpus: str, save_s: str, told: str) -> None:
    assert told in service.call("plan", "--gpus", gpus, "--save-s", save_s, "--restart-s", "600").stdout


def test_the_plan_says_where_the_service_saves_more_often(service: Service) -> None:
    words = ["plan", "--gpus", "512", "--restart-s", "600", "--save-s"]
    cap = "every 30 min at the latest (checkpoint.every_max_s)"
    assert cap in service.call(*words, "60").stdout
    assert cap not in service.call(*words, "1").stdout


def test_the_plan_of_a_run_takes_no_numbers_beside_it(service: Service) -> None:
    result = service.call("plan", "--run", "llama", "--gpus", "5")
    assert result.exit_code == 2
    assert "'--gpus' can't be given with '--run'" in result.output


def test_doctor_says_what_is_missing_and_which_files_it_is(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    result = service.call("doctor", "--json")
    report = json.loads(result.stdout)
    checks = {check["what"]: check["ok"] for check in report["checks"]}
    assert result.exit_code == 1
    assert (checks["package supervisor"], checks["slurm"], checks["ledger"]) == (True, False, False)


@pytest.mark.parametrize(
    ("text", "back"), [("90s", 90), ("30min", 1800), ("1.5h", 5400), ("7d", 604800), ("2w", 1209600)]
)
def test_a_span_is_counted_back_from_now(text: str, back: float) -> None:
    assert parse_since(text, NOW) == NOW - timedelta(seconds=back)


@pytest.mark.parametrize("text", ["", "h", "12", "12y", "1e999d", "tomorrow", "2026-13-01"])
def test_what_is_neither_span_nor_date_is_nothing(text: str) -> None:
    assert parse_since(text, NOW) is None
