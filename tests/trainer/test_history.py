"""The surviving history of a run with restarts, and its audit."""

from __future__ import annotations

from pathlib import Path

from trainer.contract import SampleRange
from trainer.data import SampleOrder
from trainer.history import StepLog, audit_samples, loss_path, read_history, read_step_log, samples_path

BATCH = 6
ORDER = SampleOrder(size=40, seed=1)


def _train(run_dir: Path, attempt: int, steps: range, *, world: int, resumed_from: str = "", shift: int = 0) -> None:
    """Log what the ranks of one start of an attempt would; `shift` makes them consume the wrong samples."""
    loss = StepLog(loss_path(run_dir, attempt), world=world, resumed_from=resumed_from)
    for step in steps:
        loss.append_loss(step, attempt + step / 1000)
    loss.close()
    for rank in range(world):
        log = StepLog(samples_path(run_dir, attempt, rank), world=world, resumed_from=resumed_from)
        for step in steps:
            log.append_samples(step, ORDER.part((step - 1) * BATCH + shift, BATCH, rank, world))
        log.close()


def _owners(run_dir: Path, attempt: int) -> list[int]:
    attempts = read_history(run_dir, attempt).attempts
    return [attempts[step] for step in sorted(attempts)]


def test_steps_after_the_resumed_checkpoint_come_from_the_later_attempt(tmp_path: Path) -> None:
    _train(tmp_path, 1, range(1, 6), world=3)
    _train(tmp_path, 2, range(4, 8), world=2, resumed_from="step-3.a1")
    assert _owners(tmp_path, 2) == [1, 1, 1, 2, 2, 2, 2]
    history = read_history(tmp_path, 2)
    assert history.losses[3] == 1.003
    assert history.losses[4] == 2.004
    assert audit_samples(history.samples, ORDER, BATCH).is_clean


def test_an_attempt_whose_checkpoints_were_refused_leaves_no_step_behind(tmp_path: Path) -> None:
    _train(tmp_path, 1, range(1, 5), world=2)
    _train(tmp_path, 2, range(3, 9), world=2, resumed_from="step-2.a1", shift=1)  # its step-6 was refused later
    _train(tmp_path, 3, range(3, 8), world=3, resumed_from="step-2.a1")
    assert _owners(tmp_path, 3) == [1, 1, 3, 3, 3, 3, 3]
    assert audit_samples(read_history(tmp_path, 3).samples, ORDER, BATCH).is_clean


def test_workers_restarted_within_an_attempt_are_followed_through_its_own_checkpoints(tmp_path: Path) -> None:
    _train(tmp_path, 1, range(1, 7), world=3)
    _train(tmp_path, 1, range(5, 9), world=2, resumed_from="step-4.a1")
    _train(tmp_path, 2, range(8, 10), world=1, resumed_from="step-7.a1")
    assert _owners(tmp_path, 2) == [1] * 7 + [2] * 2
    assert audit_samples(read_history(tmp_path, 2).samples, ORDER, BATCH).is_clean


def test_an_attempt_that_started_afresh_twice_counts_once(tmp_path: Path) -> None:
    _train(tmp_path, 1, range(1, 4), world=2)
    _train(tmp_path, 1, range(1, 6), world=2)
    assert _owners(tmp_path, 1) == [1] * 5


def test_repeated_and_skipped_samples_are_counted(tmp_path: Path) -> None:
    _train(tmp_path, 1, range(1, 4), world=2)
    _train(tmp_path, 2, range(4, 6), world=2, resumed_from="step-3.a1", shift=-BATCH)  # data position off by a step
    audit = audit_samples(read_history(tmp_path, 2).samples, ORDER, BATCH)
    assert audit.wrong_steps == (4, 5)
    assert audit.repeated == audit.skipped > 0
    assert not audit.is_clean


def test_a_missing_step_counts_as_skipped() -> None:
    audit = audit_samples({1: ORDER.batch(0, BATCH), 3: ORDER.batch(2 * BATCH, BATCH)}, ORDER, BATCH)
    assert (audit.steps, audit.skipped, audit.repeated) == (3, BATCH, 0)


def test_positions_that_a_rollback_left_out_are_no_skipped_samples() -> None:
    order = SampleOrder(size=40, seed=1, skip=(SampleRange(first=BATCH, end=3 * BATCH),))
    samples = {1: ORDER.batch(0, BATCH), 2: ORDER.batch(3 * BATCH, BATCH)}
    assert audit_samples(samples, order, BATCH).is_clean
    assert not audit_samples(samples, ORDER, BATCH).is_clean


def test_a_line_cut_off_by_a_crash_is_left_out_and_the_next_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "loss.jsonl"
    path.write_bytes(b'{"step":1,"loss":2.0,"world":1,"from":""}\n{"step":2,"lo')
    log = StepLog(path, world=1)
    log.append_loss(2, 1.5)
    log.close()
    assert [(record.step, record.loss) for record in read_step_log(path)] == [(1, 2.0), (2, 1.5)]


def test_a_log_that_cannot_be_written_loses_lines_and_not_the_training(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    log = StepLog(tmp_path / "file" / "loss.jsonl", world=1)
    log.append_loss(1, 2.0)
    log.close()
    assert log.lost == 1


def test_a_full_disk_loses_lines_and_not_the_training() -> None:
    log = StepLog(Path("/dev/full"), world=1)
    log.append_samples(1, [1, 2])
    log.close()
    assert log.lost == 1
