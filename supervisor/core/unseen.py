"""Whether the training saves where this machine can see it. Pure.

Nodes that save on a disk of their own look, from here, like a training that saves nothing: a restart would begin at 0
and throw everything away. So each node leaves a mark in the folder when it begins; and what the training itself says
that it has saved must be there.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from supervisor.model import Attempt, AttemptState, Checkpoint, Run, RunView

UNMADE_S = 3600.0  # a training that runs for so long has made the folder that it saves in
MARKS_S = 120.0  # after the start: other clients of a network file system see a new file within a minute or so


def find_unshared(run: Run, attempt: Attempt, view: RunView, now: datetime) -> tuple[str, ...]:
    """Nodes of a running attempt whose mark has not been seen in the checkpoint folder, though it should have been."""
    if run.script is not None or run.spec.checkpoint.directory is None or not run.spec.nodes.start_checks:
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


def why_unseen(run: Run, attempts: Sequence[Attempt], known: Sequence[Checkpoint], *, has_folder: bool = True) -> str:
    """Why a run of which no checkpoint is known must not begin at 0: it has saved, where this machine does not look.

    `has_folder` False: the folder that was named is not there as this machine sees it. What was before a person
    released the run is forgiven.
    """
    if known:
        return ""
    counted = [a for a in attempts if not _is_forgiven(a, run.released_at)]
    unshared = next((a.unshared_nodes for a in reversed(counted) if a.unshared_nodes), ())
    if unshared:
        return describe_unshared(run, unshared)
    longest = max(counted, key=_ran_s, default=None)
    if not has_folder and run.spec.checkpoint.directory is not None and longest is not None:
        ran_s = _ran_s(longest)
        if ran_s >= max(UNMADE_S, 3 * run.spec.checkpoint.every_s):
            return (
                f"attempt {longest.number} ran for {ran_s / 3600:.1f} h, and {run.spec.checkpoint.directory} is not "
                "even there as this machine sees it: it must lie on a file system that nodes and this machine share"
            )
    saved = max((a.saved_step for a in counted if a.saved_step is not None), default=None)
    if saved is None:
        return ""
    folder = run.spec.checkpoint.directory or run.spec.paths.checkpoints()
    return f"the training says that it has saved step {saved}, and nothing of it is in {folder} as this machine sees it"


def _ran_s(attempt: Attempt) -> float:
    if attempt.started_at is None or attempt.over_at is None:
        return 0.0
    return (attempt.over_at - attempt.started_at).total_seconds()


def _is_forgiven(attempt: Attempt, released_at: datetime | None) -> bool:
    if released_at is None or attempt.state is not AttemptState.OVER:
        return False
    return attempt.over_at is None or attempt.over_at <= released_at
