"""Builders for the tests of starts inside a job: an attempt on three nodes, two of which train."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from supervisor.model import (
    Attempt,
    Plan,
)
from tests.core.builders import (
    RUN,
    ago,
    attempt,
    attempt_in,
    attempts_in,
    job,
    launch,
    plan_for,
    progress,
    run,
    snapshot,
    spec,
    view,
    world,
)
from trainer.contract import InterruptionRecord

NODES = ("n1", "n2", "n3")
BY_JOB = run(spec=spec(restart={"in_job": False}))


def trains(**changes: Any) -> Attempt:
    """An attempt on three nodes, two of which train."""
    return attempt(nodes=NODES, spares=1, training=("n1", "n2"), stepped_at=ago(500), **changes)


def report(ages: dict[str, float] | None = None, **changes: Any) -> Any:
    known = {"training": ("n1", "n2"), **changes}
    states = known.pop("states", {"n3": "spare"})
    unchanged_s = known.pop("unchanged_s", 0.5)
    return launch({"n1": 0.2, "n2": 0.2, "n3": 0.2, **(ages or {})}, states=states, unchanged_s=unchanged_s, **known)


def interrupted(number: int = 0, kind: str = "node_lost", **changes: Any) -> InterruptionRecord:
    one = InterruptionRecord(
        attempt=1,
        launch=number,
        kind=kind,
        cause="n2 is silent, and nothing of it answers",
        nodes=("n2",),
        evidence=("no beat for 3.1 s",),
        last_step=120,
        resume_step=100,
        training=("n1", "n3"),
        detected_at=ago(20).timestamp(),
        parts_s={"stop": 0.5, "start": 3.0},
    )
    return replace(one, **changes)


def plan(one: Attempt | None = None, *, of: Any = RUN, known: dict[str, Any] | None = None, **parts: Any) -> Plan:
    """A cycle that sees this of the job's run directory; `ports`, `nodes` and `jobs` as Slurm and the network say."""
    outside = {key: parts.pop(key) for key in ("ports", "nodes") if key in parts}
    jobs = parts.pop("jobs", (job(nodes=NODES),))
    seen = view(**{"progress": progress(130), "launch": report(), **parts})
    return plan_for(world(one or trains(), of=of, **(known or {})), snapshot(*jobs, view=seen, **outside))


def is_over(made: Plan) -> bool:
    return 1 in attempts_in(made) and attempt_in(made).is_over
