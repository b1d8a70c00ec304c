"""Torchrun's own words about failures: what of them is counted, blamed and waited for."""

from __future__ import annotations

from supervisor.attribution.attribute import attribute
from supervisor.attribution.signs import find_signs
from supervisor.model import RunView
from trainer.contract import ExitRecord, NodeReport


def test_what_torchrun_says_of_its_own_restarts_is_no_interruption() -> None:
    """TE-02: interruptions are counted from the launcher's records, never from these lines."""
    text = "[default] Worker group FAILED. 1/3 attempts left; will restart worker group\nTORCHELASTIC_RESTART_COUNT=0\n"
    assert find_signs(text, "n1") == ()


def test_agents_that_wait_in_the_exit_barrier_are_no_hang() -> None:
    """TE-03: the failure is the SIGSEGV, at its time; the five minutes after it are its consequence."""
    block = (
        "Failures:\n  <NO_OTHER_FAILURES>\n" + "-" * 60 + "\nRoot Cause (first observed failure):\n[0]:\n"
        "  time      : 2026-03-02_12:00:00\n  host      : gpu02\n  rank      : 5 (local_rank: 1)\n"
        "  exitcode  : -11 (pid: 4732)\n  error_file: <N/A>\n  traceback : Signal 11 (SIGSEGV) received by PID 4732\n"
    )
    barrier = "[W api.py:900] Error waiting on exit barrier. Elapsed: 300.1 seconds\n"
    logs = {"gpu01": barrier, "gpu02": block, "gpu03": barrier}
    reports = tuple(
        NodeReport(attempt=1, node=node, host=node, time=1.0, exit_code=1, log_tail=text) for node, text in logs.items()
    )
    record = ExitRecord(attempt=1, job_id=1, exit_code=1, reason="it failed", time=1.0, nodes=dict.fromkeys(logs, 1))
    cause = attribute(RunView(attempt=1, exit=record, node_reports=reports), None)
    assert (cause.kind, cause.node) == ("crash", "gpu02")
    assert "SIGSEGV" in cause.sentence
