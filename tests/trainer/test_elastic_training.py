"""Whole trainings that change size: exactly the same batches where the data allows it, and a refusal where not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer import per_rank_training
from tests.trainer.ranks import train
from trainer.contract import (
    MANIFEST_NAME,
    AttemptSpec,
    Manifest,
    Outcome,
    Progress,
    RunPaths,
    SampleRange,
    attempt_environment,
    parse,
)
from trainer.data import ByteWindows, SampleOrder, read_text
from trainer.history import audit_samples, read_history

pytestmark = pytest.mark.torch

BATCH, STEPS = 12, 12
SMALL = (f"--steps={STEPS}", "--width=32", "--heads=2", "--layers=1", "--seq-len=32", "--warmup=5", "--log-every=1")
ORDER = SampleOrder(size=len(ByteWindows(text=read_text(), length=32)), seed=1)


def _train(
    run_dir: Path, attempt: int, world: int, stop_after: int, *, resume: str = "", skip: tuple[SampleRange, ...] = ()
) -> None:
    spec = AttemptSpec(
        run="gpt",
        attempt=attempt,
        command=(),
        nodes=1,
        resume_from=str(run_dir / "checkpoints" / resume) if resume else "",
        checkpoint_every_s=0,
        skip_samples=skip,
    )
    is_last = stop_after == STEPS
    arguments = SMALL if is_last else (*SMALL, f"--stop-after={stop_after}")
    codes = train(run_dir, world, arguments, attempt_environment(spec, run_dir))
    assert codes == [0 if is_last else 75] * world


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a training on one rank that nothing disturbed."""
    run_dir = tmp_path_factory.mktemp("alone")
    _train(run_dir, 1, 1, STEPS)
    return run_dir


def test_uneven_parts_of_a_batch_train_as_one_rank_alone_does(tmp_path: Path, alone: Path) -> None:
    """12 samples over 5 ranks, then over 3, then over 2."""
    _train(tmp_path, 1, 5, 4)
    _train(tmp_path, 2, 3, 8, resume="step-4.a1")
    _train(tmp_path, 3, 2, STEPS, resume="step-8.a2")
    history, expected = read_history(tmp_path, 3), read_history(alone, 1)
    assert history.samples == expected.samples
    assert audit_samples(history.samples, ORDER, BATCH).is_clean
    for step, loss in expected.losses.items():
        assert history.losses[step] == pytest.approx(loss, rel=1e-3), step


def test_what_a_rollback_skips_stays_skipped_over_changes_of_size(tmp_path: Path) -> None:
    skip = (SampleRange(first=5 * BATCH, end=7 * BATCH - 5),)
    _train(tmp_path, 1, 2, 4)
    _train(tmp_path, 2, 3, 8, resume="step-4.a1", skip=skip)
    _train(tmp_path, 3, 2, STEPS, resume="step-8.a2")  # the checkpoint carries what was skipped
    order = SampleOrder(size=ORDER.size, seed=ORDER.seed, skip=skip)
    samples = read_history(tmp_path, 3).samples
    assert audit_samples(samples, order, BATCH).is_clean
    assert len(samples) == STEPS


def test_a_position_on_each_rank_resumes_at_its_own_size_and_is_refused_at_any_other(tmp_path: Path) -> None:
    """CK-11, on our own checkpoints: growing has no position for new ranks, shrinking would drop some."""
    paths = RunPaths(tmp_path)
    assert per_rank_training.train(tmp_path, 1, 2, 4) == ([0, 0], [[0, 1, 2, 3], [100, 101, 102, 103]])
    manifest = parse(Manifest, (paths.checkpoint(4, 1) / MANIFEST_NAME).read_bytes())
    assert (manifest.world_size, manifest.samples, manifest.is_elastic) == (2, 8, False)
    assert parse(Progress, paths.progress(1).read_bytes()).is_elastic is False

    for attempt, world in ((2, 1), (3, 3)):
        assert per_rank_training.train(tmp_path, attempt, world, 6) == ([93] * world, [[]] * world)
        outcome = parse(Outcome, paths.outcome(attempt).read_bytes())
        assert outcome.exit_code == 93
        assert f"2 ranks, each with its own, and this job has {world}: start it with 2 ranks again" in outcome.message

    assert per_rank_training.train(tmp_path, 4, 2, 6) == ([0, 0], [[4, 5], [104, 105]])
