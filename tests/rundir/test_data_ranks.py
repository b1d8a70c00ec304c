"""What a manifest says of its ranks and of its data reaches whoever chooses the next size."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from supervisor.rundir import RunDirReader
from trainer import contract
from trainer.contract import MANIFEST_NAME, Manifest, RunPaths


@pytest.mark.parametrize(("world", "is_elastic"), [(8, True), (3, False)])
def test_a_manifest_tells_its_ranks_and_whether_another_number_can_use_its_data(
    reader: RunDirReader, paths: RunPaths, publish: Callable[..., Path], world: int, is_elastic: bool
) -> None:
    """CK-11, for checkpoints of our own."""
    path = publish(100) / MANIFEST_NAME
    manifest = contract.parse(Manifest, path.read_bytes())
    contract.write_json(path, dataclasses.replace(manifest, world_size=world, is_elastic=is_elastic))
    (seen,) = reader.read("run", paths.run_dir, 1, is_final=False, deadline_s=10.0).checkpoints
    assert (seen.is_complete, seen.world_size, seen.is_elastic) == (True, world, is_elastic)
