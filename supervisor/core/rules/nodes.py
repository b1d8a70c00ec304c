"""Rules about nodes: what sweeps teach, drains that others touched, which broken nodes are drained. Pure."""

from __future__ import annotations

from supervisor.core import drains
from supervisor.core import nodes as node_rules
from supervisor.core.draft import Draft
from supervisor.model import (
    DRAIN_WITHHELD,
    CheckRow,
    Fresh,
    Intent,
    IntentKind,
    IntentState,
    NodeEvent,
    NodeMemory,
    Stale,
    Verdict,
)


def learn_sweeps(draft: Draft) -> None:
    """Take in the sweeps that came back since the last cycle."""
    if not draft.snapshot.sweeps:
        return
    limit = drains.drain_limit(draft.policy, _cluster_size(draft))
    is_mass = node_rules.is_mass_failure(draft.snapshot.sweeps, limit)
    if is_mass:
        draft.tell("mass-check-failure", "a check fails on many nodes at once: the check is suspected, none is drained")
    for checks in draft.snapshot.sweeps:
        before = draft.node(checks.node)
        after = node_rules.fold_checks(before, checks, draft.policy.drain, is_mass=is_mass)
        draft.put(after, "sweep")
        if after.failing != before.failing:
            for result in checks.results:
                if result.ok is False or result.check in before.failing:
                    draft.put(CheckRow(node=checks.node, at=checks.at, result=result), "check changed")
        _note_verdict(draft, before.verdict, after.node, after.verdict, after.reason)


def _note_verdict(draft: Draft, before: Verdict, node: str, after: Verdict, reason: str) -> None:
    if before is not after:
        event = NodeEvent(node=node, at=draft.now, event=f"node.judged_{after.value}", detail=reason)
        draft.put(event, reason or after.value)


def _cluster_size(draft: Draft) -> int:
    return len(draft.snapshot.nodes.value) if isinstance(draft.snapshot.nodes, Fresh) else 0


def learn_drift(draft: Draft) -> None:
    """Drains that someone else lifted or took over, and those that they set on nodes that are broken anyway."""
    nodes = draft.snapshot.nodes
    if isinstance(nodes, Stale):
        return
    for memory in list(draft.nodes.values()):
        record = nodes.value.get(memory.node)
        if record is None or _is_draining(draft, memory.node):
            continue
        healed = node_rules.judge_probation(memory, record, nodes.asked_at, draft.policy.drain.window_s)
        if healed is not None:
            why = f"usable for Slurm, and its last fault is {draft.policy.drain.window_s:.0f} s ago: {memory.reason}"
            draft.put(healed, why)
            draft.put(NodeEvent(node=memory.node, at=draft.now, event="node.trusted_again", detail=why), why)
            continue
        after = node_rules.judge_drift(memory, record, nodes.asked_at)
        if after is not None:
            lifted = after.verdict is Verdict.HEALTHY
            found = "drain.taken_over" if memory.is_drained_by_us else "drain.found"
            event = "drain.lifted_by_other" if lifted else found
            draft.put(after, event)
            detail = memory.drain_reason if lifted else f"{record.reason} [{record.reason_user}]"
            draft.put(NodeEvent(node=memory.node, at=draft.now, event=event, detail=detail), event)


def drain(draft: Draft) -> None:
    """Mean a drain for each broken node that the rows of `drains` let through."""
    broken = [m for m in draft.nodes.values() if m.verdict is Verdict.BROKEN and not m.is_drained_by_us]
    if not broken:
        return
    if isinstance(draft.snapshot.nodes, Stale):
        draft.note(f"no node is drained blind: {draft.snapshot.nodes.why}")
        return
    records = draft.snapshot.nodes.value
    waiting = [
        m for m in broken if m.node in records and not records[m.node].is_withdrawn and not _is_draining(draft, m.node)
    ]
    done = draft.settled_intents(IntentKind.DRAIN, within_s=draft.policy.drain.window_s)
    used = sum(i.state is IntentState.DONE for i in done) + len(draft.open_intents(IntentKind.DRAIN))
    for memory in broken:
        if _is_draining(draft, memory.node):
            continue
        candidate = drains.Candidate(
            memory=memory,
            record=records.get(memory.node),
            policy=draft.policy,
            is_paused=draft.world.is_paused,
            used=used,
            limit=drains.drain_limit(draft.policy, len(records)),
            waiting=len(waiting),
            refusals=drains.find_refusals(draft.settled_intents(IntentKind.DRAIN), memory),
        )
        kept = drains.judge_drain(candidate)
        if kept is not None:
            draft.note(f"{memory.node} is not drained: {kept}")
            if candidate.waiting > candidate.limit or candidate.used >= candidate.limit:
                _tell_withheld(draft, memory, kept)
            continue
        used += 1
        text = drains.render_drain_reason(draft.policy.owner_tag, memory, draft.now)
        draft.intend(
            Intent(kind=IntentKind.DRAIN, key=f"drain:{memory.node}", reason=memory.reason, node=memory.node, text=text)
        )


def _tell_withheld(draft: Draft, memory: NodeMemory, kept: str) -> None:
    """Tell someone, and write it in the node's history, which `supervisor nodes` reads."""
    key = f"drain-budget:{memory.node}:{memory.since_at:%s}"
    told = {i.key for i in draft.world.settled_intents if i.kind is IntentKind.NOTIFY}
    if f"notify:{key}" in told or draft.open_intent(f"notify:{key}") is not None:
        return
    draft.tell(key, f"{memory.node} is not drained: {kept}", node=memory.node)
    draft.put(NodeEvent(node=memory.node, at=draft.now, event=DRAIN_WITHHELD, detail=kept), kept)


def _is_draining(draft: Draft, node: str) -> bool:
    return draft.open_intent(f"drain:{node}") is not None


def suspect(draft: Draft, node: str, reason: str, run: str, attempt: int) -> None:
    """Remember what speaks against a node and condemns it not: a sweep that it passes, or time, clears it."""
    before = draft.node(node)
    after = node_rules.suspect(before, reason, draft.now)
    draft.put(after, reason)
    event = NodeEvent(node=node, at=draft.now, event="node.suspected", detail=reason, run=run, attempt=attempt)
    draft.put(event, reason)


def condemn(draft: Draft, node: str, reason: str, run: str, attempt: int) -> None:
    """Call a node broken, for hard evidence."""
    before = draft.node(node)
    after = node_rules.condemn(before, reason, draft.now)
    draft.put(after, reason)
    if after is not before:
        event = NodeEvent(node=node, at=draft.now, event="node.judged_broken", detail=reason, run=run, attempt=attempt)
        draft.put(event, reason)
