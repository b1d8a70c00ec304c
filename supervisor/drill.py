"""A drill: a failure that was made on purpose, what became of the run, and whether all of that is as it must be. Pure.

What a training did is told by two traces: that of the start which was interrupted, and that of the one which followed.
Each check answers one question that a person would ask before trusting a cluster; one that can't be answered because
the training writes nothing about it (the samples of a foreign script) is open, and no failure.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise

from supervisor.model import Interruption
from trainer.contract import InterruptionRecord

KINDS: Mapping[str, str] = {
    "node": "a node is gone at once",
    "process": "one rank is killed",
    "network": "a node can reach nobody",
    "hang": "one rank stops making progress, and does not die",
}
LOSS_LIMIT = 1e-3  # relative: the same steps from the same state, maybe on other nodes and in another order of sums
_JUMPS = 5.0  # where no step was done twice, a jump of the loss may be so many usual ones

# What an interruption of each kind may be called: what is seen from outside depends on what the node can still leave
# behind, and on who answers in its place. A node whose agent lets go of the launcher has a kernel that answers.
_NAMES: Mapping[str, frozenset[str]] = {
    "node": frozenset({"node_lost", "agent_killed", "node_frozen"}),
    "process": frozenset({"process"}),
    "network": frozenset({"node_cut_off", "node_lost", "node_frozen"}),
    "hang": frozenset({"hang"}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFact:
    """One step as the training told it. `samples`: indices, where it tells them; `position`: how many in all so far."""

    step: int
    loss: float | None = None
    samples: tuple[int, ...] = ()
    position: int | None = None
    world: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Traces:
    """Steps of the start that was interrupted, up to the failure, and of the one that followed."""

    before: Mapping[int, StepFact] = field(default_factory=dict)
    after: Mapping[int, StepFact] = field(default_factory=dict)
    source: str = "nothing"  # "the training's step log", "the progress file"


@dataclass(frozen=True, slots=True, kw_only=True)
class Before:
    """The run when the failure was made."""

    run: str
    kind: str
    node: str  # that it was made on
    how: str  # in words
    attempt: int
    launch: int
    training: tuple[str, ...]  # nodes
    host: str  # of the launcher
    step: int
    verified_step: int
    made_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class After:
    """The run when it had recovered, or when the drill gave up waiting."""

    attempt: int
    launch: int
    training: tuple[str, ...] = ()
    resume_step: int | None = None
    verified_steps: frozenset[int] = frozenset()  # that were verified at some time of the drill
    recovered_s: float | None = None  # from the failure to the first new step; None: none came
    noticed_s: float | None = None  # from the failure until the run was seen to recover
    interruptions: tuple[Interruption, ...] = ()  # those of the ledger that are newer than the failure
    record: InterruptionRecord | None = None  # the launcher's own
    run_state: str = "active"
    ending: str = ""  # why the wait was over, where it did not recover


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The answer to one question. `is_ok` None: the training says nothing that would answer it."""

    name: str
    is_ok: bool | None
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A drill and its checks."""

    before: Before
    after: After
    traces: Traces
    checks: tuple[Check, ...]

    @property
    def is_passed(self) -> bool:
        """True when no check failed, and those that can always be answered were."""
        return all(check.is_ok is not False for check in self.checks)


def judge_drill(before: Before, after: After, traces: Traces, *, loss_limit: float = LOSS_LIMIT) -> Outcome:
    """The checks of a drill. Without a recovery only the first one and the ledger's are answered."""
    checks = [_recovered(before, after)]
    if after.recovered_s is not None:
        checks += [
            _checkpoint(before, after, _last_step(before, after, traces)),
            _judge_loss(traces, after, loss_limit),
            _judge_samples(traces),
            _nodes(before, after),
        ]
    checks.append(_ledger(before, after))
    return Outcome(before=before, after=after, traces=traces, checks=tuple(checks))


def _last_step(before: Before, after: After, traces: Traces) -> int:
    """The newest step that anybody knows to be done before: each of them learns of it a moment after the other."""
    told = [i.last_step for i in after.interruptions] + ([after.record.last_step] if after.record is not None else [])
    return max([before.step, *traces.before, *(step for step in told if step is not None)])


