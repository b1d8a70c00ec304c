"""What keeps a run from going on without a word of its own: a person reads it in `supervisor status`."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.stage import Stage
from tests.e2e.test_sbatch import Person, person
from tests.layouts.folders import DATA

pytestmark = pytest.mark.slurm


@pytest.fixture
def ann(stage: Stage) -> Person:
    return person(stage)


def await_reason(stage: Stage, says: str) -> None:
    def is_said() -> bool | None:
        reasons = [run["reason"] or "" for run in stage.status()["runs"]]
        return True if any(says in reason for reason in reasons) else None

    stage.wait(f"the reason {says!r}", is_said)


def test_a_run_directory_that_cannot_be_written_is_the_reason_until_it_can(ann: Person) -> None:
    in_the_way = ann.home / ".supervisor" / "train"
    in_the_way.parent.mkdir()
    in_the_way.write_text("")
    with ThreadPoolExecutor() as shell:
        submitting = shell.submit(ann.call, "sbatch", "train.sh")
        await_reason(ann.stage, f"not submitted yet: write {in_the_way}: ")
        in_the_way.unlink()
        assert submitting.result().stdout.startswith("Submitted")
    ann.end(1, 0)
    assert ann.stage.await_state("finished", "train").reason.startswith("not submitted") is False


def test_a_checkpoint_folder_that_cannot_be_looked_at_is_the_reason_also_while_it_blocks_a_restart(
    ann: Person,
) -> None:
    saves = shutil.copytree(DATA / "dcp", ann.home / "ckpt")
    ann.sbatch("--supervise-checkpoint-dir=ckpt", "--supervise-layout=dcp", "train.sh")
    ann.await_log(1)
    saves.rename(ann.home / "ckpt.away")
    saves.touch()
    await_reason(ann.stage, "the checkpoint folder can't be looked at: ")
    ann.end(1, 1)
    await_reason(ann.stage, "job 1 has ended, FAILED, and nothing follows meanwhile")
    saves.unlink()
    (ann.home / "ckpt.away").rename(saves)
    ann.await_log(2)
