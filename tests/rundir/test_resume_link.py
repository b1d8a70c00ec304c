"""The link that a script's job, queued ahead, begins from."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from supervisor.rundir import RunDirReader, RunDirUnreadable
from trainer.contract import RunPaths


def test_the_link_is_made_and_then_replaced_in_one_step(reader: RunDirReader, paths: RunPaths) -> None:
    link = paths.resume_link(2)
    for target in ("/c/step-1", "/c/step-2", "/c/step-2"):
        reader.link_resume(paths.run_dir, 2, target)
        assert link.readlink() == Path(target)
    assert [path.name for path in link.parent.iterdir()] == ["resume"]


@pytest.mark.parametrize("target", ["", "step-1", "../step-1"])
def test_a_target_that_is_no_absolute_path_is_refused(reader: RunDirReader, paths: RunPaths, target: str) -> None:
    with pytest.raises(RunDirUnreadable, match="no absolute path"):
        reader.link_resume(paths.run_dir, 2, target)
    assert not os.path.lexists(paths.resume_link(2))
