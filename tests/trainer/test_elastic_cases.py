"""What torchrun's elastic agents leave open, and the launcher decides: members that are dead, restarts, counting."""

from __future__ import annotations

from pathlib import Path

from trainer.agent.place import Place
from trainer.agent.program import Program
from trainer.agent.workers import Setting
from trainer.agent.workers_torchrun import torchrun_arguments
from trainer.launching.choice import choose_training
from trainer.launching.silence import Patience, Signs, judge_loss

PATIENCE = Patience(suspect_s=3.0, liveness_s=10.0, closed_s=2.0)


def test_a_member_that_is_dead_and_was_never_timed_out_is_dropped_and_a_decision_follows() -> None:
    """TE-13: A beat 0.2 s ago, B 50 s ago, two are needed."""
    ages = {"A": 0.2, "B": 50.0}
    lost = {node for node, age_s in ages.items() if judge_loss(Signs(node=node, age_s=age_s), PATIENCE) is not None}
    assert lost == {"B"}
    here = [node for node in ages if node not in lost]
    assert choose_training(("A", "B"), here, wanted=2, minimum=1, multiple=1) == ("A",)
    assert choose_training(("A", "B"), here, wanted=2, minimum=2, multiple=1) == ()  # resubmitted, not waited for


def test_a_late_member_is_not_dropped_at_once() -> None:
    """TE-13"""
    assert judge_loss(Signs(node="B", age_s=9.0), PATIENCE) is None


def test_torchrun_restarts_nothing_by_itself_so_each_failure_is_seen_and_counted() -> None:
    """TE-02"""
    place = Place(launch=0, rank=0, nodes=2, master_addr="10.0.0.1", master_port=29500, rdzv_id="7.1.0")
    program = Program(python="python", arguments=("train.py",))
    words = torchrun_arguments(Setting(procs=2, log_dir=Path("/l")), program, place, {}, local_addr="10.0.0.1")
    assert "--max-restarts=0" in words
