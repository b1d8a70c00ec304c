"""What a drill has made is planned: it says nothing of how often the run fails."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from supervisor.core.interval import measure_rate
from supervisor.core.launches import fold_record
from supervisor.core.reliability import run_mtbf
from supervisor.model import Drill, IntentKind, Interruption, Run
from tests.core.builders import NOW, RUN, ago, attempt_in, exit_record, intents_of, records, run_in
from tests.core.starts import interrupted, plan, report, trains

NODE = Drill(id="ab12", kind="node", node="n2", attempt=1, is_made=True, asked_at=ago(30).timestamp())


def drilled(drill: Drill = NODE, **changes: Any) -> Interruption:
    made = plan(of=replace(RUN, drill=drill), launch=report(launch=1), interruptions=(interrupted(**changes),))
    row: Interruption
    (row,) = records(made.facts, Interruption)
    return row


def test_a_failure_on_purpose_counts_as_planned_and_is_no_failure_of_the_run() -> None:
    made = plan(
        of=replace(RUN, drill=NODE),
        launch=report(launch=1),
        interruptions=(interrupted(resumed_at=ago(5).timestamp()),),
    )
    (row,) = records(made.facts, Interruption)
    assert (row.drill, row.is_planned, row.kind) == ("ab12", True, "node_lost")
    attempt = attempt_in(made)
    mtbf = run_mtbf([attempt], [row], NOW)
    assert mtbf is not None
    assert (mtbf.interruptions, measure_rate(RUN.spec, [attempt], NOW).failures) == (0, 0)
    changed = run_in(made)
    assert changed is not None
    assert changed.drill is not None
    assert changed.drill.is_seen


def test_what_is_made_outside_is_not_ordered_from_the_launcher_too() -> None:
    made = plan(of=replace(RUN, drill=NODE))
    assert not intents_of(made, IntentKind.ADVISE)
    assert intents_of(plan(of=replace(RUN, drill=replace(NODE, is_made=False))), IntentKind.ADVISE)


@pytest.mark.parametrize(
    ("drill", "changes"),
    [
        (replace(NODE, attempt=2), {}),
        (replace(NODE, is_seen=True), {}),  # one drill, one interruption
        (replace(NODE, asked_at=ago(700).timestamp()), {}),
        (replace(NODE, node="n3"), {}),  # another node failed
        (replace(NODE, is_made=False), {}),  # the launcher names those that it has sent
        (replace(NODE, is_made=False), {"evidence": ("drill ff: node on n2",)}),
    ],
)
def test_a_real_failure_beside_a_drill_stays_one(drill: Drill, changes: dict[str, Any]) -> None:
    row = drilled(drill, **changes)
    assert (row.drill, row.is_planned) == ("", False)


def test_a_drill_of_the_agents_is_told_by_the_launchers_record() -> None:
    row = drilled(replace(NODE, is_made=False, node=""), evidence=("no beat", "drill ab12: node on n2"))
    assert (row.drill, row.is_planned) == ("ab12", True)


def test_a_later_word_of_the_same_interruption_keeps_it_a_drill() -> None:
    known = replace(fold_record(interrupted(), trains(), None, ago(10)), drill="ab12", is_planned=True)
    made = plan(
        of=replace(RUN, drill=replace(NODE, is_seen=True)),
        known={"interruptions": (known,)},
        launch=report(launch=1),
        interruptions=(interrupted(kind="node_cut_off"),),
    )
    (row,) = records(made.facts, Interruption)
    assert (row.kind, row.drill, row.is_planned) == ("node_cut_off", "ab12", True)


def test_what_is_first_laid_at_a_victims_door_is_a_drill_once_the_right_node_is_named() -> None:
    first = fold_record(interrupted(nodes=(), hint="n1"), trains(), None, ago(10))
    made = plan(
        of=replace(RUN, drill=NODE),
        known={"interruptions": (first,)},
        launch=report(launch=1),
        interruptions=(interrupted(),),
    )
    (row,) = records(made.facts, Interruption)
    assert (row.node, row.drill, attempt_in(made).planned) == ("n2", "ab12", 1)


def test_a_drill_that_ends_the_job_is_no_failure_either() -> None:
    run: Run = replace(RUN, drill=replace(NODE, node="n1"))
    ended = exit_record(77, reason="n1 is lost", bad_nodes=("n1",), next="resubmit")
    made = plan(of=run, exit=ended)
    (row,) = records(made.facts, Interruption)
    assert (row.drill, row.is_planned, row.is_in_job) == ("ab12", True, False)
    attempt = attempt_in(made)
    assert (attempt.is_over, attempt.planned, measure_rate(run.spec, [attempt], NOW).failures) == (True, 1, 0)
