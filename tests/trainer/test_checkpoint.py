"""The public API: when it saves, what it does about failures, what it says at the end. One process, without a group."""

from __future__ import annotations

import json
import logging
import math
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.trainer.ranks import await_true
from trainer import contract
from trainer.contract import Advice, Divergence, Manifest, Outcome, Progress, RunPaths, SampleRange, parse, write_json
from trainer.format.manifest import parse_manifest
from trainer.storage.stored import find_checkpoints

if TYPE_CHECKING:
    from tests.trainer.trainings import Training

pytestmark = pytest.mark.torch


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Training]]:
    from tests.trainer.trainings import Training
    from trainer.contents.randomness import apply_rng, collect_rng

    kept = collect_rng()
    made: list[Training] = []

    def build(**options: Any) -> Training:
        for earlier in made:  # a run directory has one at a time
            earlier.checkpointer.close(saves=False)
        made.append(Training(tmp_path, **{"seed": 5, **options}))
        return made[-1]

    yield build
    for training in made:
        training.checkpointer.close(saves=False)
    apply_rng(kept)


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunPaths:
    """The environment of attempt 3 of a run, whose folder is the one that everything is saved in."""
    for name, value in ((contract.ENV_RUN, "gpt"), (contract.ENV_ATTEMPT, "3"), (contract.ENV_CHECKPOINT_EVERY_S, "0")):
        monkeypatch.setenv(name, value)
    return RunPaths(tmp_path)


def _saved(run_dir: Path) -> list[tuple[int, bool]]:
    return [(found.step, found.is_verified) for found in find_checkpoints(run_dir / "checkpoints")]


def _fill_disk(training: Training, *, is_full: bool) -> None:
    """Let the writer's files end after some KB, as on a full disk."""
    assert training.checkpointer.saver is not None
    pid = training.checkpointer.saver.writer_pid
    assert pid is not None
    limit = 4096 if is_full else resource.RLIM_INFINITY
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))


# ---------------------------------------------------------------- how it ends


def test_after_closing_steps_and_saves_are_refused_and_closing_again_does_nothing(
    make: Callable[..., Training],
) -> None:
    training = make(every_steps=1, when_busy="wait")
    training.step()
    training.checkpointer.close()
    for late in (training.checkpointer.step, training.checkpointer.save, training.checkpointer.leave):
        with pytest.raises(RuntimeError, match="closed"):
            late()
    training.checkpointer.close()
    assert training.checkpointer.wait() is None


def test_a_save_in_flight_is_finished_after_an_exception_in_the_training(
    make: Callable[..., Training], tmp_path: Path
) -> None:
    training = make(every_steps=2, when_busy="wait")
    saver = training.checkpointer.saver
    assert saver is not None
    with pytest.raises(RuntimeError, match="out of memory"), training.checkpointer:  # noqa: PT012 - its body is the point
        training.steps(2)
        await_true(lambda: saver.poll() is None and saver.phase != "staging")
        pid = saver.writer_pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)  # step 2 is written and not published before step 3 lets it be
        training.steps(1)
        assert _saved(tmp_path) in ([], [(2, False)])
        os.kill(pid, signal.SIGCONT)
        raise RuntimeError("out of memory")
    await_true(lambda: _saved(tmp_path) == [(2, True)], within_s=60)


# ---------------------------------------------------------------- when


def test_saves_by_steps_come_at_their_steps_and_the_last_step_is_saved_at_the_end(
    make: Callable[..., Training], tmp_path: Path
) -> None:
    training = make(every_steps=3, when_busy="wait", keep_last=9)
    with training.checkpointer:
        training.steps(7)
    assert _saved(tmp_path) == [(3, True), (6, True), (7, True)]


def test_a_last_step_that_is_saved_already_is_not_saved_again(make: Callable[..., Training], tmp_path: Path) -> None:
    training = make(every_steps=2)
    with training.checkpointer:
        training.steps(2)
    assert _saved(tmp_path) == [(2, True)]


