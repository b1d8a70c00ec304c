"""Of how many ranks the position in the data is, by the keys of a distributed checkpoint."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from supervisor.model import CheckpointView, IntentKind, RunState
from tests.core.builders import (
    attempt_in,
    checkpoint,
    cluster,
    intents_of,
    over,
    plan_for,
    run,
    run_in,
    snapshot,
    spec,
    view,
    world,
)
from tests.layouts.folders import REST, look, view_of

RANKS = {f"dp_rank_{rank}": b"its own position" for rank in range(4)}


def _save(folder: Path, state: dict[str, Any]) -> Path:
    import torch
    from torch.distributed.checkpoint.state_dict_saver import save

    save({"model.w": torch.ones(3), "train_state": {"step": torch.tensor(4)}, **state}, checkpoint_id=folder)
    for path in (folder, *folder.rglob("*")):
        os.utime(path, REST)
    return folder.parent


def _seen(folder: Path, state: dict[str, Any], layout: str) -> CheckpointView:
    return view_of(_save(folder, state), layout, folder.name)


pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]


@pytest.mark.parametrize("layout", ["torchtitan", "dcp"])
def test_positions_of_four_ranks_are_known_by_their_keys(layout: str, tmp_path: Path) -> None:
    """CK-11, as torchtitan writes it."""
    seen = _seen(tmp_path / "step-4", {"dataloader": {**RANKS, "world_size": 4}}, layout)
    assert (seen.is_complete, seen.world_size, seen.is_elastic) == (True, 4, False)


@pytest.mark.parametrize(
    "state", [{}, {"dataloader": {"position": 12}}, {"loader": {"a_dp_rank_0": 1, "dp_rank_x": 2}}]
)
def test_other_keys_say_nothing_of_ranks(state: dict[str, Any], tmp_path: Path) -> None:
    seen = _seen(tmp_path / "step-4", state, "torchtitan")
    assert (seen.is_complete, seen.world_size, seen.is_elastic) == (True, 0, True)


@pytest.mark.parametrize(("says", "nodes"), [(None, 4), (True, 3), (False, 4)])
def test_what_lies_on_disk_decides_how_many_nodes_resume_from_it(says: bool | None, nodes: int, tmp_path: Path) -> None:
    """CK-11: saved on four, and three are healthy now."""
    folder = _save(tmp_path / "step-4", {"dataloader": RANKS})
    seen = look(folder, "torchtitan").views
    one = run(spec=spec(nodes={"min": 1, "max": 4, "elastic": says}, checkpoint={"layout": "torchtitan"}))
    parts: dict[str, Any] = {
        "path": seen[0].path,
        "stamp": seen[0].stamp,
        "world_size": 4,
        "is_elastic": seen[0].is_elastic,
    }
    known = world(over(1, nodes_wanted=4), of=one, checkpoints=[checkpoint(4, 1, **parts)])

    def plan(count: int) -> Any:
        return plan_for(known, snapshot(nodes=cluster(count), view=view(checkpoints=seen)))

    assert attempt_in(plan(4), 2).nodes_wanted == 4
    fewer = plan(3)
    if nodes == 3:
        assert attempt_in(fewer, 2).nodes_wanted == 3
    else:
        waiting = run_in(fewer)
        assert intents_of(fewer, IntentKind.SUBMIT) == ()
        assert waiting is not None
        assert waiting.state is RunState.ACTIVE
        assert "3 healthy nodes, 4 are needed again" in waiting.reason
