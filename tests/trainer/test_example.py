"""The reference training, in real processes: interrupted, damaged and resized runs end like an undisturbed one."""

from __future__ import annotations

import random
import resource
import signal
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest

from tests.trainer.folders import flip_byte
from tests.trainer.ranks import Ranks, await_true, start, train, train_each
from trainer.contract import MANIFEST_NAME, AttemptSpec, Outcome, Progress, RunPaths, attempt_environment, parse
from trainer.data import ByteWindows, SampleOrder, read_text
from trainer.history import audit_samples, loss_path, read_history, read_step_log
from trainer.storage.stored import find_checkpoints, verify_checkpoint

pytestmark = pytest.mark.torch

STEPS = 24
SMALL = (f"--steps={STEPS}", "--width=32", "--heads=2", "--layers=2", "--seq-len=32", "--warmup=5", "--log-every=1")
ORDER = SampleOrder(size=len(ByteWindows(text=read_text(), length=32)), seed=1)


def _resume(run_dir: Path, attempt: int, resume_from: Path | None = None) -> dict[str, str]:
    """The environment that a service would give to an attempt."""
    spec = AttemptSpec(
        run="gpt",
        attempt=attempt,
        command=(),
        nodes=1,
        resume_from=str(resume_from or ""),
        checkpoint_every_s=0,
    )
    return attempt_environment(spec, run_dir)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a training on two ranks that nothing disturbed."""
    run_dir = tmp_path_factory.mktemp("undisturbed")
    assert train(run_dir, 2, SMALL, _resume(run_dir, 1)) == [0, 0]
    return run_dir


def _largest_difference(history: Mapping[int, float], undisturbed: Path) -> float:
    expected = read_history(undisturbed, 1).losses
    assert sorted(history) == sorted(expected) == list(range(1, STEPS + 1))
    return max(abs(history[step] - loss) / abs(loss) for step, loss in expected.items())


def _weights(path: Path) -> dict[str, list[float]]:
    """The model of a checkpoint, put together from its shards."""
    from tests.trainer.states import read_model

    return read_model(path)


def test_a_run_that_loses_and_gains_ranks_ends_like_an_undisturbed_one(tmp_path: Path, undisturbed: Path) -> None:
    paths = RunPaths(tmp_path)
    assert train(tmp_path, 2, (*SMALL, "--stop-after=8"), _resume(tmp_path, 1)) == [75] * 2
    assert train(tmp_path, 3, (*SMALL, "--stop-after=16"), _resume(tmp_path, 2, paths.checkpoint(8, 1))) == [75] * 3
    assert train(tmp_path, 2, SMALL, _resume(tmp_path, 3, paths.checkpoint(16, 2))) == [0] * 2

    history = read_history(tmp_path, 3)
    assert _largest_difference(history.losses, undisturbed) < 1e-3
    assert audit_samples(history.samples, ORDER, 12).is_clean
    ours = _weights(paths.checkpoint(STEPS, 3))
    for name, expected in _weights(RunPaths(undisturbed).checkpoint(STEPS, 1)).items():
        assert ours[name] == pytest.approx(expected, rel=1e-3, abs=1e-4), name


def test_a_killed_run_resumed_on_as_many_ranks_has_the_same_losses(tmp_path: Path, undisturbed: Path) -> None:
    paths = RunPaths(tmp_path)
    ranks = start(tmp_path, 2, (*SMALL, "--save-every-steps=6", "--step-sleep=0.05"), _resume(tmp_path, 1))
    await_true(lambda: any(f.step == 12 and f.is_verified for f in find_checkpoints(paths.checkpoints())))
    ranks.kill()
    assert train(tmp_path, 2, SMALL, _resume(tmp_path, 2, paths.checkpoint(12, 1))) == [0, 0]

    history = read_history(tmp_path, 2)
    assert _largest_difference(history.losses, undisturbed) < 1e-5
    assert audit_samples(history.samples, ORDER, 12).is_clean
    assert set(history.attempts.values()) == {1, 2}


def test_a_run_killed_at_any_moment_and_resized_repeats_and_skips_nothing(tmp_path: Path, undisturbed: Path) -> None:
    seed = random.SystemRandom().randrange(10**6)
    print("seed", seed)  # shown when it fails
    draw = random.Random(seed)
    checkpoints = RunPaths(tmp_path).checkpoints()
    arguments = (*SMALL, "--save-every-steps=2", "--step-sleep=0.02")
    for attempt in range(1, 5):
        verified = [found.path for found in find_checkpoints(checkpoints) if found.is_verified]
        environment = _resume(tmp_path, attempt, verified[-1] if verified else None)
        ranks = start(tmp_path, draw.randint(1, 3), arguments, environment)
        await_true(partial(_has_trained, ranks, tmp_path, attempt, draw.randint(0, 7)))
        ranks.kill()
    for found in find_checkpoints(checkpoints):
        if found.is_complete:
            assert verify_checkpoint(found.path).step == found.step
    verified = [found.path for found in find_checkpoints(checkpoints) if found.is_verified]
    assert train(tmp_path, 2, arguments, _resume(tmp_path, 5, verified[-1] if verified else None)) == [0, 0]

    history = read_history(tmp_path, 5)
    assert audit_samples(history.samples, ORDER, 12).is_clean
    assert _largest_difference(history.losses, undisturbed) < 1e-3


def test_workers_restarted_in_place_walk_past_a_damaged_checkpoint_of_their_own(
    tmp_path: Path, undisturbed: Path
) -> None:
    paths = RunPaths(tmp_path)
    environment = _resume(tmp_path, 1)
    assert train(tmp_path, 2, (*SMALL, "--save-every-steps=5", "--stop-after=13"), environment) == [75, 75]
    flip_byte(paths.checkpoint(13, 1) / "__1_0.distcp")
    ranks = start(tmp_path, 2, SMALL, environment)
    assert ranks.wait() == [0, 0]
    assert not paths.outcome(1).exists()  # the 75 of the first start explains nothing any more
    assert "step-13.a1 is rejected: __1_0.distcp" in ranks.text()
    assert [r.step for r in read_step_log(loss_path(tmp_path, 1))] == [*range(1, 14), *range(11, STEPS + 1)]
    assert _largest_difference(read_history(tmp_path, 1).losses, undisturbed) < 1e-5


def test_a_damaged_checkpoint_to_resume_from_is_reported_with_code_78(tmp_path: Path, undisturbed: Path) -> None:
    given = RunPaths(undisturbed).checkpoint(STEPS, 1)
    damaged = tmp_path / "checkpoints" / given.name
    damaged.mkdir(parents=True)
    for entry in given.iterdir():
        (damaged / entry.name).write_bytes(entry.read_bytes())
    flip_byte(damaged / "__1_0.distcp", offset=5000)
    assert train(tmp_path, 2, SMALL, _resume(tmp_path, 2, damaged)) == [78, 78]
    outcome = parse(Outcome, RunPaths(tmp_path).outcome(2).read_bytes())
    assert (outcome.exit_code, outcome.checkpoint) == (78, str(damaged))
    assert read_step_log(loss_path(tmp_path, 2)) == []


def test_a_signal_to_one_rank_makes_all_of_them_save_and_exit(tmp_path: Path) -> None:
    ranks = start(tmp_path, 2, ("--steps=100000", *SMALL[1:], "--step-sleep=0.02"), _resume(tmp_path, 1))
    await_true(lambda: loss_path(tmp_path, 1).exists() or _ended(ranks))
    ranks.signal(1, signal.SIGUSR1)
    assert ranks.wait() == [75, 75]
    outcome = parse(Outcome, RunPaths(tmp_path).outcome(1).read_bytes())
    assert outcome.exit_code == 75
    last = read_step_log(loss_path(tmp_path, 1))[-1].step
    assert [(f.step, f.is_verified) for f in find_checkpoints(tmp_path / "checkpoints")] == [(last, True)]


def test_a_kill_in_the_middle_of_a_save_leaves_no_manifest(tmp_path: Path) -> None:
    large = ("--steps=9", "--save-every-steps=1", "--width=768", "--layers=3", "--seq-len=8", "--global-batch=1")
    ranks = start(tmp_path, 1, large, _resume(tmp_path, 1))
    path = RunPaths(tmp_path).checkpoint(1, 1)
    await_true(lambda: _size(path / "__0_0.distcp") > 0 or _ended(ranks))
    ranks.kill()
    assert _size(path / "__0_0.distcp") > 0
    assert not (path / MANIFEST_NAME).exists()
    assert not any(f.is_complete for f in find_checkpoints(path.parent))


def test_a_full_disk_under_one_rank_fails_the_save_of_all_and_the_training_goes_on(tmp_path: Path) -> None:
    def newest_verified() -> int:
        return max((f.step for f in find_checkpoints(tmp_path / "checkpoints") if f.is_verified), default=0)

    arguments = ("--steps=100000", *SMALL[1:], "--save-every-steps=25", "--step-sleep=0.02")
    ranks = start(tmp_path, 2, arguments, _resume(tmp_path, 1))
    await_true(lambda: newest_verified() > 0 or _ended(ranks))
    ranks.limit_file_size(1, 4096)
    await_true(lambda: "training goes on" in ranks.text() or _ended(ranks))
    ranks.limit_file_size(1, resource.RLIM_INFINITY)
    before = newest_verified()
    await_true(lambda: newest_verified() > before or _ended(ranks))
    ranks.signal(0, signal.SIGUSR1)
    assert ranks.wait() == [75, 75]
    found = find_checkpoints(tmp_path / "checkpoints")
    assert all(f.is_verified for f in found)
    assert before + 25 not in [f.step for f in found]


def test_a_rank_that_dies_takes_the_others_with_it_at_once(tmp_path: Path) -> None:
    ranks = start(tmp_path, 2, ("--steps=100000", *SMALL[1:], "--save-every-steps=1"), _resume(tmp_path, 1))
    await_true(lambda: len(find_checkpoints(tmp_path / "checkpoints")) > 1 or _ended(ranks))
    ranks.signal(1, signal.SIGKILL)
    assert ranks.wait(within_s=20) == [1, -signal.SIGKILL]


def test_nodes_that_read_different_text_are_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "text").write_text(name * 5000)
    codes = train_each(tmp_path, [(*SMALL, f"--text={tmp_path / name}") for name in ("a", "b")], _resume(tmp_path, 1))
    assert codes == [93, 93]
    assert "ranks 1 read other text" in parse(Outcome, RunPaths(tmp_path).outcome(1).read_bytes()).message


def test_a_finished_run_that_is_started_again_ends_at_once_and_saves_nothing(tmp_path: Path, undisturbed: Path) -> None:
    given = RunPaths(undisturbed).checkpoint(STEPS, 1)
    assert train(tmp_path, 2, SMALL, _resume(tmp_path, 2, given)) == [0, 0]
    assert find_checkpoints(tmp_path / "checkpoints") == []


def test_a_batch_that_does_not_split_evenly_is_trained_on_whole(tmp_path: Path) -> None:
    assert train(tmp_path, 2, (*SMALL, "--global-batch=5"), _resume(tmp_path, 1)) == [0, 0]
    assert audit_samples(read_history(tmp_path, 1).samples, ORDER, 5).is_clean


def test_a_signal_to_save_is_followed_by_a_save_and_the_training_goes_on(tmp_path: Path) -> None:
    ranks = start(tmp_path, 2, ("--steps=100000", *SMALL[1:], "--step-sleep=0.02"), _resume(tmp_path, 1))
    await_true(lambda: loss_path(tmp_path, 1).exists() or _ended(ranks))
    ranks.signal(1, signal.SIGUSR2)
    await_true(lambda: any(f.is_verified for f in find_checkpoints(tmp_path / "checkpoints")) or _ended(ranks))
    saved = find_checkpoints(tmp_path / "checkpoints")[0].step
    await_true(lambda: read_step_log(loss_path(tmp_path, 1))[-1].step > saved or _ended(ranks))
    ranks.signal(0, signal.SIGUSR1)
    assert ranks.wait() == [75, 75]
    assert len(find_checkpoints(tmp_path / "checkpoints")) == 2


def test_it_publishes_its_progress(undisturbed: Path) -> None:
    progress = parse(Progress, RunPaths(undisturbed).progress(1).read_bytes())
    assert (progress.step, progress.final_step, progress.phase) == (STEPS, STEPS, "end")
    assert progress.samples == STEPS * 12
    assert progress.limit_s is not None


def test_alone_and_without_a_run_directory_it_just_trains(tmp_path: Path) -> None:
    ranks = start(tmp_path, 1, ("--steps=3", *SMALL[1:]))
    assert ranks.wait() == [0]
    assert "finished at step 3" in ranks.text()


def test_without_a_service_it_resumes_from_its_own_run_directory(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    arguments = (*SMALL, f"--run-dir={run_dir}")
    assert train(tmp_path, 1, (*arguments, "--stop-after=4")) == [75]
    assert train(tmp_path, 1, (*arguments, "--stop-after=7")) == [75]
    assert set(read_history(run_dir, 2).losses) == set(range(1, 8))


def _has_trained(ranks: Ranks, run_dir: Path, attempt: int, steps: int) -> bool:
    return len(read_step_log(loss_path(run_dir, attempt))) >= steps or _ended(ranks)


def _ended(ranks: Ranks) -> bool:
    return any(process.exitcode is not None for process in ranks.processes)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
