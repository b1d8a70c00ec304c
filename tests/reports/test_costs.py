"""What the reports say of interruptions, of planned work, of Slurm's own count, and of nodes that were out."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from supervisor.model import Attempt, Interruption, NodeEvent
from supervisor.reports.history import History, history_as_json, summary_line
from supervisor.reports.nodes import Nodes, fold_repairs, nodes_as_json, repairs_table

T0 = datetime(2026, 1, 1, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return T0 + timedelta(seconds=seconds)


def attempt(number: int, **changes: object) -> Attempt:
    return Attempt(run="a", number=number, token=f"t{number}", nodes_wanted=2, planned_at=T0, **changes)  # type: ignore[arg-type]


def interruption(number: int, *, planned: bool = False, since: float = 0, down_s: float | None = None) -> Interruption:
    return Interruption(
        run="a",
        attempt=number,
        kind="maintenance" if planned else "node_silent",
        cause="",
        node=None,
        is_planned=planned,
        detected_at=at(since),
        resumed_at=None if down_s is None else at(since + down_s),
        caught_up_at=None if down_s is None else at(since + down_s),
    )


def history(*interruptions: Interruption, attempts: tuple[Attempt, ...] = ()) -> History:
    return History(interruptions=interruptions, observed_s=7200, since=None, attempts=attempts, now=at(10_000))


def test_planned_work_has_a_line_of_down_time_of_its_own_and_is_not_in_mtbf() -> None:
    """Case AC-08."""
    report = history(interruption(1, down_s=60), interruption(2, planned=True, since=1000, down_s=1800))
    summary = history_as_json(report)["summary"]
    assert (summary["interruptions"], summary["planned"]) == (1, 1)
    assert (summary["down_s"], summary["planned_down_s"]) == (60, 1800)
    assert summary["mtbf_h"] == 2
    assert "1 planned, 30.0 min of planned down time" in summary_line(report)


def test_slurms_restarts_and_ours_are_both_shown_by_name_and_mtbf_uses_ours() -> None:
    """Case AC-10: Restarts=3 in Slurm; one failure and two preemptions here."""
    report = history(
        interruption(1, down_s=60), attempts=(attempt(1), attempt(2, slurm_restarts=1), attempt(3, slurm_restarts=2))
    )
    summary = history_as_json(report)["summary"]
    assert (summary["slurm_restarts"], summary["interruptions"], summary["mtbf_h"]) == (3, 1, 2)
    assert "1 unplanned" in summary_line(report)
    assert "Slurm counts 3 restarts of its own (Restarts)" in summary_line(report)


def test_an_interruption_shows_its_parts_and_that_it_is_open() -> None:
    """Cases AC-09, AC-12."""
    report = history(interruption(1), attempts=(attempt(1, progress_at=at(-30)),))
    (shown,) = history_as_json(report)["interruptions"]
    assert shown["gap"] == {
        "detection_s": 30,
        "restart_s": 10_000,
        "recompute_s": 0,
        "total_s": 10_030,
        "open": True,
        "clock_stepped": False,
    }


# ---------------------------------------------------------------- nodes


def event(kind: str, seconds: float, node: str = "n1") -> NodeEvent:
    return NodeEvent(node=node, at=at(seconds), event=kind)


def test_a_node_is_out_from_its_drain_until_it_is_returned() -> None:
    (repair,) = fold_repairs([event("node.drained", 0), event("drain.lifted_by_other", 600)], at(9999))
    assert (repair.spent_s, repair.until_at, repair.has_clock_step) == (600, at(600), False)


def test_a_clock_that_was_set_back_gives_no_negative_repair_and_is_said() -> None:
    """Case AC-12: drained at 1000, undrained at 900."""
    repairs = fold_repairs([event("node.drained", 1000), event("drain.lifted_by_other", 900)], at(2000))
    assert [(r.spent_s, r.has_clock_step) for r in repairs] == [(0, True)]
    assert "the clock was set back" in repairs_table(Nodes(nodes=(), repairs=repairs)).rows[0][3]


def test_a_node_that_is_still_out_counts_up_to_now_and_is_shown_as_open() -> None:
    """Case AC-12: drained at 1000, no end."""
    repairs = fold_repairs([event("node.drained", 1000), event("node.drained", 500, "n2")], at(2000))
    report = nodes_as_json(Nodes(nodes=(), repairs=repairs))
    assert [(r["node"], r["spent_s"], r["open"]) for r in report["repairs"]] == [("n1", 1000, True), ("n2", 1500, True)]
    assert "still out" in repairs_table(Nodes(nodes=(), repairs=repairs)).rows[0][3]
