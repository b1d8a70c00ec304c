"""The reference training with other tiers behind the run directory, and restarts from what only they have."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.trainer.folders import flip_byte
from tests.trainer.objectstore import S3Server
from tests.trainer.ranks import start, train
from trainer.contract import (
    MANIFEST_NAME,
    OBJECT_NAME,
    VERIFIED_NAME,
    AttemptSpec,
    RunPaths,
    UploadReport,
    attempt_environment,
    parse,
)
from trainer.history import read_history
from trainer.storage.stored import find_checkpoints

pytestmark = pytest.mark.torch

SMALL = ("--width=32", "--heads=2", "--layers=2", "--seq-len=32", "--warmup=5", "--log-every=1")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[S3Server]:
    running = S3Server(tmp_path / "server")
    running.start()
    yield running
    running.kill()


def environment(run_dir: Path, server: S3Server, attempt: int, resume_from: Path | None = None) -> dict[str, str]:
    """What a service gives to an attempt, and what a site does."""
    spec = AttemptSpec(
        run="gpt", attempt=attempt, command=(), nodes=1, checkpoint_every_s=0, object_url=server.url,
        resume_from=str(resume_from or ""), local_dir=str(run_dir.parent / "disk"),
    )  # fmt: skip
    return {**attempt_environment(spec, run_dir), **server.environment()}


def _cut_short(path: Path) -> None:
    """A save whose way to the run directory was cut short."""
    for name in (MANIFEST_NAME, VERIFIED_NAME):
        (path / name).unlink()
    os.truncate(path / "__1_0.distcp", 100)


@pytest.mark.parametrize("is_node_replaced", [False, True])
def test_workers_restarted_in_place_finish_what_is_on_their_nodes_disks(tmp_path: Path, is_node_replaced: bool) -> None:
    run_dir, paths = tmp_path / "gpt", RunPaths(tmp_path / "gpt")
    spec = AttemptSpec(run="gpt", attempt=1, command=(), nodes=2, local_dir=f"{tmp_path}/disk$RANK")
    told = attempt_environment(spec, run_dir)
    arguments = ("--steps=20", "--save-every-steps=4", "--stop-after=8", *SMALL)
    assert start(run_dir, 2, arguments, told, node_size=1).wait() == [75, 75]
    _cut_short(paths.checkpoint(8, 1))
    if is_node_replaced:
        shutil.rmtree(tmp_path / "disk1")

    ranks = start(run_dir, 2, ("--steps=9", *SMALL), told, node_size=1)
    assert ranks.wait() == [0, 0]
    assert ("step-8.a1 was on the nodes' disks alone and is finished" in ranks.text()) is not is_node_replaced
    assert f"resumed from step-{4 if is_node_replaced else 8}.a1" in ranks.text()
    assert [f.step for f in find_checkpoints(paths.checkpoints()) if f.is_verified][-1] == 9


def _damage(path: Path) -> None:
    flip_byte(path / "__1_0.distcp", 5000)
    (path / ".metadata").write_bytes(b"")


@pytest.mark.s3
@pytest.mark.parametrize("harm", [shutil.rmtree, _damage])
def test_a_training_goes_on_from_object_storage_where_the_run_directory_lost_or_damaged_its_checkpoint(
    tmp_path: Path, server: S3Server, harm: Callable[[Path], None]
) -> None:
    run_dir = tmp_path / "gpt"
    last = RunPaths(run_dir).checkpoint(6, 1)
    assert train(run_dir, 2, ("--steps=6", *SMALL), environment(run_dir, server, 1)) == [0, 0]
    assert f"gpt/{last.name}/{MANIFEST_NAME}" in server.objects()
    assert (last / OBJECT_NAME).exists()

    harm(last)
    shutil.rmtree(tmp_path / "disk", ignore_errors=True)
    ranks = start(run_dir, 2, ("--steps=9", *SMALL), environment(run_dir, server, 2, last))
    assert ranks.wait() == [0, 0]
    assert f"resumed from {last.name}: step 6" in ranks.text()
    assert "from object storage" in ranks.text()
    assert sorted(read_history(run_dir, 2).losses) == list(range(1, 10))


@pytest.mark.s3
def test_a_training_is_not_disturbed_by_storage_that_is_away(tmp_path: Path, server: S3Server) -> None:
    server.kill()
    run_dir = tmp_path / "gpt"
    arguments = ("--steps=20", "--save-every-steps=4", "--stop-after=12", *SMALL)
    ranks = start(run_dir, 2, arguments, environment(run_dir, server, 1))
    assert ranks.wait() == [75, 75]
    found = find_checkpoints(RunPaths(run_dir).checkpoints())
    assert [f.step for f in found if f.is_verified] == [4, 8, 12]
    report = parse(UploadReport, RunPaths(run_dir).upload_report(1, 0).read_bytes())
    assert (report.checkpoint.startswith("step-"), report.uploaded) == (True, "")
    assert ranks.text().count("training goes on, the newest checkpoint is tried again") <= 1
