"""What a training writes of a loss that went wrong, as the service reads it; and removing what is not there."""

from __future__ import annotations

import pytest

from supervisor.rundir import RunDirReader
from trainer import contract
from trainer.contract import Divergence, RunPaths


def record(attempt: int = 1) -> Divergence:
    return Divergence(
        attempt=attempt, kind="nan", onset_step=7, step=9, first_sample=60, end_sample=90, loss=None, time=1.0
    )


def seen(reader: RunDirReader, paths: RunPaths) -> tuple[Divergence | None, tuple[str, ...]]:
    view = reader.read("run", paths.run_dir, 1, is_final=False, deadline_s=10.0)
    return view.divergence, view.unreadable


def test_a_divergence_is_read_while_the_attempt_still_runs(reader: RunDirReader, paths: RunPaths) -> None:
    """Nobody knows how the attempt will end: a controller may forget its job."""
    contract.write_json(paths.divergence(1), record())
    assert seen(reader, paths) == (record(), ())


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[]", b'{"attempt": 1, "kind": "nan", "onset_step": "seven", "step": 9, "time": 1}', b"\xff" * 100],
)
def test_what_is_no_divergence_counts_as_none_and_is_named(reader: RunDirReader, paths: RunPaths, text: bytes) -> None:
    paths.divergence(1).write_bytes(text)
    found, unreadable = seen(reader, paths)
    assert found is None
    assert any("divergence.json" in line for line in unreadable)


def test_a_divergence_of_another_attempt_is_not_this_ones(reader: RunDirReader, paths: RunPaths) -> None:
    contract.write_json(paths.divergence(1), record(attempt=2))
    assert seen(reader, paths)[0] is None


def test_removing_a_folder_that_was_never_made_is_no_error(reader: RunDirReader, paths: RunPaths) -> None:
    """CK-08: the save failed, and its folder is not there."""
    reader.prune(paths.run_dir, 2000, 1)
    assert list(paths.checkpoints().iterdir()) == []
