"""Two ranks decide alike: what one is told, both act upon in the step after."""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.groups import on_ranks
from trainer.storage.stored import find_checkpoints

pytestmark = pytest.mark.torch


def _work(folder: Path) -> dict[str, Any]:
    """On each rank, one part after the other; what was seen in each."""
    return {
        "words": _add_up(),
        "error": _fail_on_rank_0(),
        "save asked of rank 1": _ask_rank_1_to_save(folder / "asked"),
        "exit asked of rank 1": _ask_rank_1_to_exit(folder / "exit"),
        "one rank's new state": _change_one_ranks_state(folder / "changed"),
        "one rank's new state when a save is due": _change_at_a_save(folder / "due"),
        "one rank's bad object": _spoil_one_rank(folder / "spoilt"),
        "different objects": _differ(folder / "differ"),
        "nan on rank 1": _diverge(folder / "nan"),
    }


def _add_up() -> list[Any]:
    from trainer.session.agreement import Agreement, Word

    agreement = Agreement()
    seen: list[Any] = [agreement.hear()]
    for step in (1, 2):
        agreement.say(step, Word(loss=step + agreement.rank, exits=float(agreement.rank)), step)
        agreed = agreement.hear()
        assert agreed is not None
        seen.append((agreed.step, agreed.loss_step, agreed.word.loss, agreed.word.exits))
    return seen


def _fail_on_rank_0() -> str:
    from trainer.session.agreement import Agreement

    def look() -> int:
        raise FileNotFoundError("only rank 0 looked")

    try:
        Agreement().from_rank_0(look)
    except FileNotFoundError as error:
        return str(error)
    return ""


def _make(folder: Path, **options: Any) -> Any:
    from tests.trainer.trainings import Training, ddp

    return Training(folder, seed=3, wrap=ddp, **options)


def _ask_rank_1_to_save(folder: Path) -> list[int]:
    training = _make(folder)
    training.step()
    if training.rank == 1:
        os.kill(os.getpid(), signal.SIGUSR2)
    for _ in range(4):
        training.step()
        training.checkpointer.wait()
    training.checkpointer.close(saves=False)
    return [found.step for found in find_checkpoints(folder / "checkpoints")]


def _ask_rank_1_to_exit(folder: Path) -> list[bool]:
    training = _make(folder)
    training.step()
    if training.rank == 1:
        os.kill(os.getpid(), signal.SIGUSR1)
    left = [training.step(), training.step()]
    training.checkpointer.close()
    return left


def _change_one_ranks_state(folder: Path) -> tuple[Any, ...]:
    import torch

    training = _make(folder)
    training.step()
    if training.rank == 1:
        training.drawer.state_dict = lambda: {"draws": [1] * 9, "last": torch.ones(3, 3)}
    training.step()
    training.checkpointer.save()
    result = training.checkpointer.wait()
    training.checkpointer.close(saves=False)
    return (result.step, result.is_verified, result.error)


def _change_at_a_save(folder: Path) -> tuple[list[tuple[int, bool]], str]:
    import torch

    training = _make(folder, every_steps=3)
    training.steps(2)
    if training.rank == 1:
        training.drawer.state_dict = lambda: {"draws": [1] * 9, "last": torch.ones(3, 3)}
    training.steps(1)
    training.checkpointer.wait()
    training.steps(2)
    training.checkpointer.wait()
    error = training.checkpointer._outcomes.error
    training.checkpointer.close(saves=False)
    return [(found.step, found.is_verified) for found in find_checkpoints(folder / "checkpoints")], error


def _spoil_one_rank(folder: Path) -> tuple[bool, str, list[int]]:
    training = _make(folder)
    training.step()
    if training.rank == 1:
        training.drawer.state_dict = lambda: {"callback": print}
    training.checkpointer.save()
    training.checkpointer.wait()
    goes_on = not training.step()
    training.checkpointer.close(saves=False)
    steps = [found.step for found in find_checkpoints(folder / "checkpoints")]
    return goes_on, training.checkpointer._outcomes.error, steps


def _differ(folder: Path) -> str:
    from trainer.contents.opaque import UnsavableObject

    training = _make(folder)
    training.average.updates = training.rank
    try:
        training.step()
    except UnsavableObject as error:
        return str(error)
    finally:
        training.checkpointer.close(saves=False)
    return ""


def _diverge(folder: Path) -> tuple[str, int, list[int]]:
    from trainer.checkpoint import LossDiverged

    training = _make(folder, every_steps=3, when_busy="wait")
    training.step()
    try:
        training.checkpointer.step(loss=math.nan if training.rank == 1 else 1.0)
        training.checkpointer.step(loss=1.0)
    except LossDiverged as error:
        return error.finding.kind, error.finding.onset_step, [f.step for f in find_checkpoints(folder / "checkpoints")]
    finally:
        training.checkpointer.close(saves=False)
    return "", 0, []


def test_what_one_rank_is_told_both_act_upon(tmp_path: Path) -> None:
    ranks = on_ranks(2, _work, tmp_path)
    for seen in ranks:
        assert seen["words"] == [None, (1, 1, 3.0, 1.0), (2, 2, 5.0, 1.0)]
        assert seen["error"] == "only rank 0 looked"
        assert seen["save asked of rank 1"] == [3]
        assert seen["exit asked of rank 1"] == [False, True]
        assert seen["one rank's new state"] == (2, True, "")
        assert seen["one rank's new state when a save is due"] == ([(5, True)], "")
        goes_on, error, steps = seen["one rank's bad object"]
        assert goes_on
        assert error.startswith("rank 1: UnsavableObject: the state of per_rank 'drawer'")
        assert steps == []
        assert "extra['average'] on ranks 1 differs from rank 0's" in seen["different objects"]
        assert seen["nan on rank 1"] == ("nan", 2, [])
