"""The order of the rules: world, snapshot, policy and now in, one plan out. Pure: no I/O, no clock, no log.

Level-triggered: whatever happened while nobody looked, the current values are enough. Each rule reads what the rules
before it wrote in the same cycle, and stays silent (with a note) when a source that it needs is stale.
"""

from __future__ import annotations

from datetime import datetime

from supervisor.core.draft import Draft
from supervisor.core.rules import ahead, attempts, checkpoints, interval, nodes, outages, runs, uploads, waiting
from supervisor.model import Plan, Policy, Snapshot, World


def reconcile(world: World, snapshot: Snapshot, policy: Policy, now: datetime) -> Plan:
    """What was learnt and what is meant, each with its reason."""
    draft = Draft(world, snapshot, policy, now)
    nodes.learn_sweeps(draft)
    nodes.learn_drift(draft)
    checkpoints.learn_verifications(draft)
    for run in world.runs:
        checkpoints.learn_checkpoints(draft, run)
        attempts.judge_attempt(draft, run)
        interval.advise(draft, run.name)
        interval.tell_saves(draft, run.name)
        uploads.tell_uploads(draft, run.name)
        waiting.tell_waiting(draft, run.name)
        waiting.tell_unsubmitted(draft, run.name)
        waiting.tell_stuck(draft, run.name)
        attempts.learn_resumed(draft, run.name)
        attempts.clear_jobs(draft, run.name)
        attempts.clear_twins(draft, run.name)
        checkpoints.verify_new(draft, draft.runs[run.name])
        checkpoints.prune(draft, draft.runs[run.name])
        runs.settle_run(draft, run.name)
        ahead.learn_begun(draft, run.name)
        ahead.clear(draft, run.name)
        ahead.point(draft, run.name)
        runs.start(draft, run.name)
        ahead.queue(draft, run.name)
        runs.pace(draft, run.name)
    nodes.drain(draft)
    outages.tell_silence(draft)
    return draft.plan()
