"""Where a process stands, as the environment says it."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer import contract
from trainer.session.place import read_place


def test_variables_in_the_nodes_own_folder_are_filled_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert read_place({contract.ENV_LOCAL_DIR: "/scratch/$SLURM_JOB_ID"}).local_dir == Path("/scratch/7")


@pytest.mark.parametrize("folder", ["/scratch/$NOPE", "/scratch/${NOPE}/x", "$NOPE"])
def test_a_folder_of_a_variable_that_is_not_set_is_not_made_and_told_once_a_node(
    folder: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("NOPE", raising=False)
    assert read_place({contract.ENV_LOCAL_DIR: folder}).local_dir is None
    assert read_place({contract.ENV_LOCAL_DIR: folder, "LOCAL_RANK": "1"}).local_dir is None
    (said,) = (record.getMessage() for record in caplog.records)
    assert said == f"local_dir {folder}: $NOPE is not set; nothing is kept on this node's own disk"
