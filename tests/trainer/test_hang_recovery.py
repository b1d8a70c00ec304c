"""A hang from its beginning to the next start: real launcher, agents and ranks."""

from __future__ import annotations

import os
import signal
import time

from tests.trainer.attempts import Attempt, attempt, eventually

__all__ = ["attempt"]

# Ranks on two nodes that meet by files; on start 0, rank 1 stops at step 8.
STEPS = """
import os, pathlib, signal, time
from trainer.progress import LimitPolicy, ProgressWriter
rank, launch, rig = os.environ["RANK"], os.environ["SUPERVISOR_LAUNCH"], pathlib.Path(os.environ["RIG_DIR"])
progress = ProgressWriter(None, 1, policy=LimitPolicy(min_s=1.0))
for step in range(1, LAST + 1):
    if (rank, launch, step) == ("1", "0", HANGS_AT):
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.1)
    (rig / f"met.{launch}.{rank}.{step}").touch()
    while not (rig / f"met.{launch}.{1 - int(rank)}.{step}").exists():
        time.sleep(0.01)
    progress.step_done(step)
"""
BOUNDS = {"step": (2.5, 60.0)}


def program(*, last: int, hangs_at: int = 0) -> str:
    return f"LAST, HANGS_AT = {last}, {hangs_at}\n{STEPS}"


def test_a_rank_that_hangs_is_named_with_evidence_and_the_training_starts_again(attempt: Attempt) -> None:
    attempt.start(program(last=15, hangs_at=8), nodes=2, in_job=True, phase_bounds_s=BOUNDS)
    ended = attempt.end()

    record = attempt.interruption()
    evidence = attempt.paths.evidence(1, 0)
    assert (ended.exit_code, ended.launches, ended.bad_nodes) == (0, 2, ())
    assert (record.kind, record.nodes, record.hint) == ("hang", (), "n2")
    assert "waiting for rank 1 on n2" in record.cause
    assert "rank 1: its process is stopped (T)" in record.evidence
    assert 2.5 <= record.parts_s["detect"] < 10.0
    assert {"rank0.stacks.txt", "rank0.proc.txt", "rank1.proc.txt"} <= {path.name for path in evidence.iterdir()}
    assert "is stopped (T)" in (evidence / "rank1.proc.txt").read_text()


def test_a_job_that_is_suspended_for_longer_than_a_limit_goes_on_as_if_nothing_was(attempt: Attempt) -> None:
    attempt.start(program(last=20), nodes=2, in_job=True, phase_bounds_s=BOUNDS)
    met = attempt.rig / "met.0.0.5"
    assert eventually(met.exists)
    everybody = attempt.processes()

    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in everybody:
            os.kill(pid, number)
        if number is signal.SIGSTOP:
            time.sleep(3.5)  # what is tested: longer than the limit

    ended = attempt.end()
    assert (ended.exit_code, ended.launches) == (0, 1)
