"""A training that was interrupted goes on bit for bit like one that was not: weights, optimizer, losses, samples."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.trainer.trainings import Record

pytestmark = pytest.mark.torch

BEFORE, AFTER = 7, 50
FAILED = "the interruption"


def _interrupt_and_resume(folder: Path, cases: list[tuple[str, str]]) -> list[tuple[Record, Record, int]]:
    """On every rank, for each way to wrap and each optimizer: (undisturbed, resumed, step resumed from)."""
    from tests.trainer import trainings

    results = []
    for number, (wrap, make) in enumerate(cases):
        parts: dict[str, Any] = {"wrap": getattr(trainings, wrap), "make": getattr(trainings, make)}
        first = trainings.Training(folder / str(number), seed=11, **parts)
        first.steps(BEFORE)
        first.evaluate()
        first.checkpointer.save()
        undisturbed = first.steps(AFTER)  # while the save is in flight
        saved = first.checkpointer.wait()
        assert saved is None or saved.is_verified, saved
        first.checkpointer.close(saves=False)
        second = trainings.Training(folder / str(number), seed=77, **parts)
        restored = second.checkpointer.restore()
        assert restored is not None
        assert not restored.is_reseeded
        assert restored.notes == ()
        results.append((undisturbed, second.steps(AFTER), restored.step))
        second.checkpointer.close(saves=False)
    return results


def _check(ranks: list[list[tuple[Record, Record, int]]]) -> None:
    for rank in ranks:
        for undisturbed, resumed, step in rank:
            assert step == BEFORE
            assert resumed.losses == undisturbed.losses
            assert resumed.samples == undisturbed.samples
            assert resumed.means == undisturbed.means
            assert resumed.end == undisturbed.end


def test_on_two_ranks_plain_ddp_and_fsdp2_go_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    from tests.trainer.groups import on_ranks

    cases = [("ddp", "momentum"), ("ddp", "adam"), ("fsdp", "adamw"), ("fsdp", "stateless")]
    _check(on_ranks(2, _interrupt_and_resume, tmp_path, cases))


def test_on_four_ranks_hsdp_and_fsdp2_go_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    from tests.trainer.groups import on_ranks

    _check(on_ranks(4, _interrupt_and_resume, tmp_path, [("hsdp", "adamw"), ("fsdp", "momentum")]))
