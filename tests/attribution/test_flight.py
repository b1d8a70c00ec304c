"""What Flight Recorder dumps say of an attempt's end, beside its logs and exit codes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from supervisor.attribution.attribute import attribute
from supervisor.model import Cause, RunView
from supervisor.observed import FlightView
from trainer.contract import ExitRecord, NodeReport

WATCHDOG = (
    "[rank{rank}]:[E302 16:48:25 ProcessGroupNCCL.cpp:683] [PG ID 0 PG GUID 0(default_pg) Rank {rank}] Watchdog caught "
    "collective operation timeout: WorkNCCL(SeqNum=4, OpType=ALLREDUCE, NumelIn=80, NumelOut=80, Timeout(ms)=600000) "
    "ran for 600096 milliseconds before timing out.\n"
)
ABSENT = FlightView(
    launch=0,
    kind="absent",
    sentence="rank 9 did not join all_reduce #4 of group 0; ranks 0-8 wait for it",
    confidence="high",
    ranks=(9,),
    nodes=("n3",),
)
DESYNC = FlightView(
    launch=0,
    kind="mismatch",
    sentence="the ranks disagree on collective #4 of group 0",
    confidence="high",
    ranks=(9,),
    nodes=("n3",),
    is_program_fault=True,
)


def judge(flight: FlightView | None, logs: dict[str, str], codes: dict[str, int | None] | None = None) -> Cause:
    codes = codes or dict.fromkeys(logs, 1)
    record = ExitRecord(attempt=1, job_id=1, exit_code=1, reason="it failed", time=1.0, nodes=codes)
    reports = tuple(
        NodeReport(attempt=1, node=node, host=node, time=1.0, exit_code=codes[node], log_tail=text)
        for node, text in logs.items()
    )
    return attribute(RunView(attempt=1, exit=record, node_reports=reports, flight=flight), None)


def test_the_rank_that_is_missing_from_the_collective_is_named_not_those_that_report_the_time_out() -> None:
    """TE-08: -6 after the watchdog's line and -15 are consequences; the suspect has printed nothing."""
    logs = {
        "n1": WATCHDOG.format(rank=0)
        + "  exitcode  : -6 (pid: 4731)\n  traceback : Signal 6 (SIGABRT) received by PID 4731\n",
        "n2": "  exitcode  : -15 (pid: 4734)\n  traceback : Signal 15 (SIGTERM) received by PID 4734\n",
        "n3": "",
    }
    cause = judge(ABSENT, logs)
    assert (cause.kind, cause.node, cause.blames_node) == ("hang", "n3", False)
    assert "rank 9 did not join" in cause.sentence
    without = judge(None, logs, {"n1": 1, "n2": 1, "n3": None})
    assert (without.kind, without.blames_node) == ("collective_timeout", False)


def test_ranks_that_call_different_things_are_the_program_s_fault_and_may_be_started_again() -> None:
    cause = judge(DESYNC, {"n1": WATCHDOG.format(rank=0), "n3": ""})
    assert (cause.kind, cause.node, cause.blames_node, cause.is_curable) == ("desync", None, False, True)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("2026-11-30 12:00:35 kernel: NVRM: Xid (PCI:0000:4e:00): 79, pid=4122, GPU has fallen off the bus.\n", "gpu"),
        (
            'Traceback (most recent call last):\n  File "/w/train.py", line 1, in <module>\nValueError: no\n',
            "python_traceback",
        ),
    ],
)
def test_a_hardware_line_and_a_traceback_go_before_what_the_dumps_say(text: str, kind: str) -> None:
    cause = judge(ABSENT, {"n1": WATCHDOG.format(rank=0), "n2": text})
    assert (cause.kind, cause.node) == (kind, "n2")
    assert any("rank 9 did not join" in line for line in cause.evidence)


def test_what_the_dumps_only_guess_stands_behind_the_log_s_own_words() -> None:
    cause = judge(replace(ABSENT, confidence="low"), {"n1": WATCHDOG.format(rank=0), "n2": ""})
    assert cause.kind == "collective_timeout"
    assert "Watchdog" in cause.sentence
    assert any("Flight Recorder" in line for line in cause.evidence)


@pytest.mark.parametrize("kind", ["none", "stuck_together", "unfinished"])
def test_dumps_that_name_nobody_are_no_sign(kind: str) -> None:
    cause = judge(replace(ABSENT, kind=kind, ranks=(), nodes=()), {"n1": WATCHDOG.format(rank=0)})
    assert cause.kind == "collective_timeout"
