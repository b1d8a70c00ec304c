"""Whether the training saves where this machine can see it. Pure.

Nodes that save on a disk of their own look, from here, like a training that saves nothing: a restart would begin at 0
and throw everything away. So each node leaves a mark in the folder when it begins; and what the training itself says
that it has saved must be there.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from supervisor.model import Attempt, AttemptState, Checkpoint, Run, RunView

MARKS_S = 120.0  # after the start: other clients of a network file system see a new file within a minute or so


def find_unshared(run: Run, attempt: Attempt, view: RunView, now: datetime) -> tuple[str, ...]:
    """Nodes of a running attempt whose mark has not been seen in the checkpoint folder, though it should have been."""
    if run.script is not None or run.spec.checkpoint.directory is None or not run.spec.health.start_checks:
        return ()
    if view.checkpoints_unknown or view.launch is None or view.launch.value.phase != "running":
        return ()
    if attempt.started_at is None or (now - attempt.started_at).total_seconds() < MARKS_S:
        return ()
    training = (node for node, beat in view.launch.value.nodes.items() if beat.state == "running")
    return tuple(sorted(node for node in training if f"{attempt.number}-{node}" not in view.node_marks))


def describe_unshared(run: Run, nodes: Sequence[str]) -> str:
    """One sentence for people, with the way out."""
    named = ", ".join(nodes[:5]) + (f" and {len(nodes) - 5} more" if len(nodes) > 5 else "")
    return (
        f"{run.spec.checkpoint.directory} as {named} sees it is not the folder that this machine sees (a mark left "
        "there does not show): it must lie on a file system that all of them share"
    )


def why_unseen(run: Run, attempts: Sequence[Attempt], known: Sequence[Checkpoint]) -> str:
    """Why a run of which no checkpoint is known must not begin at 0: it has saved, where this machine does not look.

    What was before a person released the run is forgiven.
    """
    if known:
        return ""
    counted = [a for a in attempts if not _is_forgiven(a, run.released_at)]
    unshared = next((a.unshared_nodes for a in reversed(counted) if a.unshared_nodes), ())
    if unshared:
        return describe_unshared(run, unshared)
    saved = max((a.saved_step for a in counted if a.saved_step is not None), default=None)
    if saved is None:
        return ""
    folder = run.spec.checkpoint.directory or run.spec.paths.checkpoints()
    return f"the training says that it has saved step {saved}, and nothing of it is in {folder} as this machine sees it"


def _is_forgiven(attempt: Attempt, released_at: datetime | None) -> bool:
    if released_at is None or attempt.state is not AttemptState.OVER:
        return False
    return attempt.over_at is None or attempt.over_at <= released_at
