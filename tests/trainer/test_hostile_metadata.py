"""The training's own loader, and metadata that somebody made to harm it: its checksums match, and it runs nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer.hostile import exploits
from tests.verify.folders import publish

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("name", exploits(Path("mark")))
def test_hostile_metadata_with_a_matching_manifest_is_rejected_and_runs_nothing(name: str, tmp_path: Path) -> None:
    from trainer.saving.reading import load_state
    from trainer.storage.stored import CheckpointRejected, verify_checkpoint

    mark = tmp_path / "ran"
    folder = publish(tmp_path / "gpt", meta=exploits(mark)[name])
    manifest = verify_checkpoint(folder)
    with pytest.raises(CheckpointRejected):
        load_state(folder, {}, manifest=manifest)
    assert not mark.exists()