def rung(before: Before, after: After) -> str:
    """Which rung of the ladder it was, in words."""
    if after.attempt != before.attempt:
        return "3 (a new job)"
    if set(after.training) == set(before.training):
        return "1 (the ranks were started again on the same nodes)"
    if len(after.training) < len(before.training):
        return f"2 (started again in the allocation, on {len(after.training)} nodes in place of {len(before.training)})"
    return "2 (started again in the allocation, on other nodes)"


# ---------------------------------------------------------------- the checks


def _recovered(before: Before, after: After) -> Check:
    if after.recovered_s is None:
        return Check(name="recovered", is_ok=False, detail=after.ending or "no new step came in time")
    noticed = f", noticed after {after.noticed_s:.1f} s" if after.noticed_s is not None else ""
    return Check(
        name="recovered",
        is_ok=True,
        detail=f"first new step {after.recovered_s:.1f} s after the failure{noticed}; by rung {rung(before, after)}",
    )


def _checkpoint(before: Before, after: After, last_step: int) -> Check:
    step = after.resume_step
    if step is None:
        return Check(name="checkpoint", is_ok=False, detail="it is not known what the training began from")
    if step < before.verified_step:
        detail = f"began from step {step}, though step {before.verified_step} was verified before the failure"
        return Check(name="checkpoint", is_ok=False, detail=detail)
    if step and step not in after.verified_steps:
        return Check(name="checkpoint", is_ok=False, detail=f"began from step {step}, which was never verified")
    return Check(
        name="checkpoint",
        is_ok=True,
        detail=f"began from step {step}, verified; {_count(max(0, last_step - step))} done again{_as_known(after)}",
    )


def _as_known(after: After) -> str:
    """What the ledger holds of it: the launcher was told of a step up to a second after it was done."""
    known = next((i.lost_steps for i in after.interruptions if i.lost_steps is not None), None)
    return "" if known is None else f" (history: {known}, by what the launcher was told last)"


def _count(steps: int) -> str:
    return f"{steps} step was" if steps == 1 else f"{steps} steps were"


def _judge_loss(traces: Traces, after: After, limit: float) -> Check:
    old = {step: fact.loss for step, fact in traces.before.items() if fact.loss is not None}
    new = {step: fact.loss for step, fact in traces.after.items() if fact.loss is not None}
    if not old or not new:
        return Check(name="loss", is_ok=None, detail="the training tells no loss")
    gap = _find_gap(traces, after)
    if gap:
        return Check(name="loss", is_ok=False, detail=gap)
    twice = sorted(old.keys() & new.keys())
    if not twice:
        return _judge_jump(old, new)
    differences = {step: _difference(new[step], old[step]) for step in twice}
    worst = max(differences, key=differences.__getitem__)
    return Check(
        name="loss",
        is_ok=differences[worst] <= limit,
        detail=f"{_count(len(twice))} compared; largest relative difference {differences[worst]:.1e}, at step "
        f"{worst} (limit {limit:g}; from {traces.source})",
    )


def _find_gap(traces: Traces, after: After) -> str:
    """What is wrong with the numbers of the steps; a step log tells each of them, a progress file does not."""
    if "log" not in traces.source or after.resume_step is None:
        return ""
    first, last = min(traces.after), max(traces.after)
    if first != after.resume_step + 1:
        return f"its first step was {first}, and it began from step {after.resume_step}"
    missing = [step for step in range(first, last + 1) if step not in traces.after]
    return f"steps are missing: {missing[:5]}" if missing else ""


def _difference(new: float, old: float) -> float:
    relative = abs(new - old) / max(abs(old), 1e-12)
    return relative if math.isfinite(relative) else math.inf


def _judge_jump(old: Mapping[int, float], new: Mapping[int, float]) -> Check:
    series = [old[step] for step in sorted(old)]
    jump = abs(new[min(new)] - series[-1])
    usual = statistics.median([abs(b - a) for a, b in pairwise(series)] or [0.0])
    is_ok = jump <= max(_JUMPS * usual, LOSS_LIMIT * abs(series[-1]))
    return Check(
        name="loss",
        is_ok=is_ok,
        detail=f"no step was seen twice; from step {max(old)} to {min(new)} it changed by {jump:.2g}, usually by "
        f"{usual:.2g}",
    )


