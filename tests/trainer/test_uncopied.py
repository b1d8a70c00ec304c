"""What a training says at its end when its last checkpoint did not get to object storage."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer import contract


class _InVain:
    """A mover whose storage takes nothing."""

    def poke(self) -> None:
        pass

    def close(self, wait_s: float = 0.0) -> bool:
        return False


@pytest.mark.torch
def test_a_finished_training_says_how_its_last_checkpoint_is_copied_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import torch

    import trainer.checkpoint

    monkeypatch.setenv(contract.ENV_OBJECT_URL, "nope://x/")
    monkeypatch.setattr(trainer.checkpoint, "open_mover", lambda place: _InVain())
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with trainer.checkpoint.Checkpointer(model=model, optimizer=optimizer, run_dir=tmp_path / "gpt") as checkpointer:
        checkpointer.step()
    said = caplog.records[-1].getMessage()
    assert "next attempt" not in said
    assert f"python -m trainer.storage.objects put {tmp_path}/gpt/checkpoints/step-... nope://x/gpt" in said
