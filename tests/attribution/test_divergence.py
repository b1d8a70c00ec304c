"""A loss that the training found wrong comes before all that follows from it."""

from __future__ import annotations

from supervisor.attribution.attribute import attribute
from supervisor.attribution.exits import read_exit
from supervisor.model import RunView
from trainer.contract import EXIT_DIVERGED, Divergence, ExitRecord, NodeReport

LATE = "[rank1]: Traceback (most recent call last):\n[rank1]: LossDiverged: the loss is not a number since step 7\n"


def test_a_divergence_is_a_class_of_its_own_and_blames_no_node() -> None:
    found = Divergence(attempt=1, kind="nan", onset_step=7, step=9, time=1.0)
    ended = ExitRecord(attempt=1, job_id=1, exit_code=EXIT_DIVERGED, reason="n1: ended", node="n1", time=1.0)
    report = NodeReport(attempt=1, node="n1", host="n1", time=1.0, exit_code=1, log_tail=LATE)
    cause = attribute(RunView(attempt=1, exit=ended, divergence=found, node_reports=(report,)), None)
    assert (cause.kind, cause.node, cause.blames_node, cause.is_curable) == ("divergence", None, False, True)
    assert cause.sentence == "the loss is not a number since step 7"


def test_exit_79_is_no_sign_against_a_node() -> None:
    assert read_exit(EXIT_DIVERGED, "n1", node="n1") is None
