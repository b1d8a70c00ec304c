"""Copies to object storage that fail are told, once in a row, and stand in the ledger."""

from __future__ import annotations

from typing import Any

from supervisor.core.rules.uploads import TOLD_AFTER
from supervisor.model import Attempt, IntentKind, Plan
from tests.core.builders import (
    ago,
    attempt,
    attempt_in,
    intents_of,
    job,
    launch,
    plan_for,
    progress,
    run,
    run_in,
    snapshot,
    view,
    world,
)
from trainer.contract import UploadReport

AWAY = "s3://b/x/gpt: EndpointConnectionError: could not connect"


def looked(one: Attempt, *reports: UploadReport, told: Plan | None = None, reason: str = "") -> Plan:
    seen = view(progress=progress(2600), launch=launch(), uploads=reports)
    settled = told.intents if told is not None else ()
    return plan_for(world(one, of=run(reason=reason), settled_intents=settled), snapshot(job(), view=seen))


def running(**changes: Any) -> Attempt:
    return attempt(stepped_at=ago(580), last_step=2600, progress_at=ago(1), **changes)


def report(node: int = 0, **changes: Any) -> UploadReport:
    return UploadReport(attempt=1, node=node, time=1.0, **changes)


def texts(plan: Plan) -> list[str]:
    return [i.text for i in intents_of(plan, IntentKind.NOTIFY)]


def test_what_is_in_object_storage_stands_in_the_ledger() -> None:
    assert attempt_in(looked(running(), report(uploaded="step-2000.a1"))).uploaded == "step-2000.a1"


def test_copying_that_keeps_failing_is_told_once_with_its_reason() -> None:
    first = looked(running(), report(failures=TOLD_AFTER, error=AWAY))
    (text,) = texts(first)
    assert AWAY in text
    assert (attempt_in(first).upload_failures, attempt_in(first).upload_error) == (TOLD_AFTER, AWAY)
    shown = run_in(first)
    assert shown is not None
    assert "object storage" in shown.reason
    assert texts(looked(attempt_in(first), report(failures=TOLD_AFTER + 9, error=AWAY), told=first)) == []


def test_a_try_that_failed_now_and_then_is_told_nobody() -> None:
    assert texts(looked(running(), report(failures=TOLD_AFTER - 1, error=AWAY))) == []


def test_the_node_that_fails_is_named_rather_than_the_one_that_waits_for_it() -> None:
    waits = report(failures=TOLD_AFTER, error="step-5.a1: nodes [3] have not copied their part")
    (text,) = texts(looked(running(), waits, report(3, failures=9, error=AWAY)))
    assert "node 3" in text
    assert AWAY in text


def test_once_it_works_again_nothing_is_shown_any_more() -> None:
    failing = looked(running(), report(failures=TOLD_AFTER, error=AWAY))
    shown = run_in(failing)
    assert shown is not None
    after = looked(attempt_in(failing), report(uploaded="step-2500.a1"), told=failing, reason=shown.reason)
    healed = run_in(after)
    assert healed is not None
    assert healed.reason == ""
    assert (attempt_in(after).upload_failures, attempt_in(after).upload_error) == (0, "")
