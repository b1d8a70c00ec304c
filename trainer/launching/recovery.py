"""What comes next on the way from an interruption to the next start in the same allocation. Pure.

EVIDENCE (of a hang only) → STOP (no rank of the old start is left) → CHECK (enough nodes are healthy) → a start.
Every stage has its bound, and no stage waits for a node that is lost.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from trainer.launching.choice import choose_training, count_nodes


class Stage(enum.Enum):
    """Where a recovery is."""

    EVIDENCE = "evidence"
    STOP = "stop"
    CHECK = "check"


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A node of the allocation as a recovery sees it. `failed`: why it may not train."""

    node: str
    was_training: bool = False
    is_here: bool = False  # its agent is connected, and it is not lost
    is_coming: bool = False  # a new agent is being started there, or its own may be back at any moment
    is_unfenced: bool = False  # ranks of the old start may write there, and a new agent is about to end them
    has_evidence: bool = False
    is_stopped: bool = False
    is_checked: bool = False
    failed: str = ""
    blamed: int = 0  # how often it was lost before: the last one to be taken


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """A recovery at one moment. Seconds since its stage began, and until it may start again."""

    stage: Stage
    stage_s: float
    wait_s: float  # that are left of a back-off
    is_point_known: bool  # where the next start begins
    previous: tuple[str, ...]  # nodes of the start that was interrupted, in rank order
    members: tuple[Member, ...]  # in the order of the allocation


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """How many nodes a start takes, and how long each stage may last, in seconds."""

    wanted: int
    minimum: int
    multiple: int
    evidence_s: float
    stop_s: float
    check_s: float
    spare_grace_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Start again, on these nodes in rank order."""

    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Short:
    """Too few nodes are left."""

    reason: str


Move = Stage | Start | Short


def next_move(scene: Scene, needs: Needs) -> Move | None:
    """The next stage, a start, that there can't be one, or None: wait."""
    old = [m for m in scene.members if m.was_training and m.is_here]
    if scene.stage is Stage.EVIDENCE:
        is_over = all(m.has_evidence for m in old) or scene.stage_s > needs.evidence_s
        return Stage.STOP if is_over else None
    if scene.stage is Stage.STOP:
        is_over = all(m.is_stopped for m in old) or scene.stage_s > needs.stop_s
        return Stage.CHECK if is_over else None
    return _look_for_start(scene, needs)


def _look_for_start(scene: Scene, needs: Needs) -> Move | None:
    usable = [m for m in scene.members if m.is_here and m.is_checked and not m.failed]
    checking = [m for m in scene.members if m.is_here and not m.is_checked and not m.failed]
    if scene.stage_s > needs.check_s:
        checking = []
    coming = [m for m in scene.members if m.is_coming and not m.is_here]
    if not _count(needs, [*usable, *checking, *coming]):
        return Short(reason=_describe_shortage(scene, needs))
    if not scene.is_point_known or scene.wait_s > 0 or any(m.was_training and m.is_unfenced for m in scene.members):
        return None
    clean = [m for m in usable if not m.blamed]
    is_enough = len(clean) >= needs.wanted
    awaited = [m for m in checking if m.was_training and not m.blamed] if is_enough else [*checking, *coming]
    may_wait = not is_enough or scene.stage_s <= needs.spare_grace_s
    if awaited and may_wait:
        return None
    chosen = clean if _count(needs, clean) == _count(needs, usable) else sorted(usable, key=lambda m: m.blamed)
    nodes = choose_training(
        scene.previous,
        [m.node for m in chosen],
        wanted=needs.wanted,
        minimum=needs.minimum,
        multiple=needs.multiple,
    )
    return Start(nodes=nodes) if nodes else None


def _count(needs: Needs, members: Sequence[Member]) -> int:
    return count_nodes(len(members), wanted=needs.wanted, minimum=needs.minimum, multiple=needs.multiple)


def _describe_shortage(scene: Scene, needs: Needs) -> str:
    gone = [m.node for m in scene.members if not m.is_here]
    failed = [f"{m.node}: {m.failed}" for m in scene.members if m.is_here and m.failed]
    unchecked = [m.node for m in scene.members if m.is_here and not m.failed and not m.is_checked]
    said = [f"lost: {', '.join(gone)}"] if gone else []
    said += [f"failed: {'; '.join(failed)}"] if failed else []
    said += [f"not checked in time: {', '.join(unchecked)}"] if unchecked else []
    fewest = min(needs.minimum, needs.wanted)
    return f"fewer than {fewest} nodes are left to train on ({', '.join(said)})"