def test_a_training_that_ends_with_an_error_saves_nothing(make: Callable[..., Training], tmp_path: Path) -> None:
    training = make()

    def fail() -> None:
        with training.checkpointer:
            training.steps(2)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert _saved(tmp_path) == []


def test_a_save_that_is_due_while_one_is_in_flight_follows_as_soon_as_that_has_ended(
    make: Callable[..., Training], tmp_path: Path
) -> None:
    training = make(every_steps=2, staging="copy", keep_last=9)
    training.steps(1)
    with _stopped_writer(training):
        training.steps(4)  # step 2 is in flight, step 4 is due
        assert training.checkpointer.is_busy
    training.checkpointer.wait()
    training.steps(2)
    training.checkpointer.wait()
    assert [step for step, _ in _saved(tmp_path)] in ([2, 6], [2, 7])


class _stopped_writer:  # noqa: N801 - reads as a statement
    """The writer stands still as soon as it has a save, until the end of the block."""

    def __init__(self, training: Training) -> None:
        assert training.checkpointer.saver is not None
        self._saver = training.checkpointer.saver
        self._begin = self._saver.begin

    def __enter__(self) -> None:
        def begin(*arguments: Any, **options: Any) -> float:
            blocked = self._begin(*arguments, **options)
            assert self._saver.writer_pid is not None
            os.kill(self._saver.writer_pid, signal.SIGSTOP)
            return blocked

        self._saver.begin = begin  # type: ignore[method-assign]

    def __exit__(self, *error: object) -> None:
        self._saver.begin = self._begin  # type: ignore[method-assign]
        assert self._saver.writer_pid is not None
        os.kill(self._saver.writer_pid, signal.SIGCONT)


def test_a_save_can_be_made_now(make: Callable[..., Training], tmp_path: Path) -> None:
    training = make()
    training.steps(2)
    assert training.checkpointer.save() > 0
    result = training.checkpointer.wait()
    assert result is not None
    assert (result.step, result.is_verified) == (2, True)


def test_the_manifest_says_what_the_training_counted(make: Callable[..., Training], tmp_path: Path) -> None:
    training = make()
    for _ in range(3):
        training.data.next()
        training.checkpointer.step(loss=1.0, tokens=100)
    training.checkpointer.save()
    result = training.checkpointer.wait()
    assert result is not None
    manifest: Manifest = parse_manifest((result.path / contract.MANIFEST_NAME).read_bytes(), needs_seal=True)
    assert (manifest.step, manifest.samples, manifest.tokens, manifest.world_size) == (3, 24, 300, 1)
    assert manifest.is_elastic


def test_without_a_run_directory_it_only_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from trainer.checkpoint import Checkpointer

    monkeypatch.delenv(contract.ENV_RUN_DIR, raising=False)
    model = torch.nn.Linear(2, 1)
    with Checkpointer(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)) as checkpointer:
        assert checkpointer.restore() is None
        assert not checkpointer.step(loss=1.0)
        assert checkpointer.steps_done == 1


# ---------------------------------------------------------------- restoring


def test_a_training_goes_on_where_it_was_in_one_process_too(make: Callable[..., Training]) -> None:
    training = make()
    training.steps(5)
    training.checkpointer.save()
    undisturbed = training.steps(10)
    training.checkpointer.wait()
    resumed = make(seed=99)
    restored = resumed.checkpointer.restore()
    assert restored is not None
    assert (restored.step, restored.samples, resumed.checkpointer.steps_done) == (5, 40, 5)
    assert resumed.steps(10) == undisturbed


def test_the_first_start_has_nothing_to_restore(make: Callable[..., Training]) -> None:
    assert make().checkpointer.restore() is None


