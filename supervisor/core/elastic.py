"""Whether an attempt may have another number of nodes than its checkpoint was made on. Pure.

Weights are resharded on load; a position in the data that each rank keeps for itself is not. Growing would fail for
the ranks that have none, and shrinking would drop the others' without a word. What can't change size keeps it: the run
waits for as many nodes again, and where nobody knows how many those were, a person is asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from supervisor.core.foreign import is_foreign
from supervisor.model import Attempt, Checkpoint, Run, RunSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedSize:
    """The only number of nodes that an attempt can have, and why. 0: there is one, and it is not known."""

    nodes: int
    why: str


def find_fixed_size(run: Run, attempts: Sequence[Attempt], checkpoint: Checkpoint | None) -> FixedSize | None:
    """The size of an attempt that resumes from `checkpoint` (None: from nothing that is known); None: any will do.

    `attempts`: those before it. A script may resume by itself from what is not seen here: where its run says that it
    can't change size, it keeps that of the last attempt that began.
    """
    if checkpoint is None:
        begun = [a for a in attempts if a.started_at is not None]
        if run.script is None or run.spec.nodes.elastic is not False or not begun:
            return None
        return FixedSize(nodes=begun[-1].nodes_wanted, why=_AS_ASKED)
    why = _why_fixed(run.spec, checkpoint)
    if not why:
        return None
    maker = next((a for a in attempts if a.number == checkpoint.attempt), None)
    return FixedSize(nodes=maker.nodes_wanted if maker is not None else 0, why=why)


def find_next_size(
    run: Run, last: Attempt, checkpoints: Sequence[Checkpoint], *, is_elastic: bool = True
) -> FixedSize | None:
    """The size of an attempt that goes on from what the running one still saves; `is_elastic`: as that one tells."""
    newest = max((c for c in checkpoints if c.is_usable), key=lambda c: c.key, default=None)
    why = _why_fixed(run.spec, newest) if newest is not None else ""
    if run.spec.nodes.elastic is False:
        why = _AS_ASKED
    elif not is_elastic:
        why = "the training says that its data loader can't change size"
    return FixedSize(nodes=last.nodes_wanted, why=why) if why else None


def _why_fixed(spec: RunSpec, checkpoint: Checkpoint) -> str:
    """Why this checkpoint can be resumed from at its own size only; empty: at any."""
    if spec.nodes.elastic is False:
        return _AS_ASKED
    if checkpoint.is_elastic or (spec.nodes.elastic is True and is_foreign(spec.checkpoint)):
        return ""
    of = f" of {checkpoint.world_size}" if checkpoint.world_size else ""
    return f"step {checkpoint.step} holds a position in the data for each rank{of}, which no other number can take over"


_AS_ASKED = "the run file says elastic = false"


def fix_size(spec: RunSpec, fixed: FixedSize | None) -> RunSpec:
    """The run with no other number of nodes than that, where it is known."""
    if fixed is None or not fixed.nodes:
        return spec
    return replace(spec, nodes=replace(spec.nodes, min=fixed.nodes, max=fixed.nodes, multiple_of=1))


def judge_size(spec: RunSpec, fixed: FixedSize | None) -> str:
    """Why a person must decide about the size; empty: nobody need."""
    nodes = spec.nodes
    if fixed is None or (not fixed.nodes and nodes.min == nodes.max):
        return ""
    allowed = f"{nodes.min} to {nodes.max}" if nodes.min < nodes.max else str(nodes.min)
    if not fixed.nodes:
        return f"{fixed.why}, and how many nodes that were is not known: the run allows {allowed}"
    if not nodes.min <= fixed.nodes <= nodes.max:
        return f"{fixed.why}: it was made on {fixed.nodes} nodes, and the run allows {allowed}"
    return ""
