"""What a Checkpointer announces while it waits, so that nobody takes it for a hang."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.torch


def test_a_training_that_leaves_is_at_its_end_while_it_waits_for_the_last_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.trainer.trainings import Training
    from trainer.progress import ProgressWriter

    progress = ProgressWriter(None, 1)
    training = Training(tmp_path, seed=1, progress=progress)
    training.steps(2)
    saves = training.checkpointer._saves
    assert saves is not None
    seen: list[str] = []
    wait = saves.wait

    def note_and_wait(*arguments: Any) -> Any:
        seen.append(progress.record.phase)
        return wait(*arguments)

    monkeypatch.setattr(saves, "wait", note_and_wait)
    assert training.checkpointer.leave()
    training.checkpointer.close()

    assert seen
    assert set(seen) <= {"end", "save"}
    assert progress.record.phase == "end"


def test_a_wait_for_a_save_in_flight_is_announced_as_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.trainer.trainings import Training
    from trainer.progress import ProgressWriter
    from trainer.session.saves import Saves

    progress = ProgressWriter(None, 1)
    training = Training(tmp_path, seed=1, progress=progress, final_wait_s=4321.0)
    training.steps(2)
    saves = training.checkpointer._saves
    assert saves is not None
    monkeypatch.setattr(Saves, "is_busy", property(lambda _: True))
    seen: list[tuple[str, float | None]] = []
    monkeypatch.setattr(saves, "wait", lambda *_: seen.append((progress.record.phase, progress.record.limit_s)))
    training.checkpointer.wait()
    monkeypatch.undo()
    training.checkpointer.close()

    assert seen == [("save", 4321.0)]