def test_a_start_at_0_beside_saves_that_did_not_end_says_so(
    make: Callable[..., Training], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (3, 5):
        RunPaths(tmp_path).checkpoint(step, 1).mkdir(parents=True)
    assert make().checkpointer.restore() is None
    (said,) = (r.getMessage() for r in caplog.records if "training begins at 0" in r.getMessage())
    assert said == "training begins at 0: step-5.a1 and 1 more in checkpoints were never finished"


def test_a_newest_checkpoint_that_is_damaged_is_passed_over(
    make: Callable[..., Training], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from tests.trainer.folders import flip_byte

    training = make(every_steps=2, when_busy="wait")
    training.steps(4)
    training.checkpointer.wait()
    flip_byte(RunPaths(tmp_path).checkpoint(4, 1) / "__0_0.distcp", 9000)
    restored = make(seed=9).checkpointer.restore()
    assert restored is not None
    assert restored.step == 2
    assert "step-4.a1 is rejected" in caplog.text


def test_samples_that_a_rollback_left_out_are_skipped(
    make: Callable[..., Training], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(contract.ENV_SKIP_SAMPLES, "8-24")
    training = make()
    training.checkpointer.restore()
    assert training.data.order.skip == (SampleRange(first=8, end=24),)
    training.steps(2)
    assert training.data.position == 32


def test_each_save_holds_what_the_tensors_were_then_however_they_lie_in_memory(tmp_path: Path) -> None:
    import torch

    from trainer.checkpoint import Checkpointer

    def build() -> tuple[torch.nn.Module, Checkpointer]:
        model = torch.nn.Linear(300, 80)
        model.weight = torch.nn.Parameter(torch.zeros(300, 160).t()[::2])  # neither dense nor contiguous
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, Checkpointer(model=model, optimizer=optimizer, run_dir=tmp_path, every_s=0.0, keep_last=9)

    model, checkpointer = build()
    for step in range(1, 4):
        with torch.no_grad():
            model.get_parameter("weight").fill_(step)
            model.get_parameter("bias").fill_(-step)
        checkpointer.step()
        checkpointer.save()
        checkpointer.wait()
    checkpointer.close()
    other, resumed = build()
    restored = resumed.restore()
    assert restored is not None
    assert restored.step == 3
    assert set(other.get_parameter("weight").flatten().tolist()) == {3.0}
    assert set(other.get_parameter("bias").tolist()) == {-3.0}
    resumed.close(saves=False)


# ---------------------------------------------------------------- structure


def test_a_state_with_new_parts_is_planned_anew_and_saved(make: Callable[..., Training]) -> None:
    training = make()
    training.steps(2)
    training.checkpointer.save()
    training.checkpointer.wait()
    late = {"late": [0] * 3, "tensor": __import__("torch").ones(7)}
    training.average.state_dict = lambda: {"updates": 1, "weights": training.average._weights, **late}  # type: ignore[method-assign]
    training.steps(1)
    training.checkpointer.save()
    result = training.checkpointer.wait()
    assert result is not None
    assert (result.step, result.is_verified, result.error) == (3, True, "")


def test_an_object_that_cannot_be_saved_is_named_at_the_first_step(make: Callable[..., Training]) -> None:
    from trainer.contents.opaque import UnsavableObject

    training = make()
    training.average.state_dict = lambda: {"callback": print}  # type: ignore[method-assign]
    with pytest.raises(UnsavableObject, match=r"extra 'average': average\.callback is a "):
        training.step()


def test_an_object_that_can_no_longer_be_saved_fails_the_save_and_not_the_training(
    make: Callable[..., Training],
) -> None:
    training = make()
    training.steps(1)
    training.average.state_dict = lambda: {"callback": print}  # type: ignore[method-assign]
    training.checkpointer.save()
    assert not training.step()
    assert "average.callback" in training.checkpointer._outcomes.error


# ---------------------------------------------------------------- failures


def test_a_failed_save_is_told_once_recorded_and_tried_again(
    make: Callable[..., Training], service: RunPaths, caplog: pytest.LogCaptureFixture
) -> None:
    """CK-17: saves fail in a row, the training goes on."""
    training = make()
    training.steps(1)
    _fill_disk(training, is_full=True)
    for _ in range(3):
        training.steps(1)
        training.checkpointer.save()
        training.checkpointer.wait()
    progress = _progress(training, service)
    assert (progress.save_failures, progress.saved_step) == (3, None)
    assert "rank 0" in progress.save_error
    assert len([r for r in caplog.records if r.levelno >= logging.ERROR]) == 1
    _fill_disk(training, is_full=False)
    training.steps(1)
    training.checkpointer.save()
    training.checkpointer.wait()
    progress = _progress(training, service)
    assert (progress.save_failures, progress.save_error, progress.saved_step) == (0, "", 5)
    assert progress.save_total_s is not None
    assert _saved(service.run_dir) == [(5, True)]


def _progress(training: Training, paths: RunPaths) -> Progress:
    assert training.checkpointer._progress.flush(30)
    return parse(Progress, paths.progress(3).read_bytes())


def test_a_failed_save_is_raised_at_the_next_step_where_that_is_wished(make: Callable[..., Training]) -> None:
    from trainer.checkpoint import SaveFailed

    training = make(on_failure="raise")
    training.steps(1)
    _fill_disk(training, is_full=True)
    training.checkpointer.save()
    training.checkpointer.wait()
    with pytest.raises(SaveFailed, match="rank 0"):
        training.steps(2)


def test_saves_that_keep_failing_end_the_training_at_last(make: Callable[..., Training]) -> None:
    from trainer.checkpoint import SavesKeepFailing

    training = make(max_failures=2)
    training.steps(1)
    _fill_disk(training, is_full=True)
    training.checkpointer.save()
    training.checkpointer.wait()
    training.steps(2)
    training.checkpointer.save()
    training.checkpointer.wait()
    with pytest.raises(SavesKeepFailing, match="last 2 saves failed"):
        training.steps(2)


# ---------------------------------------------------------------- what the service says


def test_advice_changes_the_interval_and_asks_for_saves(
    make: Callable[..., Training], service: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(contract.ENV_CHECKPOINT_EVERY_S, "600")
    training = make(every_s=None)
    training.steps(1)
    _advise(training, service, Advice(attempt=3, seq=1, checkpoint_every_s=60.0, save_requests=1))
    training.steps(2)
    training.checkpointer.wait()
    assert training.checkpointer._wishes.schedule.every_s == 60.0
    assert _saved(service.run_dir) == [(3, True)]
    training.steps(3)
    assert [step for step, _ in _saved(service.run_dir)] == [3]


def _advise(training: Training, paths: RunPaths, advice: Advice) -> None:
    write_json(paths.advice(3), advice)
    reader = training.checkpointer._wishes._advice
    assert reader is not None
    reader.look()
    assert reader.latest == advice


def test_an_interval_that_the_script_chose_stays(make: Callable[..., Training], service: RunPaths) -> None:
    training = make(every_s=900.0)
    _advise(training, service, Advice(attempt=3, seq=1, checkpoint_every_s=60.0))
    training.steps(1)
    assert training.checkpointer._wishes.schedule.every_s == 900.0


def test_advice_for_another_attempt_and_damaged_advice_are_no_advice(tmp_path: Path) -> None:
    from trainer.session.advice import AdviceReader

    path = tmp_path / "advice.json"
    reader = AdviceReader(path, 3, every_s=3600)
    for content in (b"{", b"[]", json.dumps({"attempt": 2, "seq": 9, "checkpoint_every_s": 1}).encode()):
        path.write_bytes(content)
        reader.look()
        assert reader.latest is None
    reader.close()


# ---------------------------------------------------------------- a loss that goes wrong


def test_a_loss_that_is_no_number_ends_the_training_with_what_the_service_needs(
    make: Callable[..., Training], service: RunPaths
) -> None:
    from trainer.checkpoint import LossDiverged

    training = make(every_steps=4, when_busy="wait")
    training.steps(3)
    with pytest.raises(LossDiverged, match="since step 4"):
        training.step(factor=math.nan)
    found = parse(Divergence, service.divergence(3).read_bytes())
    assert (found.kind, found.onset_step, found.loss) == ("nan", 4, None)
    assert (found.first_sample, found.end_sample) == (24, 32)
    assert parse(Outcome, service.outcome(3).read_bytes()).exit_code == contract.EXIT_DIVERGED
    assert _saved(service.run_dir) == []


def test_spikes_are_judged_as_the_environment_says(
    make: Callable[..., Training], service: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainer.checkpoint import LossDiverged

    monkeypatch.setenv(contract.ENV_SPIKE_SCORE, "20")
    monkeypatch.setenv(contract.ENV_SPIKE_WINDOW, "32")
    training = make()
    _feed(training, [2.0 + step % 3 / 10 for step in range(40)])
    with pytest.raises(LossDiverged, match="a spike"):
        _feed(training, [50.0] * 5)
    found = parse(Divergence, service.divergence(3).read_bytes())
    assert (found.kind, found.onset_step, found.loss) == ("spike", 41, 50.0)


def test_a_spike_just_after_a_restart_is_measured_by_the_losses_before_it(
    make: Callable[..., Training], monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainer.checkpoint import LossDiverged

    monkeypatch.setenv(contract.ENV_SPIKE_SCORE, "20")
    training = make()
    _feed(training, [2.0 + step % 3 / 10 for step in range(40)])
    training.checkpointer.save()
    training.checkpointer.wait()
    resumed = make()
    assert resumed.checkpointer.restore() is not None
    with pytest.raises(LossDiverged, match="since step 41"):
        _feed(resumed, [50.0] * 5)


def _feed(training: Training, losses: list[float]) -> None:
    for loss in losses:
        training.checkpointer.step(loss=loss)


# ---------------------------------------------------------------- signals


def test_a_signal_makes_it_save_and_say_that_it_wants_to_go_on(
    make: Callable[..., Training], service: RunPaths
) -> None:
    training = make()
    training.step()
    os.kill(os.getpid(), signal.SIGUSR1)
    left = [training.step() for _ in range(2)]
    assert left == [False, True]
    assert _saved(service.run_dir) == [(3, True)]
    assert parse(Outcome, service.outcome(3).read_bytes()).exit_code == contract.EXIT_RESUBMIT


def test_an_asked_exit_whose_save_fails_still_leaves(make: Callable[..., Training], service: RunPaths) -> None:
    training = make()
    training.step()
    _fill_disk(training, is_full=True)
    assert not training.checkpointer.leave()
    assert "failed" in parse(Outcome, service.outcome(3).read_bytes()).message


def test_the_last_save_is_waited_for_within_a_bound(make: Callable[..., Training], service: RunPaths) -> None:
    from trainer.checkpoint import SavesKeepFailing

    training = make(staging="copy", final_wait_s=0.2)
    training.steps(2)
    with _stopped_writer(training):
        training.checkpointer.save()
        with pytest.raises(SavesKeepFailing, match=r"in flight after 0\.2 s"):
            training.checkpointer.close()
        assert not training.checkpointer.leave()
    assert "in flight after" in parse(Outcome, service.outcome(3).read_bytes()).message


# ---------------------------------------------------------------- cost


def test_a_save_does_not_wait_for_the_file_system(make: Callable[..., Training]) -> None:
    training = make(staging="copy")
    training.steps(2)
    with _stopped_writer(training):
        training.checkpointer.save()
        before = time.monotonic()
        training.steps(20)
        assert time.monotonic() - before < 20
        assert training.checkpointer.is_busy
    await_true(lambda: not training.checkpointer.is_busy)