def _judge_samples(traces: Traces) -> Check:
    twice = sorted(traces.before.keys() & traces.after.keys())
    indices = [s for s in twice if traces.before[s].samples and traces.after[s].samples]
    if indices:
        return _judge_indices(traces, indices)
    counted = [s for s in twice if traces.before[s].position is not None and traces.after[s].position is not None]
    if counted:
        wrong = [s for s in counted if traces.before[s].position != traces.after[s].position]
        detail = f"at step {wrong[0]} the position differs" if wrong else f"the position is the same at {len(counted)}"
        return Check(name="samples", is_ok=not wrong, detail=f"{detail} steps that were seen twice")
    return _judge_batches(traces)


def _judge_batches(traces: Traces) -> Check:
    """Where no step was done twice: a position that was lost shows in a batch that was taken before."""
    old = {tuple(sorted(fact.samples)): step for step, fact in traces.before.items() if fact.samples}
    new = {step: tuple(sorted(fact.samples)) for step, fact in sorted(traces.after.items()) if fact.samples}
    if not new or len(old) < len([fact for fact in traces.before.values() if fact.samples]) or not old:
        detail = "the training does not tell them, or takes the same ones again and again"
        return Check(name="samples", is_ok=None, detail=detail)
    again = [(step, old[batch]) for step, batch in new.items() if batch in old]
    if again:
        detail = f"step {again[0][0]} took the samples of step {again[0][1]} again"
    else:
        detail = f"no step was done twice; none of {len(new)} new ones took the samples of one of the last {len(old)}"
    return Check(name="samples", is_ok=not again, detail=detail)


def _judge_indices(traces: Traces, steps: list[int]) -> Check:
    repeated = skipped = 0
    for step in steps:
        old, new = Counter(traces.before[step].samples), Counter(traces.after[step].samples)
        repeated += (new - old).total()
        skipped += (old - new).total()
    return Check(
        name="samples",
        is_ok=not repeated and not skipped,
        detail=f"{repeated} repeated, {skipped} skipped; {_count(len(steps))} compared",
    )


def _nodes(before: Before, after: After) -> Check:
    named = _named(after)
    wrong = named - {before.node}
    if wrong:
        return Check(
            name="node", is_ok=False, detail=f"{', '.join(sorted(wrong))} was named, the failure was on {before.node}"
        )
    if not named and before.kind != "process":
        return Check(name="node", is_ok=False, detail=f"no node was named, the failure was on {before.node}")
    if before.kind in {"node", "network"} and before.node in after.training:
        return Check(name="node", is_ok=False, detail=f"{before.node} trains again, without having been mended")
    said = f"{before.node} was named, and no other" if named else "no node was named: a process is no node's fault"
    return Check(
        name="node", is_ok=True, detail=f"{said}; trains now on {', '.join(after.training) or 'unknown nodes'}"
    )


def _named(after: After) -> frozenset[str]:
    names = {i.node for i in after.interruptions if i.node}
    if after.record is not None:
        names |= {*after.record.nodes, *([after.record.hint] if after.record.hint else [])}
    return frozenset(names)


def _ledger(before: Before, after: After) -> Check:
    found = after.interruptions
    told = "; ".join(f"{i.kind}: {i.cause}" for i in found) or "nothing"
    rows: tuple[tuple[Callable[[], bool], str], ...] = (
        (lambda: len(found) != 1, f"{len(found)} interruptions in place of one: {told}"),
        (lambda: not found[0].drill, f"it counts as a real failure: {told}"),
        (lambda: found[0].is_in_job and found[0].kind not in _NAMES[before.kind], f"called by another name: {told}"),
        (lambda: found[0].resumed_at is None, f"not known as recovered: {told}"),
    )
    for is_wrong, detail in rows:
        if is_wrong():
            return Check(name="ledger", is_ok=False, detail=detail)
    return Check(name="ledger", is_ok=True, detail=f"one interruption, a drill, recovered: {told}")
